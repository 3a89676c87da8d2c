"""ZeRO's shards: averaging into them, gathering them, payloads, compressed state."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.dtypes import working_dtype
from .._core.hashing import cheap_hash
from .._core.trees import fold_keys, next_count, select_leaves
from .._core.types import Array, AxisNames, Flag, Like, Payload, PRNGKeyArray, PyTree, Shape, State, Updates
from ..comm.base import Comm
from ..compressors.compressor import Compressor, check_compressor
from ..reducers.messages import as_generator, run
from ..reducers.reducer import Extras, Reducer
from ..schedule.buckets import assign_buckets, forward_positions
from ..state.marks import Sharded, axis_tuple, is_mark, with_value
from ..transforms.quantized_state import Coded, CompactState, is_coded, worth_coding
from ..wire.buffers import MULTIPLE, fuse, fuse_bytes, group_by_shape, rows_of_workers, stack_by_shape
from ..wire.codec import TreeCodec
from ..wire.shards import clear_padding, unshard

# DDP's default. The gradients of a bucket can be freed as soon as it has been sent.
BUCKET_BYTES = 25 * 2**20


def shard_for_one_worker(tree: PyTree, axis: AxisNames) -> PyTree:
    """Flattens and pads sharded leaves into a single shard, if there is no axis: one worker keeps them as written."""
    if axis_tuple(axis):
        return tree
    return jax.tree.map(
        lambda x: with_value(x, rows_of_workers(x.value, 1)[0]) if _is_sharded(x) else x, tree, is_leaf=_is_sharded
    )


def unshard_for_one_worker(tree: PyTree, like: PyTree, axis: AxisNames) -> PyTree:
    """The inverse of `shard_for_one_worker`; `like` has the original shapes."""
    if axis_tuple(axis):
        return tree

    def unshard_leaf(x: Any, original: Any) -> Any:
        return with_value(x, unshard(x.value, original.value)) if _is_sharded(x) else x

    return jax.tree.map(unshard_leaf, tree, like, is_leaf=_is_sharded)


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def buckets_of(params: Updates, stage: int) -> list[list[int]]:
    """The positions of leaves that share a collective: all of them, or in stage 2 about 25 MiB."""
    # Neighbors in the forward pass share a bucket, since their gradients are ready at about the same time.
    leaves, positions = jax.tree.leaves(params), forward_positions(params)
    # Whatever the dtype: `dynamic_loss_scale` inits with float32 copies of parameters in half precision.
    sizes = [leaves[i].size * jnp.dtype(working_dtype(leaves[i].dtype)).itemsize for i in positions]
    buckets = assign_buckets(sizes, bucket_bytes=BUCKET_BYTES if stage == 2 else sum(sizes) + 1)
    return [sorted(positions[k] for k in bucket) for bucket in buckets]


def init_buckets(form: Reducer, params: Updates, buckets: Sequence[Sequence[int]]) -> State:
    """A reducer's state for each bucket, with independent random keys."""
    return tuple(fold_keys(form.init(select_leaves(params, members)), i) for i, members in enumerate(buckets))


def reduce_buckets(
    form: Reducer, updates: Updates, state: State, buckets: Sequence[Sequence[int]], comm: Comm, extras: Extras
) -> tuple[Updates, State]:
    """Returns this worker's shard of the mean of each leaf; the collectives of one bucket run after another's."""
    leaves, tree = jax.tree.flatten(updates)
    states = []
    for members, bucket_state in zip(buckets, state, strict=True):
        part = select_leaves(updates, members)
        reduced, bucket_state = run(as_generator(form, part, bucket_state, comm, extras), comm)
        states.append(bucket_state)
        for i, leaf in zip(members, jax.tree.leaves(reduced.mean), strict=True):
            leaves[i] = leaf
    return tree.unflatten(leaves), tuple(states)


def gather(shards: Sequence[Array], likes: Sequence[Like], comm: Comm) -> list[Array]:
    """The full arrays, from all workers' shards of each leaf; one collective for each dtype.

    Not one for each bucket: XLA:TPU starts them all at once, which takes more memory than a single one.
    """
    return [unshard(rows, like) for rows, like in zip(fuse(comm, comm.all_gather, shards), likes, strict=True)]


def gather_payloads(payloads: Sequence[Payload], comm: Comm, *, agreed: bool = True) -> list[Payload]:
    """All workers' payloads, `[W, k, ...]`, by one collective of bytes."""
    arrays, structure = jax.tree.flatten(list(payloads))
    return structure.unflatten(fuse_bytes(comm, lambda x: comm.all_gather(x, agreed=agreed), arrays))


def encode(
    compressor: Compressor, shards: Sequence[Array], shapes: Sequence[Shape], key: PRNGKeyArray, comm: Comm
) -> list[Payload]:
    """The payloads `[k, ...]` of the `k` shards of each length: the program encodes once per length, not per leaf.

    `shapes` are the shapes of the full arrays; padding is encoded as zeros.
    """
    # Compressors have one scale per block, which values in the padding would distort.
    sizes = map(math.prod, shapes)
    shards = [clear_padding(x, size, comm.size, comm.index) for x, size in zip(shards, sizes, strict=True)]
    groups, stacks = stack_by_shape(shards)
    return TreeCodec(compressor, maps_single=True).encode(groups, stacks, key)


def decode(
    compressor: Compressor, payloads: Sequence[Payload], shards: Sequence[Like], *, of_all: bool = False
) -> list[Array]:
    """The inverse of `encode`; with `of_all`, payloads `[W, k, ...]` of all workers give shards `[W, n]`."""
    code = TreeCodec(compressor, maps_single=True)
    leaves: dict[int, Array] = {}
    for members, payload in zip(group_by_shape(shards), payloads, strict=True):
        first = shards[members[0]]
        stack = jax.ShapeDtypeStruct((len(members), *first.shape), first.dtype)
        decoded = code.decode_rows(payload, stack) if of_all else code.decode_stack(payload, stack)
        leaves |= {i: decoded[..., k, :] for k, i in enumerate(members)}
    return [leaves[i] for i in range(len(shards))]


def key_of_shards(shards: Sequence[Array], comm: Comm) -> PRNGKeyArray:
    """A key that depends on the parameters: other parameters get other draws, equal ones the same draws again."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), cheap_hash(shards)), comm.index)


def check_stateless(form: Reducer, like: PyTree[Like]) -> None:
    """Raises ValueError for a reducer that keeps arrays from step to step."""
    state = jax.eval_shape(form.init, like)
    if any(map(is_mark, jax.tree.leaves(state, is_leaf=is_mark))):
        raise ValueError(
            "the reducer of gathered() runs inside the backward pass and keeps nothing from step to step, but this one "
            "has error feedback: use it without, two_shot(qsgd(4)), or shard only the state, "
            "zero_redundancy(reducer=...)"
        )


class StateCodec(NamedTuple):
    """How the optimizer's state is kept between steps.

    `init(state)` encodes a new state, `decode(kept)` returns the state as this worker's optimizer sees it, and
    `encode(state, kept, some, comm)` encodes the next one; `kept` remains if `some` is False.
    """

    init: Callable[[State], State]
    decode: Callable[[State], State]
    encode: Callable[..., State]


def identity_codec() -> StateCodec:
    """Keeps the state as it is."""
    return StateCodec(lambda state: state, lambda kept: kept, lambda state, kept, some, comm: state)


def compressing_codec(compressor: Compressor) -> StateCodec:
    """Keeps the payloads of large sharded arrays; each worker encodes its own shard, which no block straddles."""
    check_compressor(compressor)
    _check_blocks(compressor)
    codec = _CompressingCodec(compressor)
    return StateCodec(codec.init, codec.decode, codec.encode)


class _CompressingCodec(NamedTuple):
    """The functions of `compressing_codec`."""

    compressor: Compressor

    def init(self, state: State) -> CompactState:
        """Encodes the large sharded arrays of a state as written; payloads are sharded as the arrays were."""

        def encode_leaf(x: Any) -> Any:
            if not (isinstance(x, Sharded) and worth_coding(x.value)):
                return x
            # Padded to whole blocks, so that the number of words is a multiple of the number of blocks.
            flat = jnp.ravel(x.value)
            flat = jnp.pad(flat, (0, -flat.size % MULTIPLE))
            payload = self.compressor.compress(flat, jax.random.key(0))
            # Words are cut where the entries are: as many words per shard as `MULTIPLE` entries have.
            sharded = jax.tree.map(lambda words: Sharded(words, multiple=words.size * MULTIPLE // flat.size), payload)
            return Coded(sharded, shape=x.shape, dtype=x.value.dtype)

        return CompactState(jax.tree.map(encode_leaf, state, is_leaf=is_mark), jnp.zeros((), jnp.int32))

    def decode(self, kept: CompactState) -> State:
        """The state that this worker would have if it had not been encoded."""

        def decode_leaf(x: Any) -> Any:
            if not is_coded(x):
                return x
            # `multiple` is the number of words per block of `MULTIPLE` entries.
            first = jax.tree.leaves(x.payload, is_leaf=is_mark)[0]
            like = jax.ShapeDtypeStruct((first.value.size // first.multiple * MULTIPLE,), x.dtype)
            # A single worker without an axis has additional padding.
            blocks = like.shape[0] // MULTIPLE
            payload = jax.tree.map(lambda words: words.value[: blocks * words.multiple], x.payload, is_leaf=is_mark)
            return Sharded(self.compressor.decompress(payload, like), shape=x.shape, axis=first.axis, multiple=MULTIPLE)

        return jax.tree.map(decode_leaf, kept.inner, is_leaf=is_coded)

    def encode(self, new: State, kept: CompactState, some: Flag, comm: Comm) -> CompactState:
        """Encodes the new state's shards where the old one's are encoded; bit for bit the old ones without examples."""
        count = next_count(kept.count)
        # Workers draw independently for their shards.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), count), comm.index)
        leaves, structure = jax.tree.flatten(kept.inner, is_leaf=is_coded)

        def encode_leaf(number: int, before: Any, after: Any) -> Any:
            if not is_coded(before):
                return after
            # `on_parts` has set its padding to zero; other values would affect the scale of the last block.
            payload = self.compressor.compress(after.value, jax.random.fold_in(key, number))
            # Encoding again is not the identity, so the old words themselves are kept.
            chosen = jax.tree.map(
                lambda old, words: with_value(old, jnp.where(some, words, old.value[: words.size])),
                before.payload,
                payload,
                is_leaf=is_mark,
            )
            return Coded(chosen, shape=before.shape, dtype=before.dtype)

        marked = structure.flatten_up_to(new)
        encoded = [encode_leaf(i, *pair) for i, pair in enumerate(zip(leaves, marked, strict=True))]
        return CompactState(structure.unflatten(encoded), count)


def _check_blocks(compressor: Compressor) -> None:
    """Checks that every `MULTIPLE` entries have their own words: then the words can be sharded as the entries are."""
    payloads = [_payload_of(compressor, MULTIPLE * count) for count in (1, 3, 32)]
    first, *more = [[x.shape for x in jax.tree.leaves(payload)] for payload in payloads]
    for count, shapes in zip((3, 32), more, strict=True):
        if any(len(s) != 1 for s in first) or shapes != [(count * s[0],) for s in first]:
            raise ValueError(
                f"state_compressor must encode every {MULTIPLE} entries by themselves, because workers own multiples "
                f"of {MULTIPLE}; this one encodes {MULTIPLE} entries as arrays of shapes {first} and "
                f"{count * MULTIPLE} entries as {shapes}. Use dynamic_fp8(block={MULTIPLE}) or "
                'cast(jnp.bfloat16, rounding="stochastic")'
            )
    if not _can_be_cut(compressor, payloads[0], payloads[-1]):
        raise ValueError(
            f"state_compressor must encode every {MULTIPLE} entries by themselves, because workers own multiples of "
            f"{MULTIPLE}; this one packs codes of several entries into the same bytes. Use "
            f'dynamic_fp8(block={MULTIPLE}) or cast(jnp.bfloat16, rounding="stochastic")'
        )


def _can_be_cut(compressor: Compressor, one: PyTree, many: PyTree) -> bool:
    """Whether the words of some entries decode to them without the others; payloads of `MULTIPLE` entries and more."""
    rng = np.random.default_rng(0)
    words = jax.tree.map(lambda x: rng.integers(1, 256, x.shape).astype(x.dtype), many)
    part = jax.tree.map(lambda x, like: x[like.size : 2 * like.size], words, one)
    size = MULTIPLE * jax.tree.leaves(many)[0].size // jax.tree.leaves(one)[0].size
    with jax.ensure_compile_time_eval():
        whole, alone = (
            np.asarray(compressor.decompress(jax.tree.map(jnp.asarray, x), jax.ShapeDtypeStruct((n,), jnp.float32)))
            for x, n in ((words, size), (part, MULTIPLE))
        )
    return np.array_equal(whole[MULTIPLE : 2 * MULTIPLE], alone, equal_nan=True)


def _payload_of(compressor: Compressor, size: int) -> PyTree:
    like = jax.ShapeDtypeStruct((size,), jnp.float32)
    return jax.eval_shape(compressor.compress, like, jax.eval_shape(lambda: jax.random.key(0)))
