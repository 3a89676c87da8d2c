"""A reducer that watches for critical regimes and changes nothing."""

from typing import NamedTuple

import jax

from .._core.descriptions import with_description
from .._core.types import State
from ..state.marks import PerWorker, with_value
from .critical_regime import CriticalRegime, CriticalRegimeState, Schedule, critical_regime
from .reducer import NO_EXTRAS, Reducer, forward_forms, forward_limits, weakest


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
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv:2010.16248, 2021.
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
    return Reducer(init, reduce, weakest(reducer), forms, limits=forward_limits(reducer))
