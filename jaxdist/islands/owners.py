"""Reduction by owners: each piece of a round's mean is computed by one island, and read by all others.

Without owners an island reads the bodies of all others, `(K-1) P` bytes of a payload `P`. With them a body is cut into
pieces, one after another in its bytes. A commit names the members, and from that follows which of them owns a piece:
it reads this piece of each body, and creates `means/ROUND/PIECE`. So an island reads `P (K-1)/K` of bodies, and as much
of means.

An island that does not find a piece in time computes it from the bodies and creates it. Since a name is created once,
its bytes are what all islands apply; and since NumPy adds, in the order of the commit, they have the same bits from any
island. So an owner that dies costs a wait within the round, and nothing else.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._stores.base import hash_of
from . import protocol
from .base import DamagedError
from .connection import GRACE, LEAST_SECONDS, LONGEST_PAUSE, Connection, _UnansweredError
from .exchange import MessagePlan, RoundMethod
from .protocol import Commit, Member

logger = logging.getLogger("jaxdist.islands")

# The share of `round_timeout` after which each island computes what owners have not.
OWNERS_SHARE = 0.25
# So often bytes are read that are not what their hash says, before they count as damaged: some are cut on the way.
TRIES = 3
# The digits of a hash.
HASH_LENGTH = len(hash_of(b""))
# Seconds between two looks for pieces, at first; later ones are further apart.
FIRST_LOOK, GROWTH = 0.005, 1.5


class PieceLayout(NamedTuple):
    """How the arrays of a message are cut into pieces of equal length, each with a part of the entries of each dtype.

    Attributes:
      number: the number of pieces.
      like: shapes and dtypes of the arrays.
    """

    number: int
    like: tuple[Any, ...]

    @property
    def kinds(self) -> list[tuple[np.dtype, int]]:
        """The dtypes, and how many entries of each a piece has: as many as the others, with zeros at the end."""
        sizes: Counter[np.dtype] = Counter()
        for x in self.like:
            sizes[np.dtype(x.dtype)] += int(np.prod(x.shape))
        return [(dtype, -(-size // self.number)) for dtype, size in sizes.items()]

    @property
    def size(self) -> int:
        """The bytes of a piece."""
        return sum(dtype.itemsize * count for dtype, count in self.kinds)

    def cut(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the pieces of arrays, as bytes: `uint8[number, size]`."""
        rows = np.zeros((self.number, self.size), np.uint8)
        start = 0
        for dtype, count in self.kinds:
            padded = np.zeros(self.number * count, dtype)
            flat = np.concatenate([x.ravel() for x in arrays if x.dtype == dtype])
            padded[: flat.size] = flat
            end = start + dtype.itemsize * count
            rows[:, start:end] = np.frombuffer(padded.tobytes(), np.uint8).reshape(self.number, -1)
            start = end
        return rows

    def join(self, rows: Sequence[bytes]) -> list[np.ndarray]:
        """Inverts `cut`."""
        flats, start = {}, 0
        for dtype, count in self.kinds:
            flats[dtype] = np.concatenate([np.frombuffer(row, dtype, count, start) for row in rows])
            start += dtype.itemsize * count
        arrays, taken = [], Counter[np.dtype]()
        for x in self.like:
            dtype, size = np.dtype(x.dtype), int(np.prod(x.shape))
            arrays.append(flats[dtype][taken[dtype] : taken[dtype] + size].reshape(x.shape))
            taken[dtype] += size
        return arrays

    def average(self, rows: Sequence[bytes], weights: Sequence[float]) -> bytes:
        """Returns `Σ n_w x_w / Σ n_w` of one piece, added in float32 or better in this order; zeros of no rows."""
        parts, start = [], 0
        for dtype, count in self.kinds:
            wide = np.dtype(np.float32) if dtype.itemsize < 4 else dtype
            total = np.zeros(count, wide)
            for row, weight in zip(rows, weights, strict=True):
                total += wide.type(np.float32(weight)) * np.frombuffer(row, dtype, count, start).astype(wide)
            # As `take_outer_step` divides.
            total *= wide.type(1) / wide.type(np.float32(sum(weights) or 1.0))
            parts.append(total.astype(dtype).tobytes())
            start += dtype.itemsize * count
        return b"".join(parts)


def check_owners(method: RoundMethod, plans: Sequence[MessagePlan]) -> None:
    """Raises ValueError where the mean of a piece follows from more than that piece of each drift."""
    if not all(plan.is_mean for plan in plans):
        raise ValueError(
            f"owners average pieces of what islands send, and {method.reducer} sends codes, which are no numbers to "
            "average: use exact() or power_sgd(rank), or owners=0"
        )
    if method.merge != "mean":
        raise ValueError(
            f"owners average pieces of drifts, and merge={method.merge!r} needs their whole lengths: use "
            'merge="mean", or owners=0'
        )


def read_piece(store: Connection, place: str, end: int, layout: PieceLayout, piece: int, hashed: str) -> bytes:
    """Reads a piece of a body that is so long, with this hash.

    Raises:
      DamagedError: it is missing, or its bytes are not those that its hash names.
    """
    start = end - (layout.number - piece) * layout.size
    row = store.get_range_of_body(place, end, start, start + layout.size)
    if row is None or hash_of(row) != hashed:
        raise DamagedError(f"piece {piece} of the body {place} is {'missing' if row is None else 'damaged'}")
    return row


def mean_name(number: int, *piece: int) -> str:
    """The name of a piece of the mean of a round, or their prefix."""
    return "/".join(("means", f"{number:08d}", *(f"{one:06d}" for one in piece)))


def line_for(piece: int, pieces: int, number: int, commit: Commit) -> list[str]:
    """The islands that compute a piece of a round, one in the place of those before it: its owner is the first.

    Owners are members that the next round waits for, if there are any, since others are late or leave. They take turns.
    The island whose turn it is to commit (`protocol.is_first_to_commit`) owns the last piece, which it has read before.
    """
    members = [member.name for member in commit.members]
    names = [name for name in members if name in commit.expected] or members
    start = (number + pieces - 1 - piece) % len(names)
    return names[start:] + names[:start]


def seal(commit: Commit, piece: int, row: bytes) -> bytes:
    """A piece of the mean of a commit as bytes, which begin with a hash of all three."""
    return _hash(commit, piece, row) + row


def unseal(name: str, commit: Commit, piece: int, body: bytes) -> bytes:
    """Inverts `seal`; raises DamagedError if the bytes are others, or the mean of another commit."""
    row = body[HASH_LENGTH:]
    if seal(commit, piece, row) != body:
        raise DamagedError(f"{name} is not what an owner has created: {len(body)} bytes were cut or altered")
    return row


def _hash(commit: Commit, piece: int, row: bytes) -> bytes:
    mark = [piece, [[member.body, member.weight] for member in commit.members]]
    return hash_of(protocol.to_json({"of": mark}) + row).encode()


class MeanPieces:
    """The pieces of the mean of one round, which `collect` computes or reads. All processes of an island call the same.

    Args:
      store: of the run.
      number: the round.
      commit: its end.
      layout: how bodies of this round are cut.
      known: returns a piece of the body of a place, if this island has it already.
      name: this island; without a name it creates nothing, and waits for no owner.
      seconds: after which it computes what no owner has.
      check: raises where the bodies of a round may be deleted.
    """

    def __init__(
        self,
        store: Connection,
        number: int,
        commit: Commit,
        layout: PieceLayout,
        *,
        known: Callable[[str, int], bytes | None],
        name: str,
        seconds: float,
        check: Callable[[int], None],
    ):
        self._store, self._number, self._commit, self._layout = store, number, commit, layout
        self._known, self._name, self._seconds, self._check = known, name, seconds, check
        self._rows: dict[int, bytes] = {}
        self._began = store.now()
        # When it computes each piece that it has not found.
        self._due = {piece: self._began + self._wait_for(piece) for piece in range(layout.number)}

    def _wait_for(self, piece: int) -> float:
        line = self._line_for(piece)
        if self._name not in line:
            return self._seconds
        # One after another, so that not all of them compute what one does not.
        place = line.index(self._name)
        return self._seconds * 0.5 * (1 + place / len(line)) if place else 0.0

    def _line_for(self, piece: int) -> list[str]:
        return line_for(piece, self._layout.number, self._number, self._commit)

    def collect(self) -> list[np.ndarray]:
        """Returns the mean; a later call goes on where this one ends by an error.

        Raises:
          _UnansweredError: an owner, or the store, has not sent a piece by the deadline.
          DamagedError: bytes are missing or not whole, and this process has no name.
        """
        store, pause = self._store, FIRST_LOOK
        if not self._layout.size:
            return [np.zeros(x.shape, x.dtype) for x in self._layout.like]
        pending = sorted(set(self._due) - set(self._rows), key=lambda piece: (self._due[piece], piece))
        moved_at = store.now()
        while pending:
            names = store.list(mean_name(self._number) + "/")
            there = {int(name.rpartition("/")[2]) for name in names}
            found = len(self._rows)
            for piece in pending:
                if piece in there:
                    self._rows[piece] = self._read(piece)
                elif store.now() >= self._due[piece]:
                    self._rows[piece] = self._compute(piece)
            pending = [piece for piece in pending if piece not in self._rows]
            now = store.now()
            if len(self._rows) > found:
                moved_at, pause = now, FIRST_LOOK
            if pending and now >= max(store.deadline + GRACE, moved_at + LEAST_SECONDS):
                owner = self._line_for(pending[0])[0]
                raise _UnansweredError(
                    f"piece {pending[0]} of the mean of round {self._number} has not come from {owner!r} within "
                    f"{now - self._began:.1f} s",
                    # As a body that takes longer than a meeting.
                    f"bodies/{mean_name(self._number, pending[0])}",
                )
            if pending:
                store.sleep(max(min(pause, self._due[pending[0]] - now), FIRST_LOOK))
                pause = min(GROWTH * pause, LONGEST_PAUSE)
        return self._layout.join([self._rows[piece] for piece in range(self._layout.number)])

    def _read(self, piece: int) -> bytes:
        """Reads a piece that is there; one that is damaged is computed again."""
        name, problem = mean_name(self._number, piece), None
        for _ in range(TRIES):
            try:
                return unseal(name, self._commit, piece, self._store.get(name) or b"")
            except DamagedError as error:
                problem = error
        logger.warning("%s; it is computed again", problem)
        return self._average(piece)

    def _compute(self, piece: int) -> bytes:
        """Computes a piece, and creates it unless another island is faster: then it is what that one has."""
        row, name = self._average(piece), mean_name(self._number, piece)
        if not self._name or self._store.create(name, seal(self._commit, piece, row)):
            return row
        return self._read(piece)

    def _average(self, piece: int) -> bytes:
        found = [(member.weight, self._read_row(member, piece)) for member in self._commit.members]
        rows = [(weight, row) for weight, row in found if row is not None]
        return self._layout.average([row for _, row in rows], [weight for weight, _ in rows])

    def _read_row(self, member: Member, piece: int) -> bytes | None:
        """The piece of a member's body; `None` if it stays damaged: then the mean of this piece is of the others.

        Only the owner decides that, and all apply what it creates.
        """
        known, store, tries = self._known(member.body, piece), self._store, 0
        while known is None:
            try:
                known = read_piece(store, member.body, member.bytes, self._layout, piece, member.pieces[piece])
            except DamagedError as error:
                self._check(protocol.round_of(member.body))
                tries, now = tries + 1, store.now()
                if tries >= TRIES and not self._name:
                    raise
                if tries >= TRIES and now >= self._began + self._seconds:
                    logger.warning("%s: round %d does not count it of %s", error, self._number, member.name)
                    return None
                if now >= max(store.deadline + GRACE, self._began + self._seconds):
                    raise _UnansweredError(str(error), protocol.body_name(member.body)) from error
                store.sleep(max(self._seconds / 10, FIRST_LOOK))
        return known
