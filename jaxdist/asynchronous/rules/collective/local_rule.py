"""The rule that variants of local SGD configure: local steps, a snapshot, and the merge of its average."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from ...._core.checks import check_count
from ...._core.dtypes import working_dtype
from ...._core.types import Number, PyTree
from ... import protocol
from ...protocol import After, Compute, GradientRecord, Message, Reaction, Role, Rule, Site
from ...values import numeric
from ..base import apply_gradient, optimizer_on_values, other_workers, reduce_all, step_records, unknown_message


class _LocalState(NamedTuple):
    """A worker's model, the replicated global parameters, and the average in progress."""

    site: Site
    params: Any
    opt_state: Any
    # The global parameters, in float32 or better, and their optimizer's state: replicated, and updated when an average
    # arrives. The anchor is the rule's final model.
    anchor: Any
    outer_state: Any
    # The number of averages that this worker's model has merged.
    version: int = 0
    # Local steps since the last snapshot, and the oldest version at which a gradient since then was computed.
    steps: int = 0
    oldest: int = 0
    # The snapshot whose average is in progress, or None, and the oldest version in it.
    sent: Any = None
    sent_oldest: int = 0
    # Whether its average has arrived but is not merged yet.
    back: bool = False
    # Local steps since the beginning.
    total: int = 0
    computing: bool = True
    # Whether the clock allows a snapshot, and the number of its last timer, which is the timer's tag; others have 0.
    due: bool = True
    clock: int = 0


# Local steps, whose last arguments are the anchor and, for random choices, the seed, the worker and the local step.
def plain_step(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, gradient: PyTree, *unused: Any
) -> tuple[PyTree, PyTree]:
    """One step of the optimizer."""
    return apply_gradient(optimizer, params, opt_state, gradient)


# Averages.
def _to_working_dtype(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, working_dtype(leaf.dtype)), tree)


def _merge_average(params: PyTree, anchor: PyTree, sent: PyTree) -> PyTree:
    # x_i <- a + (x_i - s_i), as x_i + (a - s_i): exact where the average changes nothing.
    return jax.tree.map(
        lambda x, a, s: (x.astype(a.dtype) + (a - s.astype(a.dtype))).astype(x.dtype), params, anchor, sent
    )


# a - x_i in the dtype of the anchor: small differences of bfloat16 models would be lost.
_drift = numeric(lambda anchor, params: jax.tree.map(lambda a, x: a - x.astype(a.dtype), anchor, params))
_merge = numeric(_merge_average)
_cast_like = numeric(lambda anchor, params: jax.tree.map(lambda a, x: a.astype(x.dtype), anchor, params))


def local_rule(
    name: str,
    optimizer: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    sync_period: Number | Sequence[Number] | Int[np.ndarray, " workers"],
    delay: int | None,
    step: Callable[..., tuple[PyTree, PyTree]] = plain_step,
    interval: Number = 0.0,
) -> Rule:
    """Makes a rule of local steps and averages of drifts `a - x_i`.

    The mean drift is the gradient of `outer`, the optimizer of the global parameters. `delay` is the number of local
    steps between a snapshot and merging its average, when workers wait for it; None merges it on arrival, and workers
    never wait.
    """
    periods = tuple(np.atleast_1d(sync_period).tolist())
    for period in periods:
        check_count("sync_period", period, 1)
    if delay is not None and not 0 <= delay < min(periods):
        raise ValueError(
            f"delay must be in [0, sync_period={sync_period}), got {delay}: only one average may be in progress"
        )

    rule = _LocalRule(
        name,
        *optimizer_on_values(optimizer, step),
        numeric(_to_working_dtype, shared=True),
        *optimizer_on_values(outer, shared=True),
        periods,
        delay,
        interval,
    )
    worker = Role(rule.init, rule.receive, lambda state: state.anchor, rule.waits_for)
    return Rule(name, worker)


class _LocalRule(NamedTuple):
    """The arguments of `local_rule`, as functions of values."""

    name: str
    start: Callable[..., Any]
    step: Callable[..., Any]
    to_working_dtype: Callable[..., Any]
    start_outer: Callable[..., Any]
    outer_step: Callable[..., Any]
    # One for all workers, or one for each.
    sync_periods: tuple[Number, ...]
    delay: int | None
    interval: Number

    def init(self, site: Site, params: Any) -> Reaction:
        if len(self.sync_periods) not in (1, site.workers):
            raise ValueError(f"sync_period must be one number or {site.workers}, one a worker, got {self.sync_periods}")
        anchor = self.to_working_dtype(params)
        state = _LocalState(site, params, self.start(params), anchor, self.start_outer(anchor))
        state, clock = self._wind_clock(state)
        return state, (Compute(params, 0), *clock)

    def _wind_clock(self, state: _LocalState) -> Reaction:
        """Without an interval a snapshot is always due, and there is no timer."""
        if not self.interval:
            return state, ()
        clock = state.clock + 1
        return state._replace(due=False, clock=clock), (After(self.interval, clock),)

    @no_type_check
    def receive(self, state: _LocalState, sender: int, message: Message) -> Reaction:
        kind, records = message.kind, ()
        if kind == protocol.COMPUTED:
            records = (GradientRecord(state.site.index, message.version, state.version),)
            state = self._local_step(state, message)
        elif kind == protocol.REDUCED:
            # The global parameters are updated as soon as the average arrives, at all workers at once.
            anchor, outer_state = self.outer_step(state.anchor, state.outer_state, message.value)
            state = state._replace(anchor=anchor, outer_state=outer_state, back=True)
            # A step in the trace is an average.
            records = step_records(state.site, state.version + 1, state.sent_oldest)
        elif kind == protocol.RECOVERED:
            # The gradient that was running is lost, and the timer may be: another takes its place.
            state = state._replace(computing=False)
            if not state.due:
                state, records = self._wind_clock(state)
        elif kind == protocol.TIMER:
            state = state._replace(due=state.due or message.tag == state.clock)
        else:
            raise unknown_message(f"a worker of {self.name}", message)
        state, reduce = self._try_snapshot(self._merge_if_due(state))
        actions = (*records, *reduce)
        if state.computing or self._is_waiting(state):
            return state, actions
        if reduce and self.delay is None:
            # Where messages take no time, the average arrives at this same instant: look before continuing.
            return state, (*actions, After(0))
        return state._replace(computing=True), (*actions, Compute(state.params, state.version))

    def _local_step(self, state: _LocalState, message: Message) -> _LocalState:
        site = state.site
        # For random local steps: the same numbers in a replay and on real processes.
        words = np.array([site.seed & 0xFFFFFFFF, site.index, state.total], np.uint32)
        params, opt_state = self.step(state.params, state.opt_state, message.value, state.anchor, words)
        return state._replace(
            params=params,
            opt_state=opt_state,
            steps=state.steps + 1,
            oldest=state.oldest if state.steps else message.version,
            total=state.total + 1,
            computing=False,
        )

    def _merge_if_due(self, state: _LocalState) -> _LocalState:
        """Merges an average that has arrived into this worker's model, if it is due."""
        if not state.back or (self.delay is not None and state.steps < self.delay):
            return state
        anchor, params = state.anchor, state.params
        # Without local steps since the snapshot the model is the anchor itself.
        params = _merge(params, anchor, state.sent) if state.steps else _cast_like(anchor, params)
        return state._replace(params=params, version=state.version + 1, sent=None, back=False)

    def _try_snapshot(self, state: _LocalState) -> Reaction:
        """Starts the next average, if the last one is merged and enough local steps were taken."""
        # H, or H_i.
        period = self.sync_periods[state.site.index % len(self.sync_periods)]
        if state.sent is not None or state.steps < period or not state.due:
            return state, ()
        reduce = reduce_all(state.site, state.version, _drift(state.anchor, state.params))
        state, clock = self._wind_clock(state._replace(sent=state.params, sent_oldest=state.oldest, steps=0))
        return state, (reduce, *clock)

    def _is_waiting(self, state: _LocalState) -> bool:
        return state.sent is not None and self.delay is not None and state.steps >= self.delay

    def waits_for(self, state: _LocalState) -> tuple[int, ...]:
        return other_workers(state.site) if self._is_waiting(state) else ()
