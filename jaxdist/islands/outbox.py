"""The drift of an island that is under way: until the store has its body, and until a round has counted it."""

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import jax

from .._core.types import State, Updates
from . import protocol
from .base import DamagedError
from .bodies import Body, is_whole
from .connection import LEAST_SECONDS, SLICE, Connection, _RefusedError
from .protocol import Drift, number_in, round_name

# Seconds between two looks for drifts of others: there is no hurry before the next meeting.
FIRST_LOOK, LONGEST_LOOK = 0.05, 5.0


class InFlight(NamedTuple):
    """A drift that no round has counted yet. It is a part of what is ahead of the global parameters.

    Attributes:
      body: the place of its bytes.
      drift: what it takes of this island's progress if it counts; `None` if that is all that is ahead of the global
        parameters, before these or the island's model change.
      ahead: what the island's model has of it until then: all of it, or the outer step along the island's own share.
      reducer: the reducer's state if it counts.
      record: what the store is told of it, but for the round's `base`.
      rates: the sum of the learning rates of its steps.
      round: the round in which its record is; `None` if that is not known.
      sent_at: when it came there, by the clock of process 0.
    """

    body: str
    drift: Updates | None
    ahead: Updates | None
    reducer: State
    record: Drift
    rates: float
    round: int | None = None
    sent_at: float = 0.0


class Sender:
    """Puts a body into the store, then creates its record in the round that is open as far as this island knows.

    Then, for `overlap`, it reads the bodies of the others ahead. It asks no device and no other process.

    Args:
      store: a connection of its own.
      body: its bytes.
      record: the name and the bytes of its record; another meeting may set those of a later round.
      expected: the islands whose bodies to read ahead.
    """

    def __init__(self, store: Connection, body: Body, record: tuple[str, bytes], expected: Iterable[str]):
        self._store, self._body, self.record = store, body, record
        self._expected = frozenset(expected)
        # The name of the record, whether it was created, and when.
        self.created: tuple[str, bool, float] | None = None
        self.upload_seconds: float | None = None
        self.problem: BaseException | None = None
        self.is_sent = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def again(self) -> "Sender":
        """Sends the same once more, but for the pieces that the store has."""
        return Sender(self._store, self._body, self.record, self._expected)

    def last_problem(self) -> str | None:
        """Why the last try failed, if it did."""
        return self._store.problem

    def close(self) -> None:
        """Begins no request any more."""
        self._store.closed.set()

    def join(self) -> None:
        """Waits for what goes on."""
        self._thread.join()

    def _run(self) -> None:
        try:
            started = time.monotonic()
            self._store.put_body(self._body)
            self.upload_seconds = time.monotonic() - started
            if self._store.closed.is_set():
                # Who has left with this progress may send it again.
                return
            name, record = self.record
            self.created = name, self._store.create(name, record), time.monotonic()
            self.is_sent.set()
            if self._expected:
                with suppress(ConnectionError, DamagedError):
                    self._read_ahead(name)
        # For the thread that asks what has become of it.
        except BaseException as problem:
            self.problem = problem
        finally:
            self.is_sent.set()

    def _read_ahead(self, own: str) -> None:
        number, pause, done = number_in(own), FIRST_LOOK, {own}
        store = self._store.in_background(urgent=False)
        store.closed = self._store.closed
        prefix = round_name(number, "")
        while not store.closed.wait(pause):
            seen = protocol.see(name.removeprefix(prefix) for name in store.list(prefix))
            for name in (round_name(number, "drift", island) for island in sorted(seen.drifts)):
                if name not in done:
                    self._read(store, name)
                    done.add(name)
            if seen.committed or not protocol.missing_islands(seen, self._expected):
                return
            pause = min(1.2 * pause, LONGEST_LOOK)

    def _read(self, store: Connection, name: str) -> None:
        record = store.get(name) or b""
        place = protocol.parse(Drift, name, record).body
        found = store.get_body(place)
        # Nothing that was cut on the way is kept.
        if found is not None and is_whole(found) and protocol.is_intact(place, found[0]):
            store.keep_ahead({name: record, protocol.body_name(place): found})


class Outbox:
    """Sends one drift of a fragment at a time. All processes of an island call the same functions.

    Attributes:
      flight: the drift that is under way.
      upload_seconds: how long the last upload took; `None` before the first.
      uploading: the body whose upload has not ended, and since when; `None` if there is none.
    """

    def __init__(self, store: Connection):
        self.flight: InFlight | None = None
        self.upload_seconds: float | None = None
        self.uploading: tuple[str, float] | None = None
        self._store = store
        # In process 0.
        self._sender: Sender | None = None

    def send(self, flight: InFlight, body: Body, number: int, base: str, name: str, expected: Iterable[str]) -> None:
        """Begins to send a drift; then the bodies of the `expected` islands are read ahead."""
        # Before the store is asked: an answer may be lost, and then another drift must not take the place of this one.
        self.flight = flight
        record = self._record(number, base, name)
        if jax.process_index() == 0:
            self._sender = Sender(self._store.in_background(urgent=True), body, record, expected)

    def record_in(self, number: int, base: str, name: str, *, wait: bool) -> str:
        """Brings the record of the drift into a round, once its body is in the store.

        Args:
          number: the open round.
          base: the digest of the global parameters before it.
          name: of this island.
          wait: whether to wait for the upload, until the deadline.

        Returns:
          "uploading", "there", or "taken" if the round has a record of another process.

        Raises:
          ConnectionError: the store is out of reach, or refuses the body.
        """
        flight = self.flight
        assert flight is not None
        if flight.round == number:
            return "there"
        place, record = self._record(number, base, name)
        state, created, sent_at = self._await_sender(place, record, wait=wait)
        if state == "uploading":
            return state
        if created is None:
            created, sent_at = self._store.create(place, record), self._store.now()
        self.flight = flight._replace(sent_at=sent_at)
        if not created:
            # Created by a try of ours whose answer was lost, or by another process of this name.
            found = protocol.parse(Drift, place, self._store.get(place) or b"")
            if found.body != flight.body:
                return "taken"
        self.flight = self.flight._replace(round=number)
        return "there"

    def clear(self) -> None:
        """Forgets the drift."""
        self.flight = None
        self._store.drop_ahead()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def next_round(self) -> None:
        """The round has ended without the drift: another one may count it."""
        if self.flight is not None:
            self.flight = self.flight._replace(round=None)
        self._store.drop_ahead()

    def abandon(self) -> None:
        """Begins no request any more."""
        if self._sender is not None:
            self._sender.close()

    def _record(self, number: int, base: str, name: str) -> tuple[str, bytes]:
        assert self.flight is not None
        return round_name(number, "drift", name), protocol.to_json(self.flight.record._replace(base=base))

    def _await_sender(self, place: str, record: bytes, *, wait: bool) -> tuple[str, bool | None, float]:
        """Waits for the thread; returns whether it created this record, `None` if it created another one or none."""
        end, again = max(self._store.deadline, self._store.now() + LEAST_SECONDS), wait
        while True:
            left = end - self._store.now()
            state, seconds, created, sent_at, problem = self._store.agree(
                self._look, place, record, left if wait else 0.0, again
            )
            again = False
            if state == "refused":
                raise _RefusedError(problem)
            if state == "uploading" and wait and left > 0:
                continue
            if state == "uploading" and problem is not None:
                raise ConnectionError(f"the store is out of reach: {problem}")
            if seconds is not None:
                self.upload_seconds = seconds
            return state, created, sent_at

    def _look(self, place: str, record: bytes, left: float, again: bool) -> list[Any]:
        """In process 0: what has become of the drift; one that was refused before this meeting is sent `again`."""
        sender = self._sender
        if sender is None:
            return ["sent", None, None, 0.0, None]
        if again and sender.is_sent.is_set() and isinstance(sender.problem, ConnectionError):
            sender = self._sender = sender.again()
        if not sender.is_sent.is_set():
            # If the upload goes on, the thread creates the record in this round and not in one that has ended.
            sender.record = place, record
            sender.is_sent.wait(max(min(SLICE, left), 0.0))
        if not sender.is_sent.is_set():
            return ["uploading", None, None, 0.0, sender.last_problem()]
        if sender.problem is not None:
            if not isinstance(sender.problem, ConnectionError):
                raise sender.problem
            problem, self._sender = str(sender.problem), sender.again()
            return ["refused", None, None, 0.0, problem]
        if sender.created is None:
            # It was closed when the body was there: the record is for the caller to create.
            return ["sent", sender.upload_seconds, None, 0.0, None]
        name, created, sent_at = sender.created
        return ["sent", sender.upload_seconds, created if name == place else None, sent_at, None]
