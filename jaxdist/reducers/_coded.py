"""What the reducers that code arrays share: keys, counts, decoding, and the form of a code for feedback."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Array, Int, Key, Payload, State
from ..comm import Comm
from ..compressors import scaled
from ..compressors.base import Compressor


def next_count(count: Int[Array, "..."]) -> Int[Array, "..."]:
    """One more, up to the largest number that there is."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count)


def fold_keys(state: State, data: Array | int) -> State:
    """The keys of a reducer's state, folded with a number; all else stays."""

    def one(leaf):
        return jax.random.fold_in(leaf, data) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(one, state)


def step_key(key: Key[Array, ""], count: Int[Array, ""], comm: Comm, *, shared: bool) -> Key[Array, ""]:
    """The key of this step, and of this worker unless the code wants the same one everywhere."""
    key = jax.random.fold_in(key, count)
    return key if shared else jax.random.fold_in(key, comm.index)


def contraction_form(compressor: Compressor) -> Compressor:
    """The code to use where its error is kept for later: itself, or an unbiased one scaled by `1/(1+ω)`."""
    if compressor.contraction is not None:
        return compressor
    if compressor.variance is not None:
        return scaled(compressor)
    raise ValueError(
        "error feedback needs a contraction, and this compressor states neither its contraction δ nor its variance ω: "
        "give the Compressor one of them, or use it without feedback"
    )


def mean_of_decoded(decode: Callable[[Payload], Array], payloads: Payload) -> Array:
    """Decodes payloads `[W, ...]` one worker after the other: one accumulator, not `W` decoded copies."""
    first, rest = jax.tree.map(lambda x: x[0], payloads), jax.tree.map(lambda x: x[1:], payloads)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    total = decode(first)
    if workers > 1:
        total, _ = lax.scan(lambda total, payload: (total + decode(payload), None), total, rest)
    return total / workers
