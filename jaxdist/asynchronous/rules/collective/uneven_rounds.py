"""Rounds in which fast workers contribute more gradients: as many as fit into a fixed time, or a measured share."""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.types import Number, PyTree
from ....schedule.stragglers import allocate_tasks
from ... import protocol
from ...protocol import After, Cancel, Compute, GradientRecord, Message, Reaction, Role, Rule, Site, StepRecord
from ...values import add, numeric, zeros_of_sum
from ..base import (
    apply_gradient,
    collective_rule,
    optimizer_on_values,
    other_workers,
    params_of,
    reduce_all,
    step_records,
    unknown_message,
)


class _AnyBatchState(NamedTuple):
    """A worker's replicated model, the sum and number of its gradients in this round, and whether it has joined."""

    site: Site
    params: Any
    opt_state: Any
    version: int
    total: Any
    count: int = 0
    waiting: bool = False


def any_batch(window: Number, optimizer: optax.GradientTransformation) -> Rule:
    """Each worker computes at one model for T seconds: `x <- x - γ Σ_i S_i / Σ_i b_i`, with `S_i` its sum of `b_i`.

    No worker waits for a slow one, which contributes fewer gradients: `b_i = floor(T / τ_i)`, and a round takes T and
    one all-reduce. A `Compute` is one sample, or one microbatch; a gradient that is unfinished at the end of the window
    is discarded, and its data count as used. A round without any gradients changes nothing. All samples have the same
    weight: on data that differ between workers fast ones count more. A worker that failed contributes what it has as
    soon as it recovers.

    On the wire: an all-reduce of the sum of gradients, in float32 or wider, and of their number, 4 bytes, per round,
    kind `"reduced"`.

    State: replicated model and optimizer state, and a sum of gradients per worker.

    Args:
      window: T. Several times the duration of a gradient, or much work is discarded; `schedule.anytime_window` returns
        the window in which workers complete a given batch on average.
      optimizer: the optimizer of every worker.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.any_batch(3.5, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 3]), workers=3, seconds=35)
      >>> len(run.trace.steps), len(run.trace.gradients)  # 3 + 3 + 1 in each
      (10, 70)

    References:
      Ferdinand et al., "Anytime minibatch: exploiting stragglers in online distributed optimization", arXiv:2006.05752.
    """
    if not 0 < window < float("inf"):
        raise ValueError(f"window must be positive and finite, got {window}")
    start, step = optimizer_on_values(optimizer, _step_with_mean, shared=True)
    zeros = numeric(zeros_of_sum, shared=True)

    def begin_round(site: Site, params: Any, opt_state: Any, version: int, *records: StepRecord) -> Reaction:
        state = _AnyBatchState(site, params, opt_state, version, zeros(params))
        # The timer has the tag of its round, so that one of an earlier round is ignored.
        return state, (*records, After(window, version), Compute(params, version))

    @no_type_check
    def receive(state: _AnyBatchState, sender: int, message: Message) -> Reaction:
        site, kind, version = state.site, message.kind, state.version
        if kind == protocol.COMPUTED:
            state = state._replace(total=add(state.total, message.value), count=state.count + 1)
            return state, (GradientRecord(site.index, version, version), Compute(state.params, version))
        if kind == protocol.TIMER:
            return (state, ()) if state.waiting or message.tag != version else _end_round(state)
        if kind == protocol.RECOVERED:
            # The timer may have expired during the outage.
            return (state, ()) if state.waiting else _end_round(state)
        if kind == protocol.REDUCED:
            params, opt_state = step(state.params, state.opt_state, message.value)
            return begin_round(site, params, opt_state, version + 1, *step_records(site, version + 1, version))
        raise unknown_message("a worker of any_batch", message)

    def init(site: Site, params: Any) -> Reaction:
        return begin_round(site, params, start(params), 0)

    return Rule(
        "any_batch", Role(init, receive, params_of, lambda state: other_workers(state.site) if state.waiting else ())
    )


# An integer, which no code rounds.
_contribution = numeric(lambda total, count: (total, jnp.asarray(count, jnp.int32)))


def _step_with_mean(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, mean: PyTree
) -> tuple[PyTree, PyTree]:
    total, count = mean
    # Both are divided by n, which cancels: Σ S_i / Σ b_i.
    gradient = jax.tree.map(lambda s, x: (s / jnp.where(count > 0, count, 1)).astype(x.dtype), total, params)
    stepped = apply_gradient(optimizer, params, opt_state, gradient)
    # A round without gradients leaves everything as it was, the optimizer's counts included.
    return jax.tree.map(lambda old, new: jnp.where(count > 0, new, old), (params, opt_state), stepped)


def _end_round(state: _AnyBatchState) -> Reaction:
    # S_i and b_i, of which the all-reduce computes the means.
    contribution = _contribution(state.total, state.count)
    return state._replace(waiting=True), (Cancel(), reduce_all(state.site, state.version, contribution))


# The length in rounds of the moving average of durations: fewer follow noise, more react slowly to a changed speed.
MEMORY = 8

_allocate = functools.lru_cache(maxsize=16)(
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


def task_allocation(
    batch: int, optimizer: optax.GradientTransformation, *, seconds: Sequence[Number] | None = None
) -> Rule:
    """Synchronous SGD with B microbatches a step, divided among workers in proportion to speed: `Σ_i b_i = B`.

    `x <- x - γ (1/B) Σ_i Σ_{k <= b_i} g_ik`, with shares such that the last worker finishes soonest. A round takes
    about `B / Σ 1/τ_i`, where even shares take `max τ_i B / n`. All microbatches have the same weight: on data that
    differ between workers fast ones count more.

    With `seconds` the shares are fixed (*static*), and a worker that would only delay the others gets none: it joins
    the all-reduce with zeros. Otherwise each worker gets at least one microbatch, the first round is divided evenly,
    and each worker measures the duration of its microbatches. All gather the durations, in whole microseconds, beside
    the all-reduce, and update the estimates `τ_i <- τ_i + (measured - τ_i) / min(t + 1, 8)`. `ata` allocates by
    measured speeds too, and leaves workers out.

    On the wire: an all-reduce of the sum of gradients, in float32 or wider, per round, and unless `seconds` are given
    a gather of 8 bytes from each worker; kind `"reduced"`, of which `compressed` encodes the gradients only.

    State: replicated model, optimizer state and n durations; a sum of gradients per worker.

    Args:
      batch: B, at least the number of workers. Finer microbatches fit the speeds better: use 4 or more per worker.
      optimizer: the optimizer of every worker.
      seconds: `τ_i`, the known duration of a microbatch at each worker. None measures.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> law = durations.constant([1, 1, 4])
      >>> run = replay.run(rules.task_allocation(12, optax.sgd(0.1)), durations=law, workers=3, seconds=1000)
      >>> (run.trace.steps.tick[[0, 1, -1]] // 10**9).tolist()  # 16 s evenly, then 6 s: 5, 6 and 1
      [16, 22, 1000]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous environment", arXiv:2111.08272,
      2021. The average over 8 rounds is ours.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least the number of workers, got {batch}")
    if seconds is None:
        return _allocation_rule("task_allocation", batch, optimizer, _adaptive_shares, _moving_average, measures=True)
    given = tuple(map(float, seconds))
    # Refuses durations that cannot be before the first round.
    allocate_tasks(given, batch)
    shares = partial(_static_shares, given)
    return _allocation_rule("task_allocation", batch, optimizer, shares, _moving_average, measures=False)


def ata(batch: int, optimizer: optax.GradientTransformation, *, confidence: Number = 1.0) -> Rule:
    """Adaptive task allocation: `task_allocation` that learns unknown speeds as a bandit and leaves out slow workers.

    In round k worker i has completed `K_i` microbatches of mean duration `m_i`. The B microbatches are divided such
    that the last worker would finish soonest if each took the lower confidence bound of its duration,

        s_i = max(0, m_i (1 - c (sqrt(L / K_i) + L / K_i))),   L = ln(2 k²);   0 while K_i = 0

    so that a worker that might be fast is tried again, ever more rarely, and one that is certainly slow gets nothing.
    Nothing that is computed is thrown away: `rennala` is about as fast per step, and keeps all workers busy.

    On the wire: an all-reduce of the sum of gradients and a gather of 8 bytes from each worker, per round, also from
    workers without a microbatch; kind `"reduced"`.

    State: replicated model, optimizer state, n durations and n counts; a sum of gradients per worker.

    Args:
      batch: B, the microbatches of a step, at least 1.
      optimizer: the optimizer of every worker.
      confidence: c. In theory `4 e η`, where η bounds the spread of a duration relative to its mean (1 for exponential
        ones), which explores for thousands of rounds; 0.1 to 1 are practical. 0 trusts the means at once, and a worker
        that was slow by chance the first time is never tried again.

    Examples:
      >>> import numpy as np, optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> law = durations.constant([1, 1, 2, 50])
      >>> run = replay.run(rules.ata(5, optax.sgd(0.1), confidence=0.1), durations=law, workers=4, steps=100)
      >>> np.bincount(run.trace.gradients.worker[-50:], minlength=4).tolist()
      [20, 20, 10, 0]

    References:
      Maranjyan, Saad, Richtárik, Orabona, "ATA: Adaptive Task Allocation for Efficient Resource Management in
      Distributed Machine Learning", arXiv:2502.00775, 2025 (the empirical variant, whose bound is relative to the
      mean). Maranjyan, "First Provably Optimal Asynchronous SGD for Homogeneous and Heterogeneous Data",
      arXiv:2601.02523, 2026.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if not 0 <= confidence < float("inf"):
        raise ValueError(f"confidence must be at least 0 and finite, got {confidence}")
    shares = partial(_optimistic_shares, float(confidence))
    return _allocation_rule("ata", batch, optimizer, shares, _mean_of_all, measures=True)


# Shares of the next round: `(batch, seconds, tasks, version) -> shares`, from what all workers know.


def _adaptive_shares(batch: int, seconds: tuple, tasks: tuple, version: int) -> tuple[int, ...]:
    workers = len(tasks)
    if batch < workers:
        raise ValueError(f"batch must be at least 1 microbatch for each of the {workers} workers, got {batch}")
    return _allocate(seconds if version else (1.0,) * workers, batch, 1)


def _static_shares(given: tuple[float, ...], batch: int, seconds: tuple, tasks: tuple, version: int) -> tuple[int, ...]:
    if len(given) != len(tasks):
        raise ValueError(f"seconds must be those of the {len(tasks)} workers, got {len(given)} numbers")
    return _allocate(given, batch, 0)


@no_type_check
def _optimistic_shares(confidence: float, batch: int, seconds: tuple, tasks: tuple, version: int) -> tuple[int, ...]:
    return _allocate(lower_bounds(seconds, tasks, version + 1, confidence), batch, 0)


@no_type_check
def lower_bounds(seconds: tuple, tasks: tuple, number: int, confidence: float) -> tuple[float, ...]:
    """Returns the lower confidence bounds of the durations in round `number`, counted from 1."""
    # s_i = max(0, m_i (1 - c (sqrt(L / K_i) + L / K_i))), L = ln(2 k²)
    log = math.log(2 * number**2)
    return tuple(
        [
            max(0.0, mean * (1 - confidence * (math.sqrt(log / count) + log / count))) if count else 0.0
            for mean, count in zip(seconds, tasks)
        ]
    )


# The weight of a round in the estimate of a duration: `(round, its microbatches, all so far) -> weight`.


def _moving_average(version: int, count: int, total: int) -> float:
    # A mean over the first rounds, then a moving average.
    return 1 / min(version + 1, MEMORY)


def _mean_of_all(version: int, count: int, total: int) -> float:
    return count / total


class _AllocationConfig(NamedTuple):
    """The arguments of `_allocation_rule`, as functions of values."""

    batch: int
    start: Callable[..., Any]
    step: Callable[..., Any]
    zeros: Callable[[Any], Any]
    allocate: Callable[..., tuple[int, ...]]
    weigh: Callable[[int, int, int], float]
    measures: bool


def _allocation_rule(
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
    cfg = _AllocationConfig(batch, start, step, numeric(zeros_of_sum, shared=True), allocate, weigh, measures)
    return collective_rule(
        name,
        partial(_init_allocation, cfg),
        partial(_on_microbatch, cfg),
        partial(_on_reduced, cfg),
        is_computing=lambda state: state.count < state.shares[state.site.index],
    )


def _step_scaled(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, mean: PyTree, weight: Any
) -> tuple[PyTree, PyTree]:
    # The mean of sums over n workers times n/B is the mean over microbatches.
    gradient = jax.tree.map(lambda s, x: (s * weight).astype(x.dtype), mean, params)
    return apply_gradient(optimizer, params, opt_state, gradient)


def _init_allocation(cfg: _AllocationConfig, site: Site, params: Any) -> Reaction:
    tasks = (0,) * site.workers
    return _begin_allocated(cfg, site, params, cfg.start(params), 0, (0.0,) * site.workers, tasks)


def _begin_allocated(
    cfg: _AllocationConfig,
    site: Site,
    params: Any,
    opt_state: Any,
    version: int,
    seconds: tuple[float, ...],
    tasks: tuple[int, ...],
) -> Reaction:
    """Begins a round; a worker without a share joins the collectives at once."""
    shares = cfg.allocate(cfg.batch, seconds, tasks, version)
    state = _AllocationState(site, params, opt_state, version, shares, seconds, tasks)
    if shares[site.index]:
        return state, (Compute(params, version),)
    return state, _join_collectives(cfg, state, cfg.zeros(params))


@no_type_check
def _on_microbatch(cfg: _AllocationConfig, state: _AllocationState, message: Message) -> Reaction:
    site, version = state.site, state.version
    total = add(cfg.zeros(state.params) if state.total is None else state.total, message.value)
    # Integers: a gather of them is exact, and all workers compute the same shares.
    spent = state.spent + round(message.seconds * 1e6)
    state = state._replace(total=total, count=state.count + 1, spent=spent)
    record = GradientRecord(site.index, version, version)
    if state.count < state.shares[site.index]:
        return state, (record, Compute(state.params, version))
    return state, (record, *_join_collectives(cfg, state, total))


def _join_collectives(cfg: _AllocationConfig, state: _AllocationState, total: Any) -> tuple[Any, ...]:
    # Even tags are sums of gradients, odd ones durations.
    sums = reduce_all(state.site, 2 * state.version, total)
    return (sums, reduce_all(state.site, 2 * state.version + 1, state.spent, "gather")) if cfg.measures else (sums,)


def _on_reduced(cfg: _AllocationConfig, state: _AllocationState, message: Message) -> Reaction:
    """Begins the next round once both collectives of this one are complete."""
    if message.tag % 2:
        state = state._replace(measured=tuple(map(int, message.value)))
    else:
        state = state._replace(mean=message.value)
    site, version = state.site, state.version
    if state.mean is None or (cfg.measures and state.measured is None):
        return state, ()
    tasks = tuple([done + count for done, count in zip(state.tasks, state.shares)])
    seconds = state.seconds
    if state.measured is not None:
        seconds = _update_durations(cfg, state, tasks)
    params, opt_state = cfg.step(state.params, state.opt_state, state.mean, site.workers / cfg.batch)
    state, actions = _begin_allocated(cfg, site, params, opt_state, version + 1, seconds, tasks)
    return state, (*step_records(site, version + 1, version), *actions)


@no_type_check
def _update_durations(cfg: _AllocationConfig, state: _AllocationState, tasks: tuple[int, ...]) -> tuple[float, ...]:
    found = []
    for old, spent, count, total in zip(state.seconds, state.measured, state.shares, tasks):
        # τ_i <- τ_i + w (measured - τ_i); a worker without a share has measured nothing.
        weight = cfg.weigh(state.version, count, total) if count else 0.0
        found.append(old + weight * (max(spent, 1) / 1e6 / max(count, 1) - old))
    return tuple(found)
