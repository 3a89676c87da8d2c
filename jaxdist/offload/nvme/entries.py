"""Runs the programs of leaves on the chunks of their streams, block by block."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from .arrays import Sink, aligned
from .entrywise import EntryProgram
from .layout import UNIT, Layout, Piece, pieces, planes

# Entries in a block: the arrays of one stay in the cache while they are computed and written back.
BLOCK = 1 << 18
# XLA computes so short a block in one thread.
THREADS = min(4, os.cpu_count() or 1)

# From which entry on, how many -> entries.
Source = Callable[[int, int], np.ndarray]


class Block(NamedTuple):
    """Entries `start` to `start + size` of a chunk, whose leaves have one program; computed as `length`."""

    program: int
    start: int
    size: int
    length: int
    pieces: tuple[Piece, ...]


def blocks_of(layout: Layout, programs: Sequence[EntryProgram]) -> list[list[Block]]:
    """The blocks of each chunk. They have two lengths only, so that each program is compiled for two."""
    found = []
    for chunk in layout.chunks:
        inside = pieces(layout.segments[chunk.stream], chunk.start, chunk.start + chunk.length)
        blocks, at = [], 0
        for _, run in groupby(inside, lambda piece: (programs[piece.leaf].key, programs[piece.leaf].numbers)):
            run = list(run)
            left = sum(piece.size for piece in run)
            while left:
                length = BLOCK if left > BLOCK // 4 else UNIT
                size = min(length, left)
                blocks.append(Block(run[0].leaf, at, size, length, tuple(_taken(run, size))))
                at, left = at + size, left - size
        found.append(blocks)
    return found


def _taken(run: list[Piece], size: int) -> list[Piece]:
    """Takes so many entries from the front of `run`."""
    taken = []
    while size:
        piece = run.pop(0)
        part = min(piece.size, size)
        taken.append(piece._replace(size=part))
        if part < piece.size:
            run.insert(0, piece._replace(start=piece.start + part, size=piece.size - part))
        size -= part
    return taken


def runner(layout: Layout, programs: Sequence[EntryProgram], compiled: dict[str, Callable]) -> Callable:
    """A function for all chunks of one step.

    It is called with the numbers, the sources of what lies in memory (`sources[array][leaf][shard]`), the sinks of what
    goes there (`sinks[leaf][shard]`), and returns what works in a chunk: the arrays on disk are replaced in place.
    """
    blocks = blocks_of(layout, programs)
    host = jax.local_devices(backend="cpu")[0]
    local = threading.local()
    pool = ThreadPoolExecutor(THREADS, "nvme-compute")
    for program in programs:
        compiled.setdefault(program.key, jax.jit(program.run))

    def padded(slot: int, parts: Sequence[np.ndarray], length: int) -> np.ndarray:
        key = (slot, length, parts[0].dtype)
        scratch = local.__dict__.setdefault("scratch", {})
        room = scratch.setdefault(key, aligned(length, parts[0].dtype))
        at = 0
        for part in parts:
            room[at : at + part.size] = part
            at += part.size
        room[at:] = 0
        return room

    def step(
        numbers: Sequence[Any],
        sources: Sequence[Sequence[Sequence[Source]]],
        sinks: Sequence[Sequence[Sink]] | None,
        fresh: bool = False,
    ) -> Callable[[int, np.ndarray], None]:
        numbers = [jax.device_put(np.asarray(x), host) for x in numbers]

        def visit(k: int, data: np.ndarray) -> None:
            chunk = layout.chunks[k]
            stored = planes(data, chunk, layout.dtypes[chunk.stream])
            if fresh:
                data[...] = 0

            def work(block: Block) -> None:
                stop = block.start + block.length
                arrays = []
                for plane in [] if fresh else stored:
                    whole = stop <= plane.size
                    part = plane[block.start : stop]
                    arrays.append(part if whole else padded(len(arrays), [part], block.length))
                for one in sources:
                    parts = [one[p.leaf][p.shard](p.start, p.size) for p in block.pieces]
                    whole = len(parts) == 1 and block.size == block.length
                    arrays.append(parts[0] if whole else padded(len(arrays), parts, block.length))
                program = programs[block.program]
                given = [numbers[at] for at in program.numbers]
                results = compiled[program.key](jax.device_put(arrays, host), given)
                # All are there before the first is written back; one that was only passed on still lies in a plane.
                results = [np.asarray(x) for x in results]
                results = [np.array(x) if np.may_share_memory(x, data) else x for x in results]
                for plane, new in zip(stored, results, strict=False):
                    plane[block.start : block.start + block.size] = new[: block.size]
                if sinks is not None:
                    at, new = 0, results[-1]
                    for piece in block.pieces:
                        sinks[piece.leaf][piece.shard].put(piece.start, new[at : at + piece.size])
                        at += piece.size

            jobs = [pool.submit(work, block) for block in blocks[k]]
            wait(jobs)
            for job in jobs:
                job.result()

        return visit

    return step
