"""Which collectives of a compiled program run underneath computation, and which the step waits for."""

from typing import NamedTuple

from .base import Collective, check_branch
from .cost import Cluster
from .hlo.reader import Program, parse, program_text
from .hlo.simulate_schedule import Span, walk


class Overlapped(NamedTuple):
    """One collective and what the schedule places between its start and its end.

    Attributes:
      collective: as from `collectives`, with its executions and their bytes.
      asynchronous: whether start and end are apart in the schedule. Else all waits for it.
      operations: computations between start and end, in one execution; those that touch less than 1 KiB not counted.
      flops: their operations in products of matrices.
      bytes: what they read and write in the memory of the device.
      seconds: what one execution takes; 0 without a cluster.
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
    """What a step hides of its communication.

    Attributes:
      ops: the collectives, in the order in which they end.
      wire_bytes: what one worker sends in a step.
      asynchronous_bytes: the part of it in asynchronous collectives.
      exposed_bytes: the part with no computation between start and end: certainly not hidden.
      flops: of all products of matrices in a step.
      memory_bytes: what the step reads and writes in the memory of a device.
      seconds: of a step; this and the following are 0 without a cluster.
      compute_seconds: of computation.
      communication_seconds: of the collectives, one after the other.
      exposed_seconds: what the step waits for collectives.
      spans: what each lane (`"compute"`, a class of links, `"host"`, `"memory"`) is busy with, for a picture.
      warnings: what the program does not tell.
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
    """Reads from a compiled program which collectives are hidden behind computation, and what is waited for.

    A collective is asynchronous where the compiler has split it into a start and an end (on GPU and TPU, of all
    spellings: pairs, wrapped operations, collectives that run underneath several fusions; on CPU there are none). What
    stands between the two in the schedule can hide it. Loops count as often as they run.

    With a `cluster`, a clock goes through the schedule: computation takes `max(FLOPs / peak, bytes / bandwidth)`, a
    collective `hops · α + bytes · β` of the slowest class of links that it crosses, one at a time on each class. No
    operation reaches its roofline and no collective its links' full bandwidth: the seconds are a bound from below, to
    compare schedules with. Kernel launches, memory that both share and stragglers are left out.

    Args:
      program: a compiled or lowered program, or the text of a scheduled one (`compiled.as_text()`).
      cluster: the devices and their links, from `cost.of_mesh` or `cost.cluster`.
      branch: the branch of a conditional that is walked, the one that sends `"max"` or `"min"`.

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
    walked = walk(parse(program_text(program)), cluster, branch)
    ops = tuple(
        Overlapped(
            seen.op._replace(
                count=seen.times, messages=seen.op.messages * seen.times, wire_bytes=seen.op.wire_bytes * seen.times
            ),
            seen.asynchronous,
            int(seen.operations),
            seen.flops,
            seen.bytes,
            seen.seconds,
            seen.exposed,
        )
        for seen in walked.seen
    )
    return Overlap(
        ops=ops,
        wire_bytes=_sent(ops),
        asynchronous_bytes=_sent(op for op in ops if op.asynchronous),
        exposed_bytes=_sent(op for op in ops if not op.asynchronous or not op.operations),
        flops=walked.flops,
        memory_bytes=walked.bytes,
        seconds=walked.seconds,
        compute_seconds=walked.compute_seconds,
        communication_seconds=sum((op.seconds * op.collective.count for op in ops), 0.0),
        exposed_seconds=sum((op.exposed_seconds for op in ops), 0.0),
        spans=tuple(walked.spans),
        warnings=tuple(dict.fromkeys(walked.warnings)),
    )


def _sent(ops) -> float:
    return float(sum(op.collective.wire_bytes for op in ops))
