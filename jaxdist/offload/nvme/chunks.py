"""The state on disk in chunks, and the programs of leaves that run on them, span by span."""

import bisect
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from ...state.marks import LeafOrder
from .arrays import Sink, allocate_aligned
from .entrywise import EntryProgram

# Chunks are multiples of this many entries: whole pages for dtypes of any width, and no odd lengths for XLA.
UNIT = 4096
# Entries in a span: its arrays stay in the cache while they are computed and written back.
SPAN = 1 << 18
# XLA computes an array this short in one thread.
THREADS = min(4, os.cpu_count() or 1)

# `(start, size) -> entries` of an array in memory.
Source = Callable[[int, int], np.ndarray]


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

    `dtypes[stream]`: the dtypes of the arrays on disk that belong to each leaf. `order` has the names and shapes of the
    parameters, and then of the optimizer's state, which the signature does not have.
    """

    dtypes: tuple[tuple[np.dtype, ...], ...]
    segments: tuple[tuple[Segment, ...], ...]
    chunks: tuple[Chunk, ...]
    nbytes: int
    signature: str
    order: LeafOrder = ()


class Piece(NamedTuple):
    """Entries `start` to `start + size` of a shard of a leaf."""

    leaf: int
    shard: int
    start: int
    size: int


def lay_out(
    names: Sequence[str], sizes: Sequence[Sequence[int]], dtypes: Sequence[Sequence[Any]], chunk_bytes: int, where: str
) -> Layout:
    """Concatenates the shards (`sizes[leaf][shard]`) of all leaves, the largest first."""
    # One stream for each combination of dtypes, so that all arrays of a chunk are equally long.
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


class EntrySpan(NamedTuple):
    """Entries `start` to `start + size` of a chunk, whose leaves share a program; computed as `length` entries."""

    program: int
    start: int
    size: int
    length: int
    pieces: tuple[Piece, ...]


def spans_of(layout: Layout, programs: Sequence[EntryProgram]) -> list[list[EntrySpan]]:
    """The spans of each chunk. They have only two lengths, so that each program is compiled at most twice."""
    found = []
    for chunk in layout.chunks:
        inside = pieces(layout.segments[chunk.stream], chunk.start, chunk.start + chunk.length)
        spans, at = [], 0
        for _, group in groupby(inside, lambda piece: (programs[piece.leaf].key, programs[piece.leaf].numbers)):
            rest = list(group)
            left = sum(piece.size for piece in rest)
            while left:
                # A short rest is computed in small spans: padding it to a large one would cost more.
                length = SPAN if left > SPAN // 4 else UNIT
                size = min(length, left)
                spans.append(EntrySpan(rest[0].leaf, at, size, length, tuple(_pop_entries(rest, size))))
                at, left = at + size, left - size
        found.append(spans)
    return found


def _pop_entries(pieces: list[Piece], size: int) -> list[Piece]:
    """Removes `size` entries from the front of `pieces`, and returns them."""
    popped = []
    while size:
        piece = pieces.pop(0)
        part = min(piece.size, size)
        popped.append(piece._replace(size=part))
        if part < piece.size:
            pieces.insert(0, piece._replace(start=piece.start + part, size=piece.size - part))
        size -= part
    return popped


class _Operands(NamedTuple):
    """What the programs of a step read beside the chunks, and where their last results go."""

    numbers: list[Any]
    sources: Sequence[Sequence[Sequence[Source]]]
    sinks: Sequence[Sequence[Sink]] | None
    fresh: bool


class Runner:
    """Runs the programs of one step, one for each leaf, on chunks. `compiled` caches compiled programs by key."""

    def __init__(self, layout: Layout, programs: Sequence[EntryProgram], compiled: dict[str, Callable]):
        self.layout, self.programs, self.compiled = layout, programs, compiled
        self.spans = spans_of(layout, programs)
        self.host = jax.local_devices(backend="cpu")[0]
        self.scratch = threading.local()
        self.pool = ThreadPoolExecutor(THREADS, "nvme-compute")
        for program in programs:
            compiled.setdefault(program.key, jax.jit(program.run))

    def step(
        self,
        numbers: Sequence[Any],
        sources: Sequence[Sequence[Sequence[Source]]],
        sinks: Sequence[Sequence[Sink]] | None,
        fresh: bool = False,
    ) -> Callable[[int, np.ndarray], None]:
        """Returns the function that updates one chunk in place.

        `numbers` are the results of the head; `sources[array][leaf][shard]` the arrays in memory that programs read;
        `sinks[leaf][shard]` receive the last result of each program. A `fresh` chunk has no contents to read yet.
        """
        on_host = [jax.device_put(np.asarray(x), self.host) for x in numbers]
        return partial(self._visit, _Operands(on_host, sources, sinks, fresh))

    def _visit(self, operands: _Operands, k: int, data: np.ndarray) -> None:
        chunk = self.layout.chunks[k]
        if operands.fresh:
            data[...] = 0
        run = partial(self._run_span, operands, data, planes(data, chunk, self.layout.dtypes[chunk.stream]))
        jobs = [self.pool.submit(run, span) for span in self.spans[k]]
        wait(jobs)
        for job in jobs:
            job.result()

    def _run_span(self, operands: _Operands, data: np.ndarray, stored: Sequence[np.ndarray], span: EntrySpan) -> None:
        stop = span.start + span.length
        arrays: list[np.ndarray] = []
        # Vectors that fill the span are passed as views; only the last, shorter one is copied and padded.
        for plane in () if operands.fresh else stored:
            part = plane[span.start : stop]
            arrays.append(part if stop <= plane.size else self._pad(len(arrays), [part], span.length))
        for source in operands.sources:
            parts = [source[p.leaf][p.shard](p.start, p.size) for p in span.pieces]
            fits = len(parts) == 1 and span.size == span.length
            arrays.append(parts[0] if fits else self._pad(len(arrays), parts, span.length))
        program = self.programs[span.program]
        given = [operands.numbers[at] for at in program.numbers]
        results = self.compiled[program.key](jax.device_put(arrays, self.host), given)
        # All results are computed before the first is written back. A result that is an unchanged operand may share
        # memory with a plane, so it is copied.
        results = [np.asarray(x) for x in results]
        results = [np.array(x) if np.may_share_memory(x, data) else x for x in results]
        for plane, new in zip(stored, results, strict=False):
            plane[span.start : span.start + span.size] = new[: span.size]
        if operands.sinks is not None:
            at, new = 0, results[-1]
            for piece in span.pieces:
                operands.sinks[piece.leaf][piece.shard].put(piece.start, new[at : at + piece.size])
                at += piece.size

    def _pad(self, slot: int, parts: Sequence[np.ndarray], length: int) -> np.ndarray:
        """The parts in one vector, padded with zeros; each thread has one buffer per operand."""
        key = (slot, length, parts[0].dtype)
        buffers = self.scratch.__dict__.setdefault("buffers", {})
        room = buffers.setdefault(key, allocate_aligned(length, parts[0].dtype))
        at = 0
        for part in parts:
            room[at : at + part.size] = part
            at += part.size
        room[at:] = 0
        return room
