"""Error feedback: compression errors are kept and added to later updates. Combinators over any reducer with a law."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.dtypes import widen_like, working_dtype
from .._core.types import Array, Like, State, Updates
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


def _zeros(like: Like):
    return jnp.zeros(like.shape, working_dtype(like.dtype))


def error_feedback(reducer: Reducer, *, decay: float | int = 1.0, with_learning_rate: bool = False) -> Reducer:
    """Adds to each update what earlier ones left behind: `v = x + e`, `mean, own = reduce(v)`, `e = v - own`.

    The outputs then telescope: their sum plus the mean residual is the sum of the inputs. Feedback needs a contraction;
    an unbiased code (`qsgd`, `random_k(unbiased=True)`) is scaled by `1/(1+ω)` inside, since it would expand the error.
    Around a reducer that is merely unbiased (`two_shot(qsgd(4))`) the same holds up to the noise on the way back.

    *On the wire*: what the reducer sends.

    *State*: that of the reducer, and per worker a residual in float32 (or better) of the size of the updates.

    Args:
      reducer: what to correct: `compressed(top_k(0.01))`, `power_sgd(rank=4)`, ...
      decay: `v = x + decay · e`. Below 1 old errors fade, which is momentum for updates that come seldom (SparseLoCo
        has 0.95); nothing telescopes then. Keep 1 for gradients of every step.
      with_learning_rate: keep the residual times the learning rate at which it arose, `v = x + e / rate`,
        `e = rate (v - own)`. Without it, what was left behind under a high rate is applied at the lower one of today:
        turn it on where the schedule is steep. The step must pass `update(..., learning_rate=rate)`.

    Returns:
      The reducer with feedback.

    Raises:
      ValueError: the reducer has no law, its code has neither a contraction nor a variance, or `decay` is outside
        (0, 1]; at trace time, the step passes no learning rate where one is needed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.error_feedback(jd.compressed(jd.top_k(0.5)))
      >>> state = reducer.init(jnp.zeros(2))
      >>> reduced, state = reducer.reduce(jnp.array([1.0, 4.0]), state, jd.comm.alone())
      >>> reduced.mean.tolist(), state.residual.value.tolist()
      ([0.0, 4.0], [1.0, 0.0])

    References:
      Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
      Speech DNNs", 2014. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      arXiv 1901.09847, 2019 (with the learning rate inside). Sarfi, Thérien, Lidin, Belilovsky, "Communication
      Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, 2025 (decay).
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}")
    return _with_feedback(contraction_of(reducer), decay, with_learning_rate)


def _with_feedback(inner: Reducer, decay: float, with_learning_rate: bool) -> Reducer:
    def init(like):
        wide = jax.tree.map(widen_like, like)
        return ErrorFeedbackState(inner.init(wide), PerWorker(jax.tree.map(_zeros, like)))

    def messages(updates, state, comm, extras):
        old = state.residual.value
        rate = _rate(extras) if with_learning_rate else 1.0
        # At a rate of zero neither the mean nor the residual reaches the parameters.
        factor = jnp.where(rate == 0, 0, decay / jnp.where(rate == 0, 1, rate)) if with_learning_rate else decay
        corrected = jax.tree.map(lambda x, e: x.astype(e.dtype) + _scale(e, factor), updates, old)
        reduced, inner_state = yield from as_generator(inner, corrected, state.reducer, comm, extras)
        residual = jax.tree.map(_compression_error, corrected, reduced.own)
        if with_learning_rate:
            residual = jax.tree.map(lambda new, e: jnp.where(rate == 0, e, _scale(new, rate)), residual, old)
        state = ErrorFeedbackState(inner_state, with_value(state.residual, residual))
        return Reduced(cast_like(reduced.mean, updates), reduced.own), state

    forms = forward_forms(lambda inner: _with_feedback(inner, decay, with_learning_rate), inner)
    return from_generator(
        "error_feedback", init, messages, law=weakest(inner), forms=forms._replace(no_feedback=HAS_FEEDBACK)
    )


def _rate(extras: Extras) -> Array:
    if extras.learning_rate is None:
        raise ValueError(
            "error_feedback(with_learning_rate=True) needs the rate of this step: pass learning_rate= to the update"
        )
    return jnp.asarray(extras.learning_rate)


def _compression_error(corrected: Array, own: Array) -> Array:
    """The compression error. Zero, without computing it, if the leaf was sent uncompressed."""
    return jnp.zeros_like(corrected) if own is corrected else corrected - own


def _scale(x: Array, factor: Array | float) -> Array:
    """Multiplies without changing the dtype of `x`."""
    if isinstance(factor, float | int) and factor == 1:
        return x
    return x * jnp.asarray(factor).astype(x.dtype)


def ef21(reducer: Reducer, *, eta: float | int = 1.0) -> Reducer:
    """Sends the compressed *change* of each worker's gradient: `c = C(v - h)`, `h += c`; the mean is that of `h`.

    With `v = (1-eta) v + eta x`; `eta=1` is EF21 and `eta<1` EF21-SGDM, which needs no large batches. Workers and their
    agreed mean advance only by what was transmitted, decoded.

    *On the wire*: what the reducer sends.

    *State*: per worker `h` (and `v` when `eta<1`), agreed the mean of all `h`; float32 or better, as large as the
    updates.

    Args:
      reducer: compresses the change; a contraction, as in `error_feedback`.
      eta: the weight of the new gradient, in (0, 1]. Lower averages more noise away and follows more slowly; start at
        0.1 with small batches, 1 with full gradients.

    Returns:
      The reducer; `own` is `h`.

    Raises:
      ValueError: `eta` is outside (0, 1], or the reducer is no contraction.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.ef21(jd.compressed(jd.top_k(0.5)))
      >>> state, x = reducer.init(jnp.zeros(2)), jnp.array([1.0, 4.0])
      >>> for _ in range(2):
      ...     reduced, state = reducer.reduce(x, state, jd.comm.alone())
      >>> reduced.mean.tolist()
      [1.0, 4.0]

    References:
      Richtárik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback", arXiv 2106.05203, 2021. Fatkhullin, Tyurin, Richtárik, "Momentum Provably Improves Error Feedback!",
      arXiv 2305.15155, 2023.
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
        own, mean, momentum = (jax.tree.map(_zeros, like) for _ in range(3))  # separate buffers: states may be donated
        momentum = PerWorker(momentum if eta < 1 else ())
        return EF21State(inner.init(jax.tree.map(widen_like, like)), PerWorker(own), mean, momentum)

    def messages(updates, state, comm, extras):
        target = cast_like(updates, state.mean)
        momentum = state.momentum
        if eta < 1:
            target = jax.tree.map(lambda v, x: (1 - eta) * v + eta * x, momentum.value, target)
            momentum = with_value(momentum, target)
        change = jax.tree.map(jnp.subtract, target, state.own.value)
        reduced, inner_state = yield from as_generator(inner, change, state.reducer, comm, extras)
        own = jax.tree.map(jnp.add, state.own.value, reduced.own)
        mean = jax.tree.map(jnp.add, state.mean, reduced.mean)
        state = EF21State(inner_state, with_value(state.own, own), mean, momentum)
        return Reduced(cast_like(mean, updates), own), state

    # A server residual is missing from `mean` once, not from each step: that is weaker than Law.TELESCOPING.
    law = Law.EXACT if inner.law <= Law.EXACT else Law.NONE
    return from_generator("ef21", init, messages, law=law, forms=Forms(no_feedback=HAS_FEEDBACK))
