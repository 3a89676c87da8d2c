"""The code of a patch: which words of a state have changed, and to what, in few bytes.

A patch is exact for the state that it was made from: a change is coded as the difference of two bit patterns, which
is mostly plus or minus one, and the follower's pattern is known by its hash. See the page of the format in
docs/reference/publish.md.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..compressors.entropy_codes import (
    LANE_BITS,
    Reader,
    decode_streams,
    encode_streams,
    number_bytes,
    take_stream,
)
from .changes import Changes
from .words import PublishedLeaf

MAGIC = b"jdpatch2"
# Words of a part: it bounds the memory beside the state.
PART = 2**24
# Classes of words by the exponent of the old value: the largest of the part, half of it, and so on.
CLASSES = 24
# Words that are sorted by class at once: they and their order stay in the cache.
BLOCK = 2**18
# Numbers below this have a symbol each, larger ones a symbol for each quarter of a power of two.
DIRECT = 8
# Symbols of a lane at most: with those of `entropy_codes`, which has fewer bytes of lanes, a patch of signs takes eight
# times as many steps to read, for half a percent of its bytes.
LANE_SYMBOLS = 512
# Vectors of numbers whose symbols are coded side by side: their tables together have some 10 MB.
TOGETHER = 64
# Instead of an alphabet: numbers of one width as they are, where symbols would save less than three percent.
RAW, PLENTY = 255, 1.03
# Numbers below this, which most are, are split by a table.
SMALL = 2**16
BY_LEAF, FLAT = range(2)


class _Plan(NamedTuple):
    """A code that may be chosen: about how many bytes it has, its counts, and the vectors of numbers that follow."""

    size: float
    counts: bytes
    vectors: list[np.ndarray]


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
      (22, True)
    """
    chosen = []
    for members in _groups(leaves):
        plans = []
        for arrangement in (BY_LEAF, FLAT):
            parts = [
                _plan_part(changes, old, part, leaves[members[0]].dtype, arrangement)
                for part in _parts(members, leaves, arrangement)
            ]
            plans.append(_join(bytes([arrangement]), parts))
        chosen.append(min(plans, key=lambda plan: plan.size))
    whole = _join(MAGIC, chosen)
    return whole.counts + encode_vectors(whole.vectors)


def apply_patch(body: bytes, words: Sequence[np.ndarray], leaves: Sequence[PublishedLeaf]) -> None:
    """Turns one state into the other, in place.

    Raises:
      ValueError, IndexError: the body is no patch of such leaves (`DamagedCodeError` among them); the words are then
        undefined.
    """
    reader = Reader(body)
    if reader.take(len(MAGIC)) != MAGIC:
        raise ValueError(f"a patch begins with {MAGIC!r}, this one with {body[: len(MAGIC)]!r}")
    parts: list[tuple[list[_Piece], list[int]]] = []
    for members in _groups(leaves):
        arrangement = reader.take(1)[0]
        parts += [(part, _take_counts(reader, part)) for part in _parts(members, leaves, arrangement)]
    vectors = decode_vectors(reader, [count for _, counts in parts for count in counts if count for _ in range(2)])
    for part, counts in parts:
        if any(counts):
            found = _gather(words, part)
            _apply_part(found, counts, vectors, leaves[part[0].leaf].dtype)
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
    """The words of a part: those of a single piece as they are in memory."""
    pieces = [words[piece.leaf][piece.start : piece.stop] for piece in part]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _scatter(words: Sequence[np.ndarray], part: Sequence[_Piece], found: np.ndarray) -> None:
    place = 0
    for piece in part if len(part) > 1 else ():
        size = piece.stop - piece.start
        words[piece.leaf][piece.start : piece.stop] = found[place : place + size]
        place += size


# One part


def _plan_part(
    changes: Sequence[Changes], old: Sequence[np.ndarray], pieces: Sequence[_Piece], dtype: str, arrangement: int
) -> _Plan:
    part = _select(changes, old, pieces)
    simple = _plan_simple(part)
    if arrangement == BY_LEAF or simple.size < 1000 or not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return simple
    some = [_plan_simple(one) for one in _split_by_class(part, _gather(old, pieces), dtype)]
    counts = np.array([len(plan.vectors[0]) if plan.vectors else 0 for plan in some], "<u4")
    plan = _join(b"", some)._replace(counts=bytes([CLASSES]) + counts.tobytes())
    return min(simple, plan, key=lambda plan: plan.size)


def _split_by_class(part: _Part, words: np.ndarray, dtype: str) -> list[_Part]:
    """The changes of each class, with positions among its words."""
    wheres: list[list[np.ndarray]] = [[] for _ in range(CLASSES)]
    changes: list[list[np.ndarray]] = [[] for _ in range(CLASSES)]
    sizes = [0] * CLASSES
    for start, members in _blocks_by_class(words, dtype):
        first, last = np.searchsorted(part.where, (start, start + BLOCK))
        is_changed = np.zeros(BLOCK, bool)
        is_changed[part.where[first:last] - start] = True
        for kind, own in enumerate(members):
            found = np.flatnonzero(is_changed[own])
            wheres[kind].append(found + sizes[kind])
            changes[kind].append(first + np.searchsorted(part.where[first:last], own[found] + start))
            sizes[kind] += len(own)
    mine = [np.concatenate(found) for found in changes]
    return [
        _Part(np.concatenate(where), part.before[own], part.after[own], size)
        for where, own, size in zip(wheres, mine, sizes, strict=True)
    ]


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
    if not len(part.where):
        return _Plan(1, bytes([0]), [])
    # Vectors of several plans are in memory until one is chosen: positions of 64 bits would be most of it.
    vectors = [_narrow(np.diff(part.where, prepend=-1) - 1), _narrow(_zigzag(part.after - part.before) - 1)]
    return _Plan(5 + sum(map(_estimate, vectors)), bytes([1]) + number_bytes(len(part.where)), vectors)


def _join(head: bytes, plans: Sequence[_Plan]) -> _Plan:
    size = len(head) + sum(plan.size for plan in plans)
    return _Plan(size, head + b"".join(plan.counts for plan in plans), [x for plan in plans for x in plan.vectors])


def _take_counts(reader: Reader, part: Sequence[_Piece]) -> list[int]:
    """How many words of a part have changed, in all or in each class; empty if none has."""
    length, size = reader.take(1)[0], sum(piece.stop - piece.start for piece in part)
    counts = reader.take_array(length, "<u4").tolist() if length in (0, 1, CLASSES) else [size + 1]
    if sum(counts) > size:
        raise ValueError(f"a part of {size} words has {length} counts, of {sum(counts)} changes")
    return counts


def _apply_part(words: np.ndarray, counts: Sequence[int], vectors: Iterator[np.ndarray], dtype: str) -> None:
    """Changes the words of a part in place."""
    changes = {kind: _take_changes(vectors, words.dtype) for kind, count in enumerate(counts) if count}
    if len(counts) == 1:
        words[changes[0].where] += changes[0].words
        return
    # For each class, how many of its words and of its changes are in the blocks before.
    sizes, done = [0] * CLASSES, [0] * CLASSES
    for start, members in _blocks_by_class(words, dtype):
        block = words[start : start + BLOCK]
        # A class of large words seldom changes.
        for kind, (where, steps) in changes.items():
            first, own = done[kind], members[kind]
            last = done[kind] = int(where.searchsorted(sizes[kind] + len(own)))
            block[own[where[first:last] - sizes[kind]]] += steps[first:last]
            sizes[kind] += len(own)


def _take_changes(vectors: Iterator[np.ndarray], dtype: np.dtype) -> Changes:
    """The next changes: positions, and the differences of the words."""
    gaps, steps = next(vectors), next(vectors)
    return Changes(np.cumsum(gaps.astype(np.int64) + 1) - 1, _unzigzag(steps.astype(dtype) + dtype.type(1)))


def _blocks_by_class(words: np.ndarray, dtype: str) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Block by block: where it begins, and where in it the words of each class are, which may be changed afterwards.

    How likely a small step changes a floating-point number follows from its size. A class is how many powers of two
    its exponent is below the largest one of all words.
    """
    info, starts = jnp.finfo(dtype), range(0, len(words), BLOCK)
    shift, mask = words.dtype.type(info.nmant), words.dtype.type(2**info.nexp - 1)
    largest = max(np.max((words[start : start + BLOCK] >> shift) & mask) for start in starts)
    for start in starts:
        exponents = (words[start : start + BLOCK] >> shift) & mask
        classes = np.minimum(largest - exponents, CLASSES - 1).astype(np.uint8)
        order = np.argsort(classes, kind="stable")
        bounds = np.searchsorted(classes, np.arange(CLASSES + 1), sorter=order)
        yield start, [order[first:last] for first, last in itertools.pairwise(bounds)]


def _narrow(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(np.max(numbers))), copy=False)


def _zigzag(steps: np.ndarray) -> np.ndarray:
    """Differences of words, as unsigned numbers that are small for small ones of either sign: 1, -1, 2 are 2, 1, 4."""
    last = steps.dtype.type(8 * steps.dtype.itemsize - 1)
    sign = -(steps >> last)  # all bits of a negative one
    return (steps << steps.dtype.type(1)) ^ sign


def _unzigzag(codes: np.ndarray) -> np.ndarray:
    one = codes.dtype.type(1)
    return (codes >> one) ^ -(codes & one)


# Numbers of any size: a symbol, and bits that are sent as they are


def encode_vectors(vectors: Sequence[np.ndarray]) -> bytes:
    """Encodes vectors of numbers below `2**64`, none empty: symbols by rANS, and lower bits of large ones.

    Examples:
      >>> body = encode_vectors([np.array([0, 7, 8, 1000]), np.array([1])])
      >>> [x.tolist() for x in decode_vectors(Reader(body), [4, 1])]
      [[0, 7, 8, 1000], [1]]
    """
    return b"".join(_encode_batch(vectors[start:][:TOGETHER]) for start in range(0, len(vectors), TOGETHER))


def decode_vectors(reader: Reader, counts: Sequence[int]) -> Iterator[np.ndarray]:
    """Decodes vectors of so many numbers, each as uint64.

    Raises:
      DamagedCodeError: the bytes are no such code.
    """
    for start in range(0, len(counts), TOGETHER):
        yield from _decode_batch(reader, counts[start:][:TOGETHER])


def _encode_batch(vectors: Sequence[np.ndarray]) -> bytes:
    kinds, symbols, rests = [], [], []
    for vector in vectors:
        numbers = vector.astype(np.uint64)
        if _is_raw(numbers):
            width = _width_of(numbers)
            kinds.append(bytes([RAW, width]))
            rests.append(_pack(numbers, width))
            continue
        some, lengths, rest = _split(numbers)
        kinds.append(bytes([int(np.max(some))]))
        symbols.append(some)
        rests += [_pack(rest[lengths == bits], bits) for bits in _lengths_in(lengths)]
    if not symbols:
        return b"".join(kinds + rests)
    streams, words = encode_streams(symbols, [int(np.max(some)) + 1 for some in symbols], most=LANE_SYMBOLS)
    heads = [number_bytes(len(stream.states)) + stream.to_bytes() for stream in streams]
    return b"".join([*kinds, *heads, number_bytes(len(words)), words.tobytes(), *rests])


def _decode_batch(reader: Reader, counts: Sequence[int]) -> Iterator[np.ndarray]:
    kinds = []
    for count in counts:
        kind = reader.take(1)[0]
        kinds.append((count, kind, reader.take(1)[0] if kind == RAW else 0))
    streams = [take_stream(reader, count, kind + 1, reader.take_number()) for count, kind, _ in kinds if kind != RAW]
    symbols = iter(decode_streams(streams, reader.take_array(reader.take_number(), "<u2")) if streams else ())
    for count, kind, width in kinds:
        yield _take_rests(reader, width, count) if kind == RAW else _join_rests(reader, next(symbols))


def _join_rests(reader: Reader, symbols: np.ndarray) -> np.ndarray:
    """The numbers of symbols, with their lower bits."""
    values, lengths = (table.take(symbols) for table in _numbers_of_symbols())
    for bits in _lengths_in(lengths):
        where = np.flatnonzero(lengths == bits)
        values[where] |= _take_rests(reader, bits, len(where))
    return values


@functools.cache
def _numbers_of_symbols() -> tuple[np.ndarray, np.ndarray]:
    """The least number of each symbol, and how many bits follow."""
    symbols = np.arange(256)
    large = symbols >= DIRECT
    lengths = np.where(large, (symbols - DIRECT) // 4 + 1, 0)
    return np.where(large, 4 + (symbols - DIRECT) % 4, symbols).astype(np.uint64) << lengths.astype(np.uint64), lengths


def _take_rests(reader: Reader, bits: int, count: int) -> np.ndarray:
    return _unpack(reader.take(-(-count * bits // 8)), bits, count)


def _is_raw(numbers: np.ndarray) -> bool:
    return len(numbers) * _width_of(numbers) / 8 <= PLENTY * _estimate_symbols(numbers)


def _width_of(numbers: np.ndarray) -> int:
    return int(np.max(numbers)).bit_length()


def _split(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The symbols of numbers, how many of their bits follow, and these."""
    if int(np.max(numbers)) < SMALL:
        small = numbers.astype(np.intp)
        symbols, lengths, rests = _split_small()
        return symbols.take(small), lengths.take(small), rests.take(small)
    return _split_any(numbers)


@functools.cache
def _split_small() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _split_any(np.arange(SMALL, dtype=np.uint64))


def _split_any(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    """About how many bytes a vector takes."""
    numbers = values.astype(np.uint64)
    raw, coded = -(-len(values) * _width_of(numbers) // 8), _estimate_symbols(numbers)
    return 2 + raw if raw <= PLENTY * coded else coded


def _estimate_symbols(values: np.ndarray) -> float:
    symbols, lengths, _ = _split(values)
    counts = np.bincount(symbols)
    bits = float(np.sum(counts * (np.log2(max(len(symbols), 1)) - np.log2(np.maximum(counts, 1)))))
    lanes = max(1, bits // LANE_BITS, len(symbols) // LANE_SYMBOLS)
    return 9 + 2 * len(counts) + 3 * lanes + (bits + float(np.sum(lengths))) / 8
