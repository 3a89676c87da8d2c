"""A batch dealt out by measured speed, so that all are done together."""

import functools
import heapq
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
    Counted,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
    Stepped,
)
from ...values import add, numeric
from .base import everybody, others

# Rounds that a measurement counts for: fewer deal noise out, more are slow to see a speed that changed.
MEMORY = 8


class AllocationState(NamedTuple):
    """A worker's model and share of the batch, and what it has of this round.

    Attributes:
      site: where it runs.
      params: the model, the same at all workers.
      opt_state: the optimizer's state.
      version: the number of rounds.
      seconds: for each worker what a microbatch takes, as all have measured; empty before the first round.
      share: how many microbatches are this worker's.
      total: the sum of its gradients so far, or None.
      done: their number.
      spent: how many microseconds they took.
      mean: the mean of sums that came back, or None.
      measured: the microseconds of all workers that came back, or None.
    """

    site: Site
    params: Any
    opt_state: Any
    version: int
    seconds: tuple[float, ...]
    share: int
    total: Any
    done: int
    spent: int
    mean: Any
    measured: tuple[int, ...] | None


@functools.lru_cache(maxsize=8)
def shares(batch: int, seconds: tuple[float, ...]) -> tuple[int, ...]:
    """How many of `batch` microbatches each worker gets, at least one, so that the last is done soonest."""
    heap = [(2 * tau, i) for i, tau in enumerate(seconds)]
    heapq.heapify(heap)
    dealt = [1] * len(seconds)
    for _ in range(batch - len(seconds)):
        _, i = heap[0]  # who would be done with one more the soonest gets it
        dealt[i] += 1
        heapq.heapreplace(heap, ((dealt[i] + 1) * seconds[i], i))
    return tuple(dealt)


def task_allocation(batch: int, optimizer: optax.GradientTransformation) -> Rule:
    """Synchronous SGD with B microbatches a step, of which each worker gets a share by its speed: `Σ_i b_i = B`.

    `x <- x - γ (1/B) Σ_i Σ_{k <= b_i} g_ik`. The first round is dealt out evenly. Workers measure what their
    microbatches take, and all learn the times of all, in whole microseconds, beside the reduction. From them follows
    what everybody expects of everybody, `τ_i <- τ_i + (measured - τ_i) / min(t + 1, 8)`, and how the next round is
    dealt out: so that the last is done as soon as can be, in proportion to the speeds. A round takes about `B / Σ
    1/τ_i`, where even shares take `max τ_i B / n`. Each microbatch weighs the same: on data that differ between workers
    fast ones count more.

    On the wire: an all-reduce of the sum of gradients, and a gather of a number of 8 bytes from each worker, per round;
    kind `"reduced"`, of which codes take the gradients alone.

    State: each worker has the model and the optimizer's state, all the same, a sum of gradients and n times.

    Args:
      batch: B, at least the number of workers. The finer the microbatches, the better the shares fit: 4 for each worker
        or more.
      optimizer: what every worker steps with.

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
      2021. The memory of 8 rounds is ours.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least the number of workers, got {batch}")

    def moved(params: PyTree, opt_state: PyTree, mean: PyTree, weight: Any) -> tuple[PyTree, PyTree]:
        gradient = jax.tree.map(lambda leaf: leaf * weight, mean)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    start, move = numeric(optimizer.init, shared=True), numeric(moved, outputs=2, shared=True)

    def init(site: Site, params: Any) -> tuple[AllocationState, Actions]:
        if batch < site.workers:
            raise ValueError(f"batch must be at least 1 microbatch for each of the {site.workers} workers, got {batch}")
        share = shares(batch, (1.0,) * site.workers)[site.index]
        return AllocationState(site, params, start(params), 0, (), share, None, 0, 0, None, None), (Compute(params, 0),)

    def went_on(state: AllocationState) -> tuple[AllocationState, Actions]:
        """The next round, when both came back."""
        site, version, measured = state.site, state.version, state.measured
        if state.mean is None or measured is None:
            return state, ()
        dealt = shares(batch, state.seconds or (1.0,) * site.workers)
        times = tuple([max(spent, 1) / 1e6 / count for spent, count in zip(measured, dealt)])
        if state.seconds:
            weight = 1 / min(version + 1, MEMORY)
            times = tuple([old + (new - old) * weight for old, new in zip(state.seconds, times)])
        params, opt_state = move(state.params, state.opt_state, state.mean, site.workers / batch)
        share = shares(batch, times)[site.index]
        state = AllocationState(site, params, opt_state, version + 1, times, share, None, 0, 0, None, None)
        books = (Stepped(version + 1, version),) if site.index == 0 else ()
        return state, (*books, Compute(params, version + 1))

    @no_type_check
    def receive(state: AllocationState, sender: int, message: Message) -> tuple[AllocationState, Actions]:
        site, kind, version = state.site, message.kind, state.version
        if kind == COMPUTED:
            total = message.value if state.total is None else add(state.total, message.value)
            spent = state.spent + round(message.seconds * 1e6)
            state = state._replace(total=total, done=state.done + 1, spent=spent)
            counted = Counted(site.index, version, version)
            if state.done < state.share:
                return state, (counted, Compute(state.params, version))
            group = everybody(site.workers)
            parts = Reduce(group, 2 * version, total), Reduce(group, 2 * version + 1, spent, "gather")
            return state, (counted, *parts)
        if kind == REDUCED and message.tag % 2:
            return went_on(state._replace(measured=tuple(map(int, message.value))))
        if kind == REDUCED:
            return went_on(state._replace(mean=message.value))
        if kind == RECOVERED:
            return state, (Compute(state.params, version),) if state.done < state.share else ()
        raise ValueError(f"a worker of task_allocation does not know the message {kind!r}")

    def waits_for(state: AllocationState) -> tuple[int, ...]:
        return others(state.site) if state.done == state.share else ()

    return Rule("task_allocation", Role(init, receive, lambda state: state.params, waits_for))
