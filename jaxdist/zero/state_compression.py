"""How workers keep their shards of the optimizer state between steps: as they are, or compressed."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.trees import next_count
from .._core.types import Flag, PyTree, State
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..state.marks import Sharded, is_mark, with_value
from ..transforms.quantized_state import Coded, CompactState, is_coded, worth_coding
from ..wire.flat import MULTIPLE


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
    """Keeps the payloads of large sharded arrays; each worker encodes its own shard, which no block straddles.

    Raises:
      ValueError: shards would cut through blocks of `compressor`.
    """
    _check_compressor(compressor)
    return StateCodec(partial(_init, compressor), partial(_decode, compressor), partial(_encode, compressor))


def _check_compressor(compressor: Compressor) -> None:
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


def _payload_of(compressor: Compressor, size: int) -> PyTree:
    like = jax.ShapeDtypeStruct((size,), jnp.float32)
    return jax.eval_shape(compressor.compress, like, jax.eval_shape(lambda: jax.random.key(0)))


def _init(compressor: Compressor, state: State) -> CompactState:
    """Encodes the large sharded arrays of a state as written; payloads are sharded as the arrays were."""

    def encode_leaf(x: Any) -> Any:
        if not (isinstance(x, Sharded) and worth_coding(x.value)):
            return x
        # Padded to whole blocks, so that the number of words is a multiple of the number of blocks.
        flat = jnp.ravel(x.value)
        flat = jnp.pad(flat, (0, -flat.size % MULTIPLE))
        payload = compressor.compress(flat, jax.random.key(0))
        # Words are cut where the entries are: as many words per shard as `MULTIPLE` entries have.
        sharded = jax.tree.map(lambda words: Sharded(words, multiple=words.size * MULTIPLE // flat.size), payload)
        return Coded(sharded, shape=x.shape, dtype=x.value.dtype)

    return CompactState(jax.tree.map(encode_leaf, state, is_leaf=is_mark), jnp.zeros((), jnp.int32))


def _decode(compressor: Compressor, kept: CompactState) -> State:
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
        return Sharded(compressor.decompress(payload, like), shape=x.shape, axis=first.axis, multiple=MULTIPLE)

    return jax.tree.map(decode_leaf, kept.inner, is_leaf=is_coded)


def _encode(compressor: Compressor, new: State, kept: CompactState, some: Flag, comm: Comm) -> CompactState:
    """Encodes the new state's shards wherever the old one's are encoded; bit for bit the old ones without examples."""
    count = next_count(kept.count)
    # Workers draw independently for their shards.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), count), comm.index)
    leaves, structure = jax.tree.flatten(kept.inner, is_leaf=is_coded)

    def encode_leaf(number: int, before: Any, after: Any) -> Any:
        if not is_coded(before):
            return after
        # `on_parts` has set its padding to zero; other values would affect the scale of the last block.
        payload = compressor.compress(after.value, jax.random.fold_in(key, number))
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
