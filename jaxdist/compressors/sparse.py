"""Payloads of a few entries and their positions."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from .._core.checks import check_range
from .._core.types import Array, Float, Int, Like, Shape, UInt
from .positions import decode_positions, encode_positions


class SparsePayload(NamedTuple):
    """The kept entries, in the order of the array, and their encoded positions."""

    values: Float[Array, " kept"]
    indices: UInt[Array, " words"]


def decompress(payload: SparsePayload, like: Like) -> Array:
    """Puts the kept entries at their positions, and zeros elsewhere."""
    where = decode_positions(payload.indices, payload.values.shape[0], math.prod(like.shape))
    return scatter(payload.values, where, like)


def add(payload: SparsePayload, total: Array) -> Array:
    """Adds the kept entries to `total`, at their positions."""
    return add_entries(payload, total, total.size)


def add_entries(payload: SparsePayload, total: Array, size: int) -> Array:
    """Adds entries at positions in `range(size)`, of which those beyond the array belong to padding."""
    where = decode_positions(payload.indices, payload.values.shape[0], size)
    values = payload.values.astype(total.dtype)
    mode = "promise_in_bounds" if size == total.size else "drop"
    return total.reshape(-1).at[where].add(values, mode=mode, unique_indices=True).reshape(total.shape)


def gather_entries(flat: Float[Array, " size"], where: Int[Array, " kept"]) -> SparsePayload:
    """Returns the payload of the entries at ascending positions."""
    values = flat.at[where].get(mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)
    return SparsePayload(values, encode_positions(where, flat.shape[0]))


def scatter(values: Float[Array, " kept"], where: Int[Array, " kept"] | UInt[Array, " kept"], like: Like) -> Array:
    """Writes the values at their positions into zeros."""
    flat = jnp.zeros(math.prod(like.shape), like.dtype)
    # Signed indices, since JAX would widen u16 and u32 differently.
    where, values = where.astype(jnp.int32), values.astype(like.dtype)
    return flat.at[where].set(values, mode="promise_in_bounds", unique_indices=True).reshape(like.shape)


def num_kept(density: float, size: int) -> int:
    """The number of entries that are sent of `size`: `max(1, round(density * size))`, none of an empty array."""
    return min(size, max(1, round(density * size)))


def check_density(density: float) -> None:
    """Checks that the density is in (0, 1]."""
    check_range("density", density, 0, 1, ends="(]")


def share_kept(density: float, shape: Shape) -> float:
    """The share `k / d` of entries that are kept; 1 for an empty array."""
    size = math.prod(shape)
    return num_kept(density, size) / size if size else 1.0
