"""Accordion: less compression in critical regimes."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from .._core.descriptions import with_description
from .._core.types import Like, State
from ..state.marks import PerWorker, with_value
from .critical_regime import CriticalRegime, CriticalRegimeState, Schedule, critical_regime
from .per_leaf import per_leaf
from .reducer import NO_EXTRAS, Reducer, forward_forms, forward_limits, weakest
from .reducer_schedule import one_of_two
from .trees import is_map_params_placeholder, list_named_leaves


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
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.accordion(
      ...     jd.compressed(jd.top_k(0.99)), jd.compressed(jd.top_k(0.5)), epoch_steps=1, interval_steps=1
      ... )
      >>> x, kept = jnp.array([1.0, 4.0]), []
      >>> state, reduce = reducer.init(x), jax.jit(lambda x, state: reducer.reduce(x, state, jd.comm.alone()))
      >>> for _ in range(3):  # nothing to compare with, then nothing changes
      ...     reduced, state = reduce(x, state)
      ...     kept.append(int((reduced.mean != 0).sum()))
      >>> kept
      [2, 2, 1]

    References:
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv:2010.16248, 2021.
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
    whole = Reducer(init, reduce, weakest(low, high), forms, limits=forward_limits(low, high))
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
