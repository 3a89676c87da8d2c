"""Reads parameters and state from disk back into memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..._core.types import PyTree, State
from . import arrays
from .disk import Disk
from .entries import SPAN
from .layout import Piece, pieces, planes
from .model import Model


def assemble(model: Model, leaves: Sequence[Any], sinks: Sequence[Sequence[arrays.Sink]]) -> PyTree:
    """The tree of the arrays that the sinks have received."""
    new = [arrays.assemble(leaf, [sink.finish() for sink in each]) for leaf, each in zip(leaves, sinks, strict=True)]
    return model.tree.unflatten(new)


def read_params(model: Model, disk: Disk) -> PyTree:
    """The master parameters, with the dtypes and shardings of the parameters in memory."""
    sinks = [
        [arrays.sink(leaf, shard, donate=False) for shard in shards]
        for leaf, shards in zip(model.leaves, model.shards, strict=True)
    ]

    def store_piece(piece, views):
        sinks[piece.leaf][piece.shard].put(piece.start, views[0].astype(model.leaves[piece.leaf].dtype))

    _scan(disk, store_piece)
    return assemble(model, model.leaves, sinks)


def hash_params(model: Model) -> list[list[int]]:
    """The hashes of the parameters in memory, for each shard of each leaf."""

    def hash_shard(leaf: Any, shard: arrays.Shard) -> int:
        source, size = arrays.source(leaf, shard), math.prod(shard.shape)
        # Span by span: a shard on a device is never copied as a whole.
        return arrays.add_hashes([arrays.hash_bits(source(at, min(SPAN, size - at))) for at in range(0, size, SPAN)])

    pairs = zip(model.leaves, model.shards, strict=True)
    return [[hash_shard(leaf, shard) for shard in shards] for leaf, shards in pairs]


def _scan(disk: Disk, visit_piece: Callable[[Piece, list[np.ndarray]], None]) -> None:
    """Calls `visit_piece(piece, arrays)` for the entries of all leaves, in order."""

    def visit(k, data):
        chunk = disk.layout.chunks[k]
        views = planes(data, chunk, disk.layout.dtypes[chunk.stream])
        at = 0
        for piece in pieces(disk.layout.segments[chunk.stream], chunk.start, chunk.start + chunk.length):
            visit_piece(piece, [view[at : at + piece.size] for view in views])
            at += piece.size

    disk.scan(visit)


def read_state(model: Model, disk: Disk) -> State:
    """The whole state in memory, as the optimizer's `init` returns it."""
    dtypes = model.dtypes()
    parts = [
        [[np.empty(int(np.prod(shard.shape)), dtype) for dtype in dtypes[k]] for shard in shards]
        for k, shards in enumerate(model.shards)
    ]

    def store_piece(piece, views):
        for room, view in zip(parts[piece.leaf][piece.shard], views, strict=True):
            room[piece.start : piece.start + view.size] = view

    _scan(disk, store_piece)
    # With master parameters they are the first array of each leaf.
    numbers, flat, seen = iter(disk.numbers), [], [int(model.master)] * len(model.leaves)
    for k in model.beside:
        if k < 0:
            flat.append(next(numbers))
            continue
        leaf, shape = model.leaves[k], model.shapes[k]
        whole = np.empty(leaf.shape, dtypes[k][seen[k]])
        for shard, part in zip(model.shards[k], parts[k], strict=True):
            whole[shard.index] = part[seen[k]].reshape(shard.shape)
        seen[k] += 1
        flat.append(whole.reshape(-1)[: int(np.prod(shape))].reshape(shape))
    return jax.tree.structure(model.state).unflatten(flat)
