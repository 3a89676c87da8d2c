"""Requests to a store that are tried again while they fail, for a time."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from .._stores.base import SharedStore
from .._stores.problems import is_refusal
from .base import PublishOfflineError
from .protocol import is_of_protocol

logger = logging.getLogger("jaxdist.publish")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
# Names that one request deletes.
DELETED_AT_ONCE = 200


class Requests:
    """The functions of a store, which are called again for `patience` seconds while they raise.

    A function that returns late is waited for. All raise `PublishOfflineError` in the end, or at once where no second
    try helps, as without rights.
    """

    def __init__(self, store: SharedStore, patience: float):
        self._store, self._patience = store, patience

    def create(self, name: str, body: bytes) -> bool:
        """Whether this call, or an earlier try of it, has created the name with these bytes."""
        # An answer may be lost, so that the second try finds what the first one has created.
        return self._ask(self._store.create, name, body) or self.get(name) == body

    def put(self, name: str, body: bytes) -> None:
        """Stores bytes under their hash."""
        self._ask(self._store.put, name, body)

    def get(self, name: str) -> bytes | None:
        """The bytes of a name, or `None`."""
        return self._ask(self._store.get, name)

    def list(self, prefix: str) -> list[str]:
        """The names of the protocol that begin so, sorted."""
        return [name for name in self._ask(self._store.list, prefix) if is_of_protocol(name)]

    def list_all(self) -> "list[str]":
        """All names, foreign ones too."""
        return self._ask(self._store.list, "")

    def delete(self, names: Sequence[str]) -> None:
        """Deletes names, which may be missing."""
        if self._store.delete_many is None:
            for name in names:
                self._ask(self._store.delete, name)
            return
        for start in range(0, len(names), DELETED_AT_ONCE):
            self._ask(self._store.delete_many, names[start : start + DELETED_AT_ONCE])

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began, pause, told = time.monotonic(), FIRST_PAUSE, False
        while True:
            try:
                return function(*arguments)
            # Stores raise what the library beneath them raises.
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                if is_refusal(error):
                    raise PublishOfflineError(f"the store refuses a request: {problem}") from error
                seconds = time.monotonic() - began
                if seconds + pause > self._patience:
                    raise PublishOfflineError(f"the store is out of reach for {seconds:.0f} s: {problem}") from error
                logger.log(logging.DEBUG if told else logging.WARNING, "the store failed, trying again: %s", problem)
            told = True
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
