"""What is known of the primitives in a trace: which of them work entry by entry, and what they call."""

from collections.abc import Iterable, Sequence
from typing import Any

from ._compat import ClosedJaxpr, Jaxpr

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
