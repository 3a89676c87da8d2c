"""Which branches of several conditionals can run in one step, as far as the program shows their conditions."""

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._core.compat import ClosedJaxpr
from .._core.jaxprs import CASTS, evaluate, inner_jaxprs
from .hlo_reader import Instruction, Module, callees_of

# Of the values of independent comparisons; beyond, each conditional is chosen by itself.
MOST_COMBINATIONS = 2**12
_DIRECTIONS = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_OPPOSITE = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
_NEGATED = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}
# Operations in whose results more than their operands and attributes may matter.
_OTHERS = re.compile(r"rng|custom-call|infeed|recv|send|async|while|conditional|partition-id|all-|reduce|collective")
# Of a scalar they give the same scalar, in HLO or in a jaxpr.
_SAME = {*CASTS, "squeeze", "reshape", "broadcast_in_dim", "expand_dims", "copy", "stop_gradient"}
_SAME |= {"bitcast", "optimization-barrier"}
# These are named alike in both, and need nothing but their operands.
_TERMS = ("and", "or", "xor", "not", "clamp", "add", "select")
# The attributes that name the computations of a conditional.
BRANCHES_OF = ("branch_computations", "true_computation", "false_computation")
_CONNECTIVES = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


class _Term(NamedTuple):
    """An operation on terms, which are numbers; equal operations on equal terms are one term."""

    op: str
    operands: tuple[int, ...]
    detail: Any
    # Whether it is a boolean, or one that was converted.
    boolean: bool


class Terms:
    """The values of a program as terms, of which those that conditions are made of can be evaluated.

    Operations are named as in HLO: `and`, `or`, `xor`, `not`, `select`, `clamp`, `compare` with its direction as the
    detail, `constant` with its value, `add`. All others are equal if their details and operands are.
    """

    def __init__(self) -> None:
        self._terms: list[_Term] = []
        self._numbers: dict[tuple[str, tuple[int, ...], Any], int] = {}

    def add(self, op: str, operands: Iterable[int] = (), detail: Any = None, *, boolean: bool = False) -> int:
        """Returns the number of a term."""
        key = op, tuple(operands), detail
        if key not in self._numbers:
            self._numbers[key] = len(self._terms)
            self._terms.append(_Term(*key, boolean))
        return self._numbers[key]

    def unknown(self) -> int:
        """Returns a term that no other equals."""
        return self.add("unknown", (), len(self._terms))

    def is_boolean(self, term: int) -> bool:
        """Whether a term is 0 or 1."""
        return self._terms[term].boolean

    def choose(self, conditions: Sequence[int], costs: Sequence[Sequence[tuple[float, ...]]], branch: str) -> list[int]:
        """Returns the branch of each conditional, so that the sum of their costs is the largest or the least possible.

        A branch runs where its condition is its number, the last one for numbers that are too large. What the program
        does not show to depend on each other is taken to be independent: the largest cost is then an upper bound.

        Args:
          conditions: the terms that choose the branches.
          costs: of each branch of each conditional.
          branch: `"max"` or `"min"`.
        """
        pick = min if branch == "min" else max
        # Those whose branches cost the same need no choice.
        unequal = [i for i, cost in enumerate(costs) if len(set(cost)) > 1]
        chosen = [pick(range(len(cost)), key=cost.__getitem__) for cost in costs]
        inner, atoms = self._take_apart([(conditions[i], len(costs[i])) for i in unequal])
        if len(unequal) < 2 or math.prod(map(len, atoms.values())) > MOST_COMBINATIONS:
            return chosen
        best: tuple[Any, list[int]] | None = None
        for values in itertools.product(*atoms.values()):
            known = dict(zip(atoms, values))
            if not self._is_possible(known):
                continue
            for term in inner:
                known[term] = self._evaluate(term, known)
            taken = [min(max(known[conditions[i]], 0), len(costs[i]) - 1) for i in unequal]
            total = tuple(map(sum, zip(*(costs[i][k] for i, k in zip(unequal, taken)))))
            if best is None or pick(best[0], total) != best[0]:
                best = total, taken
        for i, k in zip(unequal, best[1] if best else ()):
            chosen[i] = k
        return chosen

    def _take_apart(self, conditions: Sequence[tuple[int, int]]) -> tuple[list[int], dict[int, range]]:
        """The terms that can be evaluated, operands first, and what they all follow from with its possible values."""
        inner: set[int] = set()
        atoms: dict[int, range] = {}
        for condition, branches in conditions:
            left = [condition]
            while left:
                term = left.pop()
                parts = self._parts(term)
                if parts or self._terms[term].op == "constant":
                    left += [part for part in parts if part not in inner]
                    inner.add(term)
                else:
                    domain = range(2 if self._terms[term].boolean else branches)
                    atoms[term] = max(domain, atoms.get(term, domain), key=len)
        return sorted(inner), atoms

    def _parts(self, term: int) -> tuple[int, ...]:
        """The terms from which the value of this one follows; none if it is an atom."""
        op, operands, _, boolean = self._terms[term]
        if op == "constant":
            return ()
        if op in (*_CONNECTIVES, "not") and boolean:
            return operands
        if op in ("select", "clamp") or (op == "compare" and all(map(self._is_small, operands))):
            return operands
        return ()

    def _is_small(self, term: int) -> bool:
        return self._terms[term].boolean or isinstance(self._value(term), int)

    def _value(self, term: int) -> Any:
        return self._terms[term].detail if self._terms[term].op == "constant" else None

    def _evaluate(self, term: int, known: dict[int, int]) -> int:
        op, operands, detail, _ = self._terms[term]
        values = [known[operand] for operand in operands]
        if op == "constant":
            return detail if isinstance(detail, int) else 0
        if op == "not":
            return 1 - values[0]
        if op == "select":
            return values[1] if values[0] else values[2]
        if op == "clamp":
            return min(max(values[0], values[1]), values[2])
        return int((_DIRECTIONS[detail] if op == "compare" else _CONNECTIVES[op])(*values))

    def _linear(self, term: int) -> tuple[int, int]:
        """A term as another one plus an integer."""
        offset = 0
        while self._terms[term].op == "add":
            values = [self._value(operand) for operand in self._terms[term].operands]
            shifts = [i for i, value in enumerate(values) if isinstance(value, int)]
            if not shifts:
                break
            offset += values[shifts[0]]
            term = self._terms[term].operands[1 - shifts[0]]
        return term, offset

    def _is_possible(self, known: dict[int, int]) -> bool:
        """Whether comparisons of the same integers with constants can have these results."""
        limits: dict[int, list[tuple[str, int]]] = {}
        for term, value in known.items():
            op, operands, direction, boolean = self._terms[term]
            if op == "compare":
                left, right = operands
                said = direction if value else _NEGATED[direction]
                if isinstance(self._value(left), int):
                    left, right, said = right, left, _OPPOSITE.get(said, said)
                if isinstance(constant := self._value(right), int):
                    base, offset = self._linear(left)
                    limits.setdefault(base, []).append((said, constant - offset))
            elif not boolean:
                base, offset = self._linear(term)
                limits.setdefault(base, []).append(("EQ", value - offset))
        return all(map(_has_integer, limits.values()))


def _has_integer(limits: list[tuple[str, int]]) -> bool:
    """Whether an integer fulfills all comparisons with constants: one next to a constant does, if any does."""
    tried = {value + step for _, value in limits for step in (-1, 0, 1)}
    return any(all(_DIRECTIONS[said](x, value) for said, value in limits) for x in tried)


def choose_in_computation(
    module: Module, name: str, costs: Mapping[str, Sequence[tuple[float, ...]]], branch: str
) -> dict[str, int]:
    """Returns the branch of each conditional of a computation, by their names, as `Terms.choose`."""
    terms, conditions = Terms(), {}
    if sum(len(set(cost)) > 1 for cost in costs.values()) > 1:
        _add_computation(terms, module, name, None, conditions)
    chosen = terms.choose([conditions.get(key, terms.unknown()) for key in costs], list(costs.values()), branch)
    return dict(zip(costs, chosen, strict=True))


def choose_in_jaxpr(
    closed: ClosedJaxpr, costs: Mapping[int, Sequence[tuple[float, ...]]], branch: str
) -> dict[int, int]:
    """Returns the branch of each `cond` of a jaxpr, by the places of their equations, as `Terms.choose`."""
    terms = Terms()
    conditions: dict[int, int] = {}
    if sum(len(set(cost)) > 1 for cost in costs.values()) > 1:
        places = {id(equation): i for i, equation in enumerate(closed.jaxpr.eqns)}

        def rule(equation: Any, operands: list[int]) -> list[int]:
            if id(equation) in places and equation.primitive.name == "cond":
                conditions[places[id(equation)]] = operands[0]
            return _terms_of_equation(terms, equation, operands)

        evaluate(
            closed,
            rule,
            [terms.add("parameter", (), i, boolean=_is_flag(x.aval)) for i, x in enumerate(closed.jaxpr.invars)],
            literal=lambda atom: _add_constant(terms, atom.val),
            constant=lambda value: _add_constant(terms, value),
        )
    chosen = terms.choose([conditions.get(key, terms.unknown()) for key in costs], list(costs.values()), branch)
    return dict(zip(costs, chosen, strict=True))


def _terms_of_equation(terms: Terms, equation: Any, operands: list[int]) -> list[int]:
    name, out = equation.primitive.name, equation.outvars
    boolean = _is_flag(out[0].aval) if out else False
    if inner_jaxprs(equation) or len(out) != 1 or getattr(equation, "effects", None):
        return [terms.add("unknown", (), (id(equation), i)) for i in range(len(out))]
    if name in _SAME or (name == "convert_element_type" and terms.is_boolean(operands[0])):
        return operands[:1]
    if name == "select_n" and len(operands) == 3 and _is_flag(equation.invars[0].aval):
        return [terms.add("select", (operands[0], operands[2], operands[1]), None, boolean=boolean)]
    if name.upper() in _DIRECTIONS:
        return [terms.add("compare", operands, name.upper(), boolean=boolean)]
    detail = None if name in _TERMS else str(sorted(equation.params.items()))
    return [terms.add(name, operands, detail, boolean=boolean)]


def _is_flag(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == np.bool_ and aval.size == 1


def _add_constant(terms: Terms, value: Any) -> int:
    # Not the values of random keys.
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    if np.ndim(value) or getattr(dtype, "kind", "") not in ("b", "i", "u"):
        return terms.unknown()
    return terms.add("constant", (), int(value), boolean=int(value) in (0, 1))


def _add_computation(
    terms: Terms, module: Module, name: str, operands: Sequence[Any] | None, conditions: dict[str, int]
) -> Any:
    """Adds the terms of a computation, called with `operands`, and returns that of its root, a list of a tuple's."""
    found: dict[str, Any] = {}
    instructions = module.computations[name].instructions
    for instruction in instructions.values():
        op, given = instruction.opcode, [found.get(operand) for operand in instruction.operands]
        if op == "parameter" and operands is not None:
            term = operands[int(instruction.operands[0])]
        elif op == "tuple":
            term = [terms.unknown() if x is None else x for x in given]
        elif op == "get-tuple-element" and isinstance(given[0], list):
            term = given[0][int(_attribute(instruction, "index", "0"))]
        elif op in ("fusion", "call") and (callees := callees_of(instruction, "calls", "to_apply")):
            term = _add_computation(terms, module, callees[0], given, {})
        else:
            term = _add_instruction(terms, name, instruction, given)
        found[instruction.name] = term
        if op == "conditional" and isinstance(given[0], int):
            # A boolean chooses the first branch where it is true, a number the one of that number.
            is_flag = instructions[instruction.operands[0]].result.startswith("pred")
            conditions[instruction.name] = terms.add("not", [given[0]], boolean=True) if is_flag else given[0]
    return found[module.computations[name].root]


def _add_instruction(terms: Terms, where: str, instruction: Instruction, given: Sequence[Any]) -> int:
    """Adds the term of an instruction that calls no computation, or of one that is not looked into."""
    op, boolean = instruction.opcode, instruction.result.startswith("pred[]")
    known = [x for x in given if isinstance(x, int)]
    # Operands of parameters and constants are their numbers and values.
    if op == "parameter":
        return terms.add(op, (), (where, instruction.operands), boolean=boolean)
    if op == "constant":
        value = _constant(instruction)
        return terms.add(op, (), value, boolean=value in (0, 1))
    is_opaque = _OTHERS.match(op) or re.search(r"\b(to_apply|calls)=", instruction.attributes)
    if is_opaque or len(known) < len(given):
        return terms.add(op, (), (where, instruction.name), boolean=boolean)
    if op in _SAME or (op == "convert" and terms.is_boolean(known[0])):
        return known[0]
    detail: Any = None
    if op == "compare":
        detail = _attribute(instruction, "direction", "")
    elif op not in _TERMS:
        attributes = re.split(r", (?:metadata|backend_config|sharding)=", instruction.attributes)[0]
        detail = instruction.result, attributes
    return terms.add(op, known, detail, boolean=boolean)


def _attribute(instruction: Instruction, name: str, default: str) -> str:
    found = re.search(rf"\b{name}=(\w+)", instruction.attributes)
    return found[1] if found else default


def _constant(instruction: Instruction) -> Any:
    """The value of a boolean or an integer, else its text."""
    text = instruction.operands[0] if instruction.operands else ""
    if text in ("true", "false"):
        return int(text == "true")
    if re.match(r"[su]\d+\[\]", instruction.result) and re.fullmatch(r"-?\d+", text):
        return int(text)
    return instruction.result, *instruction.operands
