"""Interpreters of jaxprs: their equations, evaluation by a rule for each equation, and dependence on inputs."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from .compat import ClosedJaxpr, Jaxpr, Literal, scan_sizes

# Entry `i` of the result depends on entry `i` of the operands.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max
    min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
# These keep the order of entries.
RESHAPES = frozenset(("reshape", "squeeze", "expand_dims", "broadcast_in_dim"))
# These change the type of an array and none of its entries.
CASTS = frozenset(("pvary", "pcast"))
# No entry of a result depends on two of an operand.
ENTRYWISE = ELEMENTWISE | RESHAPES | CASTS
# Their condition or bounds may be scalars while the other operands are arrays.
TAKES_NUMBERS = frozenset(("select_n", "clamp"))

# The name of calls that are evaluated on whole arrays only, and so are their derivatives, which keep it.
WHOLE = "jaxdist_whole"

LOOPS = ("scan", "while")
# These run as a whole: none of their results is available before all operands are.
INDIVISIBLE = (*LOOPS, "cond")

# What each primitive that communicates becomes, under its names in JAX 0.10 to 0.12 without a suffix `_start`.
COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "unreduced_psum": "all-reduce",
    "unreduced_pmax": "all-reduce",
    "unreduced_pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "psend": "collective-permute",
    "pbroadcast": "collective-broadcast",
    "pbroadcast_dynamic": "collective-broadcast",
}


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation (branches, bodies), closed."""
    return list(_jaxprs_among(equation.params.values()))


def _jaxprs_among(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value
        elif isinstance(value, Jaxpr):
            yield ClosedJaxpr(value, ())
        elif isinstance(value, tuple | list):
            yield from _jaxprs_among(value)


def combines_entries(closed: Any) -> bool:
    """Whether some result depends on several entries of an array, as a norm does."""
    for equation in closed.jaxpr.eqns:
        inside = inner_jaxprs(equation)
        if any(map(combines_entries, inside)):
            return True
        if not inside and equation.primitive.name not in ENTRYWISE and any(atom.aval.ndim for atom in equation.invars):
            return True
    return False


def find_called_jaxpr(equation: Any, *, opaque: Collection[str] = INDIVISIBLE) -> Any | None:
    """The closed jaxpr that a call (`jit`, `checkpoint`, a custom derivative) runs once on its operands, or `None`."""
    inside = inner_jaxprs(equation)
    whole = WHOLE in opaque and equation.params.get("name") == WHOLE
    if len(inside) != 1 or equation.primitive.name in opaque or whole:
        return None
    # Others combine single entries, as in a scatter-add, or write into references.
    body = inside[0].jaxpr
    fits = len(body.invars) == len(equation.invars) and len(body.outvars) == len(equation.outvars)
    return inside[0] if fits else None


def describe_equation(equation: Any) -> Hashable:
    """A description that is equal for equations that compute the same function of their operands.

    Two traces of one function have different variables, and derivative rules that are different objects.
    """
    has_rules = equation.primitive.name.startswith(("custom_jvp", "custom_vjp"))
    params = inner_jaxprs(equation) if has_rules else equation.params
    return equation.primitive.name, _describe(params), tuple(str(atom.aval) for atom in equation.outvars)


def _describe(value: Any) -> Hashable:
    # Newer versions of JAX have one class for both.
    if isinstance(value, ClosedJaxpr):
        return _describe_body(value.jaxpr), tuple(map(_describe, value.consts))
    if isinstance(value, Jaxpr):
        return _describe_body(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_describe, value))
    if isinstance(value, dict):
        return tuple((name, _describe(x)) for name, x in value.items())
    if isinstance(value, np.ndarray | np.generic | float):
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()
    return value if isinstance(value, Hashable) else ("the object", id(value))


def _describe_body(jaxpr: Any) -> Hashable:
    numbers: dict[Any, int] = {}

    def describe_atom(atom: Any) -> Hashable:
        if isinstance(atom, Literal):
            return "literal", str(atom.aval), _describe(atom.val)
        return numbers.setdefault(atom, len(numbers)), str(atom.aval)

    inputs = tuple(map(describe_atom, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (tuple(map(describe_atom, x.invars)), describe_equation(x), tuple(map(describe_atom, x.outvars)))
        for x in jaxpr.eqns
    )
    return inputs, equations, tuple(map(describe_atom, jaxpr.outvars))


def apply_primitive(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation of a jaxpr, on these operands."""
    out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(out) if equation.primitive.multiple_results else [out]


def evaluate(
    closed: Any,
    rule: Callable[[Any, list[Any]], Sequence[Any]],
    operands: Sequence[Any],
    *,
    opaque: Collection[str] = INDIVISIBLE,
    kinds: tuple[type, ...] | None = None,
    primitives: Collection[str] = (),
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Evaluates a jaxpr over values of any kind; the calls in it are followed.

    Args:
      closed: a closed jaxpr.
      rule: `rule(equation, operands) -> results`.
      operands: the values of the arguments.
      opaque: primitives that are given to `rule` although they call one jaxpr; `WHOLE` for the calls of that name.
      kinds: an equation without an operand of these kinds is bound as it was traced, `rule` is not asked; ...
      primitives: ... unless it is of one of these primitives. `None` asks for every equation.
      literal: the value of a literal.
      constant: the value of a constant that the jaxpr closes over.

    Returns:
      The values of the results.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, map(constant, closed.consts), strict=True))
    known |= zip(jaxpr.invars, operands, strict=True)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(atom) if isinstance(atom, Literal) else known[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        values = read(equation.invars)
        is_special = kinds is None or any(isinstance(value, kinds) for value in values)
        if not is_special and equation.primitive.name not in primitives:
            results = apply_primitive(equation, values)
        elif body := find_called_jaxpr(equation, opaque=opaque):
            options = {"opaque": opaque, "kinds": kinds, "primitives": primitives}
            results = evaluate(body, rule, values, **options, literal=literal, constant=constant)
        else:
            results = rule(equation, values)
        known.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def find_forwarded(closed: Any) -> list[int | None]:
    """Returns for each result of a trace the argument that it is, unchanged and through any calls, or `None`."""

    def rule(equation: Any, operands: list[int | None]) -> list[int | None]:
        return operands if equation.primitive.name in CASTS else [None] * len(equation.outvars)

    arguments = range(len(closed.jaxpr.invars))
    return evaluate(closed, rule, arguments, literal=lambda _: None, constant=lambda _: None)


class LabelSets(NamedTuple):
    """`masks`: the labels that each result depends on; `merges`: equations whose operands had different labels."""

    masks: list[int]
    merges: list[Any]


def propagate(closed: Any, masks: Sequence[int], *, loops: bool = False) -> LabelSets:
    """Propagates sets of labels (bits of integers) through a trace, from arguments to results.

    Args:
      closed: a closed jaxpr.
      masks: the labels of each argument.
      loops: follow each value through loops, branches and effects. Otherwise these are indivisible: each of their
        results depends on all operands, since none is available earlier.

    Returns:
      For each result the union over the arguments that it depends on.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, int] = dict(zip(jaxpr.invars, masks, strict=True))
    merges: list[Any] = []

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        union = reduce(or_, operands, 0)
        # A call is as precise as its body, unless it has effects that its results do not show.
        body = None if loops and equation.effects else find_called_jaxpr(equation)
        if loops and union and equation.primitive.name in LOOP_RULES:
            results = LOOP_RULES[equation.primitive.name](equation, operands)
        elif body is not None:
            results, inner = propagate(body, operands, loops=loops)
            merges += inner
        else:
            if any(mask not in (0, union) for mask in operands):
                merges.append(equation)
            results = [union] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
        # It may have written into a reference.
        if loops and equation.effects and union:
            known |= {atom: read(atom) | union for atom in equation.invars if not isinstance(atom, Literal)}
    return LabelSets([read(atom) for atom in jaxpr.outvars], merges)


def _through_scan(equation: Any, operands: list[int]) -> list[int]:
    # The operands of a body: constants, carry, and one entry of each scanned array.
    consts, carried = scan_sizes(equation.params)
    body = equation.params["jaxpr"]

    def run_body(carry: list[int]) -> list[int]:
        return propagate(body, [*operands[:consts], *carry, *operands[consts + carried :]], loops=True).masks

    carry = _find_fixed_point(lambda carry: run_body(carry)[:carried], operands[consts : consts + carried])
    return [*carry, *run_body(carry)[carried:]]


def _through_while(equation: Any, operands: list[int]) -> list[int]:
    first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    consts, carry = operands[first : first + second], operands[first + second :]
    carry = _find_fixed_point(
        lambda carry: propagate(equation.params["body_jaxpr"], [*consts, *carry], loops=True).masks, carry
    )
    # The number of rounds affects everything that the loop carries.
    rounds = propagate(equation.params["cond_jaxpr"], [*operands[:first], *carry], loops=True).masks
    return [mask | reduce(or_, rounds, 0) for mask in carry]


def _through_cond(equation: Any, operands: list[int]) -> list[int]:
    # The first operand is the index of the branch, on which every result depends.
    branches = [propagate(branch, operands[1:], loops=True).masks for branch in equation.params["branches"]]
    return [reduce(or_, masks, operands[0]) for masks in zip(*branches, strict=True)]


# `rule(equation, masks) -> masks`, of equations whose results depend on some of their operands only.
LOOP_RULES = {"scan": _through_scan, "while": _through_while, "cond": _through_cond}


def _find_fixed_point(body: Callable[[list[int]], list[int]], carry: list[int]) -> list[int]:
    """The labels of a loop's carry once any number of rounds has been run."""
    while True:
        after = [before | now for before, now in zip(carry, body(carry), strict=True)]
        if after == carry:
            return carry
        carry = after
