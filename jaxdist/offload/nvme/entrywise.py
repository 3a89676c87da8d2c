"""Splits an optimizer's trace into numbers that are computed once per step and a program for the entries of each leaf.

Values that depend on state that is not in memory can only be computed entry by entry. Values that depend on arrays in
memory alone (norms of gradients) may be computed in any way; they enter the programs as numbers.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.jaxprs import ELEMENTWISE, LOOPS, RESHAPES, TAKES_NUMBERS, evaluate, inner_jaxprs
from ..._core.types import Array, PyTree
from ..host_update.flatten import Operation, Recorder, find_live, run_operations


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
    trace, given = _Trace(), [var.aval for var in closed.jaxpr.invars]
    # Argument `i` as a whole is value `i`; its entries are another value.
    heads = [None if i in stored else number for i, number in enumerate(map(trace.add, given))]
    entries = {i: trace.add_vector(given[i]) for members in leaves for i in members}
    values = [
        _Value(aval, head, entries.get(i, _number(aval, head)), "a whole array of the state")
        for i, (aval, head) in enumerate(zip(given, heads, strict=True))
    ]
    found = trace.evaluate(closed, values)
    # Leaf programs first: they determine the numbers that the head must return.
    drafts = [
        _program(trace, [entries[i] for i in ins], [found[o] for o in outs])
        for ins, outs in zip(leaves, outputs, strict=True)
    ]
    of_leaves = {o for outs in outputs for o in outs}
    others: list[int] = []
    for value in (value for o, value in enumerate(found) if o not in of_leaves):
        if value.head is None:
            raise ValueError(_refusal(value.reason))
        others.append(value.head)
    wanted = [*dict.fromkeys([*(x for program in drafts for x in program.numbers), *others])]
    position = {x: i for i, x in enumerate(wanted)}
    programs = [program._replace(numbers=tuple(position[x] for x in program.numbers)) for program in drafts]
    operations = find_live(trace.operations, wanted)
    read = {*wanted, *(x for operation in operations for x in operation.inputs)}
    memory = tuple(i for i in range(len(given)) if i in read)
    constants = {x: value for x, value in trace.constants.items() if x in read}
    head = partial(_run_head, operations, trace.scalars, constants, wanted)
    return Split(head, memory, programs, [position[x] for x in others])


def _refusal(reason: str) -> str:
    return (
        f"the optimizer needs `{reason}` of whole arrays that are on disk, but only entrywise operations and norms of "
        "gradients can be streamed: keep this optimizer in memory, or give it a few leaves with optax.partition"
    )


class _Value(NamedTuple):
    """A value of the trace, which may be recorded twice.

    `head` is its number as a whole array. `entry` is its number as a vector of any entries, or that of a whole array
    with a single entry; `reason` says why there is none.
    """

    aval: Any
    head: int | None
    entry: int | None
    reason: str = ""


def _number(aval: Any, head: int | None) -> int | None:
    """The value as a number that is equal for all entries, if it is one."""
    return head if math.prod(aval.shape) == 1 else None


class _Trace(Recorder):
    """The operations of the head and of all programs.

    `vectors`: values that only programs compute, entry by entry. `scalars`: values of the head that are computed as a
    single number. `literals`: constants that are a part of a program.
    """

    def __init__(self):
        super().__init__()
        self.vectors: set[int] = set()
        self.scalars: set[int] = set()
        self.literals: set[int] = set()
        self.recorded: dict[Any, tuple[int, ...]] = {}

    def add_vector(self, aval: Any) -> int:
        """Numbers the entries of an argument."""
        number = self.add(aval)
        self.vectors.add(number)
        return number

    def evaluate(self, closed: Any, values: Sequence[_Value]) -> list[_Value]:
        return evaluate(closed, self.apply, values, opaque=LOOPS, literal=self.literal, constant=self.constant)

    def literal(self, atom: Any) -> _Value:
        number = self.add_constant(np.asarray(atom.val, atom.aval.dtype))
        self.literals.add(number)
        return _Value(atom.aval, number, number)

    def constant(self, value: Any) -> _Value:
        aval, head = jax.typeof(value), self.add_constant(value)
        return _Value(aval, head, _number(aval, head), "a constant")

    def apply(self, equation: Any, values: list[_Value]) -> list[_Value]:
        """The results of one equation, in the head where all operands are, and entrywise where that is possible."""
        name = equation.primitive.name
        in_head = [value.head for value in values if value.head is not None]
        is_known = len(in_head) == len(values)
        if name == "cond" and not is_known:
            return self.select_branch(inner_jaxprs(equation), values)
        avals = [var.aval for var in equation.outvars]
        heads = self.record_once(equation, in_head) if is_known else [None] * len(avals)
        # An operand that is not available at all is the reason for everything that depends on it.
        reason = next((value.reason for value in values if value.head is None and value.entry is None), name)
        found = [_Value(aval, head, _number(aval, head), reason) for aval, head in zip(avals, heads, strict=True)]
        if name in ELEMENTWISE:
            reason = next((value.reason for value in values if value.entry is None), name)
            return [found[0]._replace(entry=self.apply_to_entries(equation, values, heads[0]), reason=reason)]
        if name in RESHAPES and len(values) == 1:
            entry = values[0].entry
            same_size = bool(avals) and math.prod(avals[0].shape) == math.prod(values[0].aval.shape)
            # A number may be broadcast to any shape; vectors only keep the order of their entries.
            if entry is not None and (same_size or entry not in self.vectors):
                return [found[0]._replace(entry=entry)]
        return found

    def record_once(self, equation: Any, inputs: Sequence[int], *, scalars: bool = False) -> tuple[int, ...]:
        """Records an operation of the head; once for the same operands, so that leaves share their numbers."""
        is_pure = not inner_jaxprs(equation)
        params = str(equation.params) if is_pure else id(equation)
        key = (equation.primitive.name, params, tuple(inputs), scalars)
        if key not in self.recorded:
            self.recorded[key] = self.record(equation, inputs)
        return self.recorded[key]

    def apply_to_entries(self, equation: Any, values: Sequence[_Value], head: int | None) -> int | None:
        """The entries of the result of an elementwise equation, or `None` if an operand is not entrywise."""
        entries = [value.entry for value in values if value.entry is not None]
        if len(entries) < len(values):
            return None
        if not self.vectors.isdisjoint(entries):
            (number,) = self.record(equation, entries)
            self.vectors.add(number)
        elif head is not None and math.prod(equation.outvars[0].aval.shape) == 1:
            number = head
        else:
            # Arrays of equal numbers are computed as a single number.
            (number,) = self.record_once(equation, entries, scalars=True)
            self.scalars.add(number)
        return number

    def select_branch(self, branches: Sequence[Any], values: Sequence[_Value]) -> list[_Value]:
        """Computes all branches entry by entry, and selects one of them."""
        outputs = []
        for cases in zip(*[self.evaluate(branch, values[1:]) for branch in branches], strict=True):
            like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (values[0], *cases)]
            # The equation of a `select_n` of these shapes, applied like any other elementwise one.
            select = jax.make_jaxpr(lambda which, *cases: lax.select_n(which, *cases))(*like).jaxpr.eqns[0]
            outputs += self.apply(select, [values[0], *cases])
        return outputs


def _run_head(
    operations: Sequence[Operation],
    scalars: set[int],
    constants: dict[int, Any],
    wanted: Sequence[int],
    arguments: Sequence[Any],
) -> list[Array]:
    """The wanted values of the head, for flat arguments."""

    def run(operation: Operation, operands: Sequence[Any]) -> list[Any]:
        is_scalar = operation.outputs[0] in scalars
        return operation.run([jnp.reshape(x, ()) for x in operands] if is_scalar else operands)

    known = dict(enumerate(arguments)) | {x: jnp.asarray(value) for x, value in constants.items()}
    known = run_operations(operations, known, run)
    return [known[x] for x in wanted]


def _program(trace: _Trace, inputs: Sequence[int], outputs: Sequence[_Value]) -> EntryProgram:
    """The program of one leaf, whose `numbers` are still those of values."""
    results: list[int] = []
    for value in outputs:
        if value.entry is None:
            raise ValueError(_refusal(value.reason))
        results.append(value.entry)
    operations = find_live([x for x in trace.operations if x.outputs[0] in trace.vectors], results)
    made = [operation.outputs[0] for operation in operations]
    outside = [*dict.fromkeys([*(x for operation in operations for x in operation.inputs), *results])]
    outside = [x for x in outside if x not in made and x not in inputs]
    if not trace.vectors.isdisjoint(outside):
        raise ValueError(_refusal("entries of another leaf"))
    literals = {x: trace.constants[x] for x in outside if x in trace.literals}
    numbers = [x for x in outside if x not in literals]
    dtypes = [value.aval.dtype for value in outputs]
    # Positions within the leaf, and the bits of literals: leaves that are treated alike get the same key. NumPy prints
    # as many digits as it is set to, in which two learning rates may be equal.
    spelling = {x: str(i) for i, x in enumerate([*inputs, *numbers, *made])}
    spelling |= {x: f"{v.dtype} {v.tobytes().hex()}" for x, v in literals.items()}
    steps = [(x.name, str(x.equation.params), [spelling[value] for value in x.inputs]) for x in operations]
    # The dtypes of operands, too: spans of leaves with one key share a buffer.
    key = str(([trace.types[x].dtype for x in inputs], len(numbers), steps, [spelling[x] for x in results], dtypes))

    def run(arrays: Sequence[Any], given: Sequence[Any]) -> list[Array]:
        known = dict(zip(inputs, arrays, strict=True)) | {x: jnp.asarray(value) for x, value in literals.items()}
        known |= {x: jnp.reshape(value, ()) for x, value in zip(numbers, given, strict=True)}
        shape = arrays[0].shape
        known = run_operations(operations, known, partial(_run_on_vectors, shape))
        return [jnp.broadcast_to(known[x], shape).astype(dtype) for x, dtype in zip(results, dtypes, strict=True)]

    return EntryProgram(key, run, tuple(numbers))


def _run_on_vectors(shape: tuple[int, ...], operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """Runs one operation on vectors of this shape and on numbers."""

    def must_be_vector(i: int) -> bool:
        # Numbers are broadcast, except where the primitive takes them: the condition of `select_n`, the bounds of
        # `clamp`.
        return operation.name not in TAKES_NUMBERS or (i > 0 if operation.name == "select_n" else i == 1)

    return operation.run([jnp.broadcast_to(x, shape) if must_be_vector(i) else x for i, x in enumerate(operands)])
