"""The cut state of an optimizer in few bits: each worker codes its own part, whose cuts no block crosses."""

import jax
import jax.numpy as jnp

from .._core.trees import next_count
from .._core.types import Array, PyTree
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..state.marks import Sharded, is_mark, with_value
from ..transforms.quantized_state import Coded, CompactState, is_coded, worth_coding
from ..wire.flat import MULTIPLE


def check_state_code(code: Compressor) -> None:
    """Raises unless each `MULTIPLE` entries have words of their own, which then go wherever their entries go."""
    payloads = [_payload_of(code, MULTIPLE * count) for count in (1, 3, 32)]
    one, *more = [[x.shape for x in jax.tree.leaves(payload)] for payload in payloads]
    for count, shapes in zip((3, 32), more, strict=True):
        if any(len(s) != 1 for s in one) or shapes != [(count * s[0],) for s in one]:
            raise ValueError(
                f"state_compressor must code every {MULTIPLE} entries by themselves, since workers hold multiples of "
                f"{MULTIPLE}, and this one makes of {MULTIPLE}, {count * MULTIPLE} entries arrays of shapes "
                f'{one}, {shapes}: use dynamic_fp8(block={MULTIPLE}) or cast(jnp.bfloat16, rounding="stochastic")'
            )


def _payload_of(code: Compressor, size: int) -> PyTree:
    like = jax.ShapeDtypeStruct((size,), jnp.float32)
    return jax.eval_shape(code.compress, like, jax.eval_shape(lambda: jax.random.key(0)))


def compacted(code: Compressor, state: PyTree) -> CompactState:
    """A state as written, its large cut arrays coded; the payloads are cut as the arrays were."""

    def one(x):
        if not (isinstance(x, Sharded) and worth_coding(x.value)):
            return x
        flat = jnp.ravel(x.value)
        flat = jnp.pad(flat, (0, -flat.size % MULTIPLE))
        payload = code.compress(flat, jax.random.key(0))
        cut = jax.tree.map(lambda words: Sharded(words, multiple=words.size * MULTIPLE // flat.size), payload)
        return Coded(cut, shape=x.shape, dtype=x.value.dtype)

    return CompactState(jax.tree.map(one, state, is_leaf=is_mark), jnp.zeros((), jnp.int32))


def expanded(code: Compressor, state: PyTree) -> PyTree:
    """What this worker would see if the state had not been coded."""

    def one(x):
        if not is_coded(x):
            return x
        first = jax.tree.leaves(x.payload, is_leaf=is_mark)[0]
        like = jax.ShapeDtypeStruct((first.value.size // first.multiple * MULTIPLE,), x.dtype)
        # A single worker without an axis has some padding more.
        words = like.shape[0] // MULTIPLE
        payload = jax.tree.map(lambda cut: cut.value[: words * cut.multiple], x.payload, is_leaf=is_mark)
        return Sharded(code.decompress(payload, like), shape=x.shape, axis=first.axis, multiple=MULTIPLE)

    return jax.tree.map(one, state, is_leaf=is_coded)


def compacted_again(code: Compressor, new: PyTree, old: CompactState, some: Array | bool, comm: Comm) -> CompactState:
    """The new state, its parts coded where the old one's are; the old one in every bit if there was no example."""
    count = next_count(old.count)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), count), comm.index)
    leaves, structure = jax.tree.flatten(old.inner, is_leaf=is_coded)

    def one(number, before, after):
        if not is_coded(before):
            return after
        # Its padding is zero, as `on_parts` leaves it, or it would reach into the scale of the last block.
        payload = code.compress(after.value, jax.random.fold_in(key, number))
        kept = jax.tree.map(
            lambda cut, words: with_value(cut, jnp.where(some, words, cut.value[: words.size])),
            before.payload,
            payload,
            is_leaf=is_mark,
        )
        return Coded(kept, shape=before.shape, dtype=before.dtype)

    marked = structure.flatten_up_to(new)
    found = [one(i, *pair) for i, pair in enumerate(zip(leaves, marked, strict=True))]
    return CompactState(structure.unflatten(found), count)
