"""A hash of the bits of an array, computed on the host: to know a damaged copy. It compiles nothing."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ._typing import Array


def hashes(leaves: Mapping[str, Array | np.ndarray]) -> dict[str, int]:
    """A 32-bit hash for each array, however it is cut: a sum of mixed words, to which every process adds its part.

    All processes must call it together if any of the arrays is spread over them.
    """
    parts = np.array([_own_part(leaf) for leaf in leaves.values()], np.uint32)
    if jax.process_count() > 1 and not all(isinstance(leaf, np.ndarray) for leaf in leaves.values()):
        parts = np.asarray(multihost_utils.process_allgather(parts)).sum(0, dtype=np.uint32)
    return dict(zip(leaves, parts.tolist(), strict=True))


def hash_of(x: np.ndarray) -> int:
    """The hash of an array that this process has whole."""
    return _hash(x, ())


def _own_part(x: Array | np.ndarray) -> int:
    """The sum over the words that lie in this process, each counted once."""
    if isinstance(x, np.ndarray):
        return hash_of(x)
    if x.is_fully_addressable and jax.process_index() > 0:
        return 0  # every process has all of it
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    mine = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    return sum(_hash(np.asarray(shard.data), shard.index, x.shape) for shard in mine) % 2**32


def _hash(values: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...] | None = None) -> int:
    """Of one block, which lies at `index` in an array of this shape."""
    words = _words(np.ascontiguousarray(values))
    with np.errstate(over="ignore"):  # numpy warns of scalars that wrap around
        place = np.zeros((), np.uint32)
        stride = 1
        for dimension in reversed(range(values.ndim)):
            start = index[dimension].start or 0 if index else 0
            numbers = np.arange(start, start + values.shape[dimension], dtype=np.uint64) * np.uint64(stride)
            axes = tuple(range(1, values.ndim - dimension))
            place = place + np.expand_dims((numbers * np.uint64(0x9E3779B1)).astype(np.uint32), axes)
            stride = stride * (shape or values.shape)[dimension] % 2**32
        total = 0
        for number, part in enumerate(words):  # one, or two for a dtype of eight bytes
            mixed = (part ^ (place + np.uint32(number))) * np.uint32(0x85EBCA6B)
            mixed ^= mixed >> 15
            total += int((mixed * np.uint32(0xC2B2AE35)).sum(dtype=np.uint32))
    return total % 2**32


def _words(x: np.ndarray) -> list[np.ndarray]:
    """The bits as one or more arrays of 32-bit words of the same shape."""
    if x.dtype.itemsize < 4:
        return [x.view({1: np.uint8, 2: np.uint16}[x.dtype.itemsize]).astype(np.uint32)]
    words = x.reshape(-1).view(np.uint32).reshape(*x.shape, -1)
    return [words[..., number] for number in range(words.shape[-1])]
