"""Which words of a leaf have changed: found on the host, or on the device, so that these alone are copied."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Bool, Int, UInt

# Words that are compared at once on the host.
PIECE = 2**24
# The least number of changed words that a compiled program makes room for; larger ones are powers of two.
LEAST_ROOM = 2**10
# Where more words than this share have changed, their positions take more bytes than all words.
MOST_CHANGED = 1 / 4


class Changes(NamedTuple):
    """The changed words of a leaf: their ascending positions in int64, and what they have become."""

    where: np.ndarray
    words: np.ndarray


def find_changes(old: np.ndarray, new: np.ndarray) -> Changes:
    """Compares two flat vectors of words.

    Examples:
      >>> find_changes(np.array([1, 2, 3]), np.array([1, 5, 3]))
      Changes(where=array([1]), words=array([5]))
    """
    found = [start + np.flatnonzero(old[start:][:PIECE] != new[start:][:PIECE]) for start in range(0, len(old), PIECE)]
    where = np.concatenate(found) if found else np.zeros(0, np.int64)
    return Changes(where, new[where])


def apply_changes(words: np.ndarray, changes: Changes) -> None:
    """Makes the changes in place."""
    words[changes.where] = changes.words


def can_compare(x: Array) -> bool:
    """Whether a device compares an array: its entries are words of 8 to 32 bits, and positions fit into 32."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.finfo(x.dtype).bits
    elif jnp.issubdtype(x.dtype, jnp.integer):
        bits = jnp.iinfo(x.dtype).bits
    else:
        return x.dtype == jnp.bool_ and x.size < 2**31
    return bits == 8 * x.dtype.itemsize <= 32 and x.size < 2**31


def find_changes_on_device(old: Array, new: Array) -> Changes:
    """Compares two arrays that are sharded alike, and copies to the host what has changed.

    Each shard is compared by its device: first the changes are counted, then they are compacted into the next power of
    two of entries, so that the programs of a shape are as many as the powers. A position takes four bytes.
    """
    pairs = list(_pairs_of_shards(old, new))
    counts = [_count(before, after) for _, before, after in pairs]
    parts = [_find_in_shard(*pair, int(count), new.shape) for pair, count in zip(pairs, counts, strict=True)]
    where = np.concatenate([part.where for part in parts])
    words = np.concatenate([part.words for part in parts])
    if len(parts) > 1:
        order = np.argsort(where, kind="stable")
        where, words = where[order], words[order]
    return Changes(where, words)


def _pairs_of_shards(old: Array, new: Array) -> Iterator[tuple[Sequence[slice], Array, Array]]:
    """The distinct shards of two arrays: where they are, and both of them."""
    before = {str(shard.index): shard.data for shard in old.addressable_shards}
    after = {str(shard.index): shard for shard in new.addressable_shards}
    for name, shard in after.items():
        yield shard.index, before[name], shard.data


def _find_in_shard(index: Sequence[slice], old: Array, new: Array, count: int, shape: tuple[int, ...]) -> Changes:
    if count == 0:
        where, words = np.zeros(0, np.int64), np.zeros(0, f"uint{8 * new.dtype.itemsize}")
    elif count > MOST_CHANGED * new.size:
        where, words = find_changes(*(np.asarray(bit_patterns(x)).reshape(-1) for x in (old, new)))
    else:
        room = max(LEAST_ROOM, 1 << (count - 1).bit_length())
        where, words = (x[:count] for x in jax.device_get(_compact(old, new, room)))
    where = where.astype(np.int64)
    if new.shape != shape:
        starts = [part.start or 0 for part in index]
        places = [x + start for x, start in zip(np.unravel_index(where, new.shape), starts, strict=True)]
        where = np.ravel_multi_index(places, shape)
    return Changes(where, words)


@jax.jit
def _count(old: Array, new: Array) -> Int[Array, ""]:
    return jnp.sum(_differ(old, new), dtype=jnp.int32)


@partial(jax.jit, static_argnums=2)
def _compact(old: Array, new: Array, room: int) -> tuple[Int[Array, " room"], UInt[Array, " room"]]:
    (where,) = jnp.nonzero(_differ(old, new).reshape(-1), size=room, fill_value=0)
    return where.astype(jnp.int32), bit_patterns(new).reshape(-1)[where]


def _differ(old: Array, new: Array) -> Bool[Array, "*shape"]:
    return bit_patterns(old) != bit_patterns(new)


@jax.jit
def bit_patterns(x: Array) -> UInt[Array, "*shape"]:
    """The words of an array, if `can_compare`: equal numbers may differ in them, and NaN equals itself."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
