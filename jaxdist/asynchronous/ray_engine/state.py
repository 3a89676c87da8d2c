"""What is kept of a place, and what goes between places."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..protocol import Message


class Letter(NamedTuple):
    """A message on its way: its number on its link, from 1; a part or the result of a collective names the group."""

    number: int
    message: Message
    group: tuple[int, ...] = ()
    op: str = "mean"


class Running(NamedTuple):
    """The gradient in the making: the worker's count of jobs, since when, and at which model."""

    job: int
    start: int
    version: int
    params: Any


@dataclass
class PlaceState:
    """What has to be kept of a place, so that another process can go on with it.

    Attributes:
      role: the state of the rule's role.
      running: the gradient in the making, or None.
      jobs: how many were begun.
      numbers: the last number given to a letter, for each destination; `seen` the last one read, for each source.
      outbox: for each destination, the letters that it has not acknowledged, in order.
      parts: the parts given so far of the collectives that meet here, by `(group, tag)`.
      timers: `(tick, tag)`.
      gone: who is not waited for any more.
      sent, received, computed: bytes to each place, bytes in all, and ticks.
    """

    role: Any
    running: Running | None = None
    jobs: int = 0
    numbers: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    outbox: dict[int, tuple[Letter, ...]] = field(default_factory=dict)
    parts: dict[tuple[tuple[int, ...], int], dict[int, Any]] = field(default_factory=dict)
    timers: tuple[tuple[int, int], ...] = ()
    gone: tuple[int, ...] = ()
    sent: dict[int, int] = field(default_factory=dict)
    received: int = 0
    computed: int = 0


class Books(NamedTuple):
    """Rows for the trace, as its columns; the words of events are spelled out."""

    events: list[tuple[Any, ...]]
    gradients: list[tuple[Any, ...]]
    steps: list[tuple[Any, ...]]
