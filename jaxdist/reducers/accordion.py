"""Accordion: less compression in critical regimes, when gradients change fast or the learning rate has just fallen."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import comm as comms
from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.dtypes import working_dtype
from .._core.types import Array, Bool, Float, Int, Like, PyTree, State, Updates
from ..comm.base import Comm
from ..state.marks import PerWorker, with_value
from .base import NO_EXTRAS, Reducer, forward_forms, is_map_params_placeholder, list_named_leaves, tree_norm, weakest
from .combinators import one_of_two, per_leaf

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
    """Accordion's detector: critical unless `| |A'| - |A| | < eta |A'|`, and when the learning rate falls.

    `A` is the gradient summed over the first `epoch_steps` of every `interval_steps`, and `A'` the one before. Norms
    are those of the mean over the epoch, which stay comparable when a larger batch makes epochs shorter.

    `A` must be free of compression, or the detector sees its own verdicts: error feedback moves updates from one epoch
    to another. `accordion` sums what each worker computed. Inside feedback it sees `x_t = g_t + e_(t-1)` and what
    of it was sent, `own_t = x_t - e_t`, and the sum of the gradients telescopes,
    `Σ_(s..T) g_t = Σ_(s..T-1) own_t + x_T - e_(s-1)`.

    Deviations: the paper uses one worker's sum, here the norms of all workers' sums are averaged; in the paper any
    decrease of the learning rate between epochs is critical, which a cosine has in all epochs; here it must be sudden.

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
      Learning Regime Identification", arXiv:2010.16248, 2021.
    """
    check_count("epoch_steps", epoch_steps, 1)
    check_count("interval_steps", interval_steps, 1)
    if interval_steps < epoch_steps:
        raise ValueError(f"interval_steps must be at least epoch_steps, {epoch_steps}, got {interval_steps}")
    if not eta >= 0:
        raise ValueError(f"eta must not be negative, got {eta}")
    if not 0 <= fall <= 1:
        raise ValueError(f"fall must be in [0, 1], got {fall}")
    cfg = _Config(epoch_steps, interval_steps, eta, schedule, fall)
    return CriticalRegime(partial(_init, cfg), partial(_before, cfg), partial(_after, cfg))


class _Config(NamedTuple):
    epoch_steps: int
    interval_steps: int
    eta: float | int
    schedule: Schedule | None
    fall: float | int


def _init(cfg: _Config, like: PyTree[Like]) -> CriticalRegimeState:
    if cfg.schedule is not None and _falls_all_the_time(cfg.schedule, cfg.fall):
        warnings.warn(
            f"the rates of schedule= fall by more than fall={cfg.fall} step after step, so that every step is critical "
            "and reduced with low compression: raise fall=, or use fall=1, which ignores the rates",
            stacklevel=2,
        )
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), like)
    # Separate buffers: states may be donated.
    norm, learning_rate = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return CriticalRegimeState(jnp.zeros((), jnp.int32), total, norm, jnp.ones((), bool), learning_rate)


def _before(cfg: _Config, state: CriticalRegimeState, learning_rate: Any = None) -> CriticalRegimeState:
    if cfg.schedule is not None:
        learning_rate = cfg.schedule(state.count)
    if learning_rate is None:
        return state
    rate = jnp.asarray(learning_rate, jnp.float32)
    # Deviation: in the paper any decrease is critical, which a cosine has in all steps.
    fell = rate < (1 - cfg.fall) * state.learning_rate
    return state._replace(critical=state.critical | fell, learning_rate=rate)


def _after(
    cfg: _Config, state: CriticalRegimeState, gradient: Updates, own: Updates | None = None, comm: Comm | None = None
) -> CriticalRegimeState:
    comm = comms.alone() if comm is None else comm
    own = gradient if own is None else own
    position = state.count % cfg.interval_steps
    # A saturated count keeps its verdict.
    is_counting = state.count < _LAST
    is_last = position == cfg.interval_steps - 1

    def judge(comm, total, norm, critical):
        # The whole gradient of the last step: what it leaves behind is part of the sum Σ g.
        epoch = jax.tree.map(lambda a, x: a + x.astype(a.dtype), total, gradient)
        new = comm.mean(tree_norm(epoch)) / cfg.epoch_steps
        # | |A'| - |A| | < η |A'|, negated so that a norm of NaN is critical too.
        return new, ~(jnp.abs(norm - new) < cfg.eta * norm)

    def keep(comm, total, norm, critical):
        return norm, critical

    ends = is_counting & (position == cfg.epoch_steps - 1)
    norm, critical = comms.cond(ends, judge, keep, comm, state.total, state.norm, state.critical)
    # Outside of an epoch gradients are not added, which saves a pass over them.
    total = lax.cond(
        is_counting & ((position < cfg.epoch_steps) | is_last),
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


class AccordionState(NamedTuple):
    """The states of the detector and of both reducers; that of the idle reducer does not change.

    `regime` is replicated, except `total`, the sum of this worker's gradients.
    """

    regime: CriticalRegimeState
    low: State
    high: State


@with_description
def accordion(
    low: Reducer,
    high: Reducer,
    *,
    epoch_steps: int,
    interval_steps: int,
    eta: float | int = 0.5,
    groups: Callable[[str, Like], str] | None = None,
    schedule: Schedule | None = None,
    fall: float | int = 0.1,
) -> Reducer:
    """Reduces with `low` compression in critical regimes and with `high` compression otherwise.

    Critical is the beginning, the time after the learning rate fell, and wherever the gradient of an epoch has changed
    by `eta` or more since `interval_steps` ago. Put error feedback around it: the residual then
    outlives every switch. Factors and keys belong to each of the two: a PowerSGD that comes back goes on from the
    factors that it left with.

    Judged is the gradient that the workers computed, inside error feedback too: it has neither what was left behind in
    earlier steps nor lost what a code takes away. Feedback that is no plain sum (`decay` below 1, `with_learning_rate`,
    `loco`) leaves some of the residual in it; inside `ef21` it is the change of the gradient over an epoch.

    *On the wire*: what the reducer of the step sends; the program has both. For the decision the mean of 4 bytes, with
    `groups` for each of them, in one step of every `interval_steps`.

    *State*: that of both reducers; that of the detector, agreed, with a float32 copy of the gradients per worker. With
    `groups` a dict from label to such a state.

    Args:
      low: little compression: `power_sgd(2)`, `compressed(top_k(0.99))`.
      high: much compression, of the same kind: `power_sgd(1)`, `compressed(top_k(0.1))`.
      groups: `groups(path, leaf)`, a label for each leaf: each group decides for itself, and sends by itself. `None`:
        one decision for the model and the fewest messages. `lambda path, leaf: path` is the paper's, layer by layer.

    The other arguments are those of `critical_regime`; without a `schedule` and without `learning_rate=` in the update
    the gradient alone decides. The law is the weaker one of the two reducers.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.accordion(
      ...     jd.compressed(jd.top_k(0.99)), jd.compressed(jd.top_k(0.5)), epoch_steps=1, interval_steps=1
      ... )
      >>> x, kept = jnp.array([1.0, 4.0]), []
      >>> state = reducer.init(x)
      >>> for _ in range(3):  # nothing to compare with, then nothing changes
      ...     reduced, state = reducer.reduce(x, state, jd.comm.alone())
      ...     kept.append(int((reduced.mean != 0).sum()))
      >>> kept
      [2, 2, 1]

    References:
      Agarwal et al., arXiv:2010.16248, 2021.
    """
    detector = critical_regime(
        epoch_steps=epoch_steps, interval_steps=interval_steps, eta=eta, schedule=schedule, fall=fall
    )
    return _switch(low, high, detector, groups, inside_feedback=False)


def _switch(
    low: Reducer,
    high: Reducer,
    detector: CriticalRegime,
    groups: Callable[[str, Like], str] | None,
    *,
    inside_feedback: bool,
) -> Reducer:
    def init(like):
        regime = detector.init(like)
        regime = regime._replace(total=PerWorker(regime.total))
        return AccordionState(regime, low.init(like), high.init(like))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        with jax.named_scope("accordion"):
            mark = state.regime.total
            regime = detector.before(state.regime._replace(total=mark.value), extras.learning_rate)
            parts = {"low": low, "high": high}
            reduced, state = one_of_two(regime.critical, parts, updates, state, comm, extras)
            # Without feedback what was not sent does not come again: all of the gradient is this step's.
            regime = detector.after(regime, updates, reduced.own if inside_feedback else updates, comm)
            return reduced, state._replace(regime=regime._replace(total=with_value(mark, regime.total)))

    def rebuild(low, high):
        return _switch(low, high, detector, groups, inside_feedback=True)

    # Inside feedback the detector must look at what was sent, so that form differs even if those of the parts do not.
    forms = forward_forms(rebuild, low, high, shards=False)
    if not inside_feedback and forms.contraction is None:
        forms = forms._replace(contraction=rebuild(low, high))
    whole = Reducer(init, reduce, weakest(low, high), forms)
    return whole if groups is None else _each_group(whole, groups)


def _each_group(reducer: Reducer, groups: Callable[[str, Like], str]) -> Reducer:
    """A reducer for each label that occurs, which only the tree knows."""

    def policy(tree):
        labels = {groups(path, leaf) for path, leaf in list_named_leaves(tree)}
        return per_leaf(groups, dict.fromkeys(sorted(labels), reducer))

    def init(like):
        return 0 if is_map_params_placeholder(like) else policy(like).init(like)

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        return policy(updates).reduce(updates, state, comm, extras)

    return reducer._replace(init=init, reduce=reduce)
