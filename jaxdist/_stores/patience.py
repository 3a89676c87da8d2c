"""Requests that are made again while they fail."""

import time
from collections.abc import Callable
from typing import Any


def repeat(
    request: Callable[[], Any],
    *,
    seconds: float,
    pauses: tuple[float, float],
    is_final: Callable[[Exception], bool],
    tell: Callable[[Exception], None] = lambda error: None,
) -> Any:
    """What a request returns in the end.

    Args:
      request: is called again when it raises.
      seconds: after which the last error is raised.
      pauses: the first one between two calls, and the longest: each is twice the one before.
      is_final: whether no second call mends an error, which is raised at once.
      tell: is given every error that is not raised.
    """
    until, (pause, longest) = time.monotonic() + seconds, pauses
    while True:
        try:
            return request()
        # Each library for stores has its own exceptions.
        except Exception as error:
            if is_final(error) or time.monotonic() + pause > until:
                raise
            tell(error)
        time.sleep(pause)
        pause = min(2 * pause, longest)
