"""The best levels for given entries, exactly: dynamic programming over a histogram.

References:
  R. Ben Basat, Y. Ben-Itzhak, M. Mitzenmacher, S. Vargaftik, "Optimal and approximate adaptive stochastic
  quantization", arXiv:2402.03158, 2024.
"""

import math
from typing import Literal

import jax.numpy as jnp
from jax import lax

from .._typing import Array, Float
from .buckets import normalized, to_buckets

# Of the grid. Neighbours differ by about six per cent, with buckets of 8192.
POINTS = 257


def optimal_levels(
    points: Float[Array, " points"], weights: Float[Array, " points"], count: int
) -> tuple[Float[Array, " levels"], Float[Array, ""]]:
    """The `count` of the points that make unbiased rounding of all weighted points the least variable.

    With the cost `C_jk = Σ_i w_i (x_j - x_i) (x_i - x_k)` of the points between the levels k and j, the least cost up
    to j with n levels is `D_nj = min_{k < j} D_{n-1,k} + C_jk`. All terms are positive: nothing cancels in float32.

    `O(m³)` for C, as one product of matrices, and `O(n m²)` for the rest: 257 points take a few milliseconds.

    Args:
      points: increasing. The first and the last are always levels.
      weights: not negative.
      count: of levels, from 2 to the number of points.

    Returns:
      The levels, and the sum of the variances.

    Raises:
      ValueError: there are not so many points.

    Example:
      >>> import jax.numpy as jnp
      >>> levels, loss = optimal_levels(jnp.array([0.0, 1.0, 2.0, 10.0]), jnp.ones(4), 3)
      >>> levels.tolist(), float(loss)
      ([0.0, 2.0, 10.0], 1.0)
    """
    size = points.shape[0]
    if not 2 <= count <= size:
        raise ValueError(f"count must be from 2 to the number of points, {size}, got {count}")
    above = jnp.maximum(points[:, None] - points[None, :], 0)
    costs = jnp.matmul(above * weights[None, :], above, precision=lax.Precision.HIGHEST)
    order = jnp.arange(size)
    costs = jnp.where(order[:, None] > order[None, :], costs, jnp.inf)

    def add_level(least, _):
        sums = least[None, :] + costs
        return jnp.min(sums, axis=1), jnp.argmin(sums, axis=1)

    least, before = lax.scan(add_level, costs[:, 0], None, length=count - 2)

    def back(level, before):
        return before[level], before[level]

    # The index takes the type of what it is chosen by, which may differ between workers.
    last = jnp.full_like(jnp.argmin(least), size - 1)
    _, inner = lax.scan(back, last, before, reverse=True)
    ends = points[:1], points[inner], points[-1:]
    return jnp.concatenate(ends), least[-1]


def grid(bucket: int, *, magnitudes: bool = False) -> Float[Array, " points"]:
    """Points from -1 (or 0) to 1, evenly spaced around zero, by a constant factor far from it: `sinh(a t) / sinh a`."""
    a = _stretch(bucket)
    t = jnp.linspace(0.0 if magnitudes else -1.0, 1.0, POINTS, dtype=jnp.float32)
    # The ends by themselves, since levels begin and end with exactly 1.
    return jnp.concatenate([t[:1], jnp.sinh(a * t[1:-1]) / math.sinh(a), t[-1:]])


def ratio_histogram(
    x: Array, *, bucket: int, norm: Literal["max", "l2"], norm_power: int, magnitudes: bool = False
) -> Float[Array, " points"]:
    """How the entries of normalised buckets lie on the `grid`, weighted by `norm**norm_power`.

    An entry between two points counts towards both, as much as it is near. This changes the variance of rounding by the
    same amount for all tables of grid points, so the best of them is the best for the entries themselves.

    Args:
      x: any array.
      bucket: entries that share a norm.
      norm: "max" or "l2".
      norm_power: 2 weighs entries as they enter the variance of the whole array, 0 all alike.
      magnitudes: of `|x|`.

    Returns:
      A weight for each point. Histograms of several workers may be added or averaged.
    """
    ratios, norms = normalized(x, bucket, norm)
    ratios, rows = jnp.abs(ratios) if magnitudes else ratios, ratios.shape[0]
    a, points = _stretch(bucket), grid(bucket, magnitudes=magnitudes)
    t = jnp.arcsinh(ratios * math.sinh(a)) / a
    place = t if magnitudes else (t + 1) / 2
    cell = jnp.clip((place * (POINTS - 1)).astype(jnp.int32), 0, POINTS - 2)
    low, high = points[cell], points[cell + 1]
    share = jnp.clip((ratios - low) / (high - low), 0.0, 1.0)
    real = to_buckets(jnp.ones(x.shape), bucket)
    first = POINTS * lax.broadcasted_iota(jnp.int32, cell.shape, 0)
    # One histogram for each bucket: float32 stops counting at 2**24.
    counts = jnp.zeros(rows * POINTS, jnp.float32).at[(first + cell).ravel()].add(((1 - share) * real).ravel())
    counts = counts.at[(first + cell + 1).ravel()].add((share * real).ravel())
    weights = jnp.where(norms == 0, 0.0, norms**norm_power)
    return jnp.sum(counts.reshape(rows, POINTS) * weights, axis=0)


def _stretch(bucket: int) -> float:
    return math.log(20.0 * math.sqrt(bucket))
