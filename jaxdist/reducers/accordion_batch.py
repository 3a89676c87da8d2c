"""Accordion's batches: small in the first critical regime, large afterwards."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from .._core.descriptions import with_description
from .._core.types import PyTree, State
from ..state.marks import PerWorker, with_value
from .accordion import CriticalRegime, CriticalRegimeState, Schedule, critical_regime
from .base import NO_EXTRAS, Reducer, forward_forms, weakest


class WatchedState(NamedTuple):
    """The states of the detector, replicated except `total`, this worker's sum, and of the reducer."""

    regime: CriticalRegimeState
    reducer: State


@with_description
def with_regime(
    reducer: Reducer,
    *,
    epoch_steps: int,
    interval_steps: int,
    eta: float | int = 0.5,
    schedule: Schedule | None = None,
    fall: float | int = 0.1,
) -> Reducer:
    """The same reducer, which also judges whether the regime is critical, for `accordion_batch`.

    Judged is what the workers computed, `mean_w |Σ_t g_(w,t)|`, as in `accordion`: no compression affects it, and error
    feedback belongs around this reducer. For a verdict on the reduced gradient instead, pass that to a
    `critical_regime` in your step, which then needs no communication.

    *On the wire*: what the reducer sends, and the mean of 4 bytes in one step of every `interval_steps`.

    *State*: that of the reducer, and that of the detector: replicated, with a float32 copy of the gradients per worker.

    The arguments are those of `critical_regime`; steps are those of the small batch.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.with_regime(jd.exact(), epoch_steps=1, interval_steps=1)
      >>> state = reducer.init(jnp.zeros(1))
      >>> for norm in (10.0, 4.0, 3.0):
      ...     _, state = reducer.reduce(jnp.full(1, norm), state, jd.comm.alone())
      >>> bool(state.regime.critical)
      False

    References:
      Agarwal et al., arXiv:2010.16248, 2021.
    """
    detector = critical_regime(
        epoch_steps=epoch_steps, interval_steps=interval_steps, eta=eta, schedule=schedule, fall=fall
    )
    return _watch(reducer, detector, inside_feedback=False)


def _watch(reducer: Reducer, detector: CriticalRegime, *, inside_feedback: bool) -> Reducer:
    def init(like):
        regime = detector.init(like)
        return WatchedState(regime._replace(total=PerWorker(regime.total)), reducer.init(like))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        mark = state.regime.total
        regime = detector.before(state.regime._replace(total=mark.value), extras.learning_rate)
        reduced, inner = reducer.reduce(updates, state.reducer, comm, extras)
        # Without feedback what was not sent does not come again: all of the gradient is this step's.
        with jax.named_scope("critical_regime"):
            regime = detector.after(regime, updates, reduced.own if inside_feedback else updates, comm)
        return reduced, WatchedState(regime._replace(total=with_value(mark, regime.total)), inner)

    def rebuild(reducer):
        return _watch(reducer, detector, inside_feedback=True)

    # Inside feedback the detector must look at what was sent: that form differs even if that of the reducer does not.
    forms = forward_forms(rebuild, reducer, shards=False)
    if not inside_feedback and forms.contraction is None:
        forms = forms._replace(contraction=rebuild(reducer))
    return Reducer(init, reduce, weakest(reducer), forms)


def accordion_batch(small: int, large: int) -> Callable[[int, PyTree], int]:
    """Grows the batch once the training has left its first critical regime: `next_size(size, state) -> size`.

    A decision of the host, between two epochs. `state` is that of the optimizer, or any other that contains one
    detector, of `with_regime(reducer)` or of a `critical_regime` in the step; its verdict is replicated, so all workers
    decide alike. The batch never shrinks again. Another batch is another program, and an epoch has fewer steps: give
    the learning rate as an argument of the step, and multiply it by `large / small` when the batch grows.

    Args:
      small: the examples in a batch, of all workers together, in the first critical regime.
      large: those of the batches after it; 8 times as many in the paper.

    Returns:
      The function. It raises `ValueError` for a state with no detector or with several.

    Examples:
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
      Agarwal et al., arXiv:2010.16248, 2021.
    """
    if small < 1 or large < small:
        raise ValueError(f"small must be at least 1 and large no smaller, got {small} and {large}")

    def next_size(size, state):
        return small if size < large and bool(_verdict(state)) else large

    return next_size


def _verdict(state: PyTree) -> jax.Array:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, CriticalRegimeState))
    found = [node.critical for node in nodes if isinstance(node, CriticalRegimeState)]
    if len(found) != 1:
        raise ValueError(
            f"accordion_batch needs one detector in the state, got {len(found)}: put with_regime(reducer) into the "
            "optimizer and pass its state, or pass the state of the detector itself"
        )
    return found[0]
