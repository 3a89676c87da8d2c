"""The signature of a function that hands the options it does not name to another one."""

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def takes_options_of(wrapped: Callable[..., Any], *, fixed: Collection[str] = ()) -> Callable[[F], F]:
    """Decorates a function whose `**options` are keyword-only arguments of `wrapped`: its signature names them.

    `fixed` are those that the function passes itself. `help` and the command line read that signature; calls do not,
    so Python refuses a name that `wrapped` does not take.

    Examples:
      >>> import inspect
      >>> def scale(x, *, factor=2.0, offset=0.0):
      ...     return factor * x + offset
      >>> @takes_options_of(scale, fixed=["offset"])
      ... def shift(x, *, by, **options):
      ...     return scale(x, offset=by, **options)
      >>> inspect.signature(shift), shift(1.0, by=1.0, factor=3.0)
      (<Signature (x, *, by, factor=2.0)>, 4.0)
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        named = {each.name for each in own} | set(fixed)
        theirs = inspect.signature(wrapped).parameters.values()
        more = [each for each in theirs if each.kind is each.KEYWORD_ONLY and each.name not in named]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return decorate
