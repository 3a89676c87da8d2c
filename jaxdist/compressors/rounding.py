"""Buckets of entries with a norm or scale each, rounding to integers, and the largest error of rounding to a grid."""

import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np

from .._core.dtypes import saturated
from .._core.types import Array, Float, Int, Like, PRNGKeyArray, Shape
from .base import Compressor
from .random import uniform_hash
from .rows import UnitRows, from_unit, to_unit, total

# To the nearest value (ties to even), or to one of the two neighbors at random, unbiased.
Rounding = Literal["nearest", "stochastic"]


def check_block(block: int, rounding: str) -> None:
    """Checks that `block` is positive and `rounding` is known."""
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'rounding must be "nearest" or "stochastic", got {rounding!r}')


def check_buckets(bucket: int, norm: str) -> None:
    """Checks that `bucket` is positive and `norm` is known."""
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, got {bucket}")
    if norm not in ("max", "l2"):
        raise ValueError(f'norm must be "max" or "l2", got {norm!r}')


def to_buckets(x: Array, bucket: int) -> Float[Array, "buckets width"]:
    """Rows of `bucket` entries in float32, the last padded with zeros; an array shorter than a bucket is one row."""
    width = min(bucket, max(x.size, 1))
    rows = -(-x.size // width)
    flat = x.reshape(-1).astype(jnp.float32)
    if rows * width > x.size:
        flat = jnp.pad(flat, (0, rows * width - x.size))
    return flat.reshape(rows, width)


def from_buckets(buckets: Float[Array, "buckets width"], scales: Float[Array, " buckets"], like: Like) -> Array:
    """The inverse of `to_buckets`, of rows times their scales; finite where the scale is finite."""
    scales = scales[:, None]
    values = saturated(from_unit(buckets, scales), like.dtype, jnp.isfinite(scales))
    return values.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def norms_of(scaled: UnitRows, norm: str) -> Float[Array, "buckets 1"]:
    """The largest magnitude of each of `scaled.rows` (`norm="max"`) or its Euclidean length (`"l2"`)."""
    return scaled.largest if norm == "max" else jnp.sqrt(total(scaled.rows * scaled.rows))


def normalize_buckets(
    x: Array, bucket: int, norm: str
) -> tuple[Float[Array, "buckets width"], Float[Array, "buckets 1"]]:
    """Returns each bucket divided by its norm, from -1 to 1, and the norms.

    A length above the largest float becomes that number: ratios are then larger, and the error of rounding them to
    levels grows by less than in proportion, so that bounds for vectors of length 1 hold.
    """
    scaled = to_unit(to_buckets(x, bucket))
    norms = norms_of(scaled, norm)
    limits = jnp.where(jnp.isfinite(norms), jnp.finfo(jnp.float32).max / scaled.unit, jnp.inf)
    norms = jnp.minimum(norms, limits)
    # The clip keeps ratios from exceeding 1 by a rounding error.
    ratios = jnp.clip(scaled.rows / jnp.where(norms == 0, 1.0, norms), -1.0, 1.0)
    return ratios, from_unit(norms, scaled.unit)


def whole_words(size: int, bits: int) -> int:
    """The number of codes that fill the 32-bit words of `size` codes."""
    # XLA:CPU is ten times slower for odd lengths.
    whole = 32 // math.gcd(32, bits)
    return -(-size // whole) * whole


def to_integers(x: Float[Array, "*shape"], rounding: str, key: PRNGKeyArray) -> Int[Array, "*shape"]:
    """Rounds to integers: the nearest, or `floor(x + u)` with u uniform in [0, 1)."""
    if rounding == "nearest":
        return jnp.rint(x).astype(jnp.int32)
    whole = jnp.floor(x)
    # Not `floor(x + u)`, whose rounded sum may change integers.
    return (whole + jnp.floor((x - whole) + uniform_hash(key, x.shape))).astype(jnp.int32)


def largest_error(grid: np.ndarray, lowest: float, size: int, rounding: str) -> float:
    """The supremum of `E|C(x) - x|² / |x|²` over blocks of `size` entries: 1 - δ of "nearest", ω of "stochastic".

    Entries have magnitudes up to the end of the grid, the largest one at least `lowest`. Rounding is to the grid: an
    entry x between l and h loses at most `(h - l)² / 4`, halfway between them, or `(x - l)(h - x)` on average. The
    ratio ρ is exceeded exactly if there are entries whose losses minus `ρ x²` have a positive sum. The worst entries
    for one ρ are all equal except the largest, which leaves a search for ρ, by bisection.

    Args:
      grid: the magnitudes that the code can represent, from 0 on, in order.
      lowest: the smallest value of the largest entry; one of the grid.
      size: entries of a block.
      rounding: as in `Rounding`.

    Returns:
      The ratio, up to the rounding of float64.

    Example:
      >>> round(largest_error(np.arange(8.0), 7.0, 32, "nearest"), 6)  # 31 / (4 · 7² + 31)
      0.136564
    """
    low, high = grid[:-1], grid[1:]

    def gain(ratio: float) -> float:
        worst = np.clip((low + high) / (2.0 * (1.0 + ratio)), low, high)
        x = (low + high) / 2.0 if rounding == "nearest" else worst
        gains = (x - low) * (high - x) - ratio * x * x
        first = np.max(gains, where=low >= lowest, initial=-ratio * lowest**2)
        return first + (size - 1) * np.max(gains, initial=0.0)

    below, above = 0.0, float(max(size, 1))
    for _ in range(100):
        middle = (below + above) / 2.0
        below, above = (middle, above) if gain(middle) > 0 else (below, middle)
    return above


def with_error(code: Compressor, error: Callable[[Shape], float], rounding: str) -> Compressor:
    """Adds the law that follows from the largest error: δ to nearest, ω at random."""
    if rounding == "nearest":
        return code._replace(contraction=lambda shape: 1.0 - error(shape))
    return code._replace(variance=error)
