"""Which arguments of a function each of its results depends on, read from its trace."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._compat import Literal
from ._primitives import inner_jaxprs

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
