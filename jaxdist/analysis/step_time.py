"""Predicts the time of a step over a link: computation, coding, and the communication that the schedule leaves exposed.

A method is described once, apart from any link, as a `StepCost`; `step_seconds` then predicts its step over any `Link`.
"""

import math
from typing import NamedTuple

import jax

from .base import Collective, Collectives
from .cost import Chip, Link, cluster, crossings, seconds

# Only the network matters here; the cluster needs some chip.
_ANY_CHIP = Chip("any", {"other": math.inf}, math.inf, math.inf, math.inf)
# One second for a hop and none for bytes: the seconds of a collective are then the number of its hops.
_HOP = Link("hop", 1.0, math.inf)
_SEGMENT = 2**20  # bytes: `kMaxSegmentSize` of gloo/allreduce.h
_BUFFERED = 2**15  # bytes: of the sizes measured, the largest of which both directions overlapped


class Traffic(NamedTuple):
    """The communication of one worker in one step.

    Attributes:
      wire_bytes: the bytes that it sends.
      hops: the latencies that it waits for, one after the other: `2(W-1)` for the ring of an all-reduce over `W`
        workers, `W-1` for that of an all-gather, once for each message; more for large messages over gloo.
      idle_bytes: the bytes that the link could send while the worker receives but does not send; 0 where it uses both
        directions at once.
    """

    wire_bytes: float
    hops: float
    idle_bytes: float = 0.0

    @property
    def line_bytes(self) -> float:
        """The bytes that take time on the link, sent or not."""
        return self.wire_bytes + self.idle_bytes


class Schedule(NamedTuple):
    """When a method communicates, and how late its results are used.

    Attributes:
      period: `H`, the steps of a round; 1 if every step communicates.
      fragments: the parts of the model that are synchronized at different steps of a round.
      delay: the steps of computation during which a transfer may run; 0 if the step waits for its end.
    """

    period: int = 1
    fragments: int = 1
    delay: int = 0


class StepCost(NamedTuple):
    """The costs of one method that no link changes, as means over the steps of a round.

    Attributes:
      compute: seconds of the model's own work of one worker: gradients and optimizer.
      coding: seconds of encoding and decoding.
      traffic: bytes and hops of a step.
      schedule: when they are sent.
    """

    compute: float
    coding: float
    traffic: Traffic
    schedule: Schedule = Schedule()


def traffic(found: Collectives, *, workers: int, gloo: bool = False) -> Traffic:
    """Counts the bytes and the hops of one worker in the collectives of a step.

    Every operand of a merged collective is a message of its own, as on CPU with gloo.

    Gloo differs from an ideal ring in two ways. It reduces in segments of 1 MiB, two at a time, and asks the receiver
    before it sends each: where a worker's part has `S` segments, an all-reduce takes `2⌈(W-1)S/2⌉` hops instead of
    `2(W-1)`. And the collectives that XLA builds of sends and receives send first: the worker that arrives last lets
    others send to it only behind its own payload, so two workers use one direction of the link after the other. That
    doubles the time of the bytes of an exchange between two workers (all-to-all, or a permutation that swaps), makes it
    1.5 times as long for an all-gather of two, which has two parts, and was 1.75 times as long for an all-to-all of
    four. It is an upper bound: where the latency exceeds the time between the arrivals, both directions are used.

    Args:
      found: the collectives, from a compiled program or from a trace.
      workers: the number of workers, all on links of one kind.
      gloo: whether the transport is gloo, as it is between processes on CPU (`uses_gloo`).

    Examples:
      >>> from jaxdist.analysis import base, step_time
      >>> mean = base.make_collective("all-reduce", [("float32", 16 * 2**20)], devices=4, where="")
      >>> step_time.traffic(base.summarize([mean], []), workers=4)
      Traffic(wire_bytes=25165824.0, hops=6.0, idle_bytes=0.0)
      >>> step_time.traffic(base.summarize([mean], []), workers=4, gloo=True).hops
      12.0

    Sources: `ring` in `gloo/allreduce.cc`, and `xla/backends/cpu/collectives/gloo_communicator.cc`.
    """
    around = cluster(_ANY_CHIP, [(_HOP, workers)])

    def hops_of(op: Collective) -> float:
        return _hops_in_segments(op) if gloo and op.kind == "all-reduce" else seconds(crossings(op, around))

    hops = math.fsum(op.messages * hops_of(op) for op in found.ops)
    idle = math.fsum(op.wire_bytes * _idle_share(op) for op in found.ops) if gloo else 0.0
    return Traffic(found.wire_bytes, hops, idle)


def uses_gloo() -> bool:
    """Whether the collectives between processes of the default backend are those of gloo."""
    return jax.default_backend() == "cpu" and jax.config.values["jax_cpu_collectives_implementation"] == "gloo"


def _hops_in_segments(op: Collective) -> float:
    """The latencies of one message of an all-reduce over gloo."""
    if not op.messages:  # in a loop of no steps
        return 0.0
    workers, size = op.group_size, op.bytes * op.count / op.messages
    # Each worker's part has at least two segments, so that one is reduced while the next is on its way.
    segments = max(2, math.ceil(math.ceil(size / _SEGMENT) / workers))
    # Two segments share a latency, while parts are reduced and while they are gathered.
    return 2.0 * math.ceil((workers - 1) * segments / 2)


def _idle_share(op: Collective) -> float:
    """The share of its bytes that a worker could send over gloo, but does not, while it receives."""
    # Short messages are in the buffer of the socket at once.
    if op.wire_bytes <= _BUFFERED * op.messages:
        return 0.0
    if op.kind == "collective-permute":
        return float(any(source != target and (target, source) in op.pairs for source, target in op.pairs))
    # Of more than two workers, an all-gather is a ring, and an all-to-all exchanges with all others at once.
    pair, more = {"all-gather": (0.5, 0.0), "all-to-all": (1.0, 0.75)}.get(op.kind, (0.0, 0.0))
    return pair if op.group_size == 2 else more


def mean_traffic(most: Traffic, least: Traffic, share: float) -> Traffic:
    """Averages the traffic of steps of which a `share` sends most and the others send least.

    Examples:
      >>> from jaxdist.analysis.step_time import Traffic, mean_traffic
      >>> mean_traffic(Traffic(800.0, 6.0), Traffic(0.0, 0.0), 1 / 8)
      Traffic(wire_bytes=100.0, hops=0.75, idle_bytes=0.0)
    """
    return Traffic(*(low + (high - low) * share for high, low in zip(most, least, strict=True)))


def network_seconds(cost: StepCost, link: Link) -> float:
    """Returns the seconds in a step that the link is busy, exposed or not: `hops · latency + bytes / bandwidth`.

    The bytes include those that the link could send while gloo uses its other direction.
    """
    return cost.traffic.hops * link.latency + cost.traffic.line_bytes / link.bandwidth


def step_seconds(cost: StepCost, link: Link) -> float:
    """Predicts the seconds of a step over a link, as a mean over the steps of a round.

    `compute + coding + (F/H) · max(0, (H/F) · network - delay · compute)`, with `network` as in `network_seconds`, `H`
    the period and `F` the fragments: each of the `F` transfers of a round hides behind `delay` steps of computation. So
    without delay it is the sum, and with a delay of 1 in every step `coding + max(compute, network)`.

    Coding is never hidden, since it occupies the device that computes. Contention, stragglers and the headers of
    packets are left out.

    Args:
      cost: the method.
      link: between the workers, the same for all.

    Examples:
      >>> from jaxdist.analysis.cost import Link
      >>> from jaxdist.analysis.step_time import Schedule, StepCost, Traffic, step_seconds
      >>> slow = Link("slow", latency=0.01, bandwidth=1e7)
      >>> every_step = StepCost(0.2, 0.05, Traffic(1e6, 2.0))
      >>> round(step_seconds(every_step, slow), 6)  # 0.2 + 0.05 + 2 · 0.01 + 0.1
      0.37
      >>> round(step_seconds(every_step._replace(schedule=Schedule(delay=1)), slow), 6)  # the network is hidden
      0.25

    References:
      Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005.
    """
    period, fragments, delay = cost.schedule
    transfers = fragments / period
    # Where nothing may be hidden, the division and product by the transfers would only lose digits.
    if not delay:
        return cost.compute + cost.coding + network_seconds(cost, link)
    exposed = max(0.0, network_seconds(cost, link) / transfers - delay * cost.compute)
    return cost.compute + cost.coding + transfers * exposed


def step_seconds_if_hidden(cost: StepCost, link: Link) -> float:
    """Predicts the seconds of a step whose whole communication may hide behind the computation of its round."""
    schedule = cost.schedule._replace(fragments=1, delay=cost.schedule.period)
    return step_seconds(cost._replace(schedule=schedule), link)


def break_even(cost: StepCost, baseline: StepCost, *, latency: float) -> float:
    """Returns the bandwidth, in bytes a second, below which a method's step is shorter than the baseline's.

    It is 0 if the method is never faster, and infinite if it always is. A method that sends more bytes can be faster on
    fast links alone, above a bandwidth, and gives 0 too. Nothing is hidden, of neither.

    Args:
      cost: the method.
      baseline: what it is compared with.
      latency: seconds of one hop.

    Examples:
      >>> from jaxdist.analysis.step_time import StepCost, Traffic, break_even
      >>> plain, coded = StepCost(0.2, 0.0, Traffic(9e6, 2.0)), StepCost(0.2, 0.1, Traffic(1e6, 2.0))
      >>> round(break_even(coded, plain, latency=0.0))  # 8 MB in 0.1 s
      80000000
    """
    saved = baseline.traffic.line_bytes - cost.traffic.line_bytes
    own, theirs = (each.compute + each.coding + each.traffic.hops * latency for each in (cost, baseline))
    # It wins where the time of the saved bytes exceeds the time lost otherwise.
    lost = own - theirs
    if saved > 0:
        return saved / lost if lost > 0 else math.inf
    # With equal bytes the bandwidth decides nothing.
    return math.inf if saved == 0 and lost < 0 else 0.0
