"""A trace as a flat list of equations between numbered values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..._core.compat import Literal
from ..._core.jaxprs import CASTS, ELEMENTWISE, RESHAPES, apply_primitive, inner_jaxprs

REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "iota"))
CHEAP = ELEMENTWISE | RESHAPES | REDUCTIONS | CASTS
LOOPS = frozenset(("scan", "while"))


class Node(NamedTuple):
    """One equation. An input is the number of a value, or a literal."""

    equation: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The primitive."""
        return self.equation.primitive.name

    @property
    def reads(self) -> tuple[int, ...]:
        """The inputs that are values."""
        return tuple(dict.fromkeys(x for x in self.inputs if isinstance(x, int)))

    @property
    def communicates(self) -> bool:
        """Whether it is a collective, or asks which worker this is."""
        return _communicates(self.equation)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The outputs for these operands."""
        return apply_primitive(self.equation, operands)


class Program(NamedTuple):
    """A trace. `types[v]` has the shape and dtype of value `v`; `outputs` are values or literals."""

    nodes: list[Node]
    types: list[Any]
    inputs: list[int]
    outputs: list[Any]
    constants: dict[int, Any]

    def nbytes(self, value: int) -> int:
        """0 for what has only one entry: it may go anywhere."""
        aval = self.types[value]
        return aval.size * aval.dtype.itemsize if aval.size > 1 else 0

    def is_array(self, value: int) -> bool:
        """Whether it has more than one entry."""
        return self.types[value].size > 1

    def arrays(self, values: Sequence[int]) -> list[int]:
        """Those with more than one entry."""
        return [v for v in values if self.is_array(v)]


def flatten(closed: Any) -> Program:
    """The program of a closed jaxpr: calls are inlined, moves between memories and dead equations left out."""
    types: list[Any] = []
    nodes: list[Node] = []
    constants: dict[int, Any] = {}

    def new(aval) -> int:
        types.append(aval)
        return len(types) - 1

    def constant(value) -> int:
        number = new(jax.typeof(value))
        constants[number] = value
        return number

    def inline(jaxpr, consts, atoms):
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *atoms], strict=True))

        def of(atom):
            return atom if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = [of(atom) for atom in equation.invars]
            inside = inner_jaxprs(equation)
            if equation.primitive.name == "device_put":
                outputs = inputs
            elif len(inside) == 1 and equation.primitive.name not in (*LOOPS, "cond", "compute_on", "shard_map"):
                outputs = inline(inside[0].jaxpr, [constant(c) for c in inside[0].consts], inputs)
            else:
                outputs = [new(var.aval) for var in equation.outvars]
                nodes.append(Node(equation, tuple(inputs), tuple(outputs)))
            known.update(zip(equation.outvars, outputs, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    inputs = [new(var.aval) for var in closed.jaxpr.invars]
    outputs = inline(closed.jaxpr, [constant(c) for c in closed.consts], inputs)
    return Program(_alive(nodes, outputs), types, inputs, outputs, constants)


def _alive(nodes: list[Node], outputs: Sequence[Any]) -> list[Node]:
    wanted = {x for x in outputs if isinstance(x, int)}
    kept = []
    for node in reversed(nodes):
        if wanted & set(node.outputs):
            kept.append(node)
            wanted |= set(node.reads)
    return kept[::-1]


def _communicates(equation: Any) -> bool:
    if equation.primitive.name in CASTS:
        return False
    named = (equation.params.get("axes", ()), equation.params.get("axis_name", ()))
    if any(isinstance(name, str) for names in named for name in (names if isinstance(names, tuple) else (names,))):
        return True
    return any(_communicates(inner) for closed in inner_jaxprs(equation) for inner in closed.jaxpr.eqns)
