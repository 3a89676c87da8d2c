"""The base of the library's exceptions: they pass between processes, and can be copied, with all that they say."""

from collections.abc import Callable
from typing import Any


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
    plain.__init__(error, *arguments)  # OSError keeps its number there, not in `__dict__`
    return error
