"""Leaves of any kind (numpy, memory maps, arrays on devices or sharded over a mesh) as vectors, and back."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from ..._core.types import PyTree
from ...state.marks import PerWorker, is_mark

# XLA uses numpy arrays without a copy if they have this alignment.
ALIGNED = 64


class Shard(NamedTuple):
    """One part of a leaf in this process, with all devices that have a copy of it."""

    index: Any
    shape: tuple[int, ...]
    devices: tuple[Any, ...]


class Sink(NamedTuple):
    """`put(start, entries)` receives entries of a shard, in any order; `finish` returns the array, on its device."""

    put: Callable[[int, np.ndarray], None]
    finish: Callable[[], Any]


def strip_marks(tree: PyTree) -> tuple[list[Any], list[tuple[int, ...]], Any]:
    """The arrays of a tree, their logical shapes, and the tree."""
    leaves, shapes = [], []
    for node in jax.tree.leaves(tree, is_leaf=is_mark):
        shape = None
        while is_mark(node):
            if isinstance(node, PerWorker):
                raise ValueError("parameters that differ between workers (PerWorker) have no common state to stream")
            shape = getattr(node, "shape", shape)
            node = node.value
        leaves.append(node if hasattr(node, "dtype") else np.asarray(node))
        shapes.append(leaves[-1].shape if shape is None else shape)
    return leaves, shapes, jax.tree.structure(tree)


def check_dtype(dtype: Any) -> None:
    """Refuses parameters that JAX would truncate."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"parameters of {dtype} need jax.config.update('jax_enable_x64', True)")


def shards_of(leaf: Any) -> list[Shard]:
    """The different parts of a leaf in this process."""
    if not isinstance(leaf, jax.Array):
        # As JAX writes it, so that a store accepts parameters of either kind.
        return [Shard((slice(None),) * leaf.ndim, leaf.shape, ())]
    # Replicas hold the same part: it is streamed once, and sent to the devices of all of them.
    found: dict[str, Shard] = {}
    for copy in leaf.addressable_shards:
        key = str(copy.index)
        devices = (*(found[key].devices if key in found else ()), copy.device)
        found[key] = Shard(copy.index, copy.data.shape, devices)
    return [found[key] for key in sorted(found)]


def on_host(device: Any) -> bool:
    """Returns True if numpy can read the memory of the device."""
    return device.platform == "cpu"


def source(leaf: Any, shard: Shard) -> Callable[[int, int], np.ndarray]:
    """`(start, size) -> entries` of a shard; only these entries are copied from a device."""
    if not isinstance(leaf, jax.Array):
        flat = np.asarray(leaf[shard.index]).reshape(-1)
        return lambda start, size: flat[start : start + size]
    data = next(copy.data for copy in leaf.addressable_shards if str(copy.index) == str(shard.index))
    if on_host(shard.devices[0]):
        flat = np.asarray(data).reshape(-1)
        return lambda start, size: flat[start : start + size]
    return lambda start, size: np.asarray(_slice(data, start, size))


@functools.partial(jax.jit, static_argnums=2)
def _slice(x: Any, start: Any, size: int) -> Any:
    return lax.dynamic_slice(x.reshape(-1), (start,), (size,))


def hash_bits(start: int, x: np.ndarray) -> int:
    """A hash of entries from number `start` on, of which an array has the sum modulo 2^64, whatever its parts are.

    A sum of the bits themselves would be that of many other arrays: of a permutation, or after updates without a mean.
    """
    # Σ (bits + c i)², with the odd c of Fibonacci hashing
    mixed = np.arange(start, start + x.size, dtype=np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed += x.view(f"u{x.dtype.itemsize}")
    return int(np.dot(mixed, mixed))


def hashing(sink: Sink, hashes: list[int]) -> Sink:
    """A sink that also appends the hash of everything it receives."""

    def write(start: int, x: np.ndarray) -> None:
        # Several threads append, in any order: hashes are added in the end.
        hashes.append(hash_bits(start, x))
        sink.put(start, x)

    return Sink(write, sink.finish)


def place(leaf: Any, sharding: Any) -> Any:
    """The array with this sharding (`None`: in numpy), so that it has the shards that `init` saw."""
    if sharding is None:
        return leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, sharding)


def allocate_aligned(size: int, dtype: Any) -> np.ndarray:
    """`np.empty`, aligned so that XLA need not copy it."""
    room = np.empty(size * np.dtype(dtype).itemsize + ALIGNED, np.uint8)
    first = -room.ctypes.data % ALIGNED
    return room[first : first + size * np.dtype(dtype).itemsize].view(dtype)


def _takes_entries(leaf: Any) -> bool:
    """Returns True for arrays that can be viewed as a vector and written in place."""
    return isinstance(leaf, np.ndarray) and leaf.flags.writeable and leaf.flags.c_contiguous


def check_apart(leaves: Sequence[Any]) -> None:
    """Checks that no two parameters that are overwritten are the same memory: the second would see the first's step."""
    places = sorted((leaf.ctypes.data, leaf.nbytes) for leaf in leaves if _takes_entries(leaf) and leaf.size)
    if any(start + nbytes > following for (start, nbytes), (following, _) in itertools.pairwise(places)):
        raise ValueError(
            "donate=True would write two parameters into the same memory: make tied parameters one leaf, or leave out "
            "donate"
        )


def sink(leaf: Any, shard: Shard, *, donate: bool) -> Sink:
    """A sink for the new entries of a shard."""
    kind = leaf.sharding.memory_kind if shard.devices else None
    places = [SingleDeviceSharding(device, memory_kind=kind) for device in shard.devices]
    if places and not on_host(shard.devices[0]):
        # Entries are sent to the devices as they come: the host never has the whole shard.
        sent: list[dict[int, Any]] = [{} for _ in places]

        def send(start, x):
            for place, parts in zip(places, sent, strict=True):
                parts[start] = jax.device_put(np.array(x), place)

        def concatenate():
            # `jnp.concatenate` needs at least one array.
            send(-1, np.empty(0, leaf.dtype))
            return [jnp.concatenate([parts[at] for at in sorted(parts)]).reshape(shard.shape) for parts in sent]

        return Sink(send, concatenate)

    in_place = donate and _takes_entries(leaf)
    flat = leaf.reshape(-1) if in_place else allocate_aligned(int(np.prod(shard.shape)), leaf.dtype)

    def write_entries(start, x):
        flat[start : start + x.size] = x

    def finish():
        if in_place:
            return leaf
        new = flat.reshape(shard.shape)
        return [jax.device_put(new, place) for place in places] or new

    return Sink(write_entries, finish)


def assemble(leaf: Any, parts: Sequence[Any]) -> Any:
    """The new leaf, from the results of its sinks."""
    if not isinstance(leaf, jax.Array):
        return parts[0]
    arrays = {next(iter(x.devices())): x for part in parts for x in part}
    ordered = [arrays[copy.device] for copy in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, ordered)
