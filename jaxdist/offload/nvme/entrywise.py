"""Splits an optimizer's trace into numbers that are computed once per step and a program for the entries of each leaf.

Values that depend on state that is not in memory can only be computed entry by entry. Values that depend on arrays in
memory alone (norms of gradients) may be computed in any way; they enter the programs as numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.jaxprs import (
    ELEMENTWISE,
    LOOPS,
    RESHAPES,
    TAKES_NUMBERS,
    apply_primitive,
    evaluate,
    find_called_jaxpr,
    inner_jaxprs,
)
from ..._core.types import Array, PyTree


class EntryProgram(NamedTuple):
    """The computation for the entries of one leaf.

    `run(arrays, numbers)` takes and returns vectors of any one length. Leaves of equal `key` have equal programs.
    """

    key: str
    run: Callable[[Sequence[Any], Sequence[Any]], list[Array]]
    numbers: tuple[int, ...]


class Split(NamedTuple):
    """A function in two parts: `head(flat arguments) -> numbers`, and `programs`, one for each leaf.

    `memory`: the flat arguments that `head` reads. `others`: for each output that belongs to no leaf, its position in
    the numbers. `EntryProgram.numbers` are positions in the numbers too.
    """

    head: Callable[[Sequence[Any]], list[Array]]
    memory: tuple[int, ...]
    programs: list[EntryProgram]
    others: list[int]


@dataclass(frozen=True)
class Input:
    """A vector of entries: its position among the flat arguments or, in a program, among its arrays."""

    index: int


@dataclass(frozen=True)
class OperationResult:
    """The result of an operation of the program."""

    index: int


@dataclass(frozen=True)
class Number:
    """A value of the head, equal for all entries."""

    index: int


@dataclass(frozen=True)
class Constant:
    """A literal of the trace."""

    value: Any


Operand = Input | OperationResult | Number | Constant


class _Call(NamedTuple):
    """An equation of the head; with `scalars`, all its operands are reshaped to single numbers."""

    equation: Any
    operands: tuple[int, ...]
    scalars: bool


class _Output(NamedTuple):
    """One result of a `_Call`, which comes before it."""

    call: int
    index: int


class _Value(NamedTuple):
    """A value of the trace.

    `head` is its position in the head and `entry` its operand in a program; `reason` says why there is no `entry`.
    """

    aval: Any
    head: int | None
    entry: Operand | None
    reason: str = ""


def split(
    f: Callable[..., PyTree],
    arguments: Sequence[PyTree],
    *,
    leaves: Sequence[Sequence[int]],
    stored: Sequence[int],
    outputs: Sequence[Sequence[int]],
) -> Split:
    """Splits `f` into a head and one program per leaf.

    Args:
      f: a function of trees of arrays.
      arguments: their shapes and dtypes.
      leaves: for each leaf, the positions of its vectors among the flat arguments, in the order of its program.
      stored: the positions of flat arguments that are not in memory.
      outputs: for each leaf, the positions among the flat outputs of its program's results.

    Raises:
      ValueError: an operation on arrays that are not in memory is not entrywise.
    """
    closed = jax.make_jaxpr(f)(*arguments)
    trace = _Trace()
    entries = {i for members in leaves for i in members}
    values = []
    for i, var in enumerate(closed.jaxpr.invars):
        head = None if i in stored else trace.add(Input(i))
        entry = Input(i) if i in entries else _number_of(var.aval, head)
        values.append(_Value(var.aval, head, entry, "a whole array of the state"))
    found = trace.evaluate(closed, values)

    # Leaf programs first: they determine the numbers that the head must return.
    drafts = [
        _program(trace.operations, ins, [found[o] for o in outs]) for ins, outs in zip(leaves, outputs, strict=True)
    ]
    of_leaves = {o for outs in outputs for o in outs}
    heads: list[int] = []
    for value in (value for o, value in enumerate(found) if o not in of_leaves):
        if value.head is None:
            raise ValueError(_refusal(value.reason))
        heads.append(value.head)
    wanted = [*dict.fromkeys([*(at for program in drafts for at in program.numbers), *heads])]
    position = {at: i for i, at in enumerate(wanted)}
    programs = [program._replace(numbers=tuple(position[at] for at in program.numbers)) for program in drafts]
    order = _ancestors(trace.nodes, wanted)
    memory = tuple(sorted(node.index for at in order if isinstance(node := trace.nodes[at], Input)))
    head = partial(_run_head, {at: trace.nodes[at] for at in order}, wanted)
    return Split(head, memory, programs, [position[at] for at in heads])


def _refusal(reason: str) -> str:
    return (
        f"the optimizer needs `{reason}` of whole arrays that are on disk, but only entrywise operations and norms of "
        "gradients can be streamed: keep this optimizer in memory, or give it a few leaves with optax.partition"
    )


def _number_of(aval: Any, head: int | None) -> Number | None:
    return Number(head) if head is not None and math.prod(aval.shape) == 1 else None


class _Trace:
    """The values met so far: `nodes` of the head, and entrywise `operations` of the programs."""

    def __init__(self):
        self.nodes: list[Input | Constant | _Call | _Output] = []
        self.operations: list[tuple[Any, tuple[Operand, ...]]] = []
        self.first_output: dict[Any, int] = {}

    def add(self, node: Input | Constant | _Call | _Output) -> int:
        """Adds a node to the head; returns its position."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def evaluate(self, closed: Any, values: Sequence[_Value]) -> list[_Value]:
        return evaluate(closed, self.apply, values, literal=self.literal, constant=self.constant)

    def literal(self, atom: Any) -> _Value:
        # As NumPy value: its text is part of the program's key.
        value = np.asarray(atom.val, atom.aval.dtype)
        return _Value(atom.aval, self.add(Constant(value)), Constant(value))

    def constant(self, value: Any) -> _Value:
        aval, head = jax.typeof(value), self.add(Constant(value))
        return _Value(aval, head, _number_of(aval, head), "a constant")

    def apply(self, equation: Any, values: list[_Value]) -> list[_Value]:
        """The results of one equation, in the head where all operands are, and entrywise where that is possible."""
        name = equation.primitive.name
        body = find_called_jaxpr(equation, opaque=LOOPS)
        if body is not None:
            return self.evaluate(body, values)
        in_head = tuple(value.head for value in values if value.head is not None)
        is_known = len(in_head) == len(values)
        if name == "cond" and not is_known:
            return self.select_branch(inner_jaxprs(equation), values)
        avals = [var.aval for var in equation.outvars]
        heads = self.apply_in_head(equation, in_head) if is_known else [None] * len(avals)
        # An operand that is not available at all is the reason for everything that depends on it.
        reason = next((value.reason for value in values if value.head is None and value.entry is None), name)
        found = [_Value(aval, head, _number_of(aval, head), reason) for aval, head in zip(avals, heads, strict=True)]
        if name in ELEMENTWISE:
            reason = next((value.reason for value in values if value.entry is None), name)
            return [found[0]._replace(entry=self.apply_to_entries(equation, values, heads[0]), reason=reason)]
        if name in RESHAPES and len(values) == 1:
            entry = values[0].entry
            same_size = bool(avals) and math.prod(avals[0].shape) == math.prod(values[0].aval.shape)
            # A number may be broadcast to any shape; vectors only keep the order of their entries.
            if isinstance(entry, Number | Constant) or (entry is not None and same_size):
                return [found[0]._replace(entry=entry)]
        return found

    def apply_in_head(self, equation: Any, operands: tuple[int, ...], *, scalars: bool = False) -> list[int]:
        """Adds an equation to the head; once for the same operands, so that leaves share their numbers."""
        is_pure = not inner_jaxprs(equation)
        key = (equation.primitive.name, str(equation.params) if is_pure else id(equation), operands, scalars)
        if key not in self.first_output:
            call = self.add(_Call(equation, operands, scalars))
            self.first_output[key] = call + 1
            for index in range(len(equation.outvars)):
                self.add(_Output(call, index))
        first = self.first_output[key]
        return list(range(first, first + len(equation.outvars)))

    def apply_to_entries(self, equation: Any, values: Sequence[_Value], head: int | None) -> Operand | None:
        """The operand for the result of an elementwise equation, or `None` if an operand is not entrywise."""
        operands = tuple(value.entry for value in values if value.entry is not None)
        if len(operands) < len(values):
            return None
        numbers = tuple(operand for operand in operands if isinstance(operand, Number | Constant))
        if len(numbers) < len(operands):
            self.operations.append((equation, operands))
            return OperationResult(len(self.operations) - 1)
        if math.prod(equation.outvars[0].aval.shape) == 1 and head is not None:
            return Number(head)
        # Arrays of equal numbers are computed as a single number.
        in_head = tuple(x.index if isinstance(x, Number) else self.add(Constant(x.value)) for x in numbers)
        return Number(self.apply_in_head(equation, in_head, scalars=True)[0])

    def select_branch(self, branches: Sequence[Any], values: Sequence[_Value]) -> list[_Value]:
        """Computes all branches entry by entry, and selects one of them."""
        outputs = []
        for cases in zip(*[self.evaluate(branch, values[1:]) for branch in branches], strict=True):
            like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (values[0], *cases)]
            # The equation of a `select_n` of these shapes, applied like any other elementwise one.
            select = jax.make_jaxpr(lambda which, *cases: lax.select_n(which, *cases))(*like).jaxpr.eqns[0]
            outputs += self.apply(select, [values[0], *cases])
        return outputs


def _ancestors(nodes: Sequence[Any], wanted: Sequence[int]) -> list[int]:
    """The positions of the nodes of the head that these depend on; operands come before their results."""
    needed, stack = set(), list(wanted)
    while stack:
        at = stack.pop()
        if at not in needed:
            needed.add(at)
            match nodes[at]:
                case _Call(_, operands, _):
                    stack += operands
                case _Output(call, _):
                    stack.append(call)
    return sorted(needed)


def _run_head(nodes: dict[int, Any], wanted: Sequence[int], arguments: Sequence[Any]) -> list[Array]:
    """The wanted values of the head, for flat arguments."""
    known: dict[int, Any] = {}
    for at, node in nodes.items():
        match node:
            case Input(index):
                known[at] = arguments[index]
            case Constant(value):
                known[at] = jnp.asarray(value)
            case _Output(call, index):
                known[at] = known[call][index]
            case _Call(equation, operands, scalars):
                given = [jnp.reshape(known[i], ()) if scalars else known[i] for i in operands]
                known[at] = apply_primitive(equation, given)
    return [known[at] for at in wanted]


def _program(
    operations: Sequence[tuple[Any, tuple[Operand, ...]]], inputs: Sequence[int], outputs: Sequence[_Value]
) -> EntryProgram:
    """The program of one leaf, whose `numbers` are still positions in the head."""
    results: list[Operand] = []
    for value in outputs:
        if value.entry is None:
            raise ValueError(_refusal(value.reason))
        results.append(value.entry)
    needed, stack = set(), list(results)
    while stack:
        match stack.pop():
            case OperationResult(index) if index not in needed:
                needed.add(index)
                stack += operations[index][1]
            case Input(index) if index not in inputs:
                raise ValueError(_refusal("entries of another leaf"))
    order = sorted(needed)
    position = {at: i for i, at in enumerate(order)}
    ordinal = {at: i for i, at in enumerate(inputs)}
    numbers: dict[int, int] = {}

    def renumber(operand: Operand) -> Operand:
        match operand:
            case Input(index):
                return Input(ordinal[index])
            case OperationResult(index):
                return OperationResult(position[index])
            case Number(index):
                return Number(numbers.setdefault(index, len(numbers)))
        return operand

    # Positions within the leaf: leaves that are treated alike get the same key.
    steps = [(operations[at][0], [renumber(operand) for operand in operations[at][1]]) for at in order]
    final = [(renumber(result), value.aval.dtype) for result, value in zip(results, outputs, strict=True)]
    key = str([(e.primitive.name, str(e.params), str(operands)) for e, operands in steps]) + str(final)
    return EntryProgram(key, partial(_run_entries, steps, final), tuple(numbers))


def _run_entries(
    steps: Sequence[tuple[Any, Sequence[Operand]]],
    final: Sequence[tuple[Operand, Any]],
    arrays: Sequence[Any],
    numbers: Sequence[Any],
) -> list[Array]:
    """Runs a program on vectors of one length."""
    computed: list[Any] = []
    for equation, operands in steps:
        # Numbers are broadcast to vectors, except where the primitive takes them as they are.
        mixed = equation.primitive.name in TAKES_NUMBERS
        given = [
            _read(operand, arrays, numbers, computed, broadcast=not mixed or _must_be_array(equation, i))
            for i, operand in enumerate(operands)
        ]
        computed.append(apply_primitive(equation, given)[0])
    return [jnp.asarray(_read(operand, arrays, numbers, computed), dtype) for operand, dtype in final]


def _read(
    operand: Operand, arrays: Sequence[Any], numbers: Sequence[Any], computed: Sequence[Any], *, broadcast: bool = True
) -> Any:
    match operand:
        case Input(index):
            return arrays[index]
        case OperationResult(index):
            return computed[index]
        case Number(index):
            x = jnp.reshape(numbers[index], ())
        case Constant(value):
            x = jnp.reshape(jnp.asarray(value), ())
    return jnp.broadcast_to(x, arrays[0].shape) if broadcast else x


def _must_be_array(equation: Any, position: int) -> bool:
    """Returns True for operands that need the shape of the result, in a primitive that accepts numbers for others."""
    return position > 0 if equation.primitive.name == "select_n" else position == 1
