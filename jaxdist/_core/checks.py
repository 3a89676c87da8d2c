"""Range checks on arguments, with one wording each, and the base of the library's exceptions."""

import math
import operator
from collections.abc import Callable
from typing import Any, Literal

NO_PARAMS = "this optimizer needs the parameters: tx.update(gradients, state, params)"


def check_range(
    name: str,
    value: float | int,
    low: float | int,
    high: float | int = math.inf,
    *,
    ends: Literal["[)", "[]", "()", "(]"] = "[)",
    hint: str = "",
) -> None:
    """Raises unless the value is in the interval from `low` to `high`, whose `ends` are closed or open.

    Without a `high` a closed end admits infinity. `hint` is what to do instead.

    Examples:
      >>> check_range("density", 0, 0, 1, ends="(]")
      Traceback (most recent call last):
      ValueError: density must be in (0, 1], got 0
      >>> check_range("radius", -1.0, 0, ends="(]", hint="None has no radius")
      Traceback (most recent call last):
      ValueError: radius must be positive, got -1.0; None has no radius
    """
    above = low <= value if ends[0] == "[" else low < value
    below = value <= high if ends[1] == "]" else value < high
    # NaN is neither.
    if not (above and below):
        wanted = f"in {ends[0]}{low}, {high}{ends[1]}"
        if high == math.inf:
            wanted = f"at least {low}" if ends[0] == "[" else "positive" if low == 0 else f"above {low}"
            wanted += " and finite" * (ends[1] == ")")
        if low == -math.inf:
            wanted = "finite"
        raise ValueError(f"{name} must be {wanted}, got {value}{'; ' * bool(hint)}{hint}")


def check_count(name: str, value: float | int, least: int) -> None:
    """Raises unless the value is a whole number, `least` or more, and no more than the 32 bits of a count hold."""
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if number >= 2**31:
        raise ValueError(f"{name} must be less than 2**31, got {value}")


class Portable:
    """A base of exceptions, beside one of Python's: `pickle` and `copy` make them anew from message and attributes.

    Python would call the constructor with the message alone, which fails where it takes something else: one raised in a
    `ProcessPoolExecutor` would break the pool.
    """

    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[Any], arguments: tuple[Any, ...]) -> Any:
    error = kind.__new__(kind, *arguments)
    plain = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    # OSError keeps its number there, not in `__dict__`.
    plain.__init__(error, *arguments)
    return error
