"""Descriptions of compressors and reducers: the call that made them, for `repr` and error messages."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

P = ParamSpec("P")
Made = TypeVar("Made", bound=Any)


def with_description(factory: Callable[P, Made]) -> Callable[P, Made]:
    """Decorates a factory: what it returns has the call, such as `qsgd(4)`, in its field `description`."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Made:
        return factory(*args, **kwargs)._replace(description=format_call(factory.__name__, args, kwargs))

    return make


def format_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Writes a call as in a program: `error_feedback(power_sgd(rank=4))`."""
    values = [*map(_format_value, args), *(f"{key}={_format_value(value)}" for key, value in kwargs.items())]
    return f"{name}({', '.join(values)})"


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_format_value(part)}' for key, part in value.items())}}}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, functools.partial):
        return _format_value(value.func)
    # The `repr` of a function or a scalar type has an address or a path.
    return getattr(value, "__name__", None) or repr(value)
