"""The values of a program while it runs, on two sides."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._compat import lies_on_host
from ..._typing import Array
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
