"""What must be computed together, in portions of a given size."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..._primitives import CASTS, ELEMENTWISE
from .program import Node, Program


class Chunk(NamedTuple):
    """Nodes in their order, the bytes of state that they read, and the values among it."""

    nodes: list[Node]
    state: list[int]
    nbytes: int


def chunks(program: Program, nodes: Sequence[Node], state: Collection[int], smallest: int) -> list[Chunk]:
    """Nodes that share arrays stay together (those of one leaf); groups do not depend on one another.

    They are joined up to `smallest` bytes of state.
    """
    parent = list(range(len(nodes)))

    def root(i):
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[int, int] = {}
    for i, node in enumerate(nodes):
        made_here = [value for value in node.reads if value in first]
        for value in {*program.arrays((*node.reads, *node.outputs)), *made_here}:
            j = first.setdefault(value, i)
            parent[root(i)] = root(j)
        for value in node.outputs:
            first.setdefault(value, i)
    groups: dict[int, list[Node]] = {}
    for i, node in enumerate(nodes):
        groups.setdefault(root(i), []).append(node)

    out: list[Chunk] = []
    for members in groups.values():
        read = dict.fromkeys(value for node in members for value in node.reads if value in state)
        size = sum(program.nbytes(value) for value in read)
        if out and out[-1].nbytes + size <= smallest:
            last = out.pop()
            out.append(Chunk(last.nodes + members, last.state + list(read), last.nbytes + size))
        else:
            out.append(Chunk(members, list(read), size))
    return out


def entrywise(program: Program, chunk: Chunk) -> tuple[int, ...] | None:
    """The shape of all its arrays if each entry can be computed by itself, else nothing."""
    shapes = set()
    for node in chunk.nodes:
        arrays = program.arrays((*node.reads, *node.outputs))
        shapes |= {program.types[value].shape for value in arrays}
        constant = node.name == "broadcast_in_dim" and not program.arrays(node.reads)
        if node.name not in ELEMENTWISE | CASTS and not constant:
            return None
    return shapes.pop() if len(shapes) == 1 else None
