"""Leaves of any kind (numpy, memory maps, arrays on devices, cut over a mesh) as vectors, and back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from ..._core.types import PyTree
from ...state.marks import PerWorker, is_mark

# XLA takes numpy arrays without a copy if they are aligned so.
ALIGNED = 64


class Shard(NamedTuple):
    """One part of a leaf that lies in this process, with all devices that have a copy of it."""

    index: Any
    shape: tuple[int, ...]
    devices: tuple[Any, ...]


class Sink(NamedTuple):
    """`put(start, entries)` takes entries of a shard, in any order; `done` gives the array, where it belongs."""

    put: Callable[[int, np.ndarray], None]
    done: Callable[[], Any]


def unmarked(tree: PyTree) -> tuple[list[Any], list[tuple[int, ...]], Any]:
    """The arrays of a tree, the shapes that they stand for, and the tree."""
    leaves, shapes = [], []
    for node in jax.tree.leaves(tree, is_leaf=is_mark):
        shape = None
        while is_mark(node):
            if isinstance(node, PerWorker):
                raise ValueError("parameters that differ between workers (PerWorker) have no one state to stream")
            shape = getattr(node, "shape", shape)
            node = node.value
        leaves.append(node if hasattr(node, "dtype") else np.asarray(node))
        shapes.append(leaves[-1].shape if shape is None else shape)
    return leaves, shapes, jax.tree.structure(tree)


def shards_of(leaf: Any) -> list[Shard]:
    """The different parts of a leaf in this process."""
    if not isinstance(leaf, jax.Array):
        # As JAX has it, so that a store takes parameters of either kind.
        return [Shard((slice(None),) * leaf.ndim, leaf.shape, ())]
    found: dict[str, Shard] = {}
    for one in leaf.addressable_shards:
        before = found.get(str(one.index))
        devices = (*(before.devices if before else ()), one.device)
        found[str(one.index)] = Shard(one.index, one.data.shape, devices)
    return [found[key] for key in sorted(found)]


def on_host(device: Any) -> bool:
    """Whether numpy can look at the memory of the device."""
    return device.platform == "cpu"


def source(leaf: Any, shard: Shard) -> Callable[[int, int], np.ndarray]:
    """`(start, size) -> entries` of a shard, of which no more is copied from a device than is asked for."""
    if not isinstance(leaf, jax.Array):
        flat = np.asarray(leaf[shard.index]).reshape(-1)
        return lambda start, size: flat[start : start + size]
    data = next(one.data for one in leaf.addressable_shards if str(one.index) == str(shard.index))
    if on_host(shard.devices[0]):
        flat = np.asarray(data).reshape(-1)
        return lambda start, size: flat[start : start + size]
    return lambda start, size: np.asarray(_slice(data, start, size))


@functools.partial(jax.jit, static_argnums=2)
def _slice(x, start, size):
    return lax.dynamic_slice(x.reshape(-1), (start,), (size,))


def sum_of_bits(x: np.ndarray) -> int:
    """Of the entries as whole numbers, modulo 2^64: what tells the parameters of one step from those of another."""
    return int(np.add.reduce(x.view(f"u{x.dtype.itemsize}"), dtype=np.uint64, axis=None))


def added(sums: Sequence[int]) -> int:
    """The sum of bits of what has these, part by part."""
    return sum(sums) % 2**64


def summed(sink: Sink, sums: list[int]) -> Sink:
    """A sink that leaves the sums of what it takes."""

    def put(start: int, x: np.ndarray) -> None:
        sums.append(sum_of_bits(x))  # by several threads, in any order
        sink.put(start, x)

    return Sink(put, sink.done)


def placed(leaf: Any, sharding: Any) -> Any:
    """The array with this sharding (`None`: in numpy), so that its shards are those that `init` saw."""
    if sharding is None:
        return leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, sharding)


def aligned(size: int, dtype: Any) -> np.ndarray:
    """`np.empty`, so that XLA need not copy it."""
    room = np.empty(size * np.dtype(dtype).itemsize + ALIGNED, np.uint8)
    first = -room.ctypes.data % ALIGNED
    return room[first : first + size * np.dtype(dtype).itemsize].view(dtype)


def sink(leaf: Any, shard: Shard, *, donate: bool) -> Sink:
    """Where the new entries of a shard go."""
    kind = leaf.sharding.memory_kind if shard.devices else None
    places = [SingleDeviceSharding(device, memory_kind=kind) for device in shard.devices]
    if places and not on_host(shard.devices[0]):
        # Sent on as they come: the host never has the whole shard.
        sent: list[dict[int, Any]] = [{} for _ in places]

        def put(start, x):
            for place, parts in zip(places, sent, strict=True):
                parts[start] = jax.device_put(np.array(x), place)

        def joined():
            put(-1, np.empty(0, leaf.dtype))  # concatenate wants at least one
            return [jnp.concatenate([parts[at] for at in sorted(parts)]).reshape(shard.shape) for parts in sent]

        return Sink(put, joined)

    in_place = donate and isinstance(leaf, np.ndarray) and leaf.flags.writeable and leaf.flags.c_contiguous
    flat = leaf.reshape(-1) if in_place else aligned(int(np.prod(shard.shape)), leaf.dtype)

    def put_here(start, x):
        flat[start : start + x.size] = x

    def done():
        if in_place:
            return leaf
        new = flat.reshape(shard.shape)
        return [jax.device_put(new, place) for place in places] or new

    return Sink(put_here, done)


def assembled(leaf: Any, parts: Sequence[Any]) -> Any:
    """The new leaf of the results of its sinks."""
    if not isinstance(leaf, jax.Array):
        return parts[0]
    arrays = {next(iter(x.devices())): x for part in parts for x in part}
    ordered = [arrays[one.device] for one in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, ordered)
