"""What rounding to a table of levels costs: for given entries, and at worst."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .._typing import Array, Float, Int
from .buckets import normalized, to_buckets


def expected_variance(
    x: Float[Array, "..."],
    levels: Float[Array | np.ndarray, " levels"],
    *,
    bucket: int = 8192,
    norm: Literal["max", "l2"] = "l2",
    zero_level: bool = True,
) -> Float[Array, ""]:
    """`E|C(x) - x|²` of `with_levels` in closed form: `Σ norm² (h - r_i) (r_i - l)` over all entries, no draws.

    Args:
      x: any array.
      levels: as for `with_levels`, and the others too.
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
    ratios, norms = normalized(x, bucket, norm)
    ratios = jnp.abs(ratios) if zero_level else ratios
    table = jnp.asarray(levels, jnp.float32)
    below = level_below(ratios, table)
    squares = (table[below + 1] - ratios) * (ratios - table[below])
    # What fills the last bucket does not count.
    real = to_buckets(jnp.ones(x.shape), bucket)
    # Each sum first, as a length: norms may be so large that their squares overflow, and sums may be zero.
    return jnp.sum((jnp.sqrt(jnp.sum(squares * real, axis=1)) * norms[:, 0]) ** 2)


def level_below(ratios: Float[Array, "..."], levels: Float[Array, " levels"]) -> Int[Array, "..."]:
    """The index of the last level that is not above each ratio, but never of the last one of all."""
    found = jnp.searchsorted(levels, ratios, side="right").astype(jnp.int32) - 1
    return jnp.clip(found, 0, levels.shape[0] - 2)


def worst_variance(levels: Any, size: int, norm: str) -> Any:
    """ω: the largest `E|C(x) - x|² / |x|²` over buckets of `size` entries.

    A NumPy table gives a float, a traced one a traced number. Between the neighbours l and h an entry of ratio r costs
    `(h - r) (r - l)`, which is negative outside. With the largest magnitude as the norm, one entry costs nothing and
    weighs 1, and each other entry should be the one with the best `(h - r) (r - l) - ω r²`; hence
    `ω = (d - 1) max_r ((h - r) (r - l) - ω r²)`, a quadratic equation in `t = 1 + ω` for each interval. With the
    Euclidean norm the squares of the ratios add up to 1, and the dual of that constraint with the multiplier λ gives
    `ω <= λ + d max_r ((h - r) (r - l) - λ r²)` for every λ. With `u = 1 / (1 + λ)` the maximum is over the lines
    `(l + h)² u / 4 - l h`, so the best u is where one of them is level with `1 / u`, or where two neighbours cross.
    """
    if size <= 1:
        return 0.0
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
