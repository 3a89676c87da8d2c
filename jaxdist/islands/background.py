"""What crosses the link while an island with `overlap` trains: its own drift, then those of the others, in a thread."""

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from . import records, rounds
from .connection import Connection
from .errors import DamagedError
from .records import Drift, body_name, round_name

# Seconds between two looks for drifts of others: there is no hurry before the next meeting.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0


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

    def stop(self) -> None:
        """Reads nothing more ahead; what it sends, it sends."""
        self._stopped.set()

    def finish(self, seconds: float) -> bool | None:
        """Stops after what is under way; returns whether the record was created, `None` if that is not known.

        Raises:
          TimeoutError: the thread has not ended after `seconds`.
        """
        self.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
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
        prefix, pause, done = round_name(self._message.round, ""), FIRST_PAUSE, {self._message.name}
        while not self._stopped.wait(pause) and self._store.now() < self._store.deadline:
            seen = rounds.see(name.removeprefix(prefix) for name in self._store.list(prefix))
            for name in (round_name(self._message.round, "drift", island) for island in sorted(seen.drifts)):
                if name not in done and not self._stopped.is_set():
                    self._read(name)
                    done.add(name)
            if seen.committed or not rounds.missing_islands(seen, self._expected):
                return
            pause = min(1.2 * pause, LONGEST_PAUSE)

    def _read(self, name: str) -> None:
        record = self._store.get(name) or b""
        place = records.parse(Drift, name, record).body
        body = self._store.get(body_name(place))
        # Nothing that was cut on the way is kept.
        if body is not None and records.hash_of(body) == place:
            self.found |= {name: record, body_name(place): body}
