"""The connection through which the processes of an island ask a store: one answer for all, and a deadline."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..processes.broadcast import broadcast
from .base import IslandError
from .store import SharedStore

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0


class Connection:
    """The functions of a store, and a clock, with the same answers in all processes of an island.

    Decisions that follow from these answers alone are the same in all processes, so that no process waits in a
    collective which another does not enter. A function that raises is called again until `deadline`, by the clock of
    process 0; then `ConnectionError` is raised in all of them.

    Args:
      store: what process 0 asks.
      together: whether all processes call each function; otherwise this process asks by itself.
    """

    def __init__(self, store: SharedStore, *, together: bool = True):
        self.store = store
        self._together = together and jax.process_count() > 1
        self.deadline = float("inf")
        self.sent = self.received = 0
        # Bytes that process 0 has read ahead, by name; never others than those in the store.
        self.read_ahead: Mapping[str, bytes] = {}

    def create(self, name: str, body: bytes) -> bool:
        """Stores `body` under a new name, and returns false if the name exists."""
        self.sent += len(body)
        return self.ask(self.store.create, name, body)

    def put(self, name: str, body: bytes) -> None:
        """Stores `body` under a name, and replaces what it has."""
        self.sent += len(body)
        self.ask(self.store.put, name, body)

    def get(self, name: str) -> bytes | None:
        """The bytes under a name, or `None` if there are none."""
        body = self.ask(self._read, name)
        self.received += len(body or b"")
        return body

    def list(self, prefix: str) -> list[str]:
        """The names with this prefix, sorted."""
        return self.ask(self.store.list, prefix)

    def delete(self, name: str) -> None:
        """Deletes a name, which may be missing."""
        self.ask(self.store.delete, name)

    def now(self) -> float:
        """Seconds on the monotonic clock of process 0. Clocks of different islands are never compared."""
        seconds = time.monotonic()
        return float(_share(np.float64(seconds))) if self._together else seconds

    def sleep(self, seconds: float) -> None:
        """Waits in this process."""
        time.sleep(seconds)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of a function that process 0 calls, again while it raises; `bytes`, or what JSON can hold."""
        pause = FIRST_PAUSE
        while True:
            answer, problem = (_call_once if self._together else _call)(function, *arguments)
            if problem is None:
                return answer
            if self.now() + pause > self.deadline:
                raise ConnectionError(f"the store is out of reach: {problem}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _read(self, name: str) -> bytes | None:
        return self.read_ahead[name] if name in self.read_ahead else self.store.get(name)


def _call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Calls a function of the store; returns its answer, or its problem."""
    try:
        return function(*arguments), None
    # Any error of a library for stores, none of which is known here, may pass by itself.
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _call_once(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Calls a function of the store in process 0; returns its answer, or its problem, in all processes."""
    is_first = jax.process_index() == 0
    answer, problem = _call(function, *arguments) if is_first else (None, None)
    is_bytes = isinstance(answer, bytes)
    message = answer if is_bytes else json.dumps([answer, problem]).encode()
    size = int(_share(np.int64(len(message) if is_first else 0)))
    kind = bool(_share(np.bool_(is_bytes)))
    buffer = np.frombuffer(message, np.uint8) if is_first else np.zeros(size, np.uint8)
    arrived = np.asarray(_share(buffer)).tobytes() if size else b""
    return (arrived, None) if kind else tuple(json.loads(arrived))


def _share(value: Any) -> Any:
    """The value of process 0, in all processes."""
    try:
        return broadcast(value)
    except jax.errors.JaxRuntimeError as error:
        raise IslandError(
            f"process {jax.process_index()} cannot reach the others of this island: one of them has ended; start all "
            "of them again under the same name, and this island joins again"
        ) from error
