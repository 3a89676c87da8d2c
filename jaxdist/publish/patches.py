"""The code of a patch: which words of a state have changed, and to what, in few bytes.

A patch is exact for the state that it was made from: a change is coded as the difference of two bit patterns, which
is mostly plus or minus one, and the follower's pattern is known by its hash. See the page of the format in
docs/reference/publish.md.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..compressors.entropy_codes import LANE_BITS, Reader, decode_symbols, encode_symbols, number_bytes
from ..compressors.positions import decode_host_positions, encode_host_positions, positions_bytes
from .changes import Changes
from .words import PublishedLeaf

MAGIC = b"jdpatch1"
# Words of a part: it bounds the memory beside the state.
PART = 2**24
# Classes of words by the exponent of the old value: the largest of the part, half of it, and so on.
CLASSES = 24
# Numbers below this have a symbol each, larger ones a symbol for each quarter of a power of two.
DIRECT = 8
# Symbols of a lane at most: with those of `entropy_codes`, which has fewer bytes of lanes, a patch of signs takes eight
# times as many steps to read, for half a percent of its bytes.
LANE_SYMBOLS = 512
# Instead of an alphabet: numbers of one width as they are, where symbols would save less than three percent.
RAW, PLENTY = 255, 1.03
UNCHANGED, PLAIN, CODED, CLASSED = range(4)
BY_LEAF, FLAT = range(2)


class _Plan(NamedTuple):
    """A code that may be chosen: about how many bytes it has, and the function that makes it."""

    size: float
    encode: Callable[[], bytes]


class _Piece(NamedTuple):
    """Words of a leaf."""

    leaf: int
    start: int
    stop: int


class _Part(NamedTuple):
    """The changes of a part: positions in it, the words there before and after, and how many words it has."""

    where: np.ndarray
    before: np.ndarray
    after: np.ndarray
    size: int


def encode_patch(changes: Sequence[Changes], old: Sequence[np.ndarray], leaves: Sequence[PublishedLeaf]) -> bytes:
    """Encodes the changes of a state.

    Leaves of one dtype form a group, coded leaf by leaf or as one vector, whichever is estimated to be smaller.

    Examples:
      >>> from jaxdist.publish.changes import find_changes
      >>> leaf, old = PublishedLeaf("w", (1000,), "bfloat16"), np.full(1000, 0x3F80, np.uint16)
      >>> new = old.copy()
      >>> new[[3, 500]] += 1
      >>> body = encode_patch([find_changes(old, new)], [old], [leaf])
      >>> apply_patch(body, [old], [leaf])
      >>> len(body), bool((old == new).all())
      (21, True)
    """
    bodies = [MAGIC]
    for members in _groups(leaves):
        plans = []
        for arrangement in (BY_LEAF, FLAT):
            parts = [
                _plan_part(changes, old, part, leaves[members[0]].dtype, arrangement)
                for part in _parts(members, leaves, arrangement)
            ]
            plans.append(_join(bytes([arrangement]), parts))
        bodies.append(min(plans, key=lambda plan: plan.size).encode())
    return b"".join(bodies)


def apply_patch(body: bytes, words: Sequence[np.ndarray], leaves: Sequence[PublishedLeaf]) -> None:
    """Turns one state into the other, in place.

    Raises:
      ValueError: the body is no patch of such leaves (`DamagedCodeError` among them); the words are then undefined.
    """
    reader = Reader(body)
    if reader.take(len(MAGIC)) != MAGIC:
        raise ValueError(f"a patch begins with {MAGIC!r}, this one with {body[: len(MAGIC)]!r}")
    for members in _groups(leaves):
        arrangement = reader.take(1)[0]
        for part in _parts(members, leaves, arrangement):
            found = _gather(words, part)
            if _decode_part(reader, found, leaves[members[0]].dtype):
                _scatter(words, part, found)
    reader.finish()


# Parts of a group: pieces of leaves, in order


def _groups(leaves: Sequence[PublishedLeaf]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(number)
    return [*groups.values()]


def _parts(members: Sequence[int], leaves: Sequence[PublishedLeaf], arrangement: int) -> Iterator[list[_Piece]]:
    part, room = [], PART
    for number in members:
        start, size = 0, leaves[number].size
        while start < size:
            stop = min(size, start + room)
            part.append(_Piece(number, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield part
                part, room = [], PART
        if arrangement == BY_LEAF and part:
            yield part
            part, room = [], PART
    if part:
        yield part


def _gather(words: Sequence[np.ndarray], part: Sequence[_Piece]) -> np.ndarray:
    return np.concatenate([words[piece.leaf][piece.start : piece.stop] for piece in part])


def _scatter(words: Sequence[np.ndarray], part: Sequence[_Piece], found: np.ndarray) -> None:
    place = 0
    for piece in part:
        size = piece.stop - piece.start
        words[piece.leaf][piece.start : piece.stop] = found[place : place + size]
        place += size


# One part


def _plan_part(
    changes: Sequence[Changes], old: Sequence[np.ndarray], pieces: Sequence[_Piece], dtype: str, arrangement: int
) -> _Plan:
    part = _select(changes, old, pieces)
    simple = _plan_simple(part)
    if arrangement == BY_LEAF or simple.size < 1000 or (classes := _classes_of(_gather(old, pieces), dtype)) is None:
        return simple
    some = [_plan_class(part, classes, kind) for kind in range(CLASSES)]
    return min(simple, _join(bytes([CLASSED]), some), key=lambda plan: plan.size)


def _plan_class(part: _Part, classes: np.ndarray, kind: int) -> _Plan:
    mine = np.flatnonzero(classes[part.where] == kind)
    if not len(mine):
        return _plan_simple(_Part(mine, mine, mine, 0))
    members = np.flatnonzero(classes == kind)
    where = np.searchsorted(members, part.where[mine])
    return _plan_simple(_Part(where, part.before[mine], part.after[mine], len(members)))


def _select(changes: Sequence[Changes], old: Sequence[np.ndarray], pieces: Sequence[_Piece]) -> _Part:
    """The changes within the pieces of a part."""
    where, before, after, place = [], [], [], 0
    for leaf, start, stop in pieces:
        first, last = np.searchsorted(changes[leaf].where, (start, stop))
        some = changes[leaf].where[first:last]
        where.append(some - start + place)
        before.append(old[leaf][some])
        after.append(changes[leaf].words[first:last])
        place += stop - start
    return _Part(np.concatenate(where), np.concatenate(before), np.concatenate(after), place)


def _plan_simple(part: _Part) -> _Plan:
    where = part.where
    if not len(where):
        return _Plan(1, lambda: bytes([UNCHANGED]))
    head = 5
    plain = _Plan(
        head + positions_bytes(len(where), part.size) + part.after.nbytes,
        lambda: _head(PLAIN, where) + encode_host_positions(where, part.size).tobytes() + part.after.tobytes(),
    )
    gaps, steps = np.diff(where, prepend=-1) - 1, _zigzag(part.after - part.before) - 1
    coded = _Plan(
        head + _estimate(gaps) + _estimate(steps),
        lambda: _head(CODED, where) + encode_numbers(gaps) + encode_numbers(steps),
    )
    return min(plain, coded, key=lambda plan: plan.size)


def _head(form: int, where: np.ndarray) -> bytes:
    return bytes([form]) + number_bytes(len(where))


def _join(head: bytes, plans: Sequence[_Plan]) -> _Plan:
    size = len(head) + sum(plan.size for plan in plans)
    return _Plan(size, lambda: head + b"".join(plan.encode() for plan in plans))


def _decode_part(reader: Reader, words: np.ndarray, dtype: str) -> bool:
    """Decodes a part in place; returns whether a word has changed."""
    form = reader.take(1)[0]
    if form != CLASSED:
        return _decode_simple(reader, form, words)
    classes = _classes_of(words, dtype)
    if classes is None:
        raise ValueError(f"{dtype} has no classes")
    for kind in range(CLASSES):
        form = reader.take(1)[0]
        # Large words seldom change, and to find them takes time.
        if form != UNCHANGED:
            where = np.flatnonzero(classes == kind)
            some = words[where]
            _decode_simple(reader, form, some)
            words[where] = some
    return True


def _decode_simple(reader: Reader, form: int, words: np.ndarray) -> bool:
    if form == UNCHANGED:
        return False
    count = reader.take_number()
    if form not in (PLAIN, CODED) or count > len(words):
        raise ValueError(f"a part of {len(words)} words has form {form} and {count} changes")
    if form == PLAIN:
        where = _take_positions(reader, count, len(words))
        words[where] = reader.take_array(count, words.dtype)
    else:
        where = np.cumsum(decode_numbers(reader, count).astype(np.int64) + 1) - 1
        words[where] += _unzigzag(decode_numbers(reader, count).astype(words.dtype) + words.dtype.type(1))
    return True


def _take_positions(reader: Reader, count: int, size: int) -> np.ndarray:
    taken = positions_bytes(count, size)
    # Where no code is shorter, the positions are plain words.
    plain = np.dtype("<u2" if size <= 2**16 else "<u4")
    dtype = plain if taken == count * plain.itemsize else np.dtype(np.uint8)
    return decode_host_positions(reader.take_array(taken // dtype.itemsize, dtype), count, size)


def _classes_of(words: np.ndarray, dtype: str) -> np.ndarray | None:
    """The class of each word of floating-point numbers: how likely a small step changes it follows from its size."""
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return None
    info = jnp.finfo(dtype)
    exponents = (words >> words.dtype.type(info.nmant)) & words.dtype.type(2**info.nexp - 1)
    return np.minimum(np.max(exponents) - exponents, CLASSES - 1).astype(np.uint8)


def _zigzag(steps: np.ndarray) -> np.ndarray:
    """Differences of words, as unsigned numbers that are small for small ones of either sign: 1, -1, 2 are 2, 1, 4."""
    last = steps.dtype.type(8 * steps.dtype.itemsize - 1)
    sign = -(steps >> last)  # all bits of a negative one
    return (steps << steps.dtype.type(1)) ^ sign


def _unzigzag(codes: np.ndarray) -> np.ndarray:
    one = codes.dtype.type(1)
    return (codes >> one) ^ -(codes & one)


# Numbers of any size: a symbol, and bits that are sent as they are


def encode_numbers(values: np.ndarray) -> bytes:
    """Encodes numbers below `2**64`: symbols by rANS, and the lower bits of those that are large.

    Examples:
      >>> body = encode_numbers(np.array([0, 7, 8, 1000]))
      >>> decode_numbers(Reader(body), 4).tolist()
      [0, 7, 8, 1000]
    """
    numbers = values.astype(np.uint64)
    width = int(np.max(numbers, initial=0)).bit_length()
    if len(values) * width / 8 <= PLENTY * _estimate_symbols(numbers):
        return bytes([RAW, width]) + (_pack(numbers, width) if width else b"")
    symbols, lengths, rest = _split(numbers)
    alphabet = int(np.max(symbols, initial=0)) + 1
    parts = [bytes([alphabet - 1]), encode_symbols(symbols, alphabet, most=LANE_SYMBOLS)]
    parts += [_pack(rest[lengths == bits], bits) for bits in _lengths_in(lengths)]
    return b"".join(parts)


def decode_numbers(reader: Reader, count: int) -> np.ndarray:
    """Decodes `count` numbers, as uint64.

    Raises:
      DamagedCodeError: the bytes are no such code.
    """
    kind = reader.take(1)[0]
    if kind == RAW:
        width = reader.take(1)[0]
        return _unpack(reader.take(-(-count * width // 8)), width, count) if width else np.zeros(count, np.uint64)
    symbols = decode_symbols(reader, count, kind + 1).astype(np.int64)
    large = symbols >= DIRECT
    lengths = np.where(large, (symbols - DIRECT) // 4 + 1, 0)
    values = np.where(large, 4 + (symbols - DIRECT) % 4, symbols).astype(np.uint64) << lengths.astype(np.uint64)
    for bits in _lengths_in(lengths):
        where = np.flatnonzero(lengths == bits)
        values[where] |= _unpack(reader.take(-(-len(where) * bits // 8)), bits, len(where))
    return values


def _split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The symbols of numbers, how many of their bits follow, and these."""
    numbers = values.astype(np.uint64)
    top = (np.frexp(np.maximum(numbers, DIRECT).astype(np.float64))[1] - 1).astype(np.uint64)
    # Numbers of more than 53 bits may have been rounded up to a power of two.
    top -= np.maximum(numbers, DIRECT) >> top == 0
    lengths = np.where(numbers < DIRECT, 0, top - np.uint64(2)).astype(np.uint64)
    quarters = (numbers >> lengths) & np.uint64(3)
    symbols = np.where(numbers < DIRECT, numbers, DIRECT + (lengths - np.uint64(1)) * np.uint64(4) + quarters)
    return symbols.astype(np.uint8), lengths.astype(np.int64), numbers & ((np.uint64(1) << lengths) - np.uint64(1))


def _lengths_in(lengths: np.ndarray) -> list[int]:
    return (np.flatnonzero(np.bincount(lengths, minlength=1)[1:]) + 1).tolist()


def _pack(values: np.ndarray, bits: int) -> bytes:
    some = values.astype(np.min_scalar_type(2**bits - 1))
    shifts = np.arange(bits, dtype=some.dtype)
    return np.packbits(((some[:, None] >> shifts) & some.dtype.type(1)).astype(np.uint8)).tobytes()


def _unpack(body: bytes, bits: int, count: int) -> np.ndarray:
    found = np.unpackbits(np.frombuffer(body, np.uint8), count=count * bits).reshape(count, bits)
    out = np.zeros(count, np.uint64)
    for bit in range(bits):
        out |= found[:, bit].astype(np.uint64) << np.uint64(bit)
    return out


def _estimate(values: np.ndarray) -> float:
    """About how many bytes `encode_numbers` needs."""
    numbers = values.astype(np.uint64)
    raw = -(-len(values) * int(np.max(numbers, initial=0)).bit_length() // 8)
    coded = _estimate_symbols(numbers)
    return 2 + raw if raw <= PLENTY * coded else coded


def _estimate_symbols(values: np.ndarray) -> float:
    symbols, lengths, _ = _split(values)
    counts = np.bincount(symbols)
    bits = float(np.sum(counts * (np.log2(max(len(symbols), 1)) - np.log2(np.maximum(counts, 1)))))
    lanes = max(1, bits // LANE_BITS, len(symbols) // LANE_SYMBOLS)
    return 9 + 2 * len(counts) + 3 * lanes + (bits + float(np.sum(lengths))) / 8
