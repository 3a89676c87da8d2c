"""Critical regimes: when gradients change fast, or the learning rate has just fallen, and compression does harm."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Array, Bool, Float, Int, Like, PyTree, Updates
from ..compressors.base import working_dtype

_LAST = jnp.iinfo(jnp.int32).max


class CriticalRegimeState(NamedTuple):
    """Agreed. What a detector remembers.

    Attributes:
      count: steps so far.
      total: the sum of the mean gradients of the current epoch, in float32 or better.
      norm: that of the mean gradient of the last epoch that was looked at.
      critical: the verdict.
      learning_rate: of the last step; 0 before the first one.
    """

    count: Int[Array, ""]
    total: Updates
    norm: Float[Array, ""]
    critical: Bool[Array, ""]
    learning_rate: Float[Array, ""]


class CriticalRegime(NamedTuple):
    """A detector, as pure functions.

    Attributes:
      init: `init(like) -> state` from the shapes of the gradients. The beginning is critical.
      before: `before(state, learning_rate=None) -> state`, at the beginning of a step: a rate below that of the last
        step makes it critical.
      after: `after(state, mean) -> state`, at its end, with the agreed mean gradient.
    """

    init: Callable[[PyTree[Like]], CriticalRegimeState]
    before: Callable[..., CriticalRegimeState]
    after: Callable[[CriticalRegimeState, Updates], CriticalRegimeState]


def critical_regime(
    *,
    epoch_steps: int,
    interval_steps: int,
    eta: float | int = 0.5,
    schedule: Callable[[Int[Array, ""]], Float[Array, ""] | float] | None = None,
) -> CriticalRegime:
    """Detects them as Accordion does: `critical` unless `| |A'| - |A| | < eta |A'|`, and when the learning rate falls.

    `A` is the gradient summed over the first `epoch_steps` of every `interval_steps`, and `A'` the one before. Looked
    at is the *reduced* gradient, which all workers have, so that they agree at no cost; the paper looks at one worker's
    own. Norms are those of the mean over the epoch, which stay comparable when a larger batch makes epochs shorter.

    *On the wire*: nothing.

    *State* (agreed): see `CriticalRegimeState`; a float32 copy of the gradients.

    Args:
      epoch_steps: over how many steps to sum: those of an epoch. Noise cancels in long sums, and only in them.
      interval_steps: from one verdict to the next, ten epochs in the paper. Shorter follows the training more closely
        and decides by smaller changes.
      eta: the relative change from which on a regime is critical. Lower is more careful.
      schedule: the learning rate of each step, for callers that do not pass `learning_rate`.

    Returns:
      The detector. Its verdict stands until the end of the next epoch that it looks at; there is no first one to
      compare with, so that it is critical for `interval_steps + epoch_steps` at least.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import critical_regime
      >>> detector = critical_regime(epoch_steps=1, interval_steps=1)
      >>> state, verdicts = detector.init(jnp.zeros(1)), []
      >>> for norm in (10.0, 4.0, 3.0):
      ...     state = detector.after(detector.before(state, learning_rate=0.1), jnp.full(1, norm))
      ...     verdicts.append(bool(state.critical))
      >>> verdicts, bool(detector.before(state, learning_rate=0.01).critical)
      ([True, True, False], True)

    References:
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv 2010.16248, 2021.
    """
    if epoch_steps < 1:
        raise ValueError(f"epoch_steps must be at least 1, got {epoch_steps}")
    if interval_steps < epoch_steps:
        raise ValueError(f"interval_steps must be at least epoch_steps, {epoch_steps}, got {interval_steps}")
    if eta < 0:
        raise ValueError(f"eta must not be negative, got {eta}")

    def init(like):
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), like)
        zero = jnp.zeros((), jnp.float32)
        return CriticalRegimeState(jnp.zeros((), jnp.int32), total, zero, jnp.ones((), bool), zero)

    def before(state, learning_rate=None):
        if schedule is not None:
            learning_rate = schedule(state.count)
        if learning_rate is None:
            return state
        rate = jnp.asarray(learning_rate, jnp.float32)
        return state._replace(critical=state.critical | (rate < state.learning_rate), learning_rate=rate)

    def after(state, mean):
        position = state.count % interval_steps
        looking = state.count < _LAST  # where the count stays, so does the verdict

        def add(total):
            def one(a, x):
                return jnp.where(position == 0, 0, a) + x.astype(a.dtype)

            return jax.tree.map(one, total, mean)

        def judge(total, norm, critical):
            del critical
            new = _norm(total) / epoch_steps
            return new, ~(jnp.abs(norm - new) < eta * norm)  # critical also where a norm is NaN

        total = lax.cond(looking & (position < epoch_steps), add, lambda total: total, state.total)
        ends = looking & (position == epoch_steps - 1)
        norm, critical = lax.cond(ends, judge, lambda total, *old: old, total, state.norm, state.critical)
        count = jnp.where(looking, state.count + 1, state.count)
        return CriticalRegimeState(count, total, norm, critical, state.learning_rate)

    return CriticalRegime(init, before, after)


def _norm(tree: Updates) -> Float[Array, ""]:
    """Scaled, so that squares of tiny and huge gradients neither vanish nor overflow."""
    zero = jnp.zeros((), jnp.float32)
    leaves = jax.tree.leaves(tree)
    largest = [jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in leaves]
    scale = jnp.max(jnp.stack([zero, *largest]))
    divisor = jnp.where(scale == 0, 1, scale)
    squares = [jnp.sum(jnp.square((x / divisor.astype(x.dtype)).astype(jnp.float32))) for x in leaves]
    return scale * jnp.sqrt(sum(squares, zero))
