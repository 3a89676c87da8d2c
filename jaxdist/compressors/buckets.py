"""Rows of entries that share a norm."""

import math

import jax.numpy as jnp

from .._typing import Array, Float, Like
from .base import saturated
from .rows import UnitRows, from_unit, to_unit, total


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


def from_buckets(buckets: Float[Array, "buckets width"], scales: Float[Array, " buckets"], like: Like) -> Array:
    """The inverse of `to_buckets`, of rows times their scales: finite where a scale is."""
    scales = scales[:, None]
    values = saturated(from_unit(buckets, scales), like.dtype, jnp.isfinite(scales))
    return values.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def norms_of(scaled: UnitRows, norm: str) -> Float[Array, "buckets 1"]:
    """The largest magnitude of each of `scaled.rows` (`norm="max"`) or its Euclidean length (`"l2"`)."""
    return scaled.largest if norm == "max" else jnp.sqrt(total(scaled.rows * scaled.rows))


def normalized(x: Array, bucket: int, norm: str) -> tuple[Float[Array, "buckets width"], Float[Array, "buckets 1"]]:
    """Each bucket divided by its norm, from -1 to 1, and the norms.

    A length of more than the largest float becomes that: the ratios are larger then, and what their rounding to levels
    costs is less than in proportion, so that a bound for vectors of length 1 holds.
    """
    scaled = to_unit(to_buckets(x, bucket))
    norms = norms_of(scaled, norm)
    limits = jnp.where(jnp.isfinite(norms), jnp.finfo(jnp.float32).max / scaled.unit, jnp.inf)
    norms = jnp.minimum(norms, limits)
    # The clip keeps ratios from exceeding 1 by a rounding error.
    ratios = jnp.clip(scaled.rows / jnp.where(norms == 0, 1.0, norms), -1.0, 1.0)
    return ratios, from_unit(norms, scaled.unit)


def sent(size: int, bits: int) -> int:
    """How many codes fill the 32-bit words that hold `size` of them: XLA:CPU is ten times slower for odd lengths."""
    whole = 32 // math.gcd(32, bits)
    return -(-size // whole) * whole
