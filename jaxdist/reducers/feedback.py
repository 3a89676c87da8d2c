"""Error feedback: what was not sent is kept, and sent later. Combinators over any reducer with a law."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._marks import PerWorker, with_value
from .._typing import Like, State, Updates
from ..compressors.base import working_dtype
from .base import Reduced, Reducer, cast_like, feedback_form, from_rounds, held_by, rounds_of


class ErrorFeedbackState(NamedTuple):
    """`residual` is what this worker has not delivered yet, in float32 or better, shaped like the updates."""

    reducer: State
    residual: PerWorker


class EF21State(NamedTuple):
    """`own` is this worker's estimate of its gradient as the others know it, `mean` their agreed mean."""

    reducer: State
    own: PerWorker
    mean: Updates
    momentum: PerWorker


def _wide(like: Like) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, working_dtype(like.dtype))


def _zeros(like: Like):
    return jnp.zeros(like.shape, working_dtype(like.dtype))


def error_feedback(reducer: Reducer) -> Reducer:
    """Adds to each update what earlier ones left behind: `v = x + e`, `mean, own = reduce(v)`, `e = v - own`.

    The outputs then telescope: their sum plus the mean residual is the sum of the inputs. Feedback needs a contraction;
    an unbiased code (`qsgd`, `random_k(unbiased=True)`) is scaled by `1/(1+ω)` inside, since it would expand the error.
    The residual carries no learning rate: with steep schedules, old errors are applied at the new rate.

    *On the wire*: what the reducer sends.

    *State*: that of the reducer, and per worker a residual in float32 (or better) of the size of the updates.

    Args:
      reducer: what to correct: `compressed(top_k(0.01))`, `power_sgd(rank=4)`, ...

    Returns:
      The reducer with feedback.

    Raises:
      ValueError: the reducer has no law, or its code has neither a contraction nor a variance.

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
      arXiv 1901.09847, 2019.
    """
    inner = feedback_form(reducer)

    def init(like):
        wide = jax.tree.map(_wide, like)
        return ErrorFeedbackState(inner.init(wide), PerWorker(jax.tree.map(_zeros, like)))

    def rounds(updates, state, comm, **agreed):
        corrected = jax.tree.map(lambda x, e: x.astype(e.dtype) + e, updates, state.residual.value)
        reduced, inner_state = yield from rounds_of(inner, corrected, state.reducer, comm, **agreed)
        residual = jax.tree.map(jnp.subtract, corrected, reduced.own)
        state = ErrorFeedbackState(inner_state, with_value(state.residual, residual))
        return Reduced(cast_like(reduced.mean, updates), reduced.own), state

    def held(state, like, comm):
        return held_by(inner, state.reducer, jax.tree.map(_wide, like), comm)

    return from_rounds(
        "error_feedback",
        init,
        rounds,
        law=inner.law,
        for_feedback=_already,
        held=held,
    )


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
      >>> reducer = jd.ef21(jd.compressed(jd.top_k(0.5)))
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
    inner = feedback_form(reducer)
    if inner.law == "unbiased":
        raise ValueError(
            "ef21 advances the agreed mean by what arrives, and noise on the way would pile up in it (law "
            '"unbiased"): keep it in a server residual, two_shot(..., server_feedback=True)'
        )

    def init(like):
        zeros = jax.tree.map(_zeros, like)
        momentum = PerWorker(zeros if eta < 1 else ())
        return EF21State(inner.init(jax.tree.map(_wide, like)), PerWorker(zeros), zeros, momentum)

    def rounds(updates, state, comm, **agreed):
        target = cast_like(updates, state.mean)
        momentum = state.momentum
        if eta < 1:
            target = jax.tree.map(lambda v, x: (1 - eta) * v + eta * x, momentum.value, target)
            momentum = with_value(momentum, target)
        change = jax.tree.map(jnp.subtract, target, state.own.value)
        reduced, inner_state = yield from rounds_of(inner, change, state.reducer, comm, **agreed)
        own = jax.tree.map(jnp.add, state.own.value, reduced.own)
        mean = jax.tree.map(jnp.add, state.mean, reduced.mean)
        state = EF21State(inner_state, with_value(state.own, own), mean, momentum)
        return Reduced(cast_like(mean, updates), own), state

    return from_rounds("ef21", init, rounds, for_feedback=_already)


def _already() -> Reducer:
    raise ValueError("this reducer has error feedback already; use it once, around the reducer that compresses")
