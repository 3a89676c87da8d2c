"""Reading a jaxpr: which primitives work elementwise, and which inputs each output depends on."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .compat import ClosedJaxpr, Jaxpr, Literal

# Entry `i` of the result depends on entry `i` of the operands.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max
    min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
# They keep the order of entries.
RESHAPES = frozenset(("reshape", "squeeze", "expand_dims", "broadcast_in_dim"))
# They change the type of an array, and nothing in it.
CASTS = frozenset(("pvary", "pcast"))
# Their condition and their bounds may be numbers beside arrays.
TAKES_NUMBERS = frozenset(("select_n", "clamp"))


def inner_jaxprs(values: Iterable[Any]) -> Iterable[Any]:
    """The jaxprs among the parameters of an equation, closed."""
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value
        elif isinstance(value, Jaxpr):
            yield ClosedJaxpr(value, ())
        elif isinstance(value, tuple | list):
            yield from inner_jaxprs(value)


def apply_primitive(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation of a jaxpr, on these operands."""
    out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(out) if equation.primitive.multiple_results else [out]


# They run as a whole: no result of theirs is there before all operands are.
INDIVISIBLE = ("scan", "while", "cond")


class Spread(NamedTuple):
    """`masks`: what each result depends on, as bits; `merges`: the equations whose operands carried different bits."""

    masks: list[int]
    merges: list[Any]


def spread(closed: Any, masks: Sequence[int]) -> Spread:
    """Carries sets of labels through a trace, from arguments to results.

    Args:
      closed: a closed jaxpr.
      masks: a set of bits for each argument.

    Returns:
      For each result the union over the arguments that it depends on.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, int] = dict(zip(jaxpr.invars, masks, strict=True))
    merges: list[Any] = []

    def of(atom):
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for equation in jaxpr.eqns:
        found = [of(atom) for atom in equation.invars]
        inside = list(inner_jaxprs(equation.params.values()))
        divisible = len(inside) == 1 and equation.primitive.name not in INDIVISIBLE
        if divisible and len(inside[0].jaxpr.invars) == len(found):
            results, inner = spread(inside[0], found)
            merges += inner
        else:
            union = 0
            for mask in found:
                union |= mask
            if any(mask not in (0, union) for mask in found):
                merges.append(equation)
            results = [union] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return Spread([of(atom) for atom in jaxpr.outvars], merges)
