"""The layout of the state on disk: concatenated leaves, cut into chunks of equal size."""

import bisect
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Chunks are multiples of this many entries: whole pages for dtypes of any width, and no odd lengths for XLA.
UNIT = 4096


class Segment(NamedTuple):
    """The entries of one leaf (one shard of it) in a stream."""

    leaf: int
    shard: int
    start: int
    size: int


class Chunk(NamedTuple):
    """`length` entries of a stream from entry `start`; on disk one array after another, from byte `offset`."""

    stream: int
    start: int
    length: int
    offset: int
    nbytes: int


class Layout(NamedTuple):
    """Streams (leaves with arrays of the same dtypes) and their chunks.

    `dtypes[stream]`: the dtypes of the arrays on disk that belong to each leaf.
    """

    dtypes: tuple[tuple[np.dtype, ...], ...]
    segments: tuple[tuple[Segment, ...], ...]
    chunks: tuple[Chunk, ...]
    nbytes: int
    signature: str


class Piece(NamedTuple):
    """Entries `start` to `start + size` of a shard of a leaf."""

    leaf: int
    shard: int
    start: int
    size: int


def lay_out(
    names: Sequence[str], sizes: Sequence[Sequence[int]], dtypes: Sequence[Sequence[Any]], chunk_bytes: int, where: str
) -> Layout:
    """Concatenates the shards (`sizes[leaf][shard]`) of all leaves, the largest first.

    Raises:
      ValueError: a chunk is too small for 4096 entries.
    """
    kinds = list(dict.fromkeys(tuple(np.dtype(d) for d in each) for each in dtypes))
    streams: list[tuple[Segment, ...]] = []
    chunks: list[Chunk] = []
    offset = 0
    for number, kind in enumerate(kinds):
        members = [
            (leaf, shard, size)
            for leaf, each in enumerate(sizes)
            for shard, size in enumerate(each)
            if tuple(np.dtype(d) for d in dtypes[leaf]) == kind and size
        ]
        # Large shards first: most spans then hold entries of one leaf, which need no copy.
        members.sort(key=lambda member: -member[2])
        segments, total = [], 0
        for leaf, shard, size in members:
            segments.append(Segment(leaf, shard, total, size))
            total += size
        streams.append(tuple(segments))
        width = sum(d.itemsize for d in kind)
        most = chunk_bytes // max(width, 1) // UNIT * UNIT
        if not most:
            raise ValueError(f"chunk_bytes={chunk_bytes} is too small: {UNIT} entries need {UNIT * width} bytes")
        for start in range(0, total, most):
            length = min(most, -(-(total - start) // UNIT) * UNIT)
            chunks.append(Chunk(number, start, length, offset, length * width))
            offset += length * width
    # A store may only be opened for the same layout.
    text = repr((list(names), [list(x) for x in sizes], [[d.name for d in kind] for kind in kinds], chunks, where))
    return Layout(tuple(kinds), tuple(streams), tuple(chunks), offset, hashlib.sha256(text.encode()).hexdigest())


def pieces(segments: Sequence[Segment], start: int, stop: int) -> list[Piece]:
    """The parts of leaves between two entries of a stream."""
    # The last segment that starts at or before `start`.
    at = bisect.bisect_right([s.start for s in segments], start) - 1
    found = []
    while at < len(segments) and segments[at].start < stop:
        segment = segments[at]
        first, last = max(start, segment.start), min(stop, segment.start + segment.size)
        if first < last:
            found.append(Piece(segment.leaf, segment.shard, first - segment.start, last - first))
        at += 1
    return found


def planes(data: np.ndarray, chunk: Chunk, dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
    """The arrays of a chunk as views of its bytes."""
    views, at = [], 0
    for dtype in dtypes:
        nbytes = chunk.length * dtype.itemsize
        views.append(data[at : at + nbytes].view(dtype))
        at += nbytes
    return views
