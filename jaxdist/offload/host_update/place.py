"""Second: the choice of the operations that run beside the state.

An operation runs *beside* the state if it reads the state (directly or not) and the new state needs it. Operations
before (reductions of gradients, norms, collectives) and after run on the device, but the cut is placed where the fewest
bytes cross: an operation that enlarges an array on its way to the host is moved behind the crossing, and likewise on
the way back. So of `(1-β₁)g` and `(1-β₂)g²` only `g` crosses, in its own dtype, and of new master parameters only their
rounding.
"""

from collections.abc import Collection, Container
from typing import NamedTuple

from ..._core.jaxprs import CASTS, ELEMENTWISE, LOOPS, RESHAPES
from .flatten import Operation, Program, find_live

REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "iota"))
CHEAP = ELEMENTWISE | RESHAPES | REDUCTIONS | CASTS


class _Graph(NamedTuple):
    """An update with its dependences. Operations are numbered; `reads_state[i]`: operation `i` depends on the state."""

    program: Program
    reads_state: list[bool]
    consumers: dict[int, list[int]]
    makers: dict[int, int]
    state_out: set[int]

    def is_used_in(self, i: int, members: Container[int]) -> bool:
        """Returns True if one of `members` reads a result of operation `i`."""
        outputs = self.program.operations[i].outputs
        return any(j in members for value in outputs for j in self.consumers.get(value, ()))

    def is_movable(self, i: int) -> bool:
        # A collective must stay where all workers run it, and costly work where the accelerator is.
        operation = self.program.operations[i]
        return not self.reads_state[i] and operation.name in CHEAP and not operation.communicates

    def inputs_of_chain(self, i: int) -> set[int]:
        """The arrays that must cross if operation `i` is moved with all movable operations before it."""
        found, seen, waiting = set(), {i}, [i]
        while waiting:
            for value in self.program.arrays(self.program.operations[waiting.pop()].reads):
                j = self.makers.get(value)
                if j is None or not self.is_movable(j):
                    found.add(value)
                elif j not in seen:
                    seen.add(j)
                    waiting.append(j)
        return found

    def should_move(self, i: int, beside: set[int], present: Container[int]) -> bool:
        """Returns True if moving operation `i` beside the state makes no more bytes cross; `present` are there."""
        program, operation = self.program, self.program.operations[i]
        if not self.is_movable(i) or not program.arrays(operation.outputs):
            return False
        if not self.is_used_in(i, beside) and not self.state_out & set(operation.outputs):
            return False
        # Either this operation alone moves, or with all the cheap ones before it.
        made = sum(map(program.nbytes, operation.outputs))
        ways = set(program.arrays(operation.reads)), self.inputs_of_chain(i)
        return any(sum(program.nbytes(value) for value in way if value not in present) <= made for way in ways)


def place_operations(program: Program, state_in: Collection[int], state_out: Collection[int]) -> list[list[Operation]]:
    """Places every operation of an update, from the values of the state to those of the new one.

    Returns:
      Levels: `[0]`, `[2]`, ... run on the device, `[1]`, `[3]`, ... beside the state. An operation can be in both:
      cheap ones are computed twice rather than sent.
    """
    consumers: dict[int, list[int]] = {}
    for i, operation in enumerate(program.operations):
        for value in operation.reads:
            consumers.setdefault(value, []).append(i)
    makers = {value: i for i, operation in enumerate(program.operations) for value in operation.outputs}
    graph = _Graph(program, _depends_on_state(program, state_in), consumers, makers, set(state_out))
    beside = _core(graph)
    # Backwards: an operation moves only if one that reads it has moved.
    for i in reversed(range(len(program.operations))):
        if i not in beside and graph.should_move(i, beside, ()):
            beside.add(i)
    _add_local(graph, beside, state_in)
    device = set(range(len(program.operations))) - beside
    _duplicate(graph, beside, device)
    return _levels(program, beside, device, state_in)


def _core(graph: _Graph) -> set[int]:
    """The operations that must run beside the state: they read it, and the new state needs them."""
    operations = graph.program.operations
    needed = {operation.outputs for operation in find_live(operations, graph.state_out)}
    core = {
        i
        for i, operation in enumerate(operations)
        if graph.reads_state[i] and operation.outputs in needed and not operation.communicates
    }
    for i in sorted(core):
        if operations[i].name in LOOPS:
            raise ValueError(
                f"the optimizer works on its state inside a `{operations[i].name}`, which cannot be divided between "
                "host and device: put host around the parts of the chain that have no loop"
            )
    return core


def _add_local(graph: _Graph, beside: set[int], state_in: Collection[int]) -> None:
    """Adds operations that can run beside the state without another crossing, where that saves bytes."""
    program, operations = graph.program, graph.program.operations
    made = {value for i in beside for value in operations[i].outputs}
    present = {value for i in beside for value in program.arrays(operations[i].reads)} | made | set(state_in)
    possible: set[int] = set()
    for i, operation in enumerate(operations):
        is_cheap = operation.name in CHEAP and not operation.communicates
        if is_cheap and all(v in present for v in program.arrays(operation.reads)):
            possible.add(i)
            present |= set(operation.outputs)
    for i in reversed(range(len(operations))):
        operation = operations[i]
        if i in beside or i not in possible or not program.arrays((*operation.reads, *operation.outputs)):
            continue
        if graph.reads_state[i]:
            # On the way back: the smaller array crosses.
            incoming, outgoing = (sum(map(program.nbytes, side)) for side in (operation.reads, operation.outputs))
            if incoming > outgoing or graph.is_used_in(i, beside):
                beside.add(i)
        elif graph.should_move(i, beside, present):
            beside.add(i)


def _duplicate(graph: _Graph, beside: set[int], device: set[int]) -> None:
    """Adds to the device operations that do not read the state, and whose results are needed there too."""
    sent_back = {x for x in graph.program.outputs if isinstance(x, int)} - graph.state_out
    for i in sorted(beside, reverse=True):
        outputs = set(graph.program.operations[i].outputs)
        if not graph.reads_state[i] and (sent_back & outputs or graph.is_used_in(i, device)):
            device.add(i)


def _depends_on_state(program: Program, state_in: Collection[int]) -> list[bool]:
    """For each operation, True if it depends on the state, not counting dependence through single numbers."""
    touched = {value for value in state_in if program.is_array(value)}
    found = []
    for operation in program.operations:
        found.append(any(value in touched for value in operation.reads))
        if found[-1]:
            touched |= set(program.arrays(operation.outputs))
    return found


def _levels(program: Program, beside: set[int], device: set[int], state_in: Collection[int]) -> list[list[Operation]]:
    """Alternating levels; an operation goes into the earliest one in which all its inputs are available."""
    given = [*program.inputs, *program.constants]
    # For each value the level from which on it is available, on the device and beside the state.
    ready = (dict.fromkeys(given, 0), dict.fromkeys(state_in, 1))
    levels: list[list[Operation]] = [[], []]
    for i, operation in enumerate(program.operations):
        for side, members in enumerate((device, beside)):
            if i not in members:
                continue
            level = side
            for value in operation.reads:
                here, there = ready[side].get(value), ready[1 - side].get(value)
                # A value of the other side is sent at the end of its level.
                level = max(level, min(x for x in (here, None if there is None else there + 1) if x is not None))
            levels += [[] for _ in range(level + 1 - len(levels))]
            levels[level].append(operation)
            ready[side].update(dict.fromkeys(operation.outputs, level))
    return levels
