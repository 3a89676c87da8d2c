"""Measures how much of its communication a compiled program hides behind computation."""

from typing import NamedTuple

from .base import Collective, check_branch, repeat
from .cost import Cluster
from .hlo.reader import Program, parse, program_text
from .hlo.simulate_schedule import Span, simulate_schedule


class Overlapped(NamedTuple):
    """One collective, and the computation between its start and its end in the schedule.

    Attributes:
      collective: as from `collectives`, with its executions and their bytes.
      asynchronous: whether start and end are separate in the schedule; otherwise the program waits for it.
      operations: computations between start and end, in one execution; those that touch less than 1 KiB not counted.
      flops: their operations in matrix products.
      bytes: their memory traffic on the device.
      seconds: the time of one execution; 0 without a cluster.
      exposed_seconds: how long the program waits for it, in all executions together; 0 without a cluster.
    """

    collective: Collective
    asynchronous: bool
    operations: int
    flops: float
    bytes: float
    seconds: float
    exposed_seconds: float


class Overlap(NamedTuple):
    """The collectives of a step, and sums over them.

    Attributes:
      ops: the collectives, in the order in which they end.
      wire_bytes: the bytes that one worker sends in a step.
      asynchronous_bytes: the part of it in asynchronous collectives.
      exposed_bytes: the part with no computation between start and end: certainly not hidden.
      flops: of all matrix products in a step.
      memory_bytes: the memory traffic of a step on one device.
      seconds: of a step; this and the following are 0 without a cluster.
      compute_seconds: of computation.
      communication_seconds: of the collectives, one after the other.
      exposed_seconds: how long the step waits for collectives.
      spans: the busy intervals of each lane (`"compute"`, a class of links, `"host"`, `"memory"`), for a plot.
      warnings: facts that the program does not contain.
    """

    ops: tuple[Overlapped, ...]
    wire_bytes: float
    asynchronous_bytes: float
    exposed_bytes: float
    flops: float
    memory_bytes: float
    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    spans: tuple[Span, ...]
    warnings: tuple[str, ...]


def overlap(program: Program, cluster: Cluster | None = None, *, branch: str = "max") -> Overlap:
    """Reads from a compiled program which collectives are hidden behind computation, and which the step waits for.

    A collective is asynchronous where the compiler has split it into a start and an end (on GPU and TPU, in all
    spellings: pairs, wrapped operations, collectives that run underneath several fusions; on CPU there are none). The
    computation between the two in the schedule can hide it. Loops count as often as they run.

    With a `cluster`, a clock runs through the schedule: computation takes `max(FLOPs / peak, bytes / bandwidth)`, a
    collective `hops · α + bytes · β` of the slowest class of links that it crosses, one at a time on each class. No
    operation reaches its roofline and no collective its links' full bandwidth: the seconds are lower bounds, for
    comparing schedules. Kernel launches, contention for memory and stragglers are left out.

    Args:
      program: a compiled or lowered program, or the text of a scheduled one (`compiled.as_text()`).
      cluster: the devices and their links, from `cost.of_mesh` or `cost.cluster`.
      branch: the branch of a conditional that is followed, the one that sends `"max"` or `"min"`.

    Returns:
      The collectives, and sums over a step.

    Raises:
      ValueError: the text holds no program; `branch` is unknown.

    Example:
      >>> from jaxdist import analysis
      >>> text = '''HloModule hidden, is_scheduled=true, num_partitions=2
      ... ENTRY main {
      ...   x = f32[512,512] parameter(0)
      ...   start = (f32[512,512], f32[1024,512]) all-gather-start(x), replica_groups={}, dimensions={0}
      ...   y = f32[512,512] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ...   done = f32[1024,512] all-gather-done(start)
      ...   ROOT both = (f32[512,512], f32[1024,512]) tuple(y, done)
      ... }'''
      >>> found = analysis.overlap(text)
      >>> found.ops[0].asynchronous, found.ops[0].flops == 2 * 512**3, found.exposed_bytes
      (True, True, 0.0)
      >>> cluster = analysis.cost.cluster("h100", [(analysis.cost.NVLINK, 2)])
      >>> 0 < analysis.overlap(text, cluster).exposed_seconds < 4e-6
      True

    References:
      Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005.
      Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model", CACM 52(4), 2009.
    """
    check_branch(branch)
    schedule = simulate_schedule(parse(program_text(program)), cluster, branch)
    ops = tuple(
        Overlapped(
            repeat([timed.op], timed.times)[0],
            timed.asynchronous,
            int(timed.operations),
            timed.flops,
            timed.bytes,
            timed.seconds,
            timed.exposed,
        )
        for timed in schedule.collectives
    )
    return Overlap(
        ops=ops,
        wire_bytes=_wire_bytes(ops),
        asynchronous_bytes=_wire_bytes(op for op in ops if op.asynchronous),
        exposed_bytes=_wire_bytes(op for op in ops if not op.asynchronous or not op.operations),
        flops=schedule.flops,
        memory_bytes=schedule.bytes,
        seconds=schedule.seconds,
        compute_seconds=schedule.compute_seconds,
        communication_seconds=sum((op.seconds * op.collective.count for op in ops), 0.0),
        exposed_seconds=sum((op.exposed_seconds for op in ops), 0.0),
        spans=tuple(schedule.spans),
        warnings=tuple(dict.fromkeys(schedule.warnings)),
    )


def _wire_bytes(ops) -> float:
    return float(sum(op.collective.wire_bytes for op in ops))
