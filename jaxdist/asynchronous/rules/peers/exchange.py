"""The `Exchange`: what two workers send each other to average, and how each updates its model."""

from collections.abc import Callable
from typing import Any, NamedTuple

ACTIVE, PASSIVE = 1, -1


class Exchange(NamedTuple):
    """A method of averaging a pair of models. However lossy, it keeps the sum of the two models.

    The active end initiates an exchange, and the passive end replies; both end with the same memory.

    Attributes:
      name: for messages.
      start: `start(params, words) -> memory`, from the initial model of all workers and three numbers that identify the
        pair.
      encode: `encode(params, memory, end, turn, words) -> payload`; `end` is 1 for the active end and -1 for the
        passive one, and `turn` counts the exchanges of the pair.
      settle: `settle(params, memory, request, reply, end, turn) -> (params, memory)`, with the payloads of both ends.
        The model may have changed since it was sent.
    """

    name: str
    start: Callable[[Any, Any], Any]
    encode: Callable[[Any, Any, int, int, Any], Any]
    settle: Callable[[Any, Any, Any, Any, int, int], tuple[Any, Any]]
