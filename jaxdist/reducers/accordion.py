"""Accordion: compress little while the training is in a critical regime, and much when it is not."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._marks import PerWorker, with_value
from .._typing import Array, Float, Int, Like, State
from .base import Reducer, feedback_form, held_by, is_stand_in, weakest
from .by_leaf import by_leaf
from .critical_regime import CriticalRegime, CriticalRegimeState, critical_regime
from .switch_at import one_of_two


class AccordionState(NamedTuple):
    """What the detector remembers, and the states of both reducers, of which the idle one's stays as it is.

    `regime` is agreed, but for `total`, the sum of this worker's gradients.
    """

    regime: CriticalRegimeState
    low: State
    high: State


def accordion(
    low: Reducer,
    high: Reducer,
    *,
    epoch_steps: int,
    interval_steps: int,
    eta: float | int = 0.5,
    groups: Callable[[str, Like], str] | None = None,
    schedule: Callable[[Int[Array, ""]], Float[Array, ""] | float] | None = None,
    fall: float | int = 0.1,
) -> Reducer:
    """Reduces with `low` compression in critical regimes and with `high` compression otherwise.

    Critical is the beginning, the time after the learning rate fell, and wherever the gradient of an epoch has changed
    by `eta` or more since `interval_steps` ago; see `critical_regime`. Put error feedback around it: the residual then
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
      epoch_steps: the steps of an epoch, over which gradients are summed.
      interval_steps: from one decision to the next; ten epochs in the paper.
      eta: the relative change that counts as critical. Lower compresses less.
      groups: `groups(path, leaf)`, a label for each leaf: each group decides for itself, and sends by itself. `None`:
        one decision for the model and the fewest messages. `lambda path, leaf: path` is the paper's, layer by layer.
      schedule: the learning rate of each step, where the training step does not pass `learning_rate=` to `update`.
        Without either only the gradient decides.
      fall: the part by which the rate must fall in one step to be critical; see `critical_regime`. With a cosine or
        linear schedule any fall, `0`, is every step.

    Returns:
      The reducer. Its law is the weaker one of the two.

    Raises:
      ValueError: an argument is out of range.

    Warns:
      UserWarning: from `init`, with `schedule` all steps would be critical.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.accordion(
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
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv 2010.16248, 2021.
    """
    detector = critical_regime(
        epoch_steps=epoch_steps, interval_steps=interval_steps, eta=eta, schedule=schedule, fall=fall
    )
    return _switched(low, high, detector, groups, inside_feedback=False)


def _switched(
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

    def reduce(updates, state, comm, **agreed):
        with jax.named_scope("accordion"):
            mark = state.regime.total
            regime = detector.before(state.regime._replace(total=mark.value), agreed.get("learning_rate"))
            parts = {"low": low, "high": high}
            reduced, state = one_of_two(regime.critical, parts, updates, state, comm, **agreed)
            # Without feedback what was not sent does not come again: all of the gradient is this step's.
            regime = detector.after(regime, updates, reduced.own if inside_feedback else updates, comm)
            return reduced, state._replace(regime=regime._replace(total=with_value(mark, regime.total)))

    def held(state, like, comm):
        both = held_by(low, state.low, like, comm), held_by(high, state.high, like, comm)
        return jax.tree.map(jnp.add, *both)

    def for_feedback():
        return _switched(feedback_form(low), feedback_form(high), detector, groups, inside_feedback=True)

    whole = Reducer(init, reduce, law=weakest([low, high]), for_feedback=for_feedback, held=held)
    return whole if groups is None else _each_group(whole, groups)


def _each_group(reducer: Reducer, groups: Callable[[str, Like], str]) -> Reducer:
    """A reducer for each label that occurs, which only the tree knows."""

    def policy(tree):
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        labels = {groups(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves}
        return by_leaf(groups, dict.fromkeys(sorted(labels), reducer))

    def init(like):
        return 0 if is_stand_in(like) else policy(like).init(like)

    def reduce(updates, state, comm, **agreed):
        return policy(updates).reduce(updates, state, comm, **agreed)

    def held(state, like, comm):
        return held_by(policy(like), state, like, comm)

    return reducer._replace(init=init, reduce=reduce, held=held)


def accordion_batch(small: int, large: int) -> Callable[[int, CriticalRegimeState], int]:
    """Grows the batch once the training has left its first critical regime: `next_size(size, state) -> size`.

    A decision of the host, between two epochs, from what a `critical_regime` detector in the training step remembers;
    all workers hold the same state, so that they decide alike. The batch never shrinks again. Another batch is another
    program, and an epoch has fewer steps. Multiply the learning rate by `large / small` when it grows: a rising rate is
    not critical.

    Args:
      small: the batch in the beginning.
      large: the batch afterwards.

    Returns:
      The function that gives the size of the next epoch's batch.

    Raises:
      ValueError: the sizes are not positive, or `large` is below `small`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import accordion_batch, critical_regime
      >>> detector, next_size = critical_regime(epoch_steps=1, interval_steps=1), accordion_batch(512, 4096)
      >>> size, state, sizes = 512, detector.init(jnp.zeros(1)), []
      >>> for norm in (10.0, 4.0, 3.0, 9.0):
      ...     state = detector.after(state, jnp.full(1, norm))
      ...     size = next_size(size, state)
      ...     sizes.append(size)
      >>> sizes
      [512, 512, 4096, 4096]

    References:
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv 2010.16248, 2021.
    """
    if small < 1 or large < small:
        raise ValueError(f"small must be at least 1 and large no smaller, got {small} and {large}")

    def next_size(size, state):
        return small if size < large and bool(state.critical) else large

    return next_size
