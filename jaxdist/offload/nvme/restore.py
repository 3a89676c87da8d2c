"""What is on disk, back in memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..._core.types import PyTree, State
from . import arrays
from .disk import Disk
from .entries import BLOCK
from .layout import Piece, pieces, planes
from .model import Model


def assembled(model: Model, leaves: Sequence[Any], sinks: Sequence[Sequence[arrays.Sink]]) -> PyTree:
    """The tree of what the sinks have taken."""
    new = [arrays.assembled(leaf, [sink.done() for sink in each]) for leaf, each in zip(leaves, sinks, strict=True)]
    return model.tree.unflatten(new)


def stored_params(model: Model, disk: Disk) -> PyTree:
    """The master parameters, in the dtype and in the place of those given."""
    sinks = [
        [arrays.sink(leaf, shard, donate=False) for shard in shards]
        for leaf, shards in zip(model.leaves, model.shards, strict=True)
    ]

    def take(piece, views):
        sinks[piece.leaf][piece.shard].put(piece.start, views[0].astype(model.leaves[piece.leaf].dtype))

    _scan(disk, take)
    return assembled(model, model.leaves, sinks)


def sums_of_params(model: Model) -> list[list[int]]:
    """The sums of bits of the parameters in memory, for each shard of each leaf."""

    def one(leaf: Any, shard: arrays.Shard) -> int:
        source, size = arrays.source(leaf, shard), math.prod(shard.shape)
        return arrays.added([arrays.sum_of_bits(source(at, min(BLOCK, size - at))) for at in range(0, size, BLOCK)])

    pairs = zip(model.leaves, model.shards, strict=True)
    return [[one(leaf, shard) for shard in shards] for leaf, shards in pairs]


def _scan(disk: Disk, take: Callable[[Piece, list[np.ndarray]], None]) -> None:
    """Shows the entries of all leaves, in order: `take(which, arrays)`."""

    def visit(k, data):
        chunk = disk.layout.chunks[k]
        views = planes(data, chunk, disk.layout.dtypes[chunk.stream])
        at = 0
        for piece in pieces(disk.layout.segments[chunk.stream], chunk.start, chunk.start + chunk.length):
            take(piece, [view[at : at + piece.size] for view in views])
            at += piece.size

    disk.scan(visit)


def whole_state(model: Model, disk: Disk) -> State:
    """The state as optax has it, in memory."""
    dtypes = model.dtypes()
    parts = [
        [[np.empty(int(np.prod(shard.shape)), dtype) for dtype in dtypes[k]] for shard in shards]
        for k, shards in enumerate(model.shards)
    ]

    def take(piece, views):
        for room, view in zip(parts[piece.leaf][piece.shard], views, strict=True):
            room[piece.start : piece.start + view.size] = view

    _scan(disk, take)
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
