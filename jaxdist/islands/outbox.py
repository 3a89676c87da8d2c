"""The drift of an island that is under way: until the store has it, and until its round has ended."""

from collections.abc import Iterable
from typing import NamedTuple

import jax

from .._core.types import State, Updates
from . import records
from .background import DriftMessage, DriftTransfer
from .connection import LONGEST_PAUSE, Connection
from .records import Drift


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
        self._store.put(records.body_name(message.place), message.body)
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

    def abandon(self) -> None:
        """Reads nothing more ahead."""
        if self._transfer is not None:
            self._transfer.stop()

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
            found = records.parse(Drift, message.name, self._store.get(message.name) or b"")
            body = body if found.session == self.flight.session else ""
        self.flight = self.flight._replace(body=body, message=None)
