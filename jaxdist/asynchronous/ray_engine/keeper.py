"""What all processes of a run leave in one place: states to go on from, and the books."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..portable import flat, write
from .state import Books

Arrays = dict[str, np.ndarray]


class Packed(NamedTuple):
    """A state and its model as text, with the names of their arrays, and those arrays that were not there before."""

    state: str
    model: str
    of_state: tuple[str, ...]
    of_model: tuple[str, ...]
    new: Arrays


class Entry(NamedTuple):
    """What a process is told when it starts: which start of its place it is, what was kept, and who else there is.

    `setup` is what the driver pickled, the only code that a process is given.
    """

    life: int
    setup: bytes
    kept: tuple[str, Arrays] | None
    peers: dict[int, Any]
    begun: int


class Report(NamedTuple):
    """What a place says of itself: whom it waits for, whether it computes, ticks that it computed, and bytes."""

    waits_for: tuple[int, ...] = ()
    computing: bool = False
    computed: int = 0
    received: int = 0
    sent: Mapping[int, int] = {}


class PlaceStatus(NamedTuple):
    """A place as it was last heard of: how long ago, its starts, how often it got further, and its report."""

    silent: float
    life: int
    commits: int
    report: Report


class Fault(NamedTuple):
    """When a place was heard of before it died, and when another process had taken over; None: none has."""

    place: int
    died: int
    back: int | None


class Shelf:
    """Packs states one after the other: an array that was in the last one is named, not sent again.

    Args:
      life: part of the names, so that those of two processes differ.
    """

    def __init__(self, life: int):
        self.life, self.count = life, 0
        self.held: dict[int, tuple[Any, str]] = {}  # the object too, so that its number stays its own

    def pack(self, state: Any, model: Any) -> Packed:
        """The state as it goes to the keeper; the model is a part of it, to be read alone."""
        held: dict[int, tuple[Any, str]] = {}
        new: Arrays = {}

        def written(value: Any) -> tuple[str, tuple[str, ...]]:
            names: list[str] = []

            def store(one: Any) -> str:
                found = held.get(id(one)) or self.held.get(id(one))
                if found is None:
                    self.count += 1
                    found = (one, f"{self.life}.{self.count}")
                    new[found[1]] = flat(one)
                held[id(one)] = found
                names.append(found[1])
                return found[1]

            return write(value, store), tuple(names)

        (text, names), (model_text, model_names) = written(state), written(model)
        self.held = held
        return Packed(text, model_text, names, model_names, new)


class Keeper:
    """Keeps the last state of every place. It knows no rule and computes nothing.

    Args:
      setup: handed to every process.
    """

    def __init__(self, setup: bytes):
        self.setup = setup
        self.peers: dict[int, Any] = {}
        self.begun = 0
        self.lives: dict[int, int] = {}
        self.kept: dict[int, tuple[Packed, Arrays]] = {}
        self.heard: dict[int, float] = {}
        self.commits: dict[int, int] = {}
        self.reports: dict[int, Report] = {}
        self.faults: list[Fault] = []
        self.books = Books([], [], [])

    def open(self, peers: dict[int, Any], begun: int) -> None:
        """From now on a process that starts goes on by itself."""
        self.peers, self.begun = peers, begun

    def enter(self, place: int) -> Entry:
        """A process starts; an earlier one of the same place cannot commit any more."""
        self.lives[place] = life = self.lives.get(place, 0) + 1
        kept = None
        if place in self.kept:
            packed, arrays = self.kept[place]
            kept = packed.state, {name: arrays[name] for name in packed.of_state}
        return Entry(life, self.setup, kept, self.peers, self.begun)

    def died(self, place: int, *, replaced: bool) -> None:
        """A process died when it was heard of last; another is at work now, or none will be."""
        now, tick = time.monotonic(), time.time_ns() - self.begun
        died = tick - round((now - self.heard.get(place, now)) * 1e9)
        self.faults.append(Fault(place, died, tick if replaced else None))
        self.heard[place] = now

    def commit(self, place: int, life: int, packed: Packed, books: Books, report: Report) -> bool:
        """Takes a state and the rows that led to it, both or neither; false if another process has this place now."""
        if self.lives.get(place) != life:
            return False
        arrays = (self.kept[place][1] if place in self.kept else {}) | packed.new
        arrays = {name: arrays[name] for name in (*packed.of_state, *packed.of_model)}
        self.kept[place] = (packed._replace(new={}), arrays)
        for mine, theirs in zip(self.books, books):
            mine.extend(theirs)
        self.commits[place] = self.commits.get(place, 0) + 1
        self.reports[place] = report
        self.heard[place] = time.monotonic()
        return True

    def beat(self, place: int, life: int) -> bool:
        """A sign of life."""
        if self.lives.get(place) == life:
            self.heard[place] = time.monotonic()
        return self.lives.get(place) == life

    def status(self) -> tuple[dict[int, PlaceStatus], int, int]:
        """Each place, and how many steps and gradients there are."""
        now = time.monotonic()
        found = {
            place: PlaceStatus(now - heard, self.lives[place], self.commits[place], self.reports[place])
            for place, heard in self.heard.items()
            if place in self.reports
        }
        return found, len(self.books.steps), len(self.books.gradients)

    def models(self, places: tuple[int, ...]) -> dict[int, tuple[str, Arrays]]:
        """The models of some places, as they were kept last."""
        found = {place: self.kept[place] for place in places if place in self.kept}
        return {
            place: (packed.model, {name: arrays[name] for name in packed.of_model})
            for place, (packed, arrays) in found.items()
        }

    def ledger(self) -> tuple[Books, list[Fault], dict[int, Report]]:
        """All rows, all faults, and the last report of each place."""
        return self.books, self.faults, self.reports
