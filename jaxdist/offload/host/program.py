"""A trace as a flat list of operations on numbered values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..._core.jaxprs import (
    CASTS,
    ELEMENTWISE,
    INDIVISIBLE,
    RESHAPES,
    apply_primitive,
    evaluate,
    find_called_jaxpr,
    inner_jaxprs,
)

REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "iota"))
CHEAP = ELEMENTWISE | RESHAPES | REDUCTIONS | CASTS
# Inlining these would lose where or how often they run.
OPAQUE = (*INDIVISIBLE, "compute_on", "shard_map")


class Operation(NamedTuple):
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
        """Returns True for collectives, and for the index of this worker."""
        return _communicates(self.equation)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The outputs for these operands."""
        return apply_primitive(self.equation, operands)


class Program(NamedTuple):
    """A trace. `types[v]` has the shape and dtype of value `v`; `outputs` are values or literals."""

    operations: list[Operation]
    types: list[Any]
    inputs: list[int]
    outputs: list[Any]
    constants: dict[int, Any]

    def nbytes(self, value: int) -> int:
        """The bytes of an array; 0 for a single number, which may cross freely."""
        aval = self.types[value]
        return aval.size * aval.dtype.itemsize if aval.size > 1 else 0

    def is_array(self, value: int) -> bool:
        """Returns True for values with more than one entry."""
        return self.types[value].size > 1

    def arrays(self, values: Sequence[int]) -> list[int]:
        """The values with more than one entry."""
        return [v for v in values if self.is_array(v)]


class _Flattener:
    """Collects the operations of a trace."""

    def __init__(self):
        self.types: list[Any] = []
        self.operations: list[Operation] = []
        self.constants: dict[int, Any] = {}

    def add(self, aval: Any) -> int:
        self.types.append(aval)
        return len(self.types) - 1

    def add_constant(self, value: Any) -> int:
        number = self.add(jax.typeof(value))
        self.constants[number] = value
        return number

    def inline(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        return evaluate(closed, self.apply, inputs, literal=lambda atom: atom, constant=self.add_constant)

    def apply(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        # `run` decides where values are kept, so moves between memories in the trace are dropped.
        if equation.primitive.name == "device_put":
            return inputs
        body = find_called_jaxpr(equation, opaque=OPAQUE)
        if body is not None:
            return self.inline(body, inputs)
        outputs = tuple(self.add(var.aval) for var in equation.outvars)
        self.operations.append(Operation(equation, tuple(inputs), outputs))
        return outputs


def flatten(closed: Any) -> Program:
    """The program of a closed jaxpr: calls are inlined; moves between memories and dead equations are left out."""
    flattener = _Flattener()
    inputs = [flattener.add(var.aval) for var in closed.jaxpr.invars]
    outputs = flattener.inline(closed, inputs)
    operations = _remove_dead(flattener.operations, outputs)
    return Program(operations, flattener.types, inputs, outputs, flattener.constants)


def _remove_dead(operations: list[Operation], outputs: Sequence[Any]) -> list[Operation]:
    wanted = {x for x in outputs if isinstance(x, int)}
    kept = []
    for operation in reversed(operations):
        if wanted & set(operation.outputs):
            kept.append(operation)
            wanted |= set(operation.reads)
    return kept[::-1]


def _communicates(equation: Any) -> bool:
    if equation.primitive.name in CASTS:
        return False
    named = (equation.params.get("axes", ()), equation.params.get("axis_name", ()))
    if any(isinstance(name, str) for names in named for name in (names if isinstance(names, tuple) else (names,))):
        return True
    return any(_communicates(inner) for closed in inner_jaxprs(equation) for inner in closed.jaxpr.eqns)
