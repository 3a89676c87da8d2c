"""Rows of entries that share a norm."""

import math

import jax.numpy as jnp

from .._typing import Array, Float, Like
from .rows import largest_magnitude, total


def check_buckets(bucket: int, norm: str) -> None:
    """Raises unless both can be."""
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, got {bucket}")
    if norm not in ("max", "l2"):
        raise ValueError(f'norm must be "max" or "l2", got {norm!r}')


def to_buckets(x: Array, bucket: int) -> Float[Array, "buckets width"]:
    """Rows of `bucket` entries in float32, the last filled with zeros; one shorter row where the array is shorter."""
    width = min(bucket, max(x.size, 1))
    rows = -(-x.size // width)
    flat = x.reshape(-1).astype(jnp.float32)
    if rows * width > x.size:
        flat = jnp.pad(flat, (0, rows * width - x.size))
    return flat.reshape(rows, width)


def from_buckets(buckets: Float[Array, "buckets width"], like: Like) -> Array:
    """The inverse of `to_buckets`."""
    return buckets.reshape(-1)[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)


def norms_of(magnitudes: Float[Array, "buckets width"], norm: str) -> Float[Array, "buckets 1"]:
    """The largest magnitude of each row (`norm="max"`) or its Euclidean length (`"l2"`)."""
    largest = largest_magnitude(magnitudes)
    if norm == "max":
        return largest
    # Scaled before squaring: 1e20 squared overflows and 1e-23 squared vanishes in float32.
    ratios = magnitudes / jnp.where(largest == 0, 1.0, largest)
    return largest * jnp.sqrt(total(ratios * ratios))


def sent(size: int, bits: int) -> int:
    """How many codes fill the 32-bit words that hold `size` of them: XLA:CPU is ten times slower for odd lengths."""
    whole = 32 // math.gcd(32, bits)
    return -(-size // whole) * whole
