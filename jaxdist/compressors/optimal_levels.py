"""The best levels for given entries (QUIVER, Ben Basat et al., arXiv:2402.03158), and the variance of any levels.

`optimal_levels` is exact, by dynamic programming over a histogram of the entries (`grid`, `ratio_histogram`).
`expected_variance` and `worst_variance` are the variance of stochastic rounding to a table of levels, for given entries
and for the worst ones.

References:
  R. Ben Basat, Y. Ben-Itzhak, M. Mitzenmacher, S. Vargaftik, "Optimal and approximate adaptive stochastic
  quantization", arXiv:2402.03158, 2024.
"""

import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.types import Array, Float, Int
from .rounding import normalize_buckets, to_buckets

# The number of points of the grid. Neighbors differ by about six per cent, with buckets of 8192.
POINTS = 257


def optimal_levels(
    points: Float[Array, " points"], weights: Float[Array, " points"], count: int
) -> tuple[Float[Array, " levels"], Float[Array, ""]]:
    """The `count` points that minimize the variance of unbiased rounding of all weighted points to them.

    With the cost `C_jk = Σ_i w_i (x_j - x_i) (x_i - x_k)` of the points between the levels k and j, the smallest cost
    up to j with n levels is `D_nj = min_{k < j} D_{n-1,k} + C_jk`. All terms are positive: nothing cancels in float32.

    `O(m³)` for C, as one product of matrices, and `O(n m²)` for the rest: 257 points take a few milliseconds.

    Args:
      points: increasing. The first and the last are always levels.
      weights: not negative.
      count: of levels, from 2 to the number of points.

    Returns:
      The levels, and the sum of the variances.

    Raises:
      ValueError: `count` is below 2 or larger than the number of points.

    Example:
      >>> import jax.numpy as jnp
      >>> levels, loss = optimal_levels(jnp.array([0.0, 1.0, 2.0, 10.0]), jnp.ones(4), 3)
      >>> levels.tolist(), float(loss)
      ([0.0, 2.0, 10.0], 1.0)
    """
    size = points.shape[0]
    if not 2 <= count <= size:
        raise ValueError(f"count must be from 2 to the number of points, {size}, got {count}")
    # C as a product: (x_j - x_i)₊ w_i times (x_i - x_k)₊.
    above = jnp.maximum(points[:, None] - points[None, :], 0)
    costs = jnp.matmul(above * weights[None, :], above, precision=lax.Precision.HIGHEST)
    order = jnp.arange(size)
    costs = jnp.where(order[:, None] > order[None, :], costs, jnp.inf)

    def add_level(cost, _):
        sums = cost[None, :] + costs
        return jnp.min(sums, axis=1), jnp.argmin(sums, axis=1)

    cost, previous = lax.scan(add_level, costs[:, 0], None, length=count - 2)

    # From the last level back to the first. `full_like`, since the type of the index may be per-worker.
    def step_back(level, previous):
        return previous[level], previous[level]

    last = jnp.full_like(jnp.argmin(cost), size - 1)
    _, inner = lax.scan(step_back, last, previous, reverse=True)
    return jnp.concatenate([points[:1], points[inner], points[-1:]]), cost[-1]


def grid(bucket: int, *, magnitudes: bool = False) -> Float[Array, " points"]:
    """Points `sinh(a t) / sinh a` from -1 (or 0) to 1: evenly spaced near zero, by a constant factor far from it."""
    a = _stretch(bucket)
    t = jnp.linspace(0.0 if magnitudes else -1.0, 1.0, POINTS, dtype=jnp.float32)
    # The ends as they are, since levels must begin and end with exactly 1.
    return jnp.concatenate([t[:1], jnp.sinh(a * t[1:-1]) / math.sinh(a), t[-1:]])


def ratio_histogram(
    x: Array, *, bucket: int, norm: Literal["max", "l2"], norm_power: int, magnitudes: bool = False
) -> Float[Array, " points"]:
    """A histogram of the entries of normalized buckets on the `grid`, weighted by `norm**norm_power`.

    An entry between two points counts towards both, in proportion to its nearness. This changes the variance of
    rounding by the same amount for all tables of grid points, so the best table is also the best for the entries.

    Args:
      x: any array.
      bucket: entries that share a norm.
      norm: "max" or "l2".
      norm_power: 2 weighs entries as they enter the variance of the whole array, 0 weighs all entries alike.
      magnitudes: use `|x|`.

    Returns:
      A weight for each point. Histograms of several workers may be added or averaged.
    """
    ratios, norms = normalize_buckets(x, bucket, norm)
    ratios, rows = jnp.abs(ratios) if magnitudes else ratios, ratios.shape[0]
    a, points = _stretch(bucket), grid(bucket, magnitudes=magnitudes)
    t = jnp.arcsinh(ratios * math.sinh(a)) / a
    place = t if magnitudes else (t + 1) / 2
    cell = jnp.clip((place * (POINTS - 1)).astype(jnp.int32), 0, POINTS - 2)
    low, high = points[cell], points[cell + 1]
    share = jnp.clip((ratios - low) / (high - low), 0.0, 1.0)
    real = to_buckets(jnp.ones(x.shape), bucket)
    first = POINTS * lax.broadcasted_iota(jnp.int32, cell.shape, 0)
    # One histogram for each bucket, since float32 cannot count beyond 2**24.
    counts = jnp.zeros(rows * POINTS, jnp.float32).at[(first + cell).ravel()].add(((1 - share) * real).ravel())
    counts = counts.at[(first + cell + 1).ravel()].add((share * real).ravel())
    weights = jnp.where(norms == 0, 0.0, norms**norm_power)
    return jnp.sum(counts.reshape(rows, POINTS) * weights, axis=0)


def _stretch(bucket: int) -> float:
    return math.log(20.0 * math.sqrt(bucket))


def expected_variance(
    x: Float[Array, "..."],
    levels: Float[Array | np.ndarray, " levels"],
    *,
    bucket: int = 8192,
    norm: Literal["max", "l2"] = "l2",
    zero_level: bool = True,
) -> Float[Array, ""]:
    """`E|C(x) - x|²` of `with_levels` in closed form: `Σ norm² (h - r_i) (r_i - l)` over all entries.

    Args:
      x: any array.
      levels: as for `with_levels`, as are the other arguments.
      bucket: entries that share a norm.
      norm: "max" or "l2".
      zero_level: whether `levels` are magnitudes.

    Returns:
      float32.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> round(float(expected_variance(x, jnp.array([0.0, 0.125, 0.25, 0.5, 1.0]))), 4)
      7.7187
    """
    ratios, norms = normalize_buckets(x, bucket, norm)
    ratios = jnp.abs(ratios) if zero_level else ratios
    table = jnp.asarray(levels, jnp.float32)
    below = level_below(ratios, table)
    squares = (table[below + 1] - ratios) * (ratios - table[below])
    # The padding of the last bucket does not count.
    real = to_buckets(jnp.ones(x.shape), bucket)
    # Squared last: norms may be so large that their squares overflow.
    return jnp.sum((jnp.sqrt(jnp.sum(squares * real, axis=1)) * norms[:, 0]) ** 2)


def level_below(ratios: Float[Array, "..."], levels: Float[Array, " levels"]) -> Int[Array, "..."]:
    """The index of the last level that is not above each ratio, at most the last but one."""
    found = jnp.searchsorted(levels, ratios, side="right").astype(jnp.int32) - 1
    return jnp.clip(found, 0, levels.shape[0] - 2)


def worst_variance(levels: Any, size: int, norm: str) -> Any:
    """ω: the largest `E|C(x) - x|² / |x|²` over buckets of `size` entries.

    A NumPy table gives a float, a traced one a traced number. Between the neighbors l and h an entry of ratio r costs
    `(h - r) (r - l)`, which is negative outside. With the largest magnitude as the norm, one entry costs nothing and
    weighs 1, and each other entry is worst where it has the largest `(h - r) (r - l) - ω r²`; hence
    `ω = (d - 1) max_r ((h - r) (r - l) - ω r²)`, a quadratic equation in `t = 1 + ω` for each interval. With the
    Euclidean norm the squares of the ratios add up to 1, and the dual of that constraint with the multiplier λ gives
    `ω <= λ + d max_r ((h - r) (r - l) - λ r²)` for every λ. With `u = 1 / (1 + λ)` the maximum is over the lines
    `(l + h)² u / 4 - l h`, so the best u is where one of them has the slope of `1 / u`, or where two neighbors cross.
    """
    if size <= 1:
        return 0.0
    # NumPy's float64 for tables that are known, so that ω is exact there.
    static = isinstance(levels, np.ndarray)
    xp: Any = np if static else jnp
    levels = levels.astype(np.float64) if static else levels
    low, high = levels[:-1], levels[1:]
    slopes, drops = (low + high) ** 2 / 4, low * high
    if norm == "max":
        q = 1 - (size - 1) * drops
        worst = xp.max(q + xp.sqrt(q * q + 4 * (size - 1) * slopes)) / 2 - 1
    else:
        rises = slopes[1:] - slopes[:-1]
        crossings = (drops[1:] - drops[:-1]) / xp.where(rises == 0, 1, rises)
        u = xp.concatenate([1 / xp.sqrt(size * xp.where(slopes == 0, 1, slopes)), crossings, xp.ones(1, levels.dtype)])
        u = xp.where(u > 0, u, 1)
        worst = xp.min(1 / u - 1 + size * xp.max(slopes[:, None] * u[None, :] - drops[:, None], axis=0))
    return max(0.0, float(worst)) if static else xp.maximum(worst, 0)
