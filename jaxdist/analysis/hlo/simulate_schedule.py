"""Simulates the schedule of a compiled program: one clock, one lane per resource."""

from typing import NamedTuple

from ..base import Collective
from ..collectives import CALLERS, calls_target, chain_of, chains, is_continuation, kind_of, record
from ..cost import Cluster, compute_seconds, crossings, seconds
from .loops import trip_count
from .op_cost import HOST_SPACE, CostModel, shapes
from .reader import Computation, Instruction, Module, callees_of
from .slices import between_slices

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


class TimedCollective(NamedTuple):
    """A collective of the schedule.

    Attributes:
      op: the collective, for one execution.
      asynchronous: whether its start and its end are separate instructions.
      times: how often it runs.
      operations: computations between start and end, in one execution.
      flops: their operations in matrix products.
      bytes: their memory traffic.
      seconds: the time of one execution.
      exposed: how long the program waits for it, in all executions together.
    """

    op: Collective
    asynchronous: bool
    times: int
    operations: float
    flops: float
    bytes: float
    seconds: float
    exposed: float


class SimulatedSchedule(NamedTuple):
    """The collectives in the order in which they end, the busy intervals, and the totals of one step."""

    collectives: list[TimedCollective]
    spans: list[Span]
    seconds: float
    compute_seconds: float
    flops: float
    bytes: float
    warnings: list[str]


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


def simulate_schedule(module: Module, cluster: Cluster | None, branch: str) -> SimulatedSchedule:
    """Runs a clock through the schedule of a program; without a cluster every operation takes no time.

    Computation is one lane, in program order, at the speed of its roofline. Each class of links is a lane, and so are
    the link to the host and the copies between the memories of a chip: an asynchronous operation waits until its lane
    is free, and the program waits for it at its end. The first and the second iteration of a loop are simulated; all
    later ones repeat the second.
    """
    walker = _Walker(module, cluster, branch)
    walker.run(module.entry, 1)
    clock = walker.clock
    return SimulatedSchedule(
        list(walker.timed.values()),
        walker.spans,
        clock.seconds,
        clock.compute_seconds,
        clock.flops,
        clock.bytes,
        walker.warnings,
    )


class _Walker:
    """The state of the simulation. `times` is how often the current instruction runs in one step."""

    def __init__(self, module: Module, cluster: Cluster | None, branch: str):
        self.module, self.cluster, self.branch = module, cluster, branch
        self.costs, self.chains = CostModel(module), chains(module)
        self.clock = _Clock()
        self.busy_until: dict[str, float] = {}  # by lane
        self.pending: dict[str, _Pending] = {}  # by computation and key
        self.timed: dict[tuple[str, str], TimedCollective] = {}  # by computation and instruction
        self.spans: list[Span] = []
        self.warnings: list[str] = []
        self.branch_bytes: dict[str, float] = {}

    def run(self, name: str, times: int) -> None:
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

    # ---- one handler for each kind of instruction

    def on_compute(self, name: str, instruction: Instruction) -> None:
        work = self.costs.cost(name, instruction)
        flops = sum(work.flops.values(), 0.0)
        took = compute_seconds(work.flops, float(work.bytes), self.cluster.chip) if self.cluster else 0.0
        self.draw(COMPUTE, instruction.name, self.clock.seconds, self.clock.seconds + took)
        counts = float(work.bytes >= SMALL or flops > 0)
        self.clock = self.clock.advance(_Clock(took, took, counts, flops, float(work.bytes)))

    def on_collective(self, name: str, instruction: Instruction, times: int) -> None:
        if is_continuation(self.module, self.chains, name, instruction):
            return
        sent = self.send([(instruction.name, record(self.module, name, instruction, self.warnings))])
        if instruction.opcode.endswith("-start") or instruction.opcode == "send":
            self.pending[f"{name}/{self.key_of(instruction)}"] = sent
        else:
            self.wait(sent, False, times)

    def on_done(self, name: str, instruction: Instruction, times: int) -> None:
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
        lane, took = self.copy_time(name, instruction)
        begin = max(self.clock.seconds, self.busy_until.get(lane, 0.0))
        self.busy_until[lane] = begin + took
        self.draw(lane, base, begin, begin + took)
        self.pending[f"{name}/{instruction.name}"] = _Pending([], self.clock, begin + took)

    def on_call(self, name: str, instruction: Instruction, times: int) -> None:
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
        callees = callees_of(instruction, "branch_computations", "true_computation", "false_computation")
        ranked = sorted(callees, key=self.bytes_of_branch)
        least, most = ranked[0], ranked[-1]
        if self.bytes_of_branch(least) != self.bytes_of_branch(most):
            self.warnings.append(
                f"the branches of {instruction.name} in {name} send different bytes; followed the {self.branch}imum"
            )
        self.run(least if self.branch == "min" else most, times)

    def on_while(self, name: str, instruction: Instruction, times: int) -> None:
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
            self.busy_until[lane] += (trips - 2) * iteration.seconds
        self.clock = self.clock.advance(iteration, trips - 2)
        for number in range(1, trips - 1):
            if len(self.spans) > MAX_SPANS:
                break
            later = number * iteration.seconds
            self.spans.extend(s._replace(start=s.start + later, end=s.end + later) for s in spans)

    # ---- what the handlers share

    def send(self, ops: list[tuple[str, Collective]]) -> _Pending:
        """Starts collectives one after the other, each when the slowest class of links that it crosses is free."""
        end = self.clock.seconds
        for _, op in ops:
            crossed = crossings(op, self.cluster) if self.cluster else ()
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
        exposed = max(0.0, sent.end - self.clock.seconds)
        self.clock = self.clock.advance(_Clock(seconds=exposed))
        between = self.clock.since(sent.started)
        for key, op in sent.ops:
            took = seconds(crossings(op, self.cluster)) if self.cluster else 0.0
            # A second visit, in a later iteration of its loop, adds to the first.
            old = self.timed.get((op.where, key))
            count, waited = (old.times, old.exposed) if old else (0, 0.0)
            self.timed[op.where, key] = TimedCollective(
                op,
                asynchronous,
                times + count,
                between.operations,
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
                    keys = ("body", "branch_computations", "true_computation", "false_computation")
                    total += sum(map(self.bytes_of_branch, callees_of(instruction, *keys)))
            self.branch_bytes[name] = total
        return self.branch_bytes[name]

    def key_of(self, instruction: Instruction) -> str:
        """Names a pending operation. Between slices, a `send` and its `recv` share a key; else it is the name."""
        between = between_slices(instruction, self.module.devices)
        return between.key if between else instruction.name


def _chain(body: Computation) -> str | None:
    return next((found for found in map(chain_of, body.instructions.values()) if found is not None), None)
