"""Task allocation: each worker gets a share of the batch by its measured speed, so that all finish together."""

import functools
import heapq
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import optax

from ...._core.types import PyTree
from ...protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    Actions,
    Compute,
    GradientRecord,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
)
from ...values import add, numeric
from ..base import all_workers, other_workers, params_of, step_records, unknown_message

# The length in rounds of the moving average of durations: fewer follow noise, more react slowly to a changed speed.
MEMORY = 8


class _AllocationState(NamedTuple):
    """A worker's model and share of the batch, and its progress in this round.

    Attributes:
      site: where it runs.
      params: the model, replicated.
      opt_state: the optimizer's state, replicated.
      version: the number of rounds.
      seconds: the average duration of a microbatch at each worker, replicated; empty before the first round.
      share: the number of microbatches of this worker.
      total: the sum of its gradients so far, or None.
      count: their number.
      spent: their duration in microseconds.
      mean: the reduced mean of sums, or None until known.
      measured: the microseconds of all workers, or None until known.
    """

    site: Site
    params: Any
    opt_state: Any
    version: int
    seconds: tuple[float, ...]
    share: int
    total: Any
    count: int
    spent: int
    mean: Any
    measured: tuple[int, ...] | None


@functools.lru_cache(maxsize=8)
def shares(batch: int, seconds: tuple[float, ...]) -> tuple[int, ...]:
    """Divides `batch` microbatches among workers, at least one each, so that the last worker finishes soonest."""
    # A heap of (the time at which the worker would finish one more microbatch, worker).
    heap = [(2 * tau, i) for i, tau in enumerate(seconds)]
    heapq.heapify(heap)
    counts = [1] * len(seconds)
    for _ in range(batch - len(seconds)):
        _, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, ((counts[i] + 1) * seconds[i], i))
    return tuple(counts)


def task_allocation(batch: int, optimizer: optax.GradientTransformation) -> Rule:
    """Synchronous SGD with B microbatches a step, divided among workers in proportion to speed: `Σ_i b_i = B`.

    `x <- x - γ (1/B) Σ_i Σ_{k <= b_i} g_ik`. The first round is divided evenly. Each worker measures the duration of
    its microbatches, and all gather the durations, in whole microseconds, beside the all-reduce. They update the
    estimates `τ_i <- τ_i + (measured - τ_i) / min(t + 1, 8)` and the shares of the next round, such that the last
    worker finishes soonest. A round takes about `B / Σ 1/τ_i`, where even shares take `max τ_i B / n`. All microbatches
    have the same weight: on data that differ between workers fast ones count more.

    On the wire: an all-reduce of the sum of gradients, and a gather of 8 bytes from each worker, per round; kind
    `"reduced"`, of which `compressed` encodes the gradients only.

    State: replicated model, optimizer state and n durations; a sum of gradients per worker.

    Args:
      batch: B, at least the number of workers. Finer microbatches fit the speeds better: use 4 or more per worker.
      optimizer: the optimizer of every worker.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: `batch` is less than the number of workers.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.task_allocation(12, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 4]), workers=3, seconds=1000)
      >>> (run.trace.steps.tick[[0, 1, -1]] // 10**9).tolist()  # 16 s evenly, then 6 s: 5, 6 and 1
      [16, 22, 1000]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous environment", arXiv:2111.08272,
      2021. The average over 8 rounds is ours.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least the number of workers, got {batch}")
    cfg = _Config(
        batch,
        numeric(optimizer.init, shared=True),
        numeric(partial(_step_scaled, optimizer), outputs=2, shared=True),
    )
    return Rule("task_allocation", Role(partial(_init, cfg), partial(_receive, cfg), params_of, _waits_for))


class _Config(NamedTuple):
    """B, and the replicated optimizer on values."""

    batch: int
    start: Callable[..., Any]
    step: Callable[..., Any]


def _step_scaled(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, mean: PyTree, weight: Any
) -> tuple[PyTree, PyTree]:
    # The mean of sums over n workers times n/B is the mean over microbatches.
    gradient = jax.tree.map(lambda leaf: leaf * weight, mean)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _init(cfg: _Config, site: Site, params: Any) -> tuple[_AllocationState, Actions]:
    if cfg.batch < site.workers:
        raise ValueError(f"batch must be at least 1 microbatch for each of the {site.workers} workers, got {cfg.batch}")
    share = shares(cfg.batch, (1.0,) * site.workers)[site.index]
    state = _AllocationState(site, params, cfg.start(params), 0, (), share, None, 0, 0, None, None)
    return state, (Compute(params, 0),)


@no_type_check
def _receive(cfg: _Config, state: _AllocationState, sender: int, message: Message) -> tuple[_AllocationState, Actions]:
    if message.kind == COMPUTED:
        return _on_gradient(state, message)
    if message.kind == REDUCED and message.tag % 2:
        return _try_advance(cfg, state._replace(measured=tuple(map(int, message.value))))
    if message.kind == REDUCED:
        return _try_advance(cfg, state._replace(mean=message.value))
    if message.kind == RECOVERED:
        return state, (Compute(state.params, state.version),) if state.count < state.share else ()
    raise unknown_message("a worker of task_allocation", message)


@no_type_check
def _on_gradient(state: _AllocationState, message: Message) -> tuple[_AllocationState, Actions]:
    site, version = state.site, state.version
    total = message.value if state.total is None else add(state.total, message.value)
    # Integers: a gather of them is exact, and all workers compute the same shares.
    spent = state.spent + round(message.seconds * 1e6)
    state = state._replace(total=total, count=state.count + 1, spent=spent)
    record = GradientRecord(site.index, version, version)
    if state.count < state.share:
        return state, (record, Compute(state.params, version))
    # Even tags are sums of gradients, odd ones durations.
    group = all_workers(site.workers)
    return state, (record, Reduce(group, 2 * version, total), Reduce(group, 2 * version + 1, spent, "gather"))


def _try_advance(cfg: _Config, state: _AllocationState) -> tuple[_AllocationState, Actions]:
    """Begins the next round once both collectives of this one are complete."""
    site, version, measured = state.site, state.version, state.measured
    if state.mean is None or measured is None:
        return state, ()
    # The shares of the round that has ended, to divide its durations by.
    counts = shares(cfg.batch, state.seconds or (1.0,) * site.workers)
    seconds = tuple([max(spent, 1) / 1e6 / count for spent, count in zip(measured, counts)])
    if state.seconds:
        # τ_i <- τ_i + (measured - τ_i) / min(t + 1, 8): a mean over the first rounds, then a moving average.
        weight = 1 / min(version + 1, MEMORY)
        seconds = tuple([old + (new - old) * weight for old, new in zip(state.seconds, seconds)])
    params, opt_state = cfg.step(state.params, state.opt_state, state.mean, site.workers / cfg.batch)
    share = shares(cfg.batch, seconds)[site.index]
    state = _AllocationState(site, params, opt_state, version + 1, seconds, share, None, 0, 0, None, None)
    return state, (*step_records(site, version + 1, version), Compute(params, version + 1))


def _waits_for(state: _AllocationState) -> tuple[int, ...]:
    return other_workers(state.site) if state.count == state.share else ()
