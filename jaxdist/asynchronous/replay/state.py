"""The state of a replay between two events: plain numbers, tuples and values."""

import copy
from array import array
from dataclasses import dataclass, field, fields
from typing import Any

# The classes of events, in the order in which events of the same tick happen; see `trace.CLASSES`.
FAULT, MESSAGE, DONE, COLLECTIVE, TIMER, EVALUATION = range(6)


def _integers() -> array:
    return array("q")


@dataclass
class ReplayState:
    """The state of the virtual clock, which `save` writes to a file.

    A place is a worker, or the server (index -1).

    Attributes:
      roles: the state of each worker's role and, last, the server's.
      running: for each worker `(job, start, end, version, params)` of its running gradient, or None.
      jobs: the number of gradients that each worker has begun.
      gone: the tick at which each worker failed, or -1 if it is up.
      faults: the number of failures and recoveries of each worker.
      out_free, in_free: the ticks at which each place can send and receive again, with one network card each.
      computed, down: ticks that each worker computed and was down.
      sent, received: bytes of each place.
      tick: the time.
      sequence: the number of events created so far.
      live: the number of events in the heap other than evaluations.
      heap: `(tick, class, place, sequence, data)`; the smallest is the next event.
      link_free: the tick at which each link `(source, destination)` is free again.
      collectives: the contributions so far, by `(group, tag)`.
      late: collectives that wait only for failed members to recover.
      links: bytes of each link.
      words: the numbers of the message kinds.
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


def empty_state(workers: int) -> ReplayState:
    """Returns the state before any role has begun."""
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


def copy_state(state: ReplayState) -> ReplayState:
    """Copies a state so that the original stays valid: containers are copied, values are shared."""
    new = ReplayState(**{entry.name: copy.copy(getattr(state, entry.name)) for entry in fields(state)})
    new.collectives = {key: dict(parts) for key, parts in state.collectives.items()}
    return new
