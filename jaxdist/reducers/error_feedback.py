"""Error feedback: compression errors are kept and added to later updates.

`examples/from_scratch/top_k.py` is the method, around top-k, in 100 lines of plain JAX.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.dtypes import widen_like
from .._core.types import Array, State
from ..state.marks import PerWorker, with_value
from .feedback import is_absent, wide_zeros, zero_where
from .messages import as_generator, from_generator
from .reducer import HAS_FEEDBACK, Extras, Reduced, Reducer, Use, contraction_of, forward_forms, forward_limits, weakest
from .trees import cast_like


class ErrorFeedbackState(NamedTuple):
    """`residual`: this worker's undelivered updates, in float32 or better; with `with_learning_rate` times the rate."""

    reducer: State
    residual: PerWorker


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
      arXiv:1901.09847, 2019 (with the learning rate inside). SparseLoCo: Sarfi, Thérien, Lidin, Belilovsky,
      "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706, 2025 (decay).
    """
    check_range("decay", decay, 0, 1, ends="(]")
    return _with_feedback(contraction_of(reducer), decay, with_learning_rate)


def _with_feedback(inner: Reducer, decay: float | int, with_learning_rate: bool) -> Reducer:
    def init(like):
        # The reducer compresses `v`, which is wider than half-precision updates.
        return ErrorFeedbackState(inner.init(jax.tree.map(widen_like, like)), PerWorker(wide_zeros(like)))

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
    forms = forms._replace(biased=None, codec=inner.forms.codec)
    limits = forward_limits(inner) | {Use.FEEDBACK: HAS_FEEDBACK}
    return from_generator("error_feedback", init, messages, law=weakest(inner), forms=forms, limits=limits)


def _rate(extras: Extras) -> Array:
    if extras.learning_rate is None:
        raise ValueError(
            "error_feedback(with_learning_rate=True) needs the rate of this step: pass learning_rate= to the update"
        )
    return jnp.asarray(extras.learning_rate)


def _compression_error(corrected: Array, own: Array) -> Array:
    # A leaf that was sent uncompressed is the same object: no difference to compute.
    return jnp.zeros_like(corrected) if own is corrected else corrected - own


def _scale(x: Array, factor: Array | float | int) -> Array:
    """Multiplies without changing the dtype of `x`."""
    if isinstance(factor, float | int) and factor == 1:
        return x
    return x * jnp.asarray(factor).astype(x.dtype)
