"""Long bodies in pieces: each under its own hash, several on the way at once, and one that was cut sent or read again.

A body of more than `LONGEST_WHOLE` bytes is stored as pieces, `bodies/ROUND/HASH` each, and an index with their hashes,
which has the body's own name and is put last. So a name that is there has all of its pieces; and since the hash in the
name is that of the index, it is one of all bytes. What a process leaves without an index goes with its round.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._stores.base import hash_of
from . import protocol
from .base import DamagedError

# The longest body that is one object; and the bytes of a piece of a longer one, as many as a request to a bucket has.
LONGEST_WHOLE, PIECE = 16 * 2**20, 8 * 2**20
# Pieces on the way at once, where one takes at most so many seconds: the time limit of a request includes its bytes.
TOGETHER, QUICK = 4, 2.0
# So often a piece is read whose bytes are not what its hash says, before it counts as damaged.
TRIES = 3
_INDEX = b"jdindex1"


class Body:
    """The bytes of a body, with no second copy of its arrays: a long one is put together piece by piece.

    Args:
      number: the round in whose folder it is.
      tag: as for `protocol.pack`.
      arrays: which must not change until the body is in the store, if that is long.

    Attributes:
      size: its number of bytes.
      hashes: of its pieces; none if it is stored whole.
      stored: the bytes under its name: all of them, or the index.
      place: the round, and the hash of what is stored.
      arrays: those that were given, or copies of them in what is stored.
    """

    def __init__(self, number: int, tag: str, arrays: Sequence[np.ndarray]):
        self._parts = protocol.pack_parts(tag, arrays)
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        self.size, self._sent = int(self._starts[-1]), set[str]()
        self.arrays = [*arrays]
        self.hashes: tuple[str, ...] = ()
        if self.size > LONGEST_WHOLE:
            self.hashes = tuple(hash_of(self.cut_piece(piece)) for piece in range(-(-self.size // PIECE)))
            self.stored = _INDEX + protocol.to_json({"bytes": self.size, "piece": PIECE, "hashes": self.hashes})
        else:
            self.stored, self._parts = b"".join(self._parts), []
        self.place = protocol.body_place(number, self.stored)
        if not self.hashes:
            self.arrays = protocol.unpack_pieces(self.place, [self.stored], arrays)

    def missing_pieces(self) -> list[int]:
        """The pieces that the store has not yet; of equal ones, which have one name, the first."""
        firsts = {hashed: piece for piece, hashed in reversed([*enumerate(self.hashes)])}
        return sorted(piece for hashed, piece in firsts.items() if hashed not in self._sent)

    def length_of(self, piece: int) -> int:
        """The number of bytes of a piece."""
        return min(PIECE, self.size - piece * PIECE)

    def cut_piece(self, piece: int) -> bytes:
        """The bytes of a piece."""
        start, end = piece * PIECE, min((piece + 1) * PIECE, self.size)
        first, last = np.searchsorted(self._starts, (start, end), side="right") - 1
        some = zip(self._starts[first : last + 1].tolist(), self._parts[first : last + 1])
        return b"".join(part[max(start - begin, 0) : end - begin] for begin, part in some)

    def put_pieces(self, put: Callable[[str, bytes], None], pieces: Sequence[int], closed: threading.Event) -> None:
        """Puts those of these pieces that the store has not."""

        def put_piece(piece: int) -> None:
            put(piece_name(self.place, self.hashes[piece]), self.cut_piece(piece))
            self._sent.add(self.hashes[piece])

        call_together(put_piece, [piece for piece in pieces if self.hashes[piece] not in self._sent], TOGETHER, closed)


class BodyReader:
    """Reads a body, and keeps the pieces that have come where the others fail."""

    def __init__(self, name: str):
        self._place, self._index, self._found = name.partition("/")[2], b"", dict[str, bytes]()

    def read(self, get: Callable[[str], bytes | None], closed: threading.Event) -> list[bytes] | None:
        """What is stored under the name, and the pieces if that is an index; `None` if there is nothing.

        A piece that is missing or damaged is empty.
        """
        stored = self._index or get(protocol.body_name(self._place))
        hashes = () if stored is None else hashes_in(self._place, stored)
        if stored is None or not hashes:
            return None if stored is None else [stored]
        self._index = stored

        def get_piece(piece: int) -> None:
            hashed = missing[piece]
            for _ in range(TRIES):
                body = get(piece_name(self._place, hashed))
                if body is not None and hash_of(body) == hashed:
                    self._found[hashed] = body
                    return

        missing = [hashed for hashed in dict.fromkeys(hashes) if hashed not in self._found]
        numbers = range(len(missing))
        started = time.monotonic()
        call_together(get_piece, numbers[:1], 1, closed)
        call_together(get_piece, numbers[1:], TOGETHER if time.monotonic() - started <= QUICK else 1, closed)
        return [stored, *(self._found.get(hashed, b"") for hashed in hashes)]


def hashes_in(place: str, stored: bytes) -> tuple[str, ...]:
    """The hashes of the pieces of a body, of which this is the index; none if it is the body, or damaged."""
    if not stored.startswith(_INDEX) or not protocol.is_intact(place, stored):
        return ()
    return tuple(json.loads(stored[len(_INDEX) :])["hashes"])


def unpack_found(place: str, found: list[bytes], like: Sequence[Any] | None) -> list[np.ndarray]:
    """The arrays of a body as `BodyReader` has found it, as `protocol.unpack`; it uses up the list.

    Raises:
      DamagedError: a piece is missing, or bytes are not those that were written, or are arrays of another model.
    """
    if not hashes_in(place, found[0]):
        return protocol.unpack(place, found[0], like)
    found.pop(0)
    if b"" in found:
        raise DamagedError(f"piece {found.index(b'')} of the body {place} is missing or damaged")
    return protocol.unpack_pieces(place, found, like)


def is_whole(found: list[bytes] | None) -> bool:
    """Whether a body has been found with all of its pieces."""
    return found is not None and b"" not in found[1:]


def call_together(act: Callable[[int], None], numbers: Sequence[int], together: int, closed: threading.Event) -> None:
    """Calls `act` for each of these numbers, some at once; for no more after an error, which is raised, or `closed`.

    Its threads hold up no end of the process.
    """
    waiting, errors = deque(numbers), list[BaseException]()

    def work() -> None:
        while not errors and not closed.is_set():
            try:
                number = waiting.popleft()
            except IndexError:
                return
            try:
                act(number)
            # For the thread that waits.
            except BaseException as error:
                errors.append(error)

    name = threading.current_thread().name
    threads = [threading.Thread(target=work, name=name, daemon=True) for _ in range(min(together, len(numbers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def piece_name(place: str, hashed: str) -> str:
    """The name of a piece of the body of a place."""
    return protocol.body_name(f"{place.partition('/')[0]}/{hashed}")
