"""LoCo: error feedback with a moving average of the errors, stored in 8 bits."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_count, check_range
from .._core.descriptions import with_description
from .._core.dtypes import widen_like
from .._core.types import Array, Int, Like, PyTree, State
from .._core.xla_quirks import largest_entry
from ..state.marks import PerWorker, with_value
from .feedback import is_absent, zero_where
from .messages import as_generator, from_generator
from .reducer import HAS_FEEDBACK, Reduced, Reducer, Use, contraction_of, forward_forms, forward_limits, weakest
from .trees import cast_like

LEVELS = 127  # of the codes of `loco`, in int8


class LoCoState(NamedTuple):
    """`error`: two trees like the updates, blocks of int8 `[blocks, block]` and their float32 scales, per worker.

    `count`: the steps since the last reset.
    """

    reducer: State
    error: PerWorker
    count: Int[Array, ""]


@with_description
def loco(reducer: Reducer, *, beta: float | int = 0.8, reset_every: int = 1024, block: int = 256) -> Reducer:
    """Corrects each update by a moving average of earlier errors: `h = x + e`, `e = β e + (1-β) (h - own)`.

    Summed up, `Σ own = Σ x - (e_T - e_0) / (1-β)`: nothing is lost for good, as with `error_feedback`, but an error
    is returned in small parts over `1/(1-β)` steps, which damps the oscillations of a coarse compressor. `e` is small,
    so 8 bits per entry suffice (the largest entry of a block is 127): a quarter of the memory of a float32 residual.
    Rounding `e` loses at most half a level per entry and step, and the reset discards what has accumulated, as another
    number of workers does. Error feedback around it is refused.

    *On the wire*: what the reducer sends.

    *State*: that of the reducer, a replicated count, and per worker about one byte for each entry of the updates.

    Args:
      reducer: what to correct; the paper's is `two_shot` of a 4-bit code. An unbiased code is shrunk as in
        `error_feedback`.
      beta: higher is smoother and slower to return what was lost; 0 is plain error feedback with an 8-bit memory.
      reset_every: steps after which `e` starts from zero.
      block: entries that share a scale. Smaller follows uneven leaves better and costs `4/block` bytes an entry.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.loco(jd.compressed(jd.top_k(0.5)), beta=0.5)
      >>> x = jnp.array([1.0, 4.0])
      >>> _, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
      >>> codes, scales = state.error.value
      >>> (codes * scales).tolist()
      [[0.5, 0.0]]

    References:
      Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv:2407.04480, 2024.
      Its reference code resets by a counter that all tensors share, which only some of them see; here all leaves do.
    """
    check_range("beta", beta, 0, 1)
    check_count("reset_every", reset_every, 1)
    check_count("block", block, 1)
    return _with_average(contraction_of(reducer), beta, reset_every, block)


def _with_average(inner: Reducer, beta: float | int, reset_every: int, block: int) -> Reducer:
    def init(like):
        wide = jax.tree.map(widen_like, like)
        error = _store(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wide), block)
        return LoCoState(inner.init(wide), PerWorker(error, resize="zero"), jnp.zeros((), jnp.int32))

    def messages(updates, state, comm, extras):
        error = jax.tree.map(_restore, jax.tree.map(widen_like, updates), *state.error.value)
        # h = x + e
        corrected = jax.tree.map(lambda x, e: x.astype(e.dtype) + e, updates, error)
        absent = is_absent(extras)
        corrected = zero_where(absent, corrected)
        reduced, inner_state = yield from as_generator(inner, corrected, state.reducer, comm, extras)
        # Modulo: a count of all steps would end, and with it the feedback.
        count = (state.count + 1) % reset_every
        keep = count != 0
        # e = β e + (1-β) (h - own)
        moved = jax.tree.map(lambda e, h, own: beta * e + (1 - beta) * (h - own), error, corrected, reduced.own)
        error = moved if absent is None else jax.tree.map(lambda e, new: jnp.where(absent, e, new), error, moved)
        stored = _store(jax.tree.map(lambda e: jnp.where(keep, e, 0), error), block)
        state = LoCoState(inner_state, with_value(state.error, stored), count)
        return Reduced(cast_like(reduced.mean, updates), reduced.own), state

    forms = forward_forms(lambda inner: _with_average(inner, beta, reset_every, block), inner)
    forms = forms._replace(biased=None)
    limits = forward_limits(inner) | {Use.FEEDBACK: HAS_FEEDBACK}
    return from_generator("loco", init, messages, law=weakest(inner), forms=forms, limits=limits)


def _store(tree: PyTree[Array], block: int) -> tuple[PyTree[Array], PyTree[Array]]:
    """Quantizes to 8 bits, block by block; returns a tree of codes and one of scales."""
    leaves, structure = jax.tree.flatten(tree)
    stored = [_quantize(x, block) for x in leaves]
    # Not pairs as leaves: `nnx.Optimizer` keeps variables of one array each.
    return structure.unflatten([codes for codes, _ in stored]), structure.unflatten([scales for _, scales in stored])


def _quantize(x: Array, block: int) -> tuple[Array, Array]:
    width = min(block, max(x.size, 1))
    blocks = jnp.pad(x.ravel().astype(jnp.float32), (0, -x.size % width)).reshape(-1, width)
    # The largest entry of a block is 127; a block of zeros has no scale, and is divided by 1.
    scales = largest_entry(jnp.abs(blocks), 1, keepdims=True, initial=0) / LEVELS
    codes = jnp.round(blocks / jnp.where(scales == 0, 1, scales))
    return jnp.clip(codes, -LEVELS, LEVELS).astype(jnp.int8), scales


def _restore(like: Like, codes: Array, scales: Array) -> Array:
    return (codes.astype(jnp.float32) * scales).ravel()[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)
