"""Measures how much of its communication a compiled program hides behind computation.

A simulator runs through the schedule of the program with one clock and one lane per resource.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .base import Collective, check_branch, repeat
from .branches import BRANCHES_OF, choose_in_computation
from .collectives import CALLERS, calls_target, chain_of, chains, is_continuation, kind_of, record
from .cost import Cluster, compute_seconds, crossings, seconds
from .hlo_reader import (
    Computation,
    Instruction,
    Module,
    Program,
    between_slices,
    callees_of,
    parse,
    program_text,
    shapes,
)
from .hlo_work import HOST_SPACE, CostModel, trip_count

COMPUTE, HOST, MEMORY = "compute", "host", "memory"
SMALL = 1024  # bytes: operations on scalars and counters are too short to hide communication
HEADER_BYTES = 64  # an asynchronous copy also returns a context of at most this size
MAX_SPANS = 100_000
_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


class Span(NamedTuple):
    """An interval in which one lane is busy, in seconds since the step began."""

    lane: str
    name: str
    start: float
    end: float


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
    collective `hops · α + bytes · β` of the slowest class of links that it crosses, one at a time on each class. On
    H100 and H200 the rates are those that products and copies reach, and every kernel has its launch. Those of other
    chips are of their data sheets, and no collective reaches its links' full bandwidth: there the seconds are lower
    bounds, for comparing schedules. Contention for memory and stragglers are left out.

    Args:
      program: a compiled or lowered program, or the text of a scheduled one (`compiled.as_text()`).
      cluster: the devices and their links, from `cost.of_mesh` or `cost.cluster`.
      branch: the branches of conditionals that are followed, those of the step that sends `"max"` or `"min"`.

    Examples:
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
      >>> timed = analysis.overlap(text, analysis.cost.cluster("h100", [(analysis.cost.NETWORK, 2)]))
      >>> 0 < timed.exposed_seconds < timed.communication_seconds
      True

    References:
      Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005.
      Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model", CACM 52(4), 2009.
    """
    check_branch(branch)
    module = parse(program_text(program))
    walker = _Walker(module, cluster, branch)
    walker.run(module.entry, 1)
    ops, clock = tuple(walker.timed.values()), walker.clock
    return Overlap(
        ops=ops,
        wire_bytes=_wire_bytes(ops),
        asynchronous_bytes=_wire_bytes(op for op in ops if op.asynchronous),
        exposed_bytes=_wire_bytes(op for op in ops if not op.asynchronous or not op.operations),
        flops=clock.flops,
        memory_bytes=clock.bytes,
        seconds=clock.seconds,
        compute_seconds=clock.compute_seconds,
        communication_seconds=sum((op.seconds * op.collective.count for op in ops), 0.0),
        exposed_seconds=sum((op.exposed_seconds for op in ops), 0.0),
        spans=tuple(walker.spans),
        warnings=tuple(dict.fromkeys(walker.warnings)),
    )


def _wire_bytes(ops: Iterable[Overlapped]) -> float:
    return float(sum(op.collective.wire_bytes for op in ops))


class _Clock(NamedTuple):
    """Totals since the step began; `operations` leaves out those below `SMALL`."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    operations: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def advance(self, amount: "_Clock", times: int = 1) -> "_Clock":
        return _Clock(*(now + times * more for now, more in zip(self, amount)))

    def since(self, before: "_Clock") -> "_Clock":
        return _Clock(*(now - then for now, then in zip(self, before)))


class _Pending(NamedTuple):
    """Operations that have started: their names, the clock at the start, and when the transfer ends."""

    ops: list[tuple[str, Collective]]
    started: _Clock
    end: float


class _Walker:
    """Runs a clock through the schedule of a program; without a cluster every operation takes no time.

    Computation is one lane, in program order, as the chip is described. Each class of links is a lane, and so are
    the link to the host and the copies between the memories of a chip: an asynchronous operation waits until its lane
    is free, and the program waits for it at its end. `times` is how often the current instruction runs in one step.
    """

    def __init__(self, module: Module, cluster: Cluster | None, branch: str):
        self.module, self.cluster, self.branch = module, cluster, branch
        self.costs, self.chains = CostModel(module), chains(module)
        self.clock = _Clock()
        self.busy_until: dict[str, float] = {}  # by lane
        self.pending: dict[str, _Pending] = {}  # by computation and key
        self.timed: dict[tuple[str, str], Overlapped] = {}  # by computation and instruction
        self.branch_bytes: dict[str, float] = {}
        self.branches: dict[str, dict[str, int]] = {}  # that are followed, by computation and conditional
        self.spans: list[Span] = []
        self.warnings: list[str] = []

    def run(self, name: str, times: int) -> None:
        """Visits the instructions of a computation in order."""
        for instruction in self.module.computations[name].instructions.values():
            self.visit(name, instruction, times)

    def visit(self, name: str, instruction: Instruction, times: int) -> None:
        """Calls the handler for one instruction. The order of the cases matters: an all-gather-done is a done."""
        opcode = instruction.opcode
        base = opcode.removesuffix("-start")
        if opcode.endswith("-done"):
            self.on_done(name, instruction, times)
        elif opcode.endswith("-update"):
            self.on_update(name, instruction)
        elif kind_of(instruction):
            self.on_collective(name, instruction, times)
        elif opcode == "while":
            self.on_while(name, instruction, times)
        elif opcode == "conditional":
            self.on_conditional(name, instruction, times)
        elif base in _COPIES and opcode.endswith("-start"):
            self.on_copy_start(name, instruction, base)
        elif base in CALLERS:
            self.on_call(name, instruction, times)
        else:
            self.on_compute(name, instruction)

    def on_compute(self, name: str, instruction: Instruction) -> None:
        """Adds the time of an instruction."""
        work = self.costs.cost(name, instruction)
        flops = sum(work.flops.values(), 0.0)
        took = compute_seconds(work.flops, float(work.bytes), self.cluster.chip) if self.cluster else 0.0
        self.draw(COMPUTE, instruction.name, self.clock.seconds, self.clock.seconds + took)
        counts = float(work.bytes >= SMALL or flops > 0)
        self.clock = self.clock.advance(_Clock(took, took, counts, flops, float(work.bytes)))

    def on_collective(self, name: str, instruction: Instruction, times: int) -> None:
        """Starts a collective, and waits for it unless it is asynchronous."""
        if is_continuation(self.module, self.chains, name, instruction):
            return
        sent = self.send([(instruction.name, record(self.module, name, instruction, self.warnings))])
        if instruction.opcode.endswith("-start") or instruction.opcode == "send":
            self.pending[f"{name}/{self.key_of(instruction)}"] = sent
        else:
            self.wait(sent, False, times)

    def on_done(self, name: str, instruction: Instruction, times: int) -> None:
        """Waits for the operation that an earlier instruction started."""
        start = self.module.computations[name].instructions[instruction.operands[0]]
        # Between slices the transfer ends with the receive, not with the send.
        if start.opcode == "send" and between_slices(start, self.module.devices):
            return
        self.finish(f"{name}/{self.key_of(start)}", times)

    def on_update(self, name: str, instruction: Instruction) -> None:
        """An asynchronous operation may pass through an update; from there on it has the name of the update."""
        source = self.pending.pop(f"{name}/{instruction.operands[0]}", None)
        if source is not None:
            self.pending[f"{name}/{instruction.name}"] = source

    def on_copy_start(self, name: str, instruction: Instruction, base: str) -> None:
        """Starts an asynchronous copy."""
        lane, took = self.copy_time(name, instruction)
        begin = max(self.clock.seconds, self.busy_until.get(lane, 0.0))
        self.busy_until[lane] = begin + took
        self.draw(lane, base, begin, begin + took)
        self.pending[f"{name}/{instruction.name}"] = _Pending([], self.clock, begin + took)

    def on_call(self, name: str, instruction: Instruction, times: int) -> None:
        """Runs a call or a fusion: a collective, a part of one, or computation."""
        names = callees_of(instruction, "calls", "to_apply", "called_computations")
        callees = [callee for callee in names if callee in self.module.computations]
        body = self.module.computations[callees[0]] if callees else Computation({}, "")
        found = [op for callee in callees for op in self.collectives_in(callee)]
        # XLA:TPU wraps the first and the last piece of a collective that runs underneath several fusions.
        if calls_target(body, "AsyncCollectiveStart"):
            self.pending[f"chain/{_chain(body)}"] = self.send(found)
        elif calls_target(body, "AsyncCollectiveDone"):
            self.finish(f"chain/{_chain(body)}", times)
        elif found and instruction.opcode.endswith("-start"):
            self.pending[f"{name}/{instruction.name}"] = self.send(found)
        elif instruction.opcode == "call":
            for callee in callees:
                self.run(callee, times)
        elif found:
            self.wait(self.send(found), False, times)
        else:
            self.on_compute(name, instruction)

    def on_conditional(self, name: str, instruction: Instruction, times: int) -> None:
        """Follows the branch of the step that sends most, or least."""
        callees = callees_of(instruction, *BRANCHES_OF)
        if len(set(map(self.bytes_of_branch, callees))) > 1:
            self.warnings.append(
                f"the branches of {instruction.name} in {name} send different bytes; followed the {self.branch}imum"
            )
        if name not in self.branches:
            costs = {
                conditional.name: [(self.bytes_of_branch(x),) for x in callees_of(conditional, *BRANCHES_OF)]
                for conditional in self.module.computations[name].instructions.values()
                if conditional.opcode == "conditional"
            }
            self.branches[name] = choose_in_computation(self.module, name, costs, self.branch)
        self.run(callees[self.branches[name][instruction.name]], times)

    def on_while(self, name: str, instruction: Instruction, times: int) -> None:
        """Simulates the first and the second iteration of a loop; all later ones repeat the second."""
        (body,) = callees_of(instruction, "body")
        trips = trip_count(self.module, name, instruction)
        if trips is None:
            self.warnings.append(f"the loop {instruction.name} in {name} runs an unknown number of times; counted once")
            trips = 1
        # The first iteration may wait for lanes that are busy before the loop; the later ones are alike.
        if trips:
            self.run(body, times)
        if trips > 1:
            self.repeat_iteration(body, times, trips)

    def repeat_iteration(self, body: str, times: int, trips: int) -> None:
        """Simulates the second iteration of a loop, and copies it `trips - 2` times."""
        before, drawn = self.clock, len(self.spans)
        self.run(body, times * (trips - 1))
        iteration = self.clock.since(before)
        spans = self.spans[drawn:]
        for lane in self.busy_until:
            # Lanes are busy as much later as the loop takes in its remaining iterations.
            self.busy_until[lane] += (trips - 2) * iteration.seconds
        self.clock = self.clock.advance(iteration, trips - 2)
        for number in range(1, trips - 1):
            if len(self.spans) > MAX_SPANS:
                break
            later = number * iteration.seconds
            self.spans.extend(s._replace(start=s.start + later, end=s.end + later) for s in spans)

    def send(self, ops: list[tuple[str, Collective]]) -> _Pending:
        """Starts collectives one after the other, each when the slowest class of links that it crosses is free."""
        end = self.clock.seconds
        for _, op in ops:
            crossed = crossings(op, self.cluster) if self.cluster else ()
            # The slowest class that is crossed determines the time, and is busy during it.
            lane = crossed[0].link if crossed else ""
            begin = max(end, self.busy_until.get(lane, 0.0))
            end = begin + seconds(crossed)
            self.busy_until[lane] = end
            if self.cluster:
                self.draw(lane, op.kind, begin, end)
        return _Pending(ops, self.clock, end)

    def finish(self, key: str, times: int) -> None:
        """Waits for a pending operation; those that the walker does not know have nothing to wait for."""
        sent = self.pending.pop(key, None)
        if sent is not None:
            self.wait(sent, True, times)

    def wait(self, sent: _Pending, asynchronous: bool, times: int) -> None:
        """Moves the clock to the end of a transfer and records what ran in between."""
        # Nothing else runs on the compute lane while the program waits.
        exposed = max(0.0, sent.end - self.clock.seconds)
        self.clock = self.clock.advance(_Clock(seconds=exposed))
        between = self.clock.since(sent.started)
        for key, op in sent.ops:
            took = seconds(crossings(op, self.cluster)) if self.cluster else 0.0
            # A second visit, in a later iteration of its loop, adds to the first.
            old = self.timed.get((op.where, key))
            before, waited = (old.collective.count, old.exposed_seconds) if old else (0, 0.0)
            self.timed[op.where, key] = Overlapped(
                repeat([op], before + times)[0],
                asynchronous,
                int(between.operations),
                between.flops,
                between.bytes,
                took,
                waited + times * exposed / len(sent.ops),
            )

    def draw(self, lane: str, name: str, start: float, end: float) -> None:
        """Records an interval; computations that follow each other without a gap become one."""
        if end > start and len(self.spans) < MAX_SPANS:
            last = self.spans[-1] if self.spans else None
            if last is not None and lane == COMPUTE == last.lane and start <= last.end:
                self.spans[-1] = last._replace(end=end)
            else:
                self.spans.append(Span(lane, name, start, end))

    def copy_time(self, name: str, instruction: Instruction) -> tuple[str, float]:
        """Returns the lane of an asynchronous copy and the time that it takes."""
        symbols = self.module.computations[name].instructions
        results = [shape for shape in shapes(instruction.result) if shape.nbytes > HEADER_BYTES]
        sources = [shape for operand in instruction.operands[:1] for shape in shapes(symbols[operand].result)]
        # The start of a slice returns its whole source too: the smallest array is what moves.
        size = min((shape.nbytes for shape in results), default=0)
        if any(shape.space == HOST_SPACE for shape in (*results, *sources)):
            return HOST, size / self.cluster.chip.host_bandwidth if self.cluster else 0.0
        return MEMORY, size / self.cluster.chip.bandwidth if self.cluster else 0.0

    def collectives_in(self, name: str) -> list[tuple[str, Collective]]:
        """Lists the collectives of a computation and of those that it calls."""
        found = []
        # A fusion or an asynchronous wrapper can contain the collective that it runs.
        for instruction in self.module.computations[name].instructions.values():
            if kind_of(instruction) and not is_continuation(self.module, self.chains, name, instruction):
                found.append((instruction.name, record(self.module, name, instruction, self.warnings)))
            elif instruction.opcode.removesuffix("-start") in CALLERS:
                for callee in callees_of(instruction, "calls", "to_apply"):
                    found += self.collectives_in(callee) if callee in self.module.computations else []
        return found

    def bytes_of_branch(self, name: str) -> float:
        """Sums the bytes of all collectives in a computation, loops counted once, to rank branches."""
        if name not in self.branch_bytes:
            total = sum((op.wire_bytes for _, op in self.collectives_in(name)), 0.0)
            for instruction in self.module.computations[name].instructions.values():
                if instruction.opcode in ("while", "conditional"):
                    total += sum(map(self.bytes_of_branch, callees_of(instruction, "body", *BRANCHES_OF)))
            self.branch_bytes[name] = total
        return self.branch_bytes[name]

    def key_of(self, instruction: Instruction) -> str:
        """Names a pending operation. Between slices, a `send` and its `recv` share a key; else it is the name."""
        between = between_slices(instruction, self.module.devices)
        return between.key if between else instruction.name


def _chain(body: Computation) -> str | None:
    return next((found for found in map(chain_of, body.instructions.values()) if found is not None), None)
