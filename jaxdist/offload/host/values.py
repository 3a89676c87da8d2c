"""The values of a program while it runs, in two memories, and the portions in which its state is processed."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from ..._core.compat import is_on_host
from ..._core.jaxprs import CASTS, ELEMENTWISE
from ..._core.types import Array
from .program import Operation, Program

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


class Values:
    """The values of a program, on the device, on the host or on both; each is sent to the other side at most once."""

    def __init__(self, program: Program, given: Sequence[Array]):
        self.program = program
        self.known: tuple[dict[int, Array], dict[int, Array]] = ({}, {})
        for number, x in [*zip(program.inputs, given, strict=True), *program.constants.items()]:
            self.put(number, x)

    def put(self, number: int, x: Array) -> None:
        """Stores a value that has been computed."""
        self.known[is_on_host(x)][number] = x

    def get(self, number: int, *, host: bool) -> Array:
        """A value on one of the two sides."""
        if number not in self.known[host]:
            self.known[host][number] = jax.device_put(self.known[not host][number], HOST if host else DEVICE)
        return self.known[host][number]


def run_operations(
    operations: Sequence[Operation], known: dict[int, Array], run: Callable[..., list[Any]]
) -> dict[int, Array]:
    """Runs operations in order by `run(operation, operands)`; adds their results to `known`."""
    for operation in operations:
        operands = [known[x] if isinstance(x, int) else x.val for x in operation.inputs]
        known.update(zip(operation.outputs, run(operation, operands), strict=True))
    return known


class Portion(NamedTuple):
    """Operations in order, the values of the state that they read, and the bytes of these."""

    operations: list[Operation]
    state: list[int]
    nbytes: int


def portions_of(
    program: Program, operations: Sequence[Operation], state: Collection[int], smallest: int
) -> list[Portion]:
    """Groups operations that share arrays (those of one leaf), so that portions do not depend on one another.

    Portions are merged up to `smallest` bytes of state.
    """
    out: list[Portion] = []
    for members in _components(program, operations):
        read = dict.fromkeys(value for operation in members for value in operation.reads if value in state)
        size = sum(program.nbytes(value) for value in read)
        if out and out[-1].nbytes + size <= smallest:
            last = out.pop()
            out.append(Portion(last.operations + members, last.state + list(read), last.nbytes + size))
        else:
            out.append(Portion(members, list(read), size))
    return out


def _components(program: Program, operations: Sequence[Operation]) -> list[list[Operation]]:
    """The connected components of operations that share an array, or a number that one of them computes."""
    # Union-find over the operations' positions.
    parent = list(range(len(operations)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[int, int] = {}
    for i, operation in enumerate(operations):
        made_here = [value for value in operation.reads if value in first]
        for value in {*program.arrays((*operation.reads, *operation.outputs)), *made_here}:
            j = first.setdefault(value, i)
            parent[root(i)] = root(j)
        for value in operation.outputs:
            first.setdefault(value, i)
    groups: dict[int, list[Operation]] = {}
    for i, operation in enumerate(operations):
        groups.setdefault(root(i), []).append(operation)
    return list(groups.values())


def common_shape(program: Program, portion: Portion) -> tuple[int, ...] | None:
    """The shape of all arrays of a portion whose operations are entrywise, or `None`."""
    shapes = set()
    for operation in portion.operations:
        arrays = program.arrays((*operation.reads, *operation.outputs))
        shapes |= {program.types[value].shape for value in arrays}
        is_constant = operation.name == "broadcast_in_dim" and not program.arrays(operation.reads)
        if operation.name not in ELEMENTWISE | CASTS and not is_constant:
            return None
    return shapes.pop() if len(shapes) == 1 else None
