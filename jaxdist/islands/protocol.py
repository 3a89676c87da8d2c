"""The protocol of a run: the bytes and names of what it stores, and what an island does next in a round.

All of it is pure: it needs no store and no devices. Bodies are a JSON header and raw arrays, never pickle; records are
JSON; the next action follows from the names that an island sees, and its own clock.

run.json                      the number of the run
methods/NUMBER.json           the model and the method that all islands share
names/NAME/000001             the first process that joined as NAME; the highest number is the one that counts
anchors/00000020              after 20 rounds: names the body with the global parameters
rounds/00000020/drift/NAME    what NAME adds in round 20: names the body, gives its weight
rounds/00000020/here/NAME     NAME will take part in round 20
rounds/00000020/left/NAME     NAME will not
rounds/00000020/commit        which drifts count, in which order; created once, by the island that is first; stays
bodies/00000020/HASH          bytes under their own hash, encoded while round 20 was open; of a long body (`bodies`) its
                              index, and a piece under each of the hashes in that
means/00000020/000003         with owners (`owners`): a piece of the mean of round 20, created by one of its members

A body is sent while rounds go on, so that a record may name one of an earlier round; but not of one that is more than
`most_rounds` old. So what no commit will ever name follows from numbers alone.

With fragments, each round is of one of them, in turn (`fragments.RoundOrder`). Its drifts, and the body of an earlier
round that it may count, have the leaves of that fragment alone, and its `base` is the digest of that fragment. Until
its own round the global parameters of a fragment stay as they are. So an island that leaves can put the drifts of all
fragments into the rounds to come.
"""

import enum
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._stores.base import hash_of
from .base import DamagedError

# 2: packed codes in planes. 3: bodies by rounds, and records of drifts that span several. 4: long bodies in pieces.
FORMAT = 4
_MAGIC = b"jaxdist1"


# Forms of the names that have numbers.
_FORMS = {
    "names": re.compile(r"names/[^/]+/[0-9]+"),
    "anchors": re.compile(r"anchors/[0-9]+"),
    "rounds": re.compile(r"rounds/[0-9]+/(commit|[^/]+/[^/]+)"),
    "bodies": re.compile(r"bodies/[0-9]+/[0-9a-f]+"),
    "means": re.compile(r"means/[0-9]+/[0-9]+"),
}
# A body can be counted for at least so many rounds of its fragment.
FEWEST_ROUNDS = 8
# The share of `round_timeout` that is left to the others where most of a meeting went into an upload.
LEAST_WAIT = 0.5


class Member(NamedTuple):
    """A drift that counts.

    Attributes:
      name: the island.
      body: the round and the hash of its bytes.
      weight: its weight in the mean.
      rate: the mean learning rate of its steps, or `None`.
      examples: all that it was trained on.
      bytes: the length of its body.
      pieces: with owners, the hashes of its pieces, which are at the end of the body.
    """

    name: str
    body: str
    weight: float
    rate: float | None
    examples: float
    bytes: int
    pieces: tuple[str, ...] = ()


class Drift(NamedTuple):
    """The record of a drift.

    Attributes:
      session: the process that sent it.
      body: the round and the hash of its bytes.
      bytes: their number.
      base: the digest of the global parameters of the round, of its fragment.
      weight: in the mean: its number of examples, of several rounds that of one.
      examples: all that it was trained on; 0 if the steps counted none.
      steps: their number, which may be those of several rounds.
      rate: the mean learning rate of its steps; `None` if the steps pass none.
      waited: whether the next round should wait for this island; false for one that is late again and again.
      leaving: whether this is its last.
      run: the first digits of the number of the run.
      pieces: with owners, the hashes of the pieces of its body.
    """

    session: int
    body: str
    bytes: int
    base: str
    weight: float
    examples: float
    steps: int
    rate: float | None
    waited: bool
    leaving: bool
    run: str = ""
    pieces: tuple[str, ...] = ()


class Commit(NamedTuple):
    """The end of a round.

    Attributes:
      by: the island that created it.
      base: the digest of the global parameters that its drifts start from.
      members: the drifts that count, in the order in which they are added.
      missing: islands that were waited for in vain.
      differing: islands whose global parameters were others.
      damaged: islands whose bodies were not what their hash says, or too old.
      expected: islands that the next round waits for.
      run: the first digits of the number of the run.
    """

    by: str
    base: str
    members: tuple[Member, ...]
    missing: tuple[str, ...]
    differing: tuple[str, ...]
    damaged: tuple[str, ...]
    expected: tuple[str, ...]
    run: str = ""


class Anchor(NamedTuple):
    """A kept state of the run before `round`.

    Attributes:
      body: the round and the hash of its bytes.
      digest: that of its arrays.
      counted: islands and the body of the last drift that a round took of each and each fragment, the most recent ones
        last.
    """

    round: int
    body: str
    digest: str
    counted: tuple[tuple[str, str], ...]


def round_name(number: int, *rest: str) -> str:
    """The name of what belongs to a round, or their prefix."""
    return "/".join(("rounds", f"{number:08d}", *rest))


def anchor_name(number: int) -> str:
    """The name of the record of the global parameters before a round."""
    return f"anchors/{number:08d}"


def body_place(number: int, body: bytes) -> str:
    """The place of bytes among all bodies: the round in which they were encoded, and their hash."""
    return f"{number:08d}/{hash_of(body)}"


def body_name(place: str) -> str:
    """The name of the bytes of a place."""
    return f"bodies/{place}"


def number_in(name: str) -> int:
    """The round in a name, whose second part it is."""
    return int(name.split("/")[1])


def is_of_run(name: str) -> bool:
    """Whether a name may be one of the protocol: others come by hand, as the folders of a bucket's console."""
    form = _FORMS.get(name.partition("/")[0])
    return form is None or form.fullmatch(name) is not None


def most_rounds(keep_every: int, fragments: int = 1) -> int:
    """For so many rounds a body can be counted: those from the one in which it was encoded."""
    return max(keep_every, FEWEST_ROUNDS * fragments)


def is_too_old(place: str, number: int, rounds: int) -> bool:
    """Whether a body can be counted no more in round `number`, where bodies are for so many rounds."""
    return round_of(place) <= number - rounds


def round_of(place: str) -> int:
    """The round of a body: that in which it was encoded, or for which, by an island that leaves."""
    return int(place.partition("/")[0])


def is_intact(place: str, body: bytes) -> bool:
    """Whether bytes are those that their place says."""
    return hash_of(body) == place.rpartition("/")[2]


def to_json(record: Any) -> bytes:
    """A record, or a dict, as JSON."""
    fields = record._asdict() if hasattr(record, "_asdict") else record
    # Without owners records are those of versions that know none.
    if isinstance(record, Drift | Member) and not record.pieces:
        del fields["pieces"]
    if isinstance(record, Commit):
        fields["members"] = [member if member.pieces else member[:-1] for member in record.members]
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def parse(kind: type, name: str, body: bytes) -> Any:
    """A record of this kind from its JSON. Raises `DamagedError` for anything else."""
    try:
        fields = json.loads(body)
        if kind is Commit:
            names = ("by", "base", "run")
            fields = {key: value if key in names else tuple(value) for key, value in fields.items()}
            fields["members"] = tuple(Member(*member[:6], *map(tuple, member[6:])) for member in fields["members"])
        if kind in (Drift, Member):
            fields["pieces"] = tuple(fields.get("pieces", ()))
        if kind is Anchor:
            fields["counted"] = tuple((name, body) for name, body in fields["counted"])
        return kind(**fields)  # pyright: ignore
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{name} is not a record of {kind.__name__}: {type(error).__name__}: {error}") from error


def pack(tag: str, arrays: Sequence[np.ndarray]) -> bytes:
    """Arrays as bytes: a header with shapes and dtypes, then their bits.

    The tag, the name of the record that will name this body, keeps equal arrays of two rounds apart: they are deleted
    at different times.
    """
    return b"".join(pack_parts(tag, arrays))


def pack_parts(tag: str, arrays: Sequence[np.ndarray]) -> list[memoryview]:
    """The parts that `pack` joins, as bytes: the header, and the memory of the arrays."""
    kinds = [[list(x.shape), str(x.dtype)] for x in arrays]
    header = json.dumps({"of": tag, "arrays": kinds}, separators=(",", ":")).encode()
    head = memoryview(_MAGIC + struct.pack("<I", len(header)) + header)
    return [head, *(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in arrays)]


def unpack(name: str, body: bytes, like: Sequence[Any] | None) -> list[np.ndarray]:
    """The arrays of a body whose name ends in its hash; shapes and dtypes must be those of `like`.

    If `like` is `None`, the body has one vector of bytes, of any length.

    Raises:
      DamagedError: the bytes are not those that were written, or are arrays of another model.
    """
    if not is_intact(name, body):
        raise DamagedError(f"the body {name} has another hash ({hash_of(body)}): {len(body)} bytes were cut or altered")
    return unpack_pieces(name, [body], like)


def unpack_pieces(name: str, pieces: list[bytes], like: Sequence[Any] | None) -> list[np.ndarray]:
    """As `unpack`, of bytes in pieces that are known to be whole; it removes each from the list when it has copied it.

    An array that is in a single piece is a view of it.
    """
    size = left = sum(map(len, pieces))
    try:
        magic, start = _take_bytes(pieces, 0, min(len(_MAGIC) + 4, size))
        length = struct.unpack("<I", magic[len(_MAGIC) :].tobytes())[0]
        found, start = _take_bytes(pieces, start, min(length, size - len(magic)))
        header = json.loads(found.tobytes())
    except (ValueError, struct.error) as error:
        raise DamagedError(f"the body {name} has no header: {error}") from error
    left -= len(magic) + length
    kinds = [((left,), np.dtype(np.uint8))]
    if like is not None:
        kinds = [(tuple(x.shape), np.dtype(x.dtype)) for x in like]
    wanted = [[list(shape), str(dtype)] for shape, dtype in kinds]
    if magic[: len(_MAGIC)].tobytes() != _MAGIC or not isinstance(header, dict) or header.get("arrays") != wanted:
        raise DamagedError(f"the body {name} holds other arrays than this run's: {header} instead of {wanted}")
    lengths = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in kinds]
    if sum(lengths) != left:
        raise DamagedError(f"the body {name} has {size} bytes instead of {size - left + sum(lengths)}")
    arrays = []
    for (shape, dtype), length in zip(kinds, lengths, strict=True):
        found, start = _take_bytes(pieces, start, length)
        arrays.append(found.view(dtype).reshape(shape))
    return arrays


def _take_bytes(pieces: list[bytes], start: int, length: int) -> tuple[np.ndarray, int]:
    """So many bytes of pieces from a place in the first one; and the place behind them, in the first that is left."""
    if start + length <= len(pieces[0]):
        return np.frombuffer(pieces[0], np.uint8, length, start), start + length
    found, done = np.empty(length, np.uint8), 0
    while done < length:
        some = np.frombuffer(pieces[0], np.uint8)[start : start + length - done]
        found[done : done + len(some)] = some
        done, start = done + len(some), start + len(some)
        if done < length:
            pieces.pop(0)
            start = 0
    return found, start


class Next(enum.Enum):
    """The next action: read the commit, create it, or look again later."""

    READ = "read"
    COMMIT = "commit"
    WAIT = "wait"


class Seen(NamedTuple):
    """The names of one round: whether it is committed, and the islands that sent a drift, are here, or have left."""

    committed: bool
    drifts: frozenset[str]
    here: frozenset[str]
    left: frozenset[str]


def see(names: Iterable[str]) -> Seen:
    """Sorts the names below a round, `drift/NAME` and so on."""
    found: dict[str, set[str]] = {"drift": set(), "here": set(), "left": set()}
    committed = False
    for name in names:
        kind, _, island = name.partition("/")
        committed |= kind == "commit"
        if kind in found:
            found[kind].add(island)
    return Seen(committed, *(frozenset(found[kind]) for kind in ("drift", "here", "left")))


def missing_islands(seen: Seen, expected: Iterable[str]) -> frozenset[str]:
    """Islands whose drifts this round waits for: those that the last commit expects, and those that are here."""
    return (frozenset(expected) | seen.here) - seen.left - seen.drifts


def is_first_to_commit(name: str, expected: Iterable[str], number: int) -> bool:
    """Whether an island is the one that commits a round first: they take turns, and one commit is read by all.

    Anyone else may commit; this only spares requests.
    """
    names = sorted(expected)
    return name not in names or names[number % len(names)] == name


def decide(
    seen: Seen,
    expected: Iterable[str],
    *,
    elapsed: float | int,
    since_few: float | int,
    round_timeout: float | int,
    grace: float | int,
    at_least: int,
    quorum: int,
    is_over: bool = False,
) -> Next:
    """The next action of an island whose own drift is in the store.

    A commit ends the round for all, even if some are missing. It is due when there are enough drifts, and nothing is
    left to wait for or the grace of those that are missing is over; and with `quorum` drifts in any case
    `round_timeout` seconds after one's own, on one's own clock. At the end of a meeting half of that is enough: if all
    islands were busy with uploads for the rest, they must not commit alone.

    Args:
      seen: the names of the round.
      expected: the islands that the last commit expects.
      elapsed: seconds since one's own drift.
      since_few: seconds since there were fewer than `quorum` and `at_least` drifts, as far as this island knows: since
        its last look that found so few, or since its own drift. So with `overlap` the grace begins with the training
        between two meetings, which costs no wait.
      round_timeout: how long to wait for others, in seconds.
      grace: how long to wait for those that are missing once there are enough drifts, in seconds.
      at_least: the number of drifts to wait for in the first round.
      quorum: the fewest drifts that make a round.
      is_over: whether this meeting is at its end.
    """
    if seen.committed:
        return Next.READ
    is_late = elapsed >= (LEAST_WAIT if is_over else 1.0) * round_timeout
    is_enough = len(seen.drifts) >= (quorum if is_late else max(quorum, at_least))
    is_done = is_late or since_few >= grace or not missing_islands(seen, expected)
    return Next.COMMIT if is_enough and is_done else Next.WAIT


def make_commit(
    seen: Seen,
    expected: Iterable[str],
    drifts: Mapping[str, Drift],
    damaged: Iterable[str],
    own_base: str,
    by: str,
    run: str = "",
) -> Commit:
    """The commit of these drifts, in the order of names.

    Drifts start from the global parameters of the round; where they differ, those that most of them start from count
    (one's own among equals), since sums of different starts would mean nothing. None from another run counts.
    """
    damaged = frozenset(damaged)
    sound = {name: drift for name, drift in sorted(drifts.items()) if name not in damaged}
    bases = [drift.base for drift in sound.values() if drift.run == run]
    base = max(sorted(set(bases)), key=lambda one: (bases.count(one), one == own_base), default=own_base)
    members = {name: drift for name, drift in sound.items() if (drift.base, drift.run) == (base, run)}
    return Commit(
        by=by,
        base=base,
        members=tuple(
            Member(name, drift.body, drift.weight, drift.rate, drift.examples, drift.bytes, drift.pieces)
            for name, drift in members.items()
        ),
        missing=tuple(sorted(missing_islands(seen, expected))),
        differing=tuple(sorted(set(sound) - set(members))),
        damaged=tuple(sorted(damaged)),
        expected=tuple(sorted(name for name, drift in drifts.items() if drift.waited and not drift.leaving)),
        run=run,
    )
