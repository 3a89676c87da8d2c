"""Rounds in which each worker computes a share of the batch that its measured speed gives."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import optax

from ...._core.types import PyTree
from ....schedule.allocate_tasks import allocate_tasks
from ...protocol import Compute, GradientRecord, Message, Reaction, Rule, Site
from ...values import add, numeric, zeros_of_sum
from ..base import apply_gradient, collective_rule, optimizer_on_values, reduce_all, step_records

allocate = functools.lru_cache(maxsize=16)(
    lambda seconds, batch, least: tuple(allocate_tasks(seconds, batch, least=least).tolist())
)


class _AllocationState(NamedTuple):
    """A worker's replicated model, the shares of the batch, and its progress in this round."""

    site: Site
    params: Any
    opt_state: Any
    version: int
    # The number of microbatches of each worker in this round, replicated.
    shares: tuple[int, ...]
    # The average duration of a microbatch at each worker and the number of its microbatches so far, replicated.
    seconds: tuple[float, ...]
    tasks: tuple[int, ...]
    # The sum of this worker's gradients (None at first), their number, and their duration in microseconds.
    total: Any = None
    count: int = 0
    spent: int = 0
    # The reduced mean of the sums, and the microseconds of all workers; None until known.
    mean: Any = None
    measured: tuple[int, ...] | None = None


def allocation_rule(
    name: str,
    batch: int,
    optimizer: optax.GradientTransformation,
    allocate: Callable[..., tuple[int, ...]],
    weigh: Callable[[int, int, int], float],
    *,
    measures: bool,
) -> Rule:
    """Makes a rule of rounds of B microbatches; `measures` if workers exchange the durations of their own."""
    start, step = optimizer_on_values(optimizer, _step_scaled, shared=True)
    rule = _Allocation(batch, start, step, numeric(zeros_of_sum, shared=True), allocate, weigh, measures)
    return collective_rule(
        name,
        rule.init,
        rule.on_microbatch,
        rule.on_reduced,
        is_computing=lambda state: state.count < state.shares[state.site.index],
    )


def _step_scaled(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, mean: PyTree, weight: Any
) -> tuple[PyTree, PyTree]:
    # The mean of sums over n workers times n/B is the mean over microbatches.
    gradient = jax.tree.map(lambda s, x: (s * weight).astype(x.dtype), mean, params)
    return apply_gradient(optimizer, params, opt_state, gradient)


class _Allocation(NamedTuple):
    """The arguments of `allocation_rule`, as functions of values."""

    batch: int
    start: Callable[..., Any]
    step: Callable[..., Any]
    zeros: Callable[[Any], Any]
    allocate: Callable[..., tuple[int, ...]]
    weigh: Callable[[int, int, int], float]
    measures: bool

    def init(self, site: Site, params: Any) -> Reaction:
        tasks = (0,) * site.workers
        return self._begin_allocated(site, params, self.start(params), 0, (0.0,) * site.workers, tasks)

    def _begin_allocated(
        self,
        site: Site,
        params: Any,
        opt_state: Any,
        version: int,
        seconds: tuple[float, ...],
        tasks: tuple[int, ...],
    ) -> Reaction:
        """Begins a round; a worker without a share joins the collectives at once."""
        shares = self.allocate(self.batch, seconds, tasks, version)
        state = _AllocationState(site, params, opt_state, version, shares, seconds, tasks)
        if shares[site.index]:
            return state, (Compute(params, version),)
        return state, self._join_collectives(state, self.zeros(params))

    @no_type_check
    def on_microbatch(self, state: _AllocationState, message: Message) -> Reaction:
        site, version = state.site, state.version
        total = add(self.zeros(state.params) if state.total is None else state.total, message.value)
        # Integers: a gather of them is exact, and all workers compute the same shares.
        spent = state.spent + round(message.seconds * 1e6)
        state = state._replace(total=total, count=state.count + 1, spent=spent)
        record = GradientRecord(site.index, version, version)
        if state.count < state.shares[site.index]:
            return state, (record, Compute(state.params, version))
        return state, (record, *self._join_collectives(state, total))

    def _join_collectives(self, state: _AllocationState, total: Any) -> tuple[Any, ...]:
        # Even tags are sums of gradients, odd ones durations.
        sums = reduce_all(state.site, 2 * state.version, total)
        return (
            (sums, reduce_all(state.site, 2 * state.version + 1, state.spent, "gather")) if self.measures else (sums,)
        )

    def on_reduced(self, state: _AllocationState, message: Message) -> Reaction:
        """Begins the next round once both collectives of this one are complete."""
        if message.tag % 2:
            state = state._replace(measured=tuple(map(int, message.value)))
        else:
            state = state._replace(mean=message.value)
        site, version = state.site, state.version
        if state.mean is None or (self.measures and state.measured is None):
            return state, ()
        tasks = tuple([done + count for done, count in zip(state.tasks, state.shares)])
        seconds = state.seconds
        if state.measured is not None:
            seconds = self._update_durations(state, tasks)
        params, opt_state = self.step(state.params, state.opt_state, state.mean, site.workers / self.batch)
        state, actions = self._begin_allocated(site, params, opt_state, version + 1, seconds, tasks)
        return state, (*step_records(site, version + 1, version), *actions)

    @no_type_check
    def _update_durations(self, state: _AllocationState, tasks: tuple[int, ...]) -> tuple[float, ...]:
        found = []
        for old, spent, count, total in zip(state.seconds, state.measured, state.shares, tasks):
            # τ_i <- τ_i + w (measured - τ_i); a worker without a share has measured nothing.
            weight = self.weigh(state.version, count, total) if count else 0.0
            found.append(old + weight * (max(spent, 1) / 1e6 / max(count, 1) - old))
        return tuple(found)
