"""Requests to a store that are tried again while they fail, for a time."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

from .._stores.base import SharedStore, deletions
from .._stores.patience import repeat
from .._stores.problems import is_refusal
from .base import PublishOfflineError
from .protocol import is_of_protocol

logger = logging.getLogger("jaxdist.publish")

# Seconds between two tries, at first and at the longest.
PAUSES = 0.05, 5.0
# Bytes of a piece of a long body, and how many pieces are on the way at once: where the first one took at most so many
# seconds, since the time limit of a request includes its bytes.
PIECE, AHEAD, QUICK = 2 * 2**20, 4, 2.0


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

    def get_pieces(self, name: str, size: int) -> Iterator[bytes | None]:
        """The bytes of a name, in pieces if there are many: the next ones are on the way while one is looked at."""
        if self._store.get_range is None or size <= PIECE:
            yield self.get(name)
            return
        yield from self._get_ranges([(name, start, min(start + PIECE, size)) for start in range(0, size, PIECE)])

    def ends_at(self, name: str, size: int) -> bool:
        """Whether a name has so many bytes, as far as its store reads ranges."""
        read = self._store.get_range
        return read is None or len(self._ask(read, name, size - 1, size + 1) or b"") == 1

    def get_several(self, names: Sequence[tuple[str, int]]) -> Iterator[bytes | None]:
        """The bytes of names of known sizes: the next ones are on the way while one is looked at."""
        if self._store.get_range is None or len(names) <= 1:
            yield from (self.get(name) for name, _ in names)
            return
        yield from self._get_ranges([(name, 0, size) for name, size in names])

    def _get_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes | None]:
        read, began = self._store.get_range, time.monotonic()
        assert read is not None
        yield self._ask(read, *ranges[0])
        ahead = AHEAD if time.monotonic() - began < QUICK else 1
        rest = iter(ranges[1:])
        with ThreadPoolExecutor(ahead, thread_name_prefix="jaxdist.publish") as pool:

            def ask(one: tuple[str, int, int]) -> Any:
                return pool.submit(self._ask, read, *one)

            asked = deque(map(ask, islice(rest, ahead)))
            while asked:
                piece = asked.popleft().result()
                asked.extend(map(ask, islice(rest, 1)))
                yield piece

    def list(self, prefix: str) -> list[str]:
        """The names of the protocol that begin so, sorted."""
        return [name for name in self._ask(self._store.list, prefix) if is_of_protocol(name)]

    def list_all(self) -> "list[str]":
        """All names, foreign ones too."""
        return self._ask(self._store.list, "")

    def delete(self, names: Sequence[str]) -> None:
        """Deletes names, which may be missing."""
        for field, argument in deletions(self._store, names):
            self._ask(getattr(self._store, field), argument)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began, told = time.monotonic(), False

        def tell(error: Exception) -> None:
            nonlocal told
            level = logging.DEBUG if told else logging.WARNING
            logger.log(level, "the store failed, trying again: %s", _describe(error))
            told = True

        try:
            return repeat(
                partial(function, *arguments), seconds=self._patience, pauses=PAUSES, is_final=is_refusal, tell=tell
            )
        except Exception as error:
            if is_refusal(error):
                raise PublishOfflineError(f"the store refuses a request: {_describe(error)}") from error
            seconds = time.monotonic() - began
            raise PublishOfflineError(f"the store is out of reach for {seconds:.0f} s: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
