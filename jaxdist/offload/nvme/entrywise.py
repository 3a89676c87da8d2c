"""An optimizer's trace, cut in two: numbers that are computed once a step, and a program for the entries of each leaf.

What depends on state that is not in memory may only be computed entry by entry. What depends on arrays in memory alone
(norms of gradients) may be anything; as numbers it enters the programs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.compat import Literal
from ..._core.jaxprs import ELEMENTWISE, RESHAPES, TAKES_NUMBERS, apply_primitive, inner_jaxprs
from ..._core.types import Array, PyTree


class Program(NamedTuple):
    """What is done to the entries of one leaf.

    `run(arrays, numbers)` takes and returns vectors of any one length. Leaves of equal `key` have equal programs.
    """

    key: str
    run: Callable[[Sequence[Any], Sequence[Any]], list[Array]]
    numbers: tuple[int, ...]


class Split(NamedTuple):
    """A function in two parts: `head(flat arguments) -> numbers`, and `programs`, one for each leaf.

    `memory`: which of the flat arguments `head` looks at. `others`: where in the numbers each output is that stands
    beside no leaf. `Program.numbers` are places in the numbers too.
    """

    head: Callable[[Sequence[Any]], list[Array]]
    memory: tuple[int, ...]
    programs: list[Program]
    others: list[int]


class _Value(NamedTuple):
    """A value of the trace: its place in the head, its place in the programs, and, without one, what is to blame."""

    aval: Any
    head: Any
    body: Any
    why: str = ""


def split(
    f: Callable[..., PyTree],
    arguments: Sequence[PyTree],
    *,
    leaves: Sequence[Sequence[int]],
    stored: Sequence[int],
    outputs: Sequence[Sequence[int]],
) -> Split:
    """Cuts `f` in two.

    Args:
      f: a function of trees of arrays.
      arguments: their shapes and dtypes.
      leaves: for each leaf, which of the flat arguments are its vectors, in the order in which its program takes them.
      stored: which flat arguments are not in memory.
      outputs: for each leaf, which of the flat outputs its program returns.

    Raises:
      ValueError: something else than entries is needed of what is not in memory.
    """
    closed, _ = jax.make_jaxpr(f, return_shape=True)(*arguments)
    trace = _Trace()
    entries = {i for members in leaves for i in members}
    values = []
    for i, var in enumerate(closed.jaxpr.invars):
        head = None if i in stored else trace.new(("input", i))
        body = ("in", i) if i in entries else ("number", head) if math.prod(var.aval.shape) == 1 else None
        values.append(_Value(var.aval, head, body, "a whole array of the state"))
    found = trace.run(closed.jaxpr, closed.consts, values)

    programs = [trace.program(ins, [found[o] for o in outs]) for ins, outs in zip(leaves, outputs, strict=True)]
    beside = {o for outs in outputs for o in outs}
    others = [value for o, value in enumerate(found) if o not in beside]
    for value in others:
        if value.head is None:
            raise ValueError(_refusal(value.why))
    wanted = [*dict.fromkeys([*(ref for p in programs for ref in p.numbers), *(value.head for value in others)])]
    place = {ref: at for at, ref in enumerate(wanted)}
    programs = [p._replace(numbers=tuple(place[ref] for ref in p.numbers)) for p in programs]
    head, memory = trace.head(wanted)
    return Split(head, memory, programs, [place[value.head] for value in others])


def _refusal(why: str) -> str:
    return (
        f"the optimizer needs `{why}` of whole arrays that are on disk. Only what is done entry by entry can be "
        "streamed, and norms of gradients: keep this optimizer in memory, or give it a few leaves with optax.partition"
    )


class _Trace:
    """The operations met so far. `head[ref]` makes one value of the head, `ops[i]` one of the programs."""

    def __init__(self):
        self.made: list[tuple] = []
        self.known: dict[Any, int] = {}
        self.ops: list[tuple[Any, tuple]] = []

    def new(self, how: tuple) -> int:
        self.made.append(how)
        return len(self.made) - 1

    def constant(self, value: Any) -> int:
        return self.new(("constant", value))

    def in_head(self, equation: Any, refs: tuple[int, ...], numbers: bool = False) -> list[int]:
        """The same equation on the same operands is kept once, so that leaves share their numbers."""
        pure = not inner_jaxprs(equation)
        key = (equation.primitive.name, str(equation.params) if pure else id(equation), refs, numbers)
        if key not in self.known:
            at = self.new(("apply", equation, refs, numbers))
            self.known[key] = self.new(("result", at, 0))
            for number in range(1, len(equation.outvars)):
                self.new(("result", at, number))
        first = self.known[key]
        return list(range(first, first + len(equation.outvars)))

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[_Value]) -> list[_Value]:
        at: dict[Any, _Value] = dict(zip(jaxpr.invars, values, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            at[var] = value if isinstance(value, _Value) else self.whole(var.aval, self.constant(value), "a constant")

        def of(atom: Any) -> _Value:
            if not isinstance(atom, Literal):
                return at[atom]
            aval: Any = atom.aval
            value = np.asarray(atom.val, aval.dtype)
            return _Value(aval, self.constant(value), ("literal", value))

        for equation in jaxpr.eqns:
            at.update(zip(equation.outvars, self.step(equation, [of(x) for x in equation.invars]), strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def whole(self, aval: Any, head: Any, why: str) -> _Value:
        number = head is not None and math.prod(aval.shape) == 1
        return _Value(aval, head, ("number", head) if number else None, why)

    def step(self, equation: Any, values: list[_Value]) -> list[_Value]:
        name = equation.primitive.name
        inside = inner_jaxprs(equation)
        if len(inside) == 1 and name not in ("scan", "while"):  # a call
            return self.run(inside[0].jaxpr, inside[0].consts, values)
        refs = tuple(value.head for value in values if value.head is not None)
        known = len(refs) == len(values)
        if name == "cond" and not known:
            return self.chosen(inside, values)
        outs = [var.aval for var in equation.outvars]
        heads = self.in_head(equation, refs) if known else [None] * len(outs)
        why = next((value.why for value in values if value.head is None and value.body is None), name)
        found = [self.whole(aval, head, why) for aval, head in zip(outs, heads, strict=True)]
        if name in ELEMENTWISE:
            return [found[0]._replace(body=self.elementwise(equation, values, heads[0]), why=_blame(values, name))]
        size = math.prod(outs[0].shape) if outs else 0
        if name in RESHAPES and len(values) == 1 and values[0].body is not None:
            number = values[0].body[0] in ("number", "literal")
            if number or size == math.prod(values[0].aval.shape):
                return [found[0]._replace(body=values[0].body)]
        return found

    def elementwise(self, equation: Any, values: Sequence[_Value], head: int | None) -> tuple | None:
        bodies = tuple(value.body for value in values)
        if any(body is None for body in bodies):
            return None
        if all(body[0] in ("number", "literal") for body in bodies):
            if math.prod(equation.outvars[0].aval.shape) == 1 and head is not None:
                return ("number", head)
            refs = tuple(body[1] if body[0] == "number" else self.constant(body[1]) for body in bodies)
            return ("number", self.in_head(equation, refs, numbers=True)[0])
        self.ops.append((equation, bodies))
        return ("op", len(self.ops) - 1)

    def chosen(self, branches: Sequence[Any], values: Sequence[_Value]) -> list[_Value]:
        """Both branches are computed entry by entry, and one is taken."""
        ran = [self.run(branch.jaxpr, branch.consts, values[1:]) for branch in branches]
        outs = []
        for found in zip(*ran, strict=True):
            like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (values[0], *found)]
            select = jax.make_jaxpr(lambda which, *cases: lax.select_n(which, *cases))(*like).jaxpr.eqns[0]
            outs += self.step(select, [values[0], *found])
        return outs

    def head(self, wanted: Sequence[int]) -> tuple[Callable[[Sequence[Any]], list[Array]], tuple[int, ...]]:
        """A function for these values of the head, and which flat arguments it looks at."""
        needed, stack = set(), list(wanted)
        while stack:
            ref = stack.pop()
            if ref not in needed:
                needed.add(ref)
                how = self.made[ref]
                stack += how[2] if how[0] == "apply" else how[1:2] if how[0] == "result" else ()
        order = sorted(needed)  # operands are made before their results
        memory = tuple(sorted(self.made[ref][1] for ref in order if self.made[ref][0] == "input"))

        def head(arguments):
            at: dict[int, Any] = {}
            for ref in order:
                how = self.made[ref]
                if how[0] == "input":
                    at[ref] = arguments[how[1]]
                elif how[0] == "constant":
                    at[ref] = jnp.asarray(how[1])
                elif how[0] == "result":
                    at[ref] = at[how[1]][how[2]]
                else:
                    operands = [jnp.reshape(at[r], ()) if how[3] else at[r] for r in how[2]]
                    at[ref] = apply_primitive(how[1], operands)
            return [at[ref] for ref in wanted]

        return head, memory

    def program(self, inputs: Sequence[int], outputs: Sequence[_Value]) -> Program:
        """The program of one leaf; `numbers` are still places in the head."""
        for value in outputs:
            if value.body is None:
                raise ValueError(_refusal(value.why))
        needed, stack = set(), [value.body for value in outputs]
        numbers: dict[int, int] = {}
        while stack:
            kind, at = stack.pop()
            if kind == "op" and at not in needed:
                needed.add(at)
                stack += self.ops[at][1]
            elif kind == "in" and at not in inputs:
                raise ValueError(_refusal("entries of another leaf"))
        order = sorted(needed)
        place = {at: i for i, at in enumerate(order)}
        ordinal = {at: i for i, at in enumerate(inputs)}

        def local(body):
            kind, at = body
            if kind == "number":
                return kind, numbers.setdefault(at, len(numbers))
            return (kind, ordinal[at]) if kind == "in" else (kind, place[at]) if kind == "op" else body

        steps = [(self.ops[at][0], [local(body) for body in self.ops[at][1]]) for at in order]
        results = [(local(value.body), value.aval.dtype) for value in outputs]
        key = str([(e.primitive.name, str(e.params), str(operands)) for e, operands in steps]) + str(results)

        def run(arrays, given):
            length = arrays[0].shape
            made: list[Any] = []

            def of(body, wide=True):
                kind, at = body
                if kind in ("number", "literal"):
                    x = jnp.reshape(given[at] if kind == "number" else jnp.asarray(at), ())
                    return jnp.broadcast_to(x, length) if wide else x
                return arrays[at] if kind == "in" else made[at]

            for equation, operands in steps:
                wide = equation.primitive.name not in TAKES_NUMBERS
                made.append(
                    apply_primitive(
                        equation, [of(body, wide or _case(equation, i)) for i, body in enumerate(operands)]
                    )[0]
                )
            return [jnp.asarray(of(body), dtype) for body, dtype in results]

        return Program(key, run, tuple(numbers))


def _case(equation: Any, number: int) -> bool:
    """Whether this operand must have the shape of the result, in a primitive that takes numbers too."""
    return number > 0 if equation.primitive.name == "select_n" else number == 1


def _blame(values: Sequence[_Value], name: str) -> str:
    return next((value.why for value in values if value.body is None), name)
