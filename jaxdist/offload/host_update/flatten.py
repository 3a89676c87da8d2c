"""First: an update as a flat list of operations on numbered values."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from ..._core.jaxprs import CASTS, INDIVISIBLE, apply_primitive, evaluate, inner_jaxprs

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
        """Computes the outputs for these operands."""
        return apply_primitive(self.equation, operands)


def _communicates(equation: Any) -> bool:
    if equation.primitive.name in CASTS:
        return False
    named = (equation.params.get("axes", ()), equation.params.get("axis_name", ()))
    # Positional axes, those of `reduce_sum`, are integers; mesh axes have names.
    if any(isinstance(name, str) for names in named for name in (names if isinstance(names, tuple) else (names,))):
        return True
    return any(_communicates(inner) for closed in inner_jaxprs(equation) for inner in closed.jaxpr.eqns)


def run_operations(
    operations: Sequence[Operation], known: dict[int, Any], run: Callable[..., Sequence[Any]]
) -> dict[int, Any]:
    """Runs operations in order by `run(operation, operands)`; adds their results to `known`."""
    for operation in operations:
        operands = [known[x] if isinstance(x, int) else x.val for x in operation.inputs]
        known.update(zip(operation.outputs, run(operation, operands), strict=True))
    return known


def find_live(operations: Sequence[Operation], wanted: Collection[Any]) -> list[Operation]:
    """Returns the operations that the wanted values depend on, in order."""
    # Backwards: an operation is needed if one that comes later reads its results.
    needed, live = {x for x in wanted if isinstance(x, int)}, []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs):
            live.append(operation)
            needed |= set(operation.reads)
    return live[::-1]


class Recorder:
    """Numbers the values of a trace and collects the operations on them."""

    def __init__(self):
        self.types: list[Any] = []
        self.operations: list[Operation] = []
        self.constants: dict[int, Any] = {}

    def add(self, aval: Any) -> int:
        """Numbers a new value."""
        self.types.append(aval)
        return len(self.types) - 1

    def add_constant(self, value: Any) -> int:
        """Numbers a value that the trace closes over."""
        number = self.add(jax.typeof(value))
        self.constants[number] = value
        return number

    def record(self, equation: Any, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Adds an operation; returns the numbers of its results."""
        outputs = tuple(self.add(var.aval) for var in equation.outvars)
        self.operations.append(Operation(equation, tuple(inputs), outputs))
        return outputs


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


def flatten(closed: Any) -> Program:
    """The program of a closed jaxpr: calls are inlined; moves between memories and dead equations are left out."""
    recorder = Recorder()

    def apply(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        # `host` decides where values are kept when it runs the program.
        if equation.primitive.name == "device_put":
            return inputs
        return recorder.record(equation, inputs)

    inputs = [recorder.add(var.aval) for var in closed.jaxpr.invars]
    options = {"literal": lambda atom: atom, "constant": recorder.add_constant}
    outputs = evaluate(closed, apply, inputs, opaque=OPAQUE, **options)
    return Program(find_live(recorder.operations, outputs), recorder.types, inputs, outputs, recorder.constants)
