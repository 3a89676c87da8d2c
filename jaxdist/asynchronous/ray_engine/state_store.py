"""The store of a run: the last state of every role runner, from which a new process continues."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..portable import flat, write
from .role_runner import Records

Arrays = dict[str, np.ndarray]


class Packed(NamedTuple):
    """A state and its model as text, the names of the arrays of each, and the arrays that the store does not have."""

    state: str
    model: str
    of_state: tuple[str, ...]
    of_model: tuple[str, ...]
    new: Arrays


class Entry(NamedTuple):
    """The information that a process receives when it starts."""

    # The number of starts of its place, this one included.
    life: int
    # Pickled by the driver; the only code that a process receives.
    config: bytes
    # The stored state as text and arrays, or None.
    kept: tuple[str, Arrays] | None
    # The actor handles of all places, empty before the run begins.
    peers: dict[int, Any]
    # The time at which the run began, in nanoseconds.
    begun: int


class ActorReport(NamedTuple):
    """A runner's report: the places that it waits for, whether it is computing, ticks of computation, and bytes."""

    waits_for: tuple[int, ...] = ()
    computing: bool = False
    computed: int = 0
    received: int = 0
    sent: Mapping[int, int] = {}


class PlaceStatus(NamedTuple):
    """The seconds since the last sign of life of a place, its starts, its number of commits, and its last report."""

    silent: float
    life: int
    commits: int
    report: ActorReport


class Fault(NamedTuple):
    """The ticks of the last sign of life of a process that died, and of its replacement, or None if there is none."""

    place: int
    died: int
    back: int | None


class StatePacker:
    """Packs the successive states of a runner: an array of the previous state is sent as a name only."""

    def __init__(self, life: int):
        # The life is part of the names, so that those of two processes differ.
        self.life, self.count = life, 0
        # The object is kept beside its name, so that its id is not reused.
        self.sent: dict[int, tuple[Any, str]] = {}

    def pack(self, state: Any, model: Any) -> Packed:
        """Packs a state; the model is a part of it that the store can return separately."""
        used: dict[int, tuple[Any, str]] = {}
        new: Arrays = {}
        text, names = self._write(state, used, new)
        model_text, model_names = self._write(model, used, new)
        self.sent = used
        return Packed(text, model_text, names, model_names, new)

    def _write(self, value: Any, used: dict[int, tuple[Any, str]], new: Arrays) -> tuple[str, tuple[str, ...]]:
        names: list[str] = []

        def store(value: Any) -> str:
            entry = used.get(id(value)) or self.sent.get(id(value))
            if entry is None:
                self.count += 1
                entry = (value, f"{self.life}.{self.count}")
                new[entry[1]] = flat(value)
            used[id(value)] = entry
            names.append(entry[1])
            return entry[1]

        return write(value, store), tuple(names)


def clock_since(begun: int) -> Callable[[], int]:
    """Returns a clock of the nanoseconds since a time of the wall clock, which all machines share.

    The wall clock is read once: set back later, it would stop the timers of rules.
    """
    offset = time.time_ns() - begun - time.monotonic_ns()
    return lambda: time.monotonic_ns() + offset


class StateStore:
    """Stores the last state of every place and the log of the run. It computes nothing and has no rule."""

    def __init__(self, config: bytes):
        self.config = config
        self.peers: dict[int, Any] = {}
        self.begun, self.clock = 0, clock_since(0)
        self.lives: dict[int, int] = {}
        self.kept: dict[int, tuple[Packed, Arrays]] = {}
        # The times of the last sign of life of a place, and of the start of its process.
        self.last_seen: dict[int, float] = {}
        self.entered: dict[int, float] = {}
        self.commits: dict[int, int] = {}
        self.reports: dict[int, ActorReport] = {}
        self.faults: list[Fault] = []
        self.records = Records([], [], [])

    def open(self, peers: dict[int, Any], begun: int) -> None:
        """Begins the run: processes that start from now on continue it without a call of the driver."""
        self.peers, self.begun, self.clock = peers, begun, clock_since(begun)

    def enter(self, place: int) -> Entry:
        """Registers a new process of a place; earlier ones cannot commit any more."""
        self.lives[place] = life = self.lives.get(place, 0) + 1
        self.entered[place] = time.monotonic()
        kept = None
        if place in self.kept:
            packed, arrays = self.kept[place]
            kept = packed.state, {name: arrays[name] for name in packed.of_state}
        return Entry(life, self.config, kept, self.peers, self.begun)

    def record_death(self, place: int, *, replaced: bool) -> None:
        """Logs that a process died at its last sign of life, and whether another has replaced it now."""
        now, tick = time.monotonic(), self.clock()
        died = tick - round((now - self.last_seen.get(place, now)) * 1e9)
        self.faults.append(Fault(place, died, tick if replaced else None))
        self.last_seen[place] = now

    def commit(self, place: int, life: int, packed: Packed, records: Records, report: ActorReport) -> bool:
        """Stores a state and the records that led to it, both or neither; False if a newer process has the place."""
        if not self.beat(place, life):
            return False
        arrays = (self.kept[place][1] if place in self.kept else {}) | packed.new
        # Arrays that the new state does not use are dropped.
        arrays = {name: arrays[name] for name in (*packed.of_state, *packed.of_model)}
        self.kept[place] = (packed._replace(new={}), arrays)
        for mine, theirs in zip(self.records, records):
            mine.extend(theirs)
        self.commits[place] = self.commits.get(place, 0) + 1
        self.reports[place] = report
        return True

    def beat(self, place: int, life: int) -> bool:
        """Notes a sign of life; False if a newer process has the place."""
        if self.lives.get(place) != life:
            return False
        self.last_seen[place] = time.monotonic()
        return True

    def status(self) -> tuple[dict[int, PlaceStatus], int, int]:
        """Returns the status of each place, and the numbers of steps and gradients."""
        now = time.monotonic()
        found = {
            # A replacement compiles first: the silence of its predecessor is not its own.
            place: PlaceStatus(
                now - max(seen, self.entered[place]), self.lives[place], self.commits[place], self.reports[place]
            )
            for place, seen in self.last_seen.items()
            if place in self.reports
        }
        return found, len(self.records.steps), len(self.records.gradients)

    def models(self, places: tuple[int, ...]) -> dict[int, tuple[str, Arrays]]:
        """Returns the last stored models of some places."""
        found = {}
        for place in places:
            if place in self.kept:
                packed, arrays = self.kept[place]
                found[place] = packed.model, {name: arrays[name] for name in packed.of_model}
        return found

    def log(self) -> tuple[Records, list[Fault], dict[int, ActorReport]]:
        """Returns all records, all faults, and the last report of each place."""
        return self.records, self.faults, self.reports
