"""Which equations of an update are computed beside the state, and what must cross for it.

An equation is *beside* the state if it reads the state (from any distance) and the new state needs it. What comes
before (reductions of gradients, norms, collectives) and what comes after is done on the device, but the cut runs where
the fewest bytes cross: what makes an array larger on its way to the host is moved behind the crossing, and likewise on
the way back. So of `(1-β₁)g` and `(1-β₂)g²` only `g` crosses, in the dtype that it came in, and of new master
parameters only their rounding.
"""

from collections.abc import Collection
from typing import NamedTuple

from .program import CHEAP, LOOPS, Node, Program


class Cut(NamedTuple):
    """`levels[0]`, `levels[2]`, ... are nodes for the device, `levels[1]`, `levels[3]`, ... those beside the state.

    A node can be in both: what is cheap is rather computed twice than sent.
    """

    levels: list[list[Node]]


def cut(program: Program, state_in: Collection[int], state_out: Collection[int]) -> Cut:
    """Places every node of an update.

    Args:
      program: the update.
      state_in: the values that hold the state.
      state_out: those that hold the new one.

    Raises:
      ValueError: a loop works on the state, so that no part of the work can be moved.
    """
    nodes = program.nodes
    read = _from_state(program, state_in)
    needed = _for_state(program, state_out)
    core = {i for i in range(len(nodes)) if read[i] and needed[i] and not nodes[i].communicates}
    for i in sorted(core):
        if nodes[i].name in LOOPS:
            raise ValueError(
                f"the optimizer works on its state inside a `{nodes[i].name}`, which cannot be divided between host "
                "and device: put host around the parts of the chain that have no loop"
            )
    consumers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for value in node.reads:
            consumers.setdefault(value, []).append(i)

    def users(i, among):
        return any(j in among for value in nodes[i].outputs for j in consumers.get(value, ()))

    makers = {value: i for i, node in enumerate(nodes) for value in node.outputs}

    def moves(i):
        return not read[i] and nodes[i].name in CHEAP and not nodes[i].communicates

    def sources(i):
        """The arrays that must cross if a node and all that can move with it are moved."""
        found, seen, waiting = set(), {i}, [i]
        while waiting:
            for value in program.arrays(nodes[waiting.pop()].reads):
                j = makers.get(value)
                if j is None or not moves(j):
                    found.add(value)
                elif j not in seen:
                    seen.add(j)
                    waiting.append(j)
        return found

    def sinks(i, beside, there):
        """Whether an equation before the state is moved to it."""
        if not moves(i) or not program.arrays(nodes[i].outputs):
            return False
        if not users(i, beside) and not set(state_out) & set(nodes[i].outputs):
            return False
        made = sum(map(program.nbytes, nodes[i].outputs))
        ways = set(program.arrays(nodes[i].reads)), sources(i)
        return any(sum(program.nbytes(value) for value in way if value not in there) <= made for way in ways)

    beside = set(core)
    for i in reversed(range(len(nodes))):
        if i not in beside and sinks(i, beside, ()):
            beside.add(i)

    # What the host has anyhow, and what could be computed there without another crossing.
    made = {value for i in beside for value in nodes[i].outputs}
    has = {value for i in beside for value in program.arrays(nodes[i].reads)} | made | set(state_in)
    could: set[int] = set()
    for i, node in enumerate(nodes):
        if node.name in CHEAP and not node.communicates and all(v in has for v in program.arrays(node.reads)):
            could.add(i)
            has |= set(node.outputs)
    for i in reversed(range(len(nodes))):
        if i in beside or i not in could or not program.arrays((*nodes[i].reads, *nodes[i].outputs)):
            continue
        incoming = sum(map(program.nbytes, nodes[i].reads))
        if read[i]:
            shrinks = incoming > sum(map(program.nbytes, nodes[i].outputs))
            if shrinks or users(i, beside):
                beside.add(i)
        elif sinks(i, beside, has):
            beside.add(i)
    sent_back = {x for x in program.outputs if isinstance(x, int)} - set(state_out)
    device = set(range(len(nodes))) - beside
    for i in sorted(beside, reverse=True):
        if not read[i] and (sent_back & set(nodes[i].outputs) or users(i, device)):
            device.add(i)
    return Cut(_levels(program, beside, device, state_in))


def _from_state(program: Program, state_in: Collection[int]) -> list[bool]:
    """Which nodes depend on the state, not counting ways through single numbers."""
    touched = {value for value in state_in if program.is_array(value)}
    out = []
    for node in program.nodes:
        out.append(any(value in touched for value in node.reads))
        if out[-1]:
            touched |= set(program.arrays(node.outputs))
    return out


def _for_state(program: Program, state_out: Collection[int]) -> list[bool]:
    """Which nodes the new state depends on."""
    wanted = set(state_out)
    out = []
    for node in reversed(program.nodes):
        out.append(bool(wanted & set(node.outputs)))
        if out[-1]:
            wanted |= set(node.reads)
    return out[::-1]


def _levels(program: Program, beside: set[int], device: set[int], state_in: Collection[int]) -> list[list[Node]]:
    """Alternating stages; a node goes into the earliest in which all that it reads is there or can be sent."""
    given = [*program.inputs, *program.constants]
    ready = (dict.fromkeys(given, 0), dict.fromkeys(state_in, 1))  # from which level on, on the device and beside
    levels: list[list[Node]] = [[], []]
    for i, node in enumerate(program.nodes):
        for place, members in enumerate((device, beside)):
            if i not in members:
                continue
            at = place
            for value in node.reads:
                here, there = ready[place].get(value), ready[1 - place].get(value)
                at = max(at, min(x for x in (here, None if there is None else there + 1) if x is not None))
            while len(levels) <= at:
                levels.append([])
            levels[at].append(node)
            for value in node.outputs:
                ready[place][value] = at
    return levels
