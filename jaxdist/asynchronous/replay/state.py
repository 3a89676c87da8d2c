"""All that a replay knows between two events: plain numbers, tuples and values."""

import copy
from array import array
from dataclasses import dataclass, field, fields
from typing import Any

FAULT, MESSAGE, DONE, COLLECTIVE, TIMER, EVALUATION = range(6)


def _integers() -> array:
    return array("q")


@dataclass
class ReplayState:
    """The state of the virtual clock, which `save` writes to a file.

    Attributes:
      tick, sequence, live: the time, how many events were ever made, and how many that matter are in the heap.
      heap: `(tick, class, place, sequence, data)`; the next event is the least.
      roles: the state of each worker's role and, last, the server's.
      running: for each worker `(job, start, end, version, params)` of what it computes, or None.
      jobs: how many gradients each worker has begun.
      gone: since when each worker is gone, or -1; `faults` how often it failed or came back.
      link_free, out_free, in_free: when links and places are free again.
      collectives: the parts given so far, by `(group, tag)`.
      late: collectives that are done but for members that are gone.
      computed, down: ticks that each worker computed and was gone.
      sent, received, links: bytes.
      words: the numbers of the kinds of messages.
      events, gradients, steps, times, losses: the columns of the trace.
    """

    roles: list[Any]
    running: list[tuple | None]
    jobs: list[int]
    gone: list[int]
    faults: list[int]
    out_free: list[int]
    in_free: list[int]
    computed: list[int]
    down: list[int]
    sent: list[int]
    received: list[int]
    tick: int = 0
    sequence: int = 0
    live: int = 0
    heap: list[tuple] = field(default_factory=list)
    link_free: dict[tuple[int, int], int] = field(default_factory=dict)
    collectives: dict[tuple[tuple[int, ...], int], dict[int, tuple]] = field(default_factory=dict)
    late: list[tuple] = field(default_factory=list)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    events: array = field(default_factory=_integers)
    gradients: array = field(default_factory=_integers)
    steps: array = field(default_factory=_integers)
    times: array = field(default_factory=_integers)
    losses: array = field(default_factory=lambda: array("d"))


def empty(workers: int) -> ReplayState:
    """Before anything began."""
    places = workers + 1
    return ReplayState(
        roles=[None] * places,
        running=[None] * workers,
        jobs=[0] * workers,
        gone=[-1] * workers,
        faults=[0] * workers,
        out_free=[0] * places,
        in_free=[0] * places,
        computed=[0] * workers,
        down=[0] * workers,
        sent=[0] * places,
        received=[0] * places,
    )


def copied(state: ReplayState) -> ReplayState:
    """A state to go on from while the old one stays: containers are new, values are shared."""
    out = ReplayState(**{one.name: copy.copy(getattr(state, one.name)) for one in fields(state)})
    out.collectives = {key: dict(parts) for key, parts in state.collectives.items()}
    return out
