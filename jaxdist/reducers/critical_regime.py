"""Accordion's critical regimes: gradients change fast, or the learning rate has just fallen."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import comm as comms
from .._core.checks import check_count, check_range
from .._core.dtypes import working_dtype
from .._core.types import Array, Bool, Float, Int, Like, PyTree, Updates
from ..comm.base import Comm
from .trees import tree_norm

Schedule = Callable[[Int[Array, ""]], Float[Array, ""] | float]
_LAST = jnp.iinfo(jnp.int32).max


class CriticalRegimeState(NamedTuple):
    """The state of a detector; replicated, except `total` in `accordion`.

    Attributes:
      count: steps so far.
      total: the sum of the gradients of the current epoch, in float32 or better; `PerWorker` in `accordion`.
      norm: the norm of the mean gradient of the last epoch that was judged; in `accordion` the mean over workers.
      critical: whether the regime is critical.
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
      init: `init(like) -> state` from the shapes of the gradients. The first regime is critical.
      before: `before(state, learning_rate=None) -> state`, at the beginning of a step: a rate well below that of the
        last step makes it critical.
      after: `after(state, gradient, own=None, comm=None) -> state`, at the end of a step, with the mean gradient. For a
        gradient that differs between workers pass their group `comm`, over which norms are averaged; if it contains
        error feedback, also pass the part that was sent, `own`.
    """

    init: Callable[[PyTree[Like]], CriticalRegimeState]
    before: Callable[..., CriticalRegimeState]
    after: Callable[..., CriticalRegimeState]


def critical_regime(
    *,
    epoch_steps: int,
    interval_steps: int,
    eta: float | int = 0.5,
    schedule: Schedule | None = None,
    fall: float | int = 0.1,
) -> CriticalRegime:
    """Detects Accordion's critical regimes: all but `| |A'| - |A| | < eta |A'|`, and sudden falls of the learning rate.

    `A` is the gradient summed over the first `epoch_steps` of every `interval_steps`, and `A'` the one before. Norms
    are those of the mean over the epoch. `A` must be free of compression.

    *On the wire*: nothing; with `comm` the mean of 4 bytes in each step that ends with a verdict.

    *State* (replicated): see `CriticalRegimeState`; a float32 copy of the gradients.

    Args:
      epoch_steps: the number of steps to sum, those of an epoch. Noise cancels in long sums only.
      interval_steps: the steps between verdicts, ten epochs in the paper. Shorter follows the training more closely and
        decides by smaller changes.
      eta: the relative change from which on a regime is critical. Lower is more careful.
      schedule: the learning rate of each step, for callers that do not pass `learning_rate`.
      fall: the fraction by which the rate must fall in one step to be critical: a drop to a half or a tenth is; a
        cosine or linear decay is not, except in its last few steps. 0: any decrease, as in the paper, for piecewise
        constant rates only. 1: none; the gradient alone decides.

    Returns:
      The detector. Its verdict holds until the end of the next epoch that is judged. The first epoch has nothing to be
      compared with, so at least the first `interval_steps + epoch_steps` steps are critical.

    Warns:
      UserWarning: from `init`, `schedule` falls by more than `fall` in consecutive steps, so all are critical.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist.reducers import critical_regime
      >>> detector = critical_regime(epoch_steps=1, interval_steps=1)
      >>> judge = jax.jit(lambda state, x: detector.after(detector.before(state, learning_rate=0.1), x))
      >>> state, verdicts = detector.init(jnp.zeros(1)), []
      >>> for norm in (10.0, 4.0, 3.0):
      ...     state = judge(state, jnp.full(1, norm))
      ...     verdicts.append(bool(state.critical))
      >>> verdicts, bool(detector.before(state, learning_rate=0.01).critical)
      ([True, True, False], True)

    References:
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv:2010.16248, 2021.
    """
    check_count("epoch_steps", epoch_steps, 1)
    check_count("interval_steps", interval_steps, 1)
    if interval_steps < epoch_steps:
        raise ValueError(f"interval_steps must be at least epoch_steps, {epoch_steps}, got {interval_steps}")
    check_range("eta", eta, 0, ends="[]")
    check_range("fall", fall, 0, 1, ends="[]")
    detector = _CriticalRegime(epoch_steps, interval_steps, eta, schedule, fall)
    return CriticalRegime(detector.init, detector.before, detector.after)


class _CriticalRegime(NamedTuple):
    epoch_steps: int
    interval_steps: int
    eta: float | int
    schedule: Schedule | None
    fall: float | int

    def init(self, like: PyTree[Like]) -> CriticalRegimeState:
        if self.schedule is not None and _falls_all_the_time(self.schedule, self.fall):
            warnings.warn(
                f"the rates of schedule= fall by more than fall={self.fall} step after step, so that every step is "
                "critical and reduced with low compression: raise fall=, or use fall=1, which ignores the rates",
                stacklevel=2,
            )
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), like)
        # Separate buffers: states may be donated.
        norm, learning_rate = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
        return CriticalRegimeState(jnp.zeros((), jnp.int32), total, norm, jnp.ones((), bool), learning_rate)

    def before(self, state: CriticalRegimeState, learning_rate: Any = None) -> CriticalRegimeState:
        if self.schedule is not None:
            learning_rate = self.schedule(state.count)
        if learning_rate is None:
            return state
        rate = jnp.asarray(learning_rate, jnp.float32)
        # Deviation: in the paper any decrease is critical, which a cosine has in all steps.
        fell = rate < (1 - self.fall) * state.learning_rate
        return state._replace(critical=state.critical | fell, learning_rate=rate)

    def after(
        self, state: CriticalRegimeState, gradient: Updates, own: Updates | None = None, comm: Comm | None = None
    ) -> CriticalRegimeState:
        comm = comms.alone() if comm is None else comm
        own = gradient if own is None else own
        position = state.count % self.interval_steps
        # A saturated count keeps its verdict.
        is_counting = state.count < _LAST
        is_last = position == self.interval_steps - 1

        def judge(comm, total, norm, critical):
            # The whole gradient of the last step: what it leaves behind is part of the sum Σ g.
            epoch = jax.tree.map(lambda a, x: a + x.astype(a.dtype), total, gradient)
            new = comm.mean(tree_norm(epoch)) / self.epoch_steps
            # | |A'| - |A| | < η |A'|, negated so that a norm of NaN is critical too.
            return new, ~(jnp.abs(norm - new) < self.eta * norm)

        def keep(comm, total, norm, critical):
            return norm, critical

        ends = is_counting & (position == self.epoch_steps - 1)
        norm, critical = comms.cond(ends, judge, keep, comm, state.total, state.norm, state.critical)
        # Outside of an epoch gradients are not added, which saves a pass over them.
        total = lax.cond(
            is_counting & ((position < self.epoch_steps) | is_last),
            lambda total: jax.tree.map(partial(_add_gradient, is_last), total, gradient, own),
            lambda total: total,
            state.total,
        )
        count = jnp.where(is_counting, state.count + 1, state.count)
        return CriticalRegimeState(count, total, norm, critical, state.learning_rate)


def _add_gradient(is_last: Array, total: Array, x: Array, own: Array) -> Array:
    # Σ_(s..T-1) own_t - e_(s-1): the last step before an epoch starts its sum with the residual, -e = own - x.
    return jnp.where(is_last, 0, total) + own.astype(total.dtype) - jnp.where(is_last, x.astype(total.dtype), 0)


def _falls_all_the_time(schedule: Callable[..., Any], fall: float | int) -> bool:
    """Checks whether the rate falls in consecutive steps at more than one time; piecewise constant rates do not."""
    # A sample of times, three steps from each.
    times = np.unique(np.geomspace(1, 1e6, 100).astype(np.int32))
    with jax.ensure_compile_time_eval():
        rates = jax.vmap(jax.vmap(schedule))(jnp.asarray(times[:, None] + np.arange(3, dtype=np.int32)))
        falls = np.asarray(rates[:, 1:] < (1 - fall) * rates[:, :-1])
    return bool(falls.all(axis=1).sum() > 1)
