"""Error feedback: compression errors are kept and added to later updates. Combinators over any reducer with a law."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_count, check_range
from .._core.descriptions import with_description
from .._core.dtypes import widen_like, working_dtype
from .._core.types import Array, Bool, Int, Like, PyTree, State, Updates
from .._core.xla_quirks import largest_entry
from ..state.marks import PerWorker, with_value
from .base import (
    HAS_FEEDBACK,
    Extras,
    Forms,
    Law,
    Reduced,
    Reducer,
    as_generator,
    cast_like,
    contraction_of,
    forward_forms,
    from_generator,
    weakest,
)

LEVELS = 127  # of the codes of `loco`, in int8


class ErrorFeedbackState(NamedTuple):
    """`residual`: this worker's undelivered updates, in float32 or better; with `with_learning_rate` times the rate."""

    reducer: State
    residual: PerWorker


class EF21State(NamedTuple):
    """`own` is the estimate of this worker's gradient that the others have, `mean` its replicated mean over workers."""

    reducer: State
    own: PerWorker
    mean: Updates
    momentum: PerWorker


class LoCoState(NamedTuple):
    """`error`: two trees like the updates, blocks of int8 `[blocks, block]` and their float32 scales, per worker.

    `count`: the steps since the last reset.
    """

    reducer: State
    error: PerWorker
    count: Int[Array, ""]


@with_description
def error_feedback(reducer: Reducer, *, decay: float | int = 1.0, with_learning_rate: bool = False) -> Reducer:
    """Adds to each update what earlier ones left behind: `v = x + e`, `mean, own = reduce(v)`, `e = v - own`.

    The outputs then telescope: their sum plus the mean residual is the sum of the inputs. Feedback needs a contraction;
    an unbiased code (`qsgd`, `random_k(unbiased=True)`) could expand the error, and is shrunk inside as far as that
    takes (`compressors.scaled`): typical buckets of `qsgd` with 3 bits or more are not shrunk at all. Around a reducer
    that is merely unbiased (`two_shot(qsgd(4))`) the same holds up to the noise on the way back.
    In a round of `local_steps`, a worker without examples sends zeros and keeps its residual until it takes part again.

    *On the wire*: what the reducer sends.

    *State*: that of the reducer, and per worker a residual in float32 (or better) of the size of the updates.

    Args:
      reducer: what to correct: `compressed(top_k(0.01))`, `power_sgd(rank=4)`, ...
      decay: `v = x + decay · e`. Below 1 old errors fade, which is momentum for updates that come seldom (SparseLoCo
        has 0.95); nothing telescopes then. Keep 1 for gradients of every step.
      with_learning_rate: keep the residual times the learning rate at which it arose, `v = x + e / rate`,
        `e = rate (v - own)`. Without it, what was left behind under a high rate is applied at the lower one of today:
        turn it on where the schedule is steep. The step must pass `update(..., learning_rate=rate)`.

    Raises:
      ValueError: the reducer has no law, its code has neither a contraction nor a variance, or `decay` is outside
        (0, 1]; at trace time, the step passes no learning rate where one is needed.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.error_feedback(jd.compressed(jd.top_k(0.5)))
      >>> state = reducer.init(jnp.zeros(2))
      >>> reduced, state = reducer.reduce(jnp.array([1.0, 4.0]), state, jd.comm.alone())
      >>> reduced.mean.tolist(), state.residual.value.tolist()
      ([0.0, 4.0], [1.0, 0.0])

    References:
      Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
      Speech DNNs", 2014. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      arXiv:1901.09847, 2019 (with the learning rate inside). SparseLoCo: Sarfi et al., arXiv:2508.15706, 2025 (decay).
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}")
    return _with_feedback(contraction_of(reducer), decay, with_learning_rate)


def _with_feedback(inner: Reducer, decay: float | int, with_learning_rate: bool) -> Reducer:
    def init(like):
        # The reducer compresses `v`, which is wider than half-precision updates.
        return ErrorFeedbackState(inner.init(jax.tree.map(widen_like, like)), PerWorker(_zeros(like)))

    def messages(updates, state, comm, extras):
        old, rate, factor = state.residual.value, None, decay
        if with_learning_rate:
            rate = _rate(extras)
            # At a rate of zero neither the mean nor the residual reaches the parameters.
            factor = jnp.where(rate == 0, 0, decay / jnp.where(rate == 0, 1, rate))
        # v = x + decay e (/ rate)
        corrected = jax.tree.map(lambda x, e: x.astype(e.dtype) + _scale(e, factor), updates, old)
        absent = is_absent(extras)
        corrected = zero_where(absent, corrected)
        reduced, inner_state = yield from as_generator(inner, corrected, state.reducer, comm, extras)
        # e = (rate) (v - own)
        residual = jax.tree.map(_compression_error, corrected, reduced.own)
        if rate is not None:
            residual = jax.tree.map(lambda new: _scale(new, rate), residual)
        if absent is not None:
            # e + (0 - own): a reducer may count as `own` what this worker did not send.
            residual = jax.tree.map(lambda new, e: new + jnp.where(absent, e, 0), residual, old)
        if rate is not None:
            residual = jax.tree.map(lambda new, e: jnp.where(rate == 0, e, new), residual, old)
        state = ErrorFeedbackState(inner_state, with_value(state.residual, residual))
        return Reduced(cast_like(reduced.mean, updates), reduced.own), state

    forms = forward_forms(lambda inner: _with_feedback(inner, decay, with_learning_rate), inner)
    forms = forms._replace(no_feedback=HAS_FEEDBACK, biased=None, codec=inner.forms.codec)
    return from_generator("error_feedback", init, messages, law=weakest(inner), forms=forms)


def _rate(extras: Extras) -> Array:
    if extras.learning_rate is None:
        raise ValueError(
            "error_feedback(with_learning_rate=True) needs the rate of this step: pass learning_rate= to the update"
        )
    return jnp.asarray(extras.learning_rate)


def is_absent(extras: Extras) -> Bool[Array, ""] | None:
    """Whether this worker does not take part; `None` if all do."""
    return None if extras.examples is None else extras.examples == 0


def zero_where(absent: Bool[Array, ""] | None, tree: Updates) -> Updates:
    """Zeros for a worker that does not take part: a compressor turns them into zeros, so that nothing is sent."""
    return tree if absent is None else jax.tree.map(lambda x: jnp.where(absent, 0, x), tree)


def _zeros(like: PyTree[Like]) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), like)


def _compression_error(corrected: Array, own: Array) -> Array:
    # A leaf that was sent uncompressed is the same object: no difference to compute.
    return jnp.zeros_like(corrected) if own is corrected else corrected - own


def _scale(x: Array, factor: Array | float | int) -> Array:
    """Multiplies without changing the dtype of `x`."""
    if isinstance(factor, float | int) and factor == 1:
        return x
    return x * jnp.asarray(factor).astype(x.dtype)


@with_description
def loco(reducer: Reducer, *, beta: float | int = 0.8, reset_every: int = 1024, block: int = 256) -> Reducer:
    """Corrects each update by a moving average of earlier errors: `h = x + e`, `e = β e + (1-β) (h - own)`.

    Summed up, `Σ own = Σ x - (e_T - e_0) / (1-β)`: nothing is lost for good, as with `error_feedback`, but an error
    is returned in small parts over `1/(1-β)` steps, which damps the oscillations of a coarse compressor. `e` is small,
    so 8 bits per entry suffice (the largest entry of a block is 127): a quarter of the memory of a float32 residual.
    Rounding `e` loses at most half a level per entry and step, and the reset discards what has accumulated. Error
    feedback around it is refused.

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
    forms = forms._replace(no_feedback=HAS_FEEDBACK, biased=None)
    return from_generator("loco", init, messages, law=weakest(inner), forms=forms)


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


@with_description
def ef21(reducer: Reducer, *, eta: float | int = 1.0) -> Reducer:
    """Sends the compressed *change* of each worker's gradient: `c = C(v - h)`, `h += c`; the mean is that of `h`.

    With `v = (1-eta) v + eta x`; `eta=1` is EF21 and `eta<1` EF21-SGDM, which needs no large batches. Workers and their
    agreed mean advance only by what was transmitted, decoded. `own` is `h`.

    *On the wire*: what the reducer sends.

    *State*: per worker `h` (and `v` when `eta<1`), agreed the mean of all `h`; float32 or better, as large as the
    updates.

    Args:
      reducer: compresses the change; a contraction, as in `error_feedback`. Around unbiased codes it loses.
      eta: the weight of the new gradient, in (0, 1]. Lower averages more noise away and follows more slowly; start at
        0.3 with small batches, 1 with full gradients. In a small language model 0.3 ended 8 to 9 % above `exact`, 1 and
        0.1 10 to 15 % (`benchmarks/reports/2026-11-starts`).

    Raises:
      ValueError: `eta` is outside (0, 1], the reducer is no contraction, or its law is `Law.UNBIASED`.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.ef21(jd.compressed(jd.top_k(0.5)))
      >>> state, x = reducer.init(jnp.zeros(2)), jnp.array([1.0, 4.0])
      >>> for _ in range(2):
      ...     reduced, state = reducer.reduce(x, state, jd.comm.alone())
      >>> reduced.mean.tolist()
      [1.0, 4.0]

    References:
      Richtárik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback", arXiv:2106.05203, 2021. Fatkhullin, Tyurin, Richtárik, "Momentum Provably Improves Error Feedback!",
      arXiv:2305.15155, 2023.
    """
    if not 0 < eta <= 1:
        raise ValueError(f"eta must be in (0, 1], got {eta}")
    inner = contraction_of(reducer)
    if inner.law == Law.UNBIASED:
        raise ValueError(
            "ef21 adds what arrives to its mean, and the noise of a reducer of Law.UNBIASED would pile up in it: "
            "keep it in a server residual, two_shot(..., server_feedback=True)"
        )

    def init(like):
        # Separate buffers: states may be donated.
        own, mean, momentum = _zeros(like), _zeros(like), _zeros(like) if eta < 1 else ()
        return EF21State(inner.init(jax.tree.map(widen_like, like)), PerWorker(own), mean, PerWorker(momentum))

    def messages(updates, state, comm, extras):
        target, momentum = cast_like(updates, state.mean), state.momentum
        if eta < 1:
            # v = (1-η) v + η x
            target = jax.tree.map(lambda v, x: (1 - eta) * v + eta * x, momentum.value, target)
            momentum = with_value(momentum, target)
        # c = C(v - h), h = h + c; the mean of all h advances by the mean of what was sent.
        change = jax.tree.map(jnp.subtract, target, state.own.value)
        reduced, inner_state = yield from as_generator(inner, change, state.reducer, comm, extras)
        own = jax.tree.map(jnp.add, state.own.value, reduced.own)
        mean = jax.tree.map(jnp.add, state.mean, reduced.mean)
        state = EF21State(inner_state, with_value(state.own, own), mean, momentum)
        return Reduced(cast_like(mean, updates), own), state

    # A server residual is missing from `mean` once, not from each step: that is weaker than Law.TELESCOPING.
    law = Law.EXACT if inner.law <= Law.EXACT else Law.NONE
    return from_generator(
        "ef21", init, messages, law=law, forms=Forms(no_feedback=HAS_FEEDBACK, no_parts=inner.forms.no_parts)
    )
