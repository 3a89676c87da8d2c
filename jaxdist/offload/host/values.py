"""The values of a program while it runs, on two sides."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from ..._core.compat import lies_on_host
from ..._core.jaxprs import CASTS, ELEMENTWISE
from ..._core.types import Array
from .program import Node, Program

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


class Values:
    """The values of a program, on the device, on the host or on both. What is needed elsewhere is sent, once."""

    def __init__(self, program: Program, given: Sequence[Array]):
        self.program = program
        self.known: tuple[dict[int, Array], dict[int, Array]] = ({}, {})
        for number, x in [*zip(program.inputs, given, strict=True), *program.constants.items()]:
            self.put(number, x)

    def put(self, number: int, x: Array) -> None:
        """A value that has been computed."""
        self.known[lies_on_host(x)][number] = x

    def get(self, number: int, *, host: bool) -> Array:
        """A value on one of the two sides."""
        if number not in self.known[host]:
            self.known[host][number] = jax.device_put(self.known[not host][number], HOST if host else DEVICE)
        return self.known[host][number]


def evaluate(nodes: Sequence[Node], known: dict[int, Array], run_node: Callable[..., list[Any]]) -> dict[int, Array]:
    """Runs nodes in their order."""
    for node in nodes:
        operands = [known[x] if isinstance(x, int) else x.val for x in node.inputs]
        known.update(zip(node.outputs, run_node(node, operands), strict=True))
    return known


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
