"""Runs the programs of leaves on the chunks of their streams, span by span."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from .arrays import Sink, allocate_aligned
from .entrywise import EntryProgram
from .layout import UNIT, Layout, Piece, pieces, planes

# Entries in a span: its arrays stay in the cache while they are computed and written back.
SPAN = 1 << 18
# XLA computes an array this short in one thread.
THREADS = min(4, os.cpu_count() or 1)

# `(start, size) -> entries` of an array in memory.
Source = Callable[[int, int], np.ndarray]


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


class Runner:
    """Runs the programs of one step on chunks.

    Args:
      layout: of the state on disk.
      programs: one for each leaf.
      compiled: compiled programs by key, shared between runners; extended here.
    """

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

        Args:
          numbers: the results of the head.
          sources: of the arrays in memory that programs read, `sources[array][leaf][shard]`.
          sinks: of the last result of each program, `sinks[leaf][shard]`.
          fresh: the chunk has no contents yet, which programs then do not read.
        """
        on_host = [jax.device_put(np.asarray(x), self.host) for x in numbers]
        return partial(self._visit, on_host, sources, sinks, fresh)

    def _visit(self, numbers: Sequence[Any], sources: Any, sinks: Any, fresh: bool, k: int, data: np.ndarray) -> None:
        chunk = self.layout.chunks[k]
        stored = planes(data, chunk, self.layout.dtypes[chunk.stream])
        if fresh:
            data[...] = 0
        run = partial(self._run_span, numbers, sources, sinks, data, stored, [] if fresh else stored)
        jobs = [self.pool.submit(run, span) for span in self.spans[k]]
        wait(jobs)
        for job in jobs:
            job.result()

    def _run_span(
        self,
        numbers: Sequence[Any],
        sources: Any,
        sinks: Any,
        data: np.ndarray,
        stored: Sequence[np.ndarray],
        read: Sequence[np.ndarray],
        span: EntrySpan,
    ) -> None:
        stop = span.start + span.length
        arrays: list[np.ndarray] = []
        # Vectors that fill the span are passed as views; only the last, shorter one is copied and padded.
        for plane in read:
            part = plane[span.start : stop]
            arrays.append(part if stop <= plane.size else self._pad(len(arrays), [part], span.length))
        for source in sources:
            parts = [source[p.leaf][p.shard](p.start, p.size) for p in span.pieces]
            fits = len(parts) == 1 and span.size == span.length
            arrays.append(parts[0] if fits else self._pad(len(arrays), parts, span.length))
        program = self.programs[span.program]
        given = [numbers[at] for at in program.numbers]
        results = self.compiled[program.key](jax.device_put(arrays, self.host), given)
        # All results are computed before the first is written back. A result that is an unchanged operand may share
        # memory with a plane, so it is copied.
        results = [np.asarray(x) for x in results]
        results = [np.array(x) if np.may_share_memory(x, data) else x for x in results]
        for plane, new in zip(stored, results, strict=False):
            plane[span.start : span.start + span.size] = new[: span.size]
        if sinks is not None:
            at, new = 0, results[-1]
            for piece in span.pieces:
                sinks[piece.leaf][piece.shard].put(piece.start, new[at : at + piece.size])
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
