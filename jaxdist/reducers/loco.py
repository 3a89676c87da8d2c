"""LoCo: error feedback that remembers a moving average of the error, in 8 bits."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.dtypes import widen_like
from .._core.types import Array, Int, Like, State
from ..state.marks import PerWorker, with_value
from .base import (
    HAS_FEEDBACK,
    Reduced,
    Reducer,
    as_generator,
    cast_like,
    contraction_of,
    forward_forms,
    from_generator,
    weakest,
)

LEVELS = 127


class LoCoState(NamedTuple):
    """`error`: for each leaf, blocks of int8 `[blocks, block]` and a float32 scale for each, per worker.

    `count`: the steps since the last reset.
    """

    reducer: State
    error: PerWorker
    count: Int[Array, ""]


def loco(reducer: Reducer, *, beta: float | int = 0.8, reset_every: int = 1024, block: int = 256) -> Reducer:
    """Corrects each update by a moving average of earlier errors: `h = x + e`, `e = β e + (1-β) (h - own)`.

    Summed up, `Σ own = Σ x - (e_T - e_0) / (1-β)`: nothing is lost for good, as with `error_feedback`, but an error
    is returned in small parts over `1/(1-β)` steps, which damps the oscillations of a coarse compressor. `e` is small,
    so 8 bits per entry suffice (the largest entry of a block is 127): a quarter of the memory of a float32 residual.
    Rounding `e` loses at most half a level per entry and step, and the reset discards what has accumulated.

    *On the wire*: what the reducer sends.

    *State*: that of the reducer, a replicated count, and per worker about one byte for each entry of the updates.

    Args:
      reducer: what to correct; the paper's is `two_shot` of a 4-bit code. An unbiased code is scaled to a contraction.
      beta: higher is smoother and slower to return what was lost; 0 is plain error feedback with an 8-bit memory.
      reset_every: steps after which `e` starts from zero.
      block: entries that share a scale. Smaller follows uneven leaves better and costs `4/block` bytes an entry.

    Returns:
      The reducer; error feedback around it is refused.

    Raises:
      ValueError: an argument is out of range, or the reducer is no contraction.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.loco(jd.compressed(jd.top_k(0.5)), beta=0.5)
      >>> x = jnp.array([1.0, 4.0])
      >>> _, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
      >>> codes, scales = state.error.value
      >>> (codes * scales).tolist()
      [[0.5, 0.0]]

    References:
      Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv 2407.04480, 2024.
      Its reference code resets by a counter that all tensors share, which only some of them see; here all leaves do.
    """
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    if reset_every < 1:
        raise ValueError(f"reset_every must be at least 1, got {reset_every}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    return _with_memory(contraction_of(reducer), beta, reset_every, block)


def _with_memory(inner: Reducer, beta: float, reset_every: int, block: int) -> Reducer:
    def init(like):
        wide = jax.tree.map(widen_like, like)
        error = jax.tree.map(lambda x: _store(jnp.zeros(x.shape, x.dtype), block), wide)
        return LoCoState(inner.init(wide), PerWorker(error, resize="zero"), jnp.zeros((), jnp.int32))

    def messages(updates, state, comm, extras):
        wide = jax.tree.map(widen_like, updates)
        error = jax.tree.map(_restore, wide, state.error.value)
        corrected = jax.tree.map(lambda x, e: x.astype(e.dtype) + e, updates, error)
        reduced, inner_state = yield from as_generator(inner, corrected, state.reducer, comm, extras)
        count = (state.count + 1) % reset_every  # a count of all steps would end, and with it the feedback
        keep = count != 0
        # e = β e + (1-β) (h - own)
        error = jax.tree.map(lambda e, h, own: beta * e + (1 - beta) * (h - own), error, corrected, reduced.own)
        stored = jax.tree.map(lambda e: _store(jnp.where(keep, e, 0), block), error)
        error = with_value(state.error, stored)
        return Reduced(cast_like(reduced.mean, updates), reduced.own), LoCoState(inner_state, error, count)

    forms = forward_forms(lambda inner: _with_memory(inner, beta, reset_every, block), inner)
    return from_generator("loco", init, messages, law=weakest(inner), forms=forms._replace(no_feedback=HAS_FEEDBACK))


def _store(x: Array, block: int) -> tuple[Array, Array]:
    """Quantizes to 8 bits; returns codes and scales, block by block."""
    width = min(block, max(x.size, 1))
    blocks = jnp.pad(x.ravel().astype(jnp.float32), (0, -x.size % width)).reshape(-1, width)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True, initial=0) / LEVELS
    codes = jnp.round(blocks / jnp.where(scales == 0, 1, scales))
    return jnp.clip(codes, -LEVELS, LEVELS).astype(jnp.int8), scales


def _restore(like: Like, stored: tuple[Array, Array]) -> Array:
    codes, scales = stored
    return (codes.astype(jnp.float32) * scales).ravel()[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)
