"""The drift of an island that is under way: until the store has it, and until its round has ended.

With `overlap` a thread sends it while the island trains, and then reads those of the others ahead.
"""

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import jax

from .._core.types import State, Updates
from . import protocol
from .base import DamagedError
from .connection import LONGEST_PAUSE, Connection
from .protocol import Drift, body_name, round_name

# Seconds between two looks for drifts of others: there is no hurry before the next meeting.
FIRST_LOOK, LONGEST_LOOK = 0.05, 5.0


class DriftMessage(NamedTuple):
    """A drift as bytes: the body, and the record that names it.

    Attributes:
      round: the round that it is for.
      name: the name of the record, which is created.
      record: the bytes of the record.
      place: the hash of the body, which is put first.
      body: the bytes of the body.
    """

    round: int
    name: str
    record: bytes
    place: str
    body: bytes


class DriftTransfer:
    """Sends a message, then reads ahead the bodies of the others, until all of them are there or the deadline comes.

    It asks no device and no other process.

    Args:
      store: with a deadline.
      message: what to send.
      expected: the islands whose bodies to wait for.
    """

    def __init__(self, store: Connection, message: DriftMessage, expected: Iterable[str]):
        self._store, self._message, self._expected = store, message, frozenset(expected)
        self._stopped, self._problem = threading.Event(), None
        # Whether the record was created; `None` if that is not known.
        self._created: bool | None = None
        # Records and bodies of the others, by name.
        self.found: dict[str, bytes] = {}
        # An island that ends with an error waits for no store.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> bool:
        """Stops after what is under way, and returns whether the thread has ended within `seconds`."""
        self._stopped.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def finish(self, seconds: float) -> bool | None:
        """Stops after what is under way; returns whether the record was created, `None` if that is not known.

        Raises:
          TimeoutError: the thread has not ended after `seconds`.
        """
        if not self.end(seconds):
            raise TimeoutError("a drift is still under way")
        if self._problem is not None:
            raise self._problem
        return self._created

    def _run(self) -> None:
        try:
            with suppress(ConnectionError, DamagedError):
                self._send()
                self._read_ahead()
        # For the thread that finishes it.
        except BaseException as problem:
            self._problem = problem

    def _send(self) -> None:
        message = self._message
        self._store.put(body_name(message.place), message.body)
        self._created = self._store.create(message.name, message.record)

    def _read_ahead(self) -> None:
        prefix, pause, done = round_name(self._message.round, ""), FIRST_LOOK, {self._message.name}
        while not self._stopped.wait(pause) and self._store.now() < self._store.deadline:
            seen = protocol.see(name.removeprefix(prefix) for name in self._store.list(prefix))
            for name in (round_name(self._message.round, "drift", island) for island in sorted(seen.drifts)):
                if name not in done and not self._stopped.is_set():
                    self._read(name)
                    done.add(name)
            if seen.committed or not protocol.missing_islands(seen, self._expected):
                return
            pause = min(1.2 * pause, LONGEST_LOOK)

    def _read(self, name: str) -> None:
        record = self._store.get(name) or b""
        place = protocol.parse(Drift, name, record).body
        body = self._store.get(body_name(place))
        # Nothing that was cut on the way is kept.
        if body is not None and protocol.hash_of(body) == place:
            self.found |= {name: record, body_name(place): body}


class InFlight(NamedTuple):
    """A drift whose round this island has not seen the end of.

    Attributes:
      round: the round that it is for.
      body: the hash of its bytes; empty if another process of this name has sent one, which counts.
      drift: what it takes of this island's progress if it counts.
      reducer: the reducer's state if it counts.
      sent_at: by the clock of process 0.
      message: its bytes, until it is known that the store has them.
      session: of the process that sends it.
    """

    round: int
    body: str
    drift: Updates
    reducer: State
    sent_at: float
    message: DriftMessage | None
    session: int


class Outbox:
    """Sends one drift at a time. All processes of an island call the same functions.

    Attributes:
      flight: the drift that is under way.
    """

    def __init__(self, store: Connection, seconds: float):
        self.flight: InFlight | None = None
        self._store, self._seconds = store, seconds
        # In process 0, while this island trains.
        self._transfer: DriftTransfer | None = None

    def send(self, flight: InFlight, expected: Iterable[str], *, in_background: bool) -> None:
        """Sends a drift at once, or while the island trains: then it also reads those of the `expected` islands."""
        # Before the store is asked: an answer may be lost, and then another drift must not take the place of this one.
        self.flight = flight
        if not in_background:
            self.deliver()
        elif jax.process_index() == 0:
            assert flight.message is not None
            store = Connection(self._store.store, together=False)
            store.deadline = store.now() + self._seconds
            self._transfer = DriftTransfer(store, flight.message, expected)

    def deliver(self) -> bool:
        """Puts the drift into the store, unless it is known to be there; returns whether there was one to put."""
        if self.flight is None or self.flight.message is None:
            return False
        message = self.flight.message
        self._store.put(protocol.body_name(message.place), message.body)
        self._confirm(message, self._store.create(message.name, message.record))
        # The others get their time from now on.
        self.flight = self.flight._replace(sent_at=self._store.now())
        return True

    def finish_transfer(self) -> None:
        """Ends what went on while the island trained, and takes what it found."""
        message = None if self.flight is None else self.flight.message
        if message is not None:
            created = self._store.ask(self._end_transfer)
            if created is not None:
                self._store.sent += len(message.body) + len(message.record)
                self._confirm(message, created)

    def clear(self) -> None:
        """Forgets the drift, whose round has ended."""
        self.flight, self._store.read_ahead = None, {}

    def abandon(self) -> bool:
        """Ends what goes on in the background, if that takes no longer than a moment; returns whether it has ended."""
        return self._transfer is None or self._transfer.end(min(LONGEST_PAUSE, self._seconds))

    def _end_transfer(self) -> bool | None:
        """In process 0: the answer of the store to the other thread; `None` if it is not known, or there was none."""
        if self._transfer is None:
            return None
        created = self._transfer.finish(min(LONGEST_PAUSE, self._seconds))
        self._store.read_ahead, self._transfer = self._transfer.found, None
        return created

    def _confirm(self, message: DriftMessage, created: bool) -> None:
        """Notes that the store has a drift of this name, and whether it is this one."""
        assert self.flight is not None
        body = self.flight.body
        if not created:
            # Created by a try of ours whose answer was lost, or by an earlier process of this name: that one counts.
            found = protocol.parse(Drift, message.name, self._store.get(message.name) or b"")
            body = body if found.session == self.flight.session else ""
        self.flight = self.flight._replace(body=body, message=None)
