"""Levels fitted to the distribution of the entries: ALQ and AMQ (Faghri et al., arXiv:2010.12460).

The entries of normalized buckets are summed up as a mixture of truncated normal distributions (`bucket_sums`,
`mixture_of`, `truncated_normals`), whose integrals give the variance Ψ of stochastic rounding to a table of levels.
ALQ minimizes Ψ over all inner levels, by coordinate or gradient descent (`fit_levels`); AMQ over the multiplier p of
the levels `±p^j` (`best_multiplier`).

References:
  F. Faghri, I. Tabrizian, I. Markov, D. Alistarh, D. Roy, A. Ramezani-Kebrya, "Adaptive gradient quantization for
  data-parallel SGD", arXiv:2010.12460, 2020.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Float
from .levels import powers
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


class Distribution(NamedTuple):
    """A distribution on [-1, 1] by its integrals between two points, arrays of one shape.

    Attributes:
      mass: `mass(a, c) = ∫ dF`.
      first: `first(a, c) = ∫ r dF`.
      second: `second(a, c) = ∫ r² dF`.
    """

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
    Layers of different scales in one bucket are thus separate components, and the mixture has their joint tails.
    Sums of several workers may be added or averaged.

    Args:
      x: any array.
      bucket: entries that share a norm.
      norm: "max" or "l2".
      norm_power: 2 weighs entries as they enter the variance of the whole array, 0 weighs all entries alike.
      block: entries that share a mean and a variance, at most a bucket.

    Returns:
      One row for each of the 20 scales; the last one includes all smaller scales.
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
    """The normal distributions with the means and variances of `bucket_sums`.

    Example:
      >>> import jax.numpy as jnp
      >>> mixture_of(jnp.array([[2.0, 0.0, 0.5]])).sigma.tolist()
      [0.5]
    """
    weight = sums[:, 0]
    mean, square = (sums[:, i] / jnp.where(weight == 0, 1.0, weight) for i in (1, 2))
    sigma = jnp.sqrt(jnp.maximum(square - mean * mean, SMALLEST_SIGMA**2))
    return Mixture(weight / jnp.sum(weight), mean, sigma)


def truncated_normals(mixture: Mixture) -> Distribution:
    """The distribution of a mixture, exact in the tails: differences of `erfc` on the side where it is small.

    With `z = (r - μ) / σ` and the density φ: `∫ r dF = μ ∫ dF + σ (φ(a) - φ(c))` and
    `∫ r² dF = (μ² + σ²) ∫ dF + σ ((a + μ) φ(a) - (c + μ) φ(c))`.

    Example:
      >>> import jax.numpy as jnp
      >>> normal = truncated_normals(Mixture(jnp.ones(1), jnp.zeros(1), jnp.full(1, 0.1)))
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


def expected_loss(levels: Float[Array, " levels"], distribution: Distribution) -> Float[Array, ""]:
    """`Ψ = Σ_j ∫ (l_{j+1} - r) (r - l_j) dF` over the intervals: the variance of one entry, for a norm of 1.

    Example:
      >>> import jax.numpy as jnp
      >>> uniform = Distribution(lambda a, c: c - a, lambda a, c: (c**2 - a**2) / 2, lambda a, c: (c**3 - a**3) / 3)
      >>> round(float(expected_loss(jnp.array([0.0, 0.5, 1.0]), uniform)), 6)  # (1/2)³ / 6, twice
      0.041667
    """
    low, high = levels[:-1], levels[1:]
    mass, first, second = (integral(low, high) for integral in distribution)
    return jnp.sum((low + high) * first - second - low * high * mass)


def loss_gradient(levels: Float[Array, " levels"], distribution: Distribution) -> Float[Array, " inner"]:
    """`dΨ/dl_j = ∫_{l_{j-1}}^{l_j} (r - l_{j-1}) dF - ∫_{l_j}^{l_{j+1}} (l_{j+1} - r) dF` for the inner levels."""
    return _slope(levels[:-2], levels[1:-1], levels[2:], distribution)


def _slope(below: Array, level: Array, above: Array, distribution: Distribution) -> Array:
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

    Args:
      levels: the start; the first and the last do not move.
      distribution: of the entries.
      sweeps: the number of times that every level moves.

    Returns:
      The levels.

    Example:
      >>> import jax.numpy as jnp
      >>> uniform = Distribution(lambda a, c: c - a, lambda a, c: (c**2 - a**2) / 2, lambda a, c: (c**3 - a**3) / 3)
      >>> coordinate_descent(jnp.array([0.0, 0.1, 0.2, 1.0]), uniform, sweeps=2).round(4).tolist()
      [0.0, 0.2750000059604645, 0.637499988079071, 1.0]
    """
    return _alternate(levels, partial(_to_optimum, distribution), jnp.zeros_like(levels[1:-1]), 2 * sweeps)


def _to_optimum(
    distribution: Distribution, below: Array, level: Array, above: Array, memory: Array
) -> tuple[Array, Array]:
    """The zero of the slope between two neighbors."""
    del level
    root = _bisect(lambda middle: _slope(below, middle, above, distribution) > 0, below, above)
    return jnp.where(distribution.mass(below, above) > 0, root, (below + above) / 2), memory


def gradient_descent(
    levels: Float[Array, " levels"], distribution: Distribution, *, rate: float | int = 1.0, sweeps: int = 300
) -> Float[Array, " levels"]:
    """ALQ by projected gradient descent: `l_j -= rate dΨ/dl_j`, at most half of the way to a neighbor.

    A level whose slope changes its sign continues at half its rate: the curvature `(l_{j+1} - l_{j-1}) f(l_j)` is about
    the probability around the level where there are many levels, but 40 for four levels and buckets of 8192, where the
    authors' fixed rate of 0.1 oscillates.

    Args:
      levels: the start; the first and the last do not move.
      distribution: of the entries.
      rate: the initial rate. Too low converges slowly, too high loses a few sweeps to halving.
      sweeps: the number of times that every level moves.

    Returns:
      The levels.

    Example:
      >>> import jax.numpy as jnp
      >>> uniform = Distribution(lambda a, c: c - a, lambda a, c: (c**2 - a**2) / 2, lambda a, c: (c**3 - a**3) / 3)
      >>> gradient_descent(jnp.array([0.0, 0.1, 0.2, 1.0]), uniform).round(4).tolist()
      [0.0, 0.33329999446868896, 0.666700005531311, 1.0]
    """
    first = rate * jnp.sign(loss_gradient(levels, distribution))
    return _alternate(levels, partial(_downhill, distribution), jnp.where(first == 0, rate, first), 2 * sweeps)


def _downhill(
    distribution: Distribution, below: Array, level: Array, above: Array, signed_rate: Array
) -> tuple[Array, Array]:
    """One gradient step; the sign of the rate remembers that of the last slope."""
    slope = _slope(below, level, above, distribution)
    size = jnp.abs(signed_rate) * jnp.where(slope * signed_rate < 0, 0.5, 1.0)
    room = jnp.minimum(level - below, above - level) / 2
    moved = level - jnp.sign(slope) * jnp.minimum(size * jnp.abs(slope), room)
    return moved, jnp.where(slope < 0, -size, size)


def _alternate(levels: Array, move: Callable[..., Any], memory: Array, turns: int) -> Array:
    """Moves levels with odd and with even numbers in turns; each level has one number of memory."""
    odd = jnp.arange(1, levels.shape[0] - 1) % 2

    def turn(number, carry):
        levels, memory = carry
        below, level, above = levels[:-2], levels[1:-1], levels[2:]
        moved, remembered = move(below, level, above, memory)
        margin = MARGIN * (above - below)
        moves = (odd + number) % 2 == 1
        inner = jnp.where(moves, jnp.clip(moved, below + margin, above - margin), level)
        return jnp.concatenate([levels[:1], inner, levels[-1:]]), jnp.where(moves, remembered, memory)

    return lax.fori_loop(0, turns, turn, (levels, memory))[0]


def _bisect(is_above: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """The points between `low` and `high` from which on `is_above` holds."""

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        above = is_above(middle)
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return (low + high) / 2


def fit_levels(
    distribution: Distribution, count: int, *, lowest: float | int = -1.0, solver: Literal["coordinate", "gradient"]
) -> Float[Array, " levels"]:
    """The best of three descents: from the quantiles of F, from uniform levels and from powers of 1/2.

    Args:
      distribution: of the entries, or of their magnitudes.
      count: the number of levels, the ends included.
      lowest: -1 for a table without a zero level, 0 for magnitudes with one.
      solver: the descent.

    Returns:
      `count` levels from `lowest` to 1.
    """
    uniform = jnp.linspace(lowest, 1.0, count, dtype=jnp.float32)
    starts = jnp.stack([uniform, quantiles(distribution, uniform), powers(count, 0.5, lowest=lowest)])
    # Ψ is not convex, so the result depends on the start.
    descend = coordinate_descent if solver == "coordinate" else gradient_descent
    found = jax.vmap(lambda levels: descend(levels, distribution))(starts)
    losses = jax.vmap(lambda levels: expected_loss(levels, distribution))(found)
    return found[jnp.argmin(losses)]


def quantiles(distribution: Distribution, uniform: Float[Array, " levels"]) -> Float[Array, " levels"]:
    """Levels with equal mass between neighbors, and a share of the uniform levels, which keeps them distinct."""
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
    between the neighbors of the best. (The authors descend from nine starts with a fixed rate.)

    Args:
      distribution: of the entries.
      count: of levels, even.

    Returns:
      p.
    """
    trials = jnp.geomspace(0.001, 0.99, MULTIPLIERS, dtype=jnp.float32)
    losses = jax.vmap(lambda p: expected_loss(powers(count, p), distribution))(trials)
    best = jnp.argmin(losses)

    ends = trials[jnp.maximum(best - 1, 0)], trials[jnp.minimum(best + 1, MULTIPLIERS - 1)]
    return _bisect(lambda p: multiplier_slope(p, distribution, count) > 0, *ends)
