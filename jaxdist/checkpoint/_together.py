"""What the processes of a job do together: when one cannot do its part, the others know within seconds.

They tell each other through the dictionary of text that JAX's coordination service keeps in process 0. A collective
would wait for a process that has failed, and could not run beside the steps of the training.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from .._core.compat import coordination_client
from .errors import CheckpointPeerError

# How long the others may take, which is mostly for writing.
LIMIT_SECONDS = 20 * 60.0
GRACE_SECONDS = 10.0  # for the answer of process 0, which waits for the others itself
SETTLE_SECONDS = 10.0
POLL_MILLISECONDS = 500  # nothing interrupts the call
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.25
# All processes begin equally many, in the same order: the number tells them apart.
_numbers = itertools.count()


class Together:
    """One thing that all processes do, part by part, in `with` blocks: what is raised there, the others are told.

    Process 0 hears of each part that all have done it, and answers. What has failed each process looks up itself.
    """

    def __init__(self, what: str):
        self._what, self._place = what, f"jaxdist/checkpoint/{next(_numbers)}"
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._store: Any = coordination_client() if self._processes > 1 else None
        self._answers = 0  # of process 0, so far
        self._heard_of: CheckpointPeerError | None = None

    def all(self, said: Any = None) -> list[Any]:
        """Returns what each process has to say, once all have come so far; of what JSON holds."""
        if self._store is None:
            return [said]
        if self._process > 0:
            self._set(f"said/{self._answers}/{self._process}", said)
            return self._heard()
        found = self._gathered()
        return self._answer([said, *(found[process] for process in range(1, self._processes))])

    def first(self, part: Callable[[], Any]) -> Any:
        """What `part` returns in process 0, in all processes; of what JSON holds."""
        if self._store is None:
            return part()
        return self._answer(part()) if self._process == 0 else self._heard()

    def check(self) -> None:
        """Raises if another process is known to have failed."""
        if self._store is not None and (failed := self._read("failed")):
            process = min(failed)
            self._heard_of = CheckpointPeerError(failed[process], process)
            raise self._heard_of

    def settle(self) -> None:
        """Waits, after a failure, until the others have heard of it and stopped, or give no sign."""
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
        heard = error is self._heard_of
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service may be what failed
            self._set(f"{'stopped' if heard else 'failed'}/{self._process}", text)

    def _answer(self, value: Any) -> Any:
        self._set(f"answer/{self._answers}", value)
        self._answers += 1
        return value

    def _heard(self) -> Any:
        """The answer of process 0, in another."""
        until = time.monotonic() + LIMIT_SECONDS + GRACE_SECONDS
        while time.monotonic() < until:
            try:
                text = self._store.blocking_key_value_get(f"{self._place}/answer/{self._answers}", POLL_MILLISECONDS)
            except jax.errors.JaxRuntimeError as problem:
                if "DEADLINE_EXCEEDED" not in str(problem):
                    raise
                self.check()
                continue
            self._answers += 1
            return json.loads(text)
        raise self._late(0)

    def _gathered(self) -> dict[int, Any]:
        """What the others said, in process 0."""
        until, pause = time.monotonic() + LIMIT_SECONDS, SHORTEST_PAUSE
        while True:
            self.check()
            said = self._read(f"said/{self._answers}")
            if len(said) == self._processes - 1:
                self._store.key_value_delete(f"{self._place}/said/{self._answers}/")
                return said
            if time.monotonic() > until:
                raise self._late(min(set(range(1, self._processes)) - set(said)))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _late(self, process: int) -> CheckpointPeerError:
        text = f"process {process} did not {self._what} within {LIMIT_SECONDS / 60:g} minutes: see what it does"
        return CheckpointPeerError(text, process)

    def _set(self, key: str, value: Any) -> None:
        self._store.key_value_set(f"{self._place}/{key}", json.dumps(value), allow_overwrite=True)

    def _read(self, key: str) -> dict[int, Any]:
        found = self._store.key_value_dir_get(f"{self._place}/{key}/")
        return {int(name.rpartition("/")[2]): json.loads(text) for name, text in found}
