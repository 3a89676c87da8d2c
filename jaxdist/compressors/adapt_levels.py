"""Levels fitted to the distribution of the entries: ALQ and AMQ (Faghri et al., arXiv:2010.12460).

The entries of normalized buckets are summed up as a mixture of truncated normal distributions (`bucket_sums`,
`mixture_of`, `distribution_of`), whose integrals give the variance Ψ of stochastic rounding to a table of levels.
ALQ minimizes Ψ over all inner levels, by coordinate descent (`fit_levels`); AMQ over the multiplier p of
the levels `±p^j` (`best_multiplier`).

References:
  Faghri, Tabrizian, Markov, Alistarh, Roy, Ramezani-Kebrya, "Adaptive Gradient Quantization for Data-Parallel SGD",
  arXiv:2010.12460, 2020.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.branches import bind
from .._core.types import Array, Float
from .._core.xla_quirks import smallest_entry
from .nuqsgd import powers
from .rounding import normalize_buckets, to_buckets

# A smaller standard deviation would give a bucket of equal entries infinite densities.
SMALLEST_SIGMA = 1e-6
# The number of scales of blocks of entries, each half of the one before. Smaller ones do not matter in float32.
SCALES = 20
# The steps in which an interval is bisected.
BISECTIONS = 26
# The smallest distance of a level to its neighbors, as a part of their distance.
MARGIN = 1e-5
# The number of multipliers that AMQ tries.
MULTIPLIERS = 128
# The number of points of the grid of `optimal_levels`. Neighbors differ by about six per cent, with buckets of 8192.
POINTS = 257


class Distribution(NamedTuple):
    """A distribution on [-1, 1] by its integrals `∫ dF`, `∫ r dF`, `∫ r² dF` from a to c, arrays of one shape."""

    mass: Callable[[Array, Array], Array]
    first: Callable[[Array, Array], Array]
    second: Callable[[Array, Array], Array]


class Mixture(NamedTuple):
    """Normal distributions cut off at -1 and 1; the weights need not add up to 1."""

    weight: Float[Array, " components"]
    mean: Float[Array, " components"]
    sigma: Float[Array, " components"]


def bucket_sums(
    x: Array, *, bucket: int, norm: Literal["max", "l2"], norm_power: int, block: int
) -> Float[Array, "components 3"]:
    """`Σ w`, `Σ w r`, `Σ w r²` of the entries `r = x / norm`, `w = norm**norm_power`, for each scale of `r`.

    A block of neighbors counts towards component k if the root of its mean square is between `2^-k` and `2^-(k+1)`.
    Layers of different scales in one bucket are thus separate components, and the mixture has their joint tails. The
    last of the 20 rows includes all smaller scales. Sums of several workers may be added or averaged.

    With a norm power of 2 entries weigh as they enter the variance of the whole array, with 0 all weigh alike. The
    entries of a block, at most a bucket, share a mean and a variance.
    """
    (ratios, norms), real = normalize_buckets(x, bucket, norm), to_buckets(jnp.ones(x.shape), bucket)
    width = min(block, ratios.shape[1])
    padding = ((0, 0), (0, -ratios.shape[1] % width))
    parts = [jnp.pad(values, padding).reshape(-1, width) for values in (real, ratios, ratios**2)]
    sums = jnp.stack([jnp.sum(part, axis=1) for part in parts], axis=1)
    square = sums[:, 2] / jnp.maximum(sums[:, 0], 1.0)
    scale = -0.5 * jnp.log2(jnp.where(square > 0, square, 1.0))
    component = jnp.where(square > 0, jnp.clip(scale.astype(jnp.int32), 0, SCALES - 1), SCALES - 1)
    # Norms must be near 1, or their squares overflow or vanish: callers scale the entries, and check the sums.
    weights = jnp.where(norms == 0, 0.0, norms**norm_power)
    weights = jnp.repeat(weights, sums.shape[0] // max(ratios.shape[0], 1), axis=0)
    # Sums by component as a product with one-hot rows.
    one_hot = component[:, None] == jnp.arange(SCALES)[None, :]
    return jnp.matmul(one_hot.astype(jnp.float32).T, weights * sums, precision=jax.lax.Precision.HIGHEST)


def mixture_of(sums: Float[Array, "components 3"]) -> Mixture:
    """The normal distributions with the means and variances of `bucket_sums`."""
    weight = sums[:, 0]
    mean, square = (sums[:, i] / jnp.where(weight == 0, 1.0, weight) for i in (1, 2))
    sigma = jnp.sqrt(jnp.maximum(square - mean * mean, SMALLEST_SIGMA**2))
    return Mixture(weight / jnp.sum(weight), mean, sigma)


def distribution_of(mixture: Mixture) -> Distribution:
    """The distribution of a mixture, exact in the tails: differences of `erfc` on the side where it is small.

    With `z = (r - μ) / σ` and the density φ: `∫ r dF = μ ∫ dF + σ (φ(a) - φ(c))` and
    `∫ r² dF = (μ² + σ²) ∫ dF + σ ((a + μ) φ(a) - (c + μ) φ(c))`.

    Examples:
      >>> import jax.numpy as jnp
      >>> normal = distribution_of(Mixture(jnp.ones(1), jnp.zeros(1), jnp.full(1, 0.1)))
      >>> round(float(normal.mass(jnp.float32(0), jnp.float32(1))), 6)
      0.5
    """
    mean, sigma = mixture.mean, mixture.sigma
    weight = mixture.weight / _masses(mixture, jnp.float32(-1), jnp.float32(1))

    def mass(a, c):
        return jnp.sum(weight * _masses(mixture, a, c))

    def first(a, c):
        edges = _densities(mixture, a) - _densities(mixture, c)
        return jnp.sum(weight * (mean * _masses(mixture, a, c) + sigma * edges))

    def second(a, c):
        edges = (a + mean) * _densities(mixture, a) - (c + mean) * _densities(mixture, c)
        return jnp.sum(weight * ((mean**2 + sigma**2) * _masses(mixture, a, c) + sigma * edges))

    return Distribution(*(jnp.vectorize(integral, signature="(),()->()") for integral in (mass, first, second)))


def _densities(mixture: Mixture, r: Array) -> Float[Array, " components"]:
    """`φ((r - μ) / σ)` of all components at a scalar."""
    return jnp.exp(-0.5 * ((r - mixture.mean) / mixture.sigma) ** 2) * (2 * jnp.pi) ** -0.5


def _masses(mixture: Mixture, a: Array, c: Array) -> Float[Array, " components"]:
    """The mass of all components between two scalars, before truncation."""
    left, right = ((r - mixture.mean) / mixture.sigma * 0.5**0.5 for r in (a, c))
    # In the tail on whose side the interval is: differences of `erfc` near 2 would lose all digits.
    upper = left + right > 0
    near, far = jnp.where(upper, left, -right), jnp.where(upper, right, -left)
    return 0.5 * (jax.lax.erfc(near) - jax.lax.erfc(far))


def fold(distribution: Distribution) -> Distribution:
    """Folds a distribution at zero: that of the magnitudes `|r|`."""

    def fold_integral(integral, sign):
        return lambda a, c: integral(a, c) + sign * integral(-c, -a)

    return Distribution(
        *(fold_integral(integral, sign) for integral, sign in zip(distribution, (1, -1, 1), strict=True))
    )


def rounding_loss(levels: Float[Array, " levels"], distribution: Distribution) -> Float[Array, ""]:
    """`Ψ = Σ_j ∫ (l_{j+1} - r) (r - l_j) dF` over the intervals: the variance of one entry, for a norm of 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> uniform = Distribution(lambda a, c: c - a, lambda a, c: (c**2 - a**2) / 2, lambda a, c: (c**3 - a**3) / 3)
      >>> round(float(rounding_loss(jnp.array([0.0, 0.5, 1.0]), uniform)), 6)  # (1/2)³ / 6, twice
      0.041667
    """
    low, high = levels[:-1], levels[1:]
    mass, first, second = (integral(low, high) for integral in distribution)
    return jnp.sum((low + high) * first - second - low * high * mass)


def loss_gradient(levels: Float[Array, " levels"], distribution: Distribution) -> Float[Array, " inner"]:
    """`dΨ/dl_j = ∫_{l_{j-1}}^{l_j} (r - l_{j-1}) dF - ∫_{l_j}^{l_{j+1}} (l_{j+1} - r) dF` for the inner levels."""
    return _slope(levels[:-2], levels[1:-1], levels[2:], distribution)


def _slope(below: Array, level: Array, above: Array, distribution: Distribution) -> Array:
    # dΨ/dl_j; both integrals are from `first` and `mass`, which are exact in the tails.
    left = distribution.first(below, level) - below * distribution.mass(below, level)
    right = above * distribution.mass(level, above) - distribution.first(level, above)
    return left - right


def coordinate_descent(
    levels: Float[Array, " levels"], distribution: Distribution, *, sweeps: int = 30
) -> Float[Array, " levels"]:
    """ALQ: moves each inner level in turn to `dΨ/dl_j = 0` between its neighbors; Ψ never rises.

    The slope grows with the level, so bisection finds its zero, where the paper inverts F: this needs no quantiles, and
    gives no NaN where F has no mass (then the level moves half way). Levels with odd and with even numbers take turns,
    since those of one kind do not depend on each other: the order differs from the paper's, the fixed points do not.

    Examples:
      >>> import jax.numpy as jnp
      >>> uniform = Distribution(lambda a, c: c - a, lambda a, c: (c**2 - a**2) / 2, lambda a, c: (c**3 - a**3) / 3)
      >>> coordinate_descent(jnp.array([0.0, 0.1, 0.2, 1.0]), uniform, sweeps=2).round(4).tolist()
      [0.0, 0.2750000059604645, 0.637499988079071, 1.0]
    """
    odd = jnp.arange(1, levels.shape[0] - 1) % 2

    def move_every_second(number, levels):
        below, level, above = levels[:-2], levels[1:-1], levels[2:]
        root = _bisect(lambda middle: _slope(below, middle, above, distribution) > 0, below, above)
        moved = jnp.where(distribution.mass(below, above) > 0, root, (below + above) / 2)
        # Levels stay distinct.
        margin = MARGIN * (above - below)
        inner = jnp.where((odd + number) % 2 == 1, jnp.clip(moved, below + margin, above - margin), level)
        return jnp.concatenate([levels[:1], inner, levels[-1:]])

    return lax.fori_loop(0, 2 * sweeps, move_every_second, levels)


def _bisect(is_above: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """The points between `low` and `high` from which on `is_above` holds."""

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        above = is_above(middle)
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return (low + high) / 2


def fit_levels(distribution: Distribution, count: int, *, lowest: float | int = -1.0) -> Float[Array, " levels"]:
    """The best of three descents to `count` levels: from the quantiles of F, uniform levels and powers of 1/2.

    `lowest` is -1 for a table without a zero level, 0 for the distribution of magnitudes and a table with one.
    """
    uniform = jnp.linspace(lowest, 1.0, count, dtype=jnp.float32)
    starts = jnp.stack([uniform, quantiles(distribution, uniform), powers(count, 0.5, lowest=lowest)])
    # Ψ is not convex, so the result depends on the start.
    found = jax.vmap(lambda levels: coordinate_descent(levels, distribution))(starts)
    losses = jax.vmap(lambda levels: rounding_loss(levels, distribution))(found)
    return found[jnp.argmin(losses)]


def quantiles(distribution: Distribution, uniform: Float[Array, " levels"]) -> Float[Array, " levels"]:
    """Levels with equal mass between neighbors, and a share of the uniform levels, which keeps them distinct."""
    # Shares of the mass, which grow evenly.
    lowest = uniform[:1]
    wanted = (uniform - lowest) / (1 - lowest) * distribution.mass(lowest, uniform[-1:])
    root = _bisect(
        lambda middle: distribution.mass(jnp.broadcast_to(lowest, middle.shape), middle) > wanted,
        jnp.full_like(uniform, lowest[0]),
        jnp.ones_like(uniform),
    )
    return jnp.concatenate([lowest, 0.999 * root[1:-1] + 0.001 * uniform[1:-1], uniform[-1:]])


def multiplier_slope(multiplier: Float[Array, ""], distribution: Distribution, count: int) -> Float[Array, ""]:
    """`dΨ/dp = Σ_j dΨ/dl_j dl_j/dp` for the levels `±p^j`."""
    levels, tangents = jax.jvp(lambda p: powers(count, p), (multiplier,), (jnp.ones_like(multiplier),))
    return jnp.sum(loss_gradient(levels, distribution) * tangents[1:-1])


def best_multiplier(distribution: Distribution, count: int) -> Float[Array, ""]:
    """AMQ: the p whose levels `±p^s, ..., ±p, ±1` have the smallest Ψ.

    Ψ(p) can have several minima, so it is computed for 128 values of p from 0.001 to 0.99, and dΨ/dp is then bisected
    between the neighbors of the best. (The authors descend from nine starts with a fixed rate.) `count` is even.
    """
    trials = jnp.geomspace(0.001, 0.99, MULTIPLIERS, dtype=jnp.float32)
    losses = jax.vmap(lambda p: rounding_loss(powers(count, p), distribution))(trials)
    best = jnp.argmin(losses)
    ends = trials[jnp.maximum(best - 1, 0)], trials[jnp.minimum(best + 1, MULTIPLIERS - 1)]
    return _bisect(lambda p: multiplier_slope(p, distribution, count) > 0, *ends)


def optimal_levels(
    points: Float[Array, " points"], weights: Float[Array, " points"], count: int
) -> tuple[Float[Array, " levels"], Float[Array, ""]]:
    """The `count` points that minimize the variance of unbiased rounding of all weighted points to them, and the least.

    With the cost `C_jk = Σ_i w_i (x_j - x_i) (x_i - x_k)` of the points between the levels k and j, the smallest cost
    up to j with n levels is `D_nj = min_{k < j} D_{n-1,k} + C_jk`. All terms are positive: nothing cancels in float32.

    `O(m³)` for C, as one product of matrices, and `O(n m²)` for the rest: 257 points take a few milliseconds. Points
    must increase, the first and the last are always levels, and weights are not negative.

    Examples:
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
        return smallest_entry(sums, 1), jnp.argmin(sums, axis=1)

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
    Arguments are those of `bucket_sums`; histograms of several workers may be added or averaged.
    """
    ratios, norms = normalize_buckets(x, bucket, norm)
    ratios = jnp.abs(ratios) if magnitudes else ratios
    points, real = grid(bucket, magnitudes=magnitudes), to_buckets(jnp.ones(x.shape), bucket)
    # One histogram for each bucket, since float32 cannot count beyond 2**24.
    counts = lax.platform_dependent(
        ratios,
        real,
        points,
        tpu=_count_by_comparison,
        default=bind(_count_by_scatter, stretch=_stretch(bucket), lowest=0.0 if magnitudes else -1.0),
    )
    weights = jnp.where(norms == 0, 0.0, norms**norm_power)
    return jnp.sum(counts * weights, axis=0)


def _count_by_scatter(
    ratios: Float[Array, "rows width"],
    real: Float[Array, "rows width"],
    points: Float[Array, " points"],
    *,
    stretch: float,
    lowest: float,
) -> Float[Array, "rows points"]:
    """The histogram of each row, of entries that count as `real`."""
    place = (jnp.arcsinh(ratios * math.sinh(stretch)) / stretch - lowest) / (1 - lowest)
    cell = jnp.clip((place * (POINTS - 1)).astype(jnp.int32), 0, POINTS - 2)
    low, high = points[cell], points[cell + 1]
    share = jnp.clip((ratios - low) / (high - low), 0.0, 1.0)
    first = POINTS * lax.broadcasted_iota(jnp.int32, cell.shape, 0)
    counts = jnp.zeros(cell.shape[0] * POINTS, jnp.float32).at[(first + cell).ravel()].add(((1 - share) * real).ravel())
    return counts.at[(first + cell + 1).ravel()].add((share * real).ravel()).reshape(-1, POINTS)


def _count_by_comparison(
    ratios: Float[Array, "rows width"], real: Float[Array, "rows width"], points: Float[Array, " points"]
) -> Float[Array, "rows points"]:
    # Look-ups and a scatter on TPU take 20 bytes of memory for each entry. Here all is fused into the sum: up to a
    # point the share of an entry rises from 0 to 1, and behind it, from 1 to 0.
    before, after = jnp.concatenate([points[:1] - 1, points]), jnp.concatenate([points, points[-1:] + 1])

    def rise(start: Array, end: Array) -> Float[Array, "rows width points"]:
        start, end = (x.reshape(1, 1, -1) for x in (start, end))
        return jnp.clip((ratios[:, :, None] - start) / (end - start), 0.0, 1.0)

    return jnp.sum((rise(before[:-1], after[:-1]) - rise(before[1:], after[1:])) * real[:, :, None], axis=1)


def _stretch(bucket: int) -> float:
    return math.log(20.0 * math.sqrt(bucket))
