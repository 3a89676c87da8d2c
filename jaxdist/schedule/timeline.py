"""Simulated steps on one link, event by event, with partitions, priorities and credit (ByteScheduler)."""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from .profile import Profile, counts_of, limits, not_negative, positive, profile_lists

# About the number of messages that are simulated in two seconds. Real links are bound by latency long before.
MOST_MESSAGES = 2**20


class TimedMessage(NamedTuple):
    """One partition on the link: from `start` to `end` seconds, part `part` of layer `layer`."""

    start: float
    end: float
    layer: int
    part: int


class Timeline(NamedTuple):
    """The times of a simulated step, in seconds from the start of the backward pass.

    Attributes:
      done: the time when each layer's gradient was reduced.
      messages: the messages on the link, in their order.
      forward: the start and the end of each layer's forward pass.
      makespan: the end of the last one, which is the time of a step.
    """

    done: tuple[float, ...]
    messages: tuple[TimedMessage, ...]
    forward: tuple[tuple[float, float], ...]
    makespan: float


def timeline(
    profile: Profile,
    *,
    bandwidth: float | int,
    policy: Literal["priority", "fifo"] = "priority",
    partition_bytes: float | int | None = None,
    credit_bytes: float | int | None = None,
    overhead: float | int = 0.0,
    latency: float | int = 0.0,
    barrier: bool = False,
) -> Timeline:
    """Simulates one step on one link: gradients are partitioned, queued and sent, and the next forward pass waits.

    The queue is a service beside the program, as in ByteScheduler: it sends the most urgent of the ready messages. A
    jitted step has no such queue, and ends before the next forward pass begins: see `step_timeline` for `partitioned`
    in a jitted step, and `pipelined_time` for a step that defers reductions to the next one.

    A message of `b` bytes occupies the link for `overhead + b / bandwidth`. The link sends messages in the order in
    which it gets them and never interrupts one. While less than `credit_bytes` are under way the queue passes on its
    first message: of the lowest layer (`"priority"`), or of the layer that was ready first (`"fifo"`). Layer `i` of the
    next forward pass waits for its own gradient and the layers below it, with `barrier` for all gradients.

    Args:
      profile: the layers.
      bandwidth: bytes a second.
      policy: the order of messages that are ready. Priority helps only without a barrier.
      partition_bytes: the size of the messages that layers are cut into. Smaller lets urgent layers overtake sooner and
        pays the overhead more often; more than a million messages are refused. None: each layer is one message.
      credit_bytes: the bytes that may be under way before the queue waits. One partition gives urgent layers the least
        delay; more hides the latency. None: no limit.
      overhead: seconds that each message occupies the link beside its bytes, the `α` of the α-β model.
      latency: seconds after its last byte until a message counts as done, while others are on the link already.
      barrier: start the forward pass only after the last gradient, as frameworks do by default.

    Examples:
      The last of three layers is large. Without partitions its gradient, ready first, delays that of layer 0.

      >>> from jaxdist.schedule import Profile, timeline
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> timeline(profile, bandwidth=1, policy="fifo", barrier=True).makespan
      16.0
      >>> best = timeline(profile, bandwidth=1, partition_bytes=1, credit_bytes=1)
      >>> best.makespan, best.done
      (13.0, (7.0, 5.0, 10.0))

    References:
      Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv:1905.03960, 2019.
    """
    ready, sizes, forward = profile_lists(profile)
    if policy not in ("priority", "fifo"):
        raise ValueError(f'policy must be "priority" or "fifo", got {policy!r}')
    positive(bandwidth=bandwidth, credit_bytes=credit_bytes)
    limits(partition_bytes=partition_bytes)
    not_negative(overhead=overhead, latency=latency)
    done, messages = _simulate_queue(ready, sizes, bandwidth, policy, partition_bytes, credit_bytes, overhead, latency)
    # The device is busy with the backward pass until its last gradient.
    return _with_forward_pass(done, messages, forward, max(*ready, *done) if barrier else max(ready))


def step_timeline(
    profile: Profile,
    *,
    bandwidth: float | int,
    order: Literal["priority", "fifo"] | Sequence[int] = "fifo",
    partition_bytes: float | int | None = None,
    credit_bytes: float | int | None = None,
    overhead: float | int = 0.0,
    latency: float | int = 0.0,
) -> Timeline:
    """Simulates a jitted step in which `partitioned` with the same arguments reduces the gradients.

    The order is fixed at compilation: a message waits for its gradient, for the previous message to be on the link, and
    for the message `ceil(credit / partition)` before it to arrive. The next forward pass begins when the step has
    ended, after the last message. So `"fifo"` hides most, and `"priority"` nothing: its first message has the gradient
    that is ready last.

    Other arguments are those of `timeline`; credit counts in whole partitions. The makespan is never less than
    `optimum(barrier=True)`.

    An order of numbers names each layer once for each of its messages.

    Examples:
      >>> from jaxdist.schedule import Profile, step_timeline
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> [step_timeline(profile, bandwidth=1, order=order).makespan for order in ("fifo", "priority")]
      [16.0, 20.0]
    """
    ready, sizes, forward = profile_lists(profile)
    positive(bandwidth=bandwidth, credit_bytes=credit_bytes)
    limits(partition_bytes=partition_bytes)
    not_negative(overhead=overhead, latency=latency)
    counts = _check_count(sizes, partition_bytes)
    if isinstance(order, str):
        if order not in ("priority", "fifo"):
            raise ValueError(f'order must be "priority", "fifo" or the layer of each message, got {order!r}')
        layers = range(len(counts))
        order = [i for i in (layers if order == "priority" else reversed(layers)) for _ in range(counts[i])]
    elif sorted(order) != [i for i, count in enumerate(counts) for _ in range(count)]:
        raise ValueError(f"order must name each layer once for each of its messages, {counts}, got {list(order)}")
    most = partition_bytes or max(sizes) or 1
    # The number of messages that may be under way.
    window = math.inf if credit_bytes in (None, math.inf) else math.ceil(credit_bytes / most)
    done, messages, part, free = list(ready), [], [0] * len(ready), 0.0
    for m, layer in enumerate(order):
        size = min(most, sizes[layer] - part[layer] * most)
        arrived = messages[m - int(window)].end + latency if m >= window else 0.0
        start = max(free, ready[layer], arrived)
        free = start + overhead + size / bandwidth
        messages.append(TimedMessage(start, free, layer, part[layer]))
        part[layer] += 1
        done[layer] = free + latency
    return _with_forward_pass(done, messages, forward, max(*ready, *done))


def _with_forward_pass(done: list[float], messages: list[TimedMessage], forward: list[float], now: float) -> Timeline:
    """Adds the forward pass, which begins at `now` and waits for the gradient of each layer."""
    passes = []
    for gradient, seconds in zip(done, forward, strict=True):
        start = max(now, gradient)
        now = start + seconds
        passes.append((start, now))
    return Timeline(tuple(done), tuple(messages), tuple(passes), now)


def _check_count(sizes: list[float], partition_bytes: float | int | None) -> list[int]:
    counts = counts_of(sizes, partition_bytes)
    if sum(counts) > MOST_MESSAGES:
        raise ValueError(
            f"partition_bytes={partition_bytes} makes {sum(counts):,} messages of {sum(sizes):,.0f} bytes: "
            f"use at least {sum(sizes) / MOST_MESSAGES:,.0f}"
        )
    return counts


def _simulate_queue(
    ready: list[float],
    sizes: list[float],
    bandwidth: float | int,
    policy: str,
    partition_bytes: float | int | None,
    credit_bytes: float | int | None,
    overhead: float | int,
    latency: float | int,
) -> tuple[list[float], list[TimedMessage]]:
    """The times when layers are reduced, and the messages."""
    counts = _check_count(sizes, partition_bytes)
    # Gradients that are ready at one time are queued in the order of the backward pass.
    arrivals = sorted(range(len(ready)), key=lambda layer: (ready[layer], -layer))
    rank = {layer: layer if policy == "priority" else n for n, layer in enumerate(arrivals)}
    done, messages = list(ready), []
    credit = most = math.inf if credit_bytes is None else credit_bytes
    # (rank, layer) of the layers with parts in the queue.
    waiting: list[tuple[int, int]] = []
    part = [0] * len(ready)
    # (time, bytes) at which credit returns, in order.
    returns: list[tuple[float, float]] = []
    returned = arrived = 0
    now = free = 0.0
    while returned < len(returns) or arrived < len(arrivals) or waiting:
        now = min(
            ready[arrivals[arrived]] if arrived < len(arrivals) else math.inf,
            returns[returned][0] if returned < len(returns) else math.inf,
        )
        # All events of one time come before the next message leaves the queue.
        while returned < len(returns) and returns[returned][0] <= now:
            credit = min(most, credit + returns[returned][1])
            returned += 1
            # Sums of sizes that differ much are rounded, and would leave it at 0.
            credit = most if returned == len(returns) else credit
        while arrived < len(arrivals) and ready[arrivals[arrived]] <= now:
            layer = arrivals[arrived]
            arrived += 1
            if counts[layer]:
                heappush(waiting, (rank[layer], layer))
        while waiting and credit > 0:
            layer = waiting[0][1]
            k = part[layer]
            part[layer] += 1
            size = sizes[layer]
            if partition_bytes is not None:
                size = min(partition_bytes, size - k * partition_bytes)
            start = max(now, free)
            free = start + overhead + size / bandwidth
            messages.append(TimedMessage(start, free, layer, k))
            returns.append((free + latency, size))
            credit -= size
            done[layer] = free + latency
            if part[layer] == counts[layer]:
                heappop(waiting)
    return done, messages
