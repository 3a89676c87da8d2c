"""How a failure of one process reaches the others before anything is committed."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax

from .._core.compat import coordination_client
from .errors import CheckpointPeerError

# The time limit for the other processes, which need it mostly for writing.
LIMIT_SECONDS = 20 * 60.0
GRACE_SECONDS = 10.0  # longer for the answer of process 0, which waits for the others itself
SETTLE_SECONDS = 10.0
POLL_MILLISECONDS = 500  # nothing interrupts the call
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.25
# All processes start the same operations in the same order, so that a counter identifies them.
_numbers = itertools.count()


class Share(NamedTuple):
    """What this process reads of a checkpoint in a folder: one file in `parts`, from `part` on."""

    folder: Path
    part: int
    parts: int


class Together:
    """One operation of all processes, in parts that are `with` blocks: an exception in one is reported to the others.

    After each part the others report to process 0, which answers when all have. Failures every process looks up itself.
    """

    def __init__(self, what: str):
        self._what, self._place = what, f"jaxdist/checkpoint/{next(_numbers)}"
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._store: Any = coordination_client() if self._processes > 1 else None
        self._answers = 0  # the answers of process 0 so far
        self._known: CheckpointPeerError | None = None

    def all(self, value: Any = None) -> list[Any]:
        """Gathers a JSON value of each process; returns once all processes have come this far."""
        if self._store is None:
            return [value]
        if self._process > 0:
            # The number of answers so far tells the parts of the operation apart.
            self._set(f"said/{self._answers}/{self._process}", value)
            return self._receive()
        # The answer is the list itself, so that all processes return the same.
        found = self._gather()
        return self._answer([value, *(found[process] for process in range(1, self._processes))])

    def first(self, part: Callable[[], Any]) -> Any:
        """Calls `part` in process 0 and returns its result, a JSON value, in all processes."""
        if self._store is None:
            return part()
        return self._answer(part()) if self._process == 0 else self._receive()

    def check(self) -> None:
        """Raises if another process has reported a failure."""
        if self._store is not None and (failed := self._read("failed")):
            process = min(failed)
            self._known = CheckpointPeerError(failed[process], process)
            raise self._known

    def settle(self) -> None:
        """Waits, after a failure, until the others have stopped too, or for `SETTLE_SECONDS`."""
        until = time.monotonic() + SETTLE_SECONDS
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while self._store is not None and time.monotonic() < until:
                if len({self._process, *self._read("failed"), *self._read("stopped")}) == self._processes:
                    return
                time.sleep(LONGEST_PAUSE)

    def __enter__(self) -> "Together":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._store is None or error is None:
            return
        text = f"process {self._process} could not {self._what}: {type(error).__name__}: {error}"
        # A process that only repeats the failure of another reports that it stopped.
        repeated = error is self._known
        # The service may be what failed.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set(f"{'stopped' if repeated else 'failed'}/{self._process}", text)

    def _answer(self, value: Any) -> Any:
        self._set(f"answer/{self._answers}", value)
        self._answers += 1
        return value

    def _receive(self) -> Any:
        """Waits for the answer of process 0."""
        until = time.monotonic() + LIMIT_SECONDS + GRACE_SECONDS
        while time.monotonic() < until:
            # In short waits, to notice the failure of another process.
            try:
                text = self._store.blocking_key_value_get(f"{self._place}/answer/{self._answers}", POLL_MILLISECONDS)
            except jax.errors.JaxRuntimeError as problem:
                if "DEADLINE_EXCEEDED" not in str(problem):
                    raise
                self.check()
                continue
            self._answers += 1
            return json.loads(text)
        raise self._timeout(0)

    def _gather(self) -> dict[int, Any]:
        """Waits, in process 0, for the values of the others."""
        until, pause = time.monotonic() + LIMIT_SECONDS, SHORTEST_PAUSE
        while True:
            self.check()
            values = self._read(f"said/{self._answers}")
            if len(values) == self._processes - 1:
                # The service would keep the values of every save in the memory of process 0.
                self._store.key_value_delete(f"{self._place}/said/{self._answers}/")
                return values
            if time.monotonic() > until:
                raise self._timeout(min(set(range(1, self._processes)) - set(values)))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _timeout(self, process: int) -> CheckpointPeerError:
        text = f"process {process} did not {self._what} within {LIMIT_SECONDS / 60:g} minutes: check what it is doing"
        return CheckpointPeerError(text, process)

    def _set(self, key: str, value: Any) -> None:
        self._store.key_value_set(f"{self._place}/{key}", json.dumps(value), allow_overwrite=True)

    def _read(self, key: str) -> dict[int, Any]:
        found = self._store.key_value_dir_get(f"{self._place}/{key}/")
        return {int(name.rpartition("/")[2]): json.loads(text) for name, text in found}
