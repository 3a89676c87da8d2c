"""Goes through the schedule of a compiled program in the order in which a device would, with a clock."""

from typing import NamedTuple

from ..base import Collective
from ..collectives import CALLERS, calls_target, chain_of, chains, goes_on, kind_of, record
from ..cost import Cluster, compute_seconds, crossings, seconds
from .loops import trip_count
from .op_cost import HOST_SPACE, shapes, weigher
from .reader import Computation, Instruction, Module, called
from .slices import between_slices

COMPUTE, HOST, MEMORY = "compute", "host", "memory"
SMALL = 1024  # bytes: what scalars and counters move hides nothing
MAX_SPANS = 100_000


class Span(NamedTuple):
    """Something that takes from `start` to `end`, in seconds since the step began, on one lane."""

    lane: str
    name: str
    start: float
    end: float


class Seen(NamedTuple):
    """A collective of the schedule; `operations`, `flops` and `bytes` lie between its start and its end, once."""

    op: Collective
    asynchronous: bool
    times: int
    operations: float
    flops: float
    bytes: float
    seconds: float
    exposed: float


class Walked(NamedTuple):
    """All of a schedule."""

    seen: list[Seen]
    spans: list[Span]
    seconds: float
    compute_seconds: float
    flops: float
    bytes: float
    warnings: list[str]


class _Pending(NamedTuple):
    ops: list[tuple[str, Collective]]
    began: tuple[float, float, float]
    start: float
    end: float


def walk(module: Module, where: Cluster | None, branch: str) -> Walked:
    """Walks through the schedule; without a cluster nothing takes time.

    Computation is one lane, in order, at the speed of its roofline. Each class of links is a lane, and so are the link
    to the host and the copies between the memories of a chip: what is asynchronous waits for its lane, and the program
    waits for it where it is done. Of a loop the first and the second round are walked; all others are like the second.
    """
    work, started, warnings = weigher(module), chains(module), []
    spans: list[Span] = []
    seen: dict[tuple[str, str], Seen] = {}
    busy: dict[str, float] = {}
    # Time, operations, FLOPs and bytes so far, and seconds of computation.
    clock = [0.0, 0.0, 0.0, 0.0, 0.0]
    pending: dict[str, _Pending] = {}

    def span(lane: str, name: str, start: float, end: float) -> None:
        if end > start and len(spans) < MAX_SPANS:
            last = spans[-1] if spans else None
            if last is not None and lane == COMPUTE == last.lane and start <= last.end:
                spans[-1] = last._replace(end=end)
            else:
                spans.append(Span(lane, name, start, end))

    def compute(name: str, instruction: Instruction) -> None:
        cost = work(name, instruction)
        flops = sum(cost.flops.values(), 0.0)
        took = compute_seconds(cost.flops, float(cost.bytes), where.chip) if where else 0.0
        span(COMPUTE, instruction.name, clock[0], clock[0] + took)
        for n, amount in enumerate((took, float(cost.bytes >= SMALL or flops > 0), flops, cost.bytes, took)):
            clock[n] += amount

    def send(ops: list[tuple[str, Collective]]) -> _Pending:
        begin = end = clock[0]
        first = clock[0]
        for position, (_, op) in enumerate(ops):
            crossed = crossings(op, where) if where else ()
            lane = crossed[0].link if crossed else ""
            begin = max(end, busy.get(lane, 0.0))
            first = begin if position == 0 else first
            end = begin + seconds(crossed)
            busy[lane] = end
            if where:
                span(lane, op.kind, begin, end)
        return _Pending(ops, (clock[1], clock[2], clock[3]), first, end)

    def wait(going: _Pending, asynchronous: bool, times: int) -> None:
        exposed = max(0.0, going.end - clock[0])
        clock[0] += exposed
        between = (clock[1] - going.began[0], clock[2] - going.began[1], clock[3] - going.began[2])
        for key, op in going.ops:
            took = seconds(crossings(op, where)) if where else 0.0
            old = seen.get((op.where, key))
            count, waited = (old.times, old.exposed) if old else (0, 0.0)
            waited += times * exposed / len(going.ops)
            seen[op.where, key] = Seen(op, asynchronous, times + count, *between, took, waited)

    def copied(name: str, instruction: Instruction) -> tuple[str, float]:
        """The lane of an asynchronous copy, and how long it takes."""
        symbols = module.computations[name].instructions
        moved = [shape for shape in shapes(instruction.result) if shape.nbytes > 64]
        source = [shape for operand in instruction.operands[:1] for shape in shapes(symbols[operand].result)]
        size = min((shape.nbytes for shape in moved), default=0)
        if any(shape.space == HOST_SPACE for shape in (*moved, *source)):
            return HOST, size / where.chip.host_bandwidth if where else 0.0
        return MEMORY, size / where.chip.bandwidth if where else 0.0

    def collectives_in(name: str) -> list[tuple[str, Collective]]:
        found = []
        for instruction in module.computations[name].instructions.values():
            if kind_of(instruction) and not goes_on(module, started, name, instruction):
                found.append((instruction.name, record(module, name, instruction, warnings)))
            elif instruction.opcode.removesuffix("-start") in CALLERS:
                for inner in called(instruction, "calls", "to_apply"):
                    found += collectives_in(inner) if inner in module.computations else []
        return found

    def key_of(instruction: Instruction) -> str:
        """What a pending operation is known by: between slices, one receives what another sends."""
        between = between_slices(instruction, module.devices)
        return between.key if between else instruction.name

    def run(name: str, times: int) -> None:
        for instruction in module.computations[name].instructions.values():
            visit(name, instruction, times)

    def visit(name: str, instruction: Instruction, times: int) -> None:
        opcode = instruction.opcode
        base = opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        if opcode.endswith("-done") or opcode in ("send-done", "recv-done"):
            begun = module.computations[name].instructions[instruction.operands[0]]
            if begun.opcode == "send" and between_slices(begun, module.devices):
                return  # it is on its way; who waits for it is the end of the receive
            going = pending.pop(f"{name}/{key_of(begun)}", None)
            if going is not None:
                wait(going, True, times)
        elif opcode.endswith("-update"):
            source = pending.pop(f"{name}/{instruction.operands[0]}", None)
            if source is not None:
                pending[f"{name}/{instruction.name}"] = source
        elif kind_of(instruction):
            if goes_on(module, started, name, instruction):
                return
            going = send([(instruction.name, record(module, name, instruction, warnings))])
            if opcode.endswith("-start") or opcode == "send":
                pending[f"{name}/{key_of(instruction)}"] = going
            else:
                wait(going, False, times)
        elif opcode == "while":
            loop(name, instruction, times)
        elif opcode == "conditional":
            callees = called(instruction, "branch_computations", "true_computation", "false_computation")
            run(chosen(callees, name, instruction), times)
        elif base in ("copy", "slice", "dynamic-slice", "dynamic-update-slice") and opcode.endswith("-start"):
            lane, took = copied(name, instruction)
            begin = max(clock[0], busy.get(lane, 0.0))
            busy[lane] = begin + took
            span(lane, base, begin, begin + took)
            pending[f"{name}/{instruction.name}"] = _Pending([], (clock[1], clock[2], clock[3]), begin, begin + took)
        elif base in CALLERS:
            call(name, instruction, times)
        else:
            compute(name, instruction)

    def call(name: str, instruction: Instruction, times: int) -> None:
        callees = [
            c for c in called(instruction, "calls", "to_apply", "called_computations") if c in module.computations
        ]
        body = module.computations[callees[0]] if callees else Computation({}, "")
        found = [op for callee in callees for op in collectives_in(callee)]
        if calls_target(body, "AsyncCollectiveStart"):
            pending[f"chain/{_chain(body)}"] = send(found)
        elif calls_target(body, "AsyncCollectiveDone"):
            going = pending.pop(f"chain/{_chain(body)}", None)
            if going is not None:
                wait(going, True, times)
        elif found and instruction.opcode.endswith("-start"):
            pending[f"{name}/{instruction.name}"] = send(found)
        elif instruction.opcode == "call":
            for callee in callees:
                run(callee, times)
        elif found:
            wait(send(found), False, times)
        else:
            compute(name, instruction)

    def loop(name: str, instruction: Instruction, times: int) -> None:
        (body,) = called(instruction, "body")
        rounds = trip_count(module, name, instruction)
        if rounds is None:
            warnings.append(f"the loop {instruction.name} in {name} runs an unknown number of times; counted once")
            rounds = 1
        if rounds:
            run(body, times)
        if rounds > 1:
            before, drawn = list(clock), len(spans)
            run(body, times * (rounds - 1))
            round_of = [now - then for now, then in zip(clock, before)]
            drawn_in_round = spans[drawn:]
            for lane in busy:
                busy[lane] += (rounds - 2) * round_of[0]
            for n, amount in enumerate(round_of):
                clock[n] += (rounds - 2) * amount
            for number in range(1, rounds - 1):
                if len(spans) > MAX_SPANS:
                    break
                later = number * round_of[0]
                spans.extend(s._replace(start=s.start + later, end=s.end + later) for s in drawn_in_round)

    def chosen(callees: list[str], name: str, instruction: Instruction) -> str:
        ranked = sorted(callees, key=sent)
        if sent(ranked[0]) != sent(ranked[-1]):
            warnings.append(f"the branches of {instruction.name} in {name} send unlike; walked the {branch}imum")
        return ranked[0] if branch == "min" else ranked[-1]

    sizes: dict[str, float] = {}

    def sent(name: str) -> float:
        """The bytes of all collectives that a computation contains, loops counted once: to rank branches."""
        if name not in sizes:
            sizes[name] = sum((op.wire_bytes for _, op in collectives_in(name)), 0.0)
            for instruction in module.computations[name].instructions.values():
                if instruction.opcode in ("while", "conditional"):
                    keys = ("body", "branch_computations", "true_computation", "false_computation")
                    sizes[name] += sum(map(sent, called(instruction, *keys)))
        return sizes[name]

    run(module.entry, 1)
    return Walked(list(seen.values()), spans, clock[0], clock[4], clock[2], clock[3], warnings)


def _chain(body: Computation) -> str | None:
    return next((found for found in map(chain_of, body.instructions.values()) if found is not None), None)
