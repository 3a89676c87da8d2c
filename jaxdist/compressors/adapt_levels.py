"""How the entries of normalized buckets are distributed: what levels are fitted to."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Float
from .levels import powers
from .rounding import normalized, to_buckets

# Below it a bucket of equal entries would have infinite densities.
SMALLEST_SIGMA = 1e-6


# Of blocks of entries, each half of the one before: all that float32 can tell from nothing.
SCALES = 20


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
    """`Σ w`, `Σ w r`, `Σ w r²` of the entries `r = x / norm`, `w = norm**norm_power`, apart for each scale of `r`.

    A block of neighbors counts towards component k if the root of its mean square is between `2^-k` and `2^-(k+1)`.
    Layers of different scales in one bucket thus stay apart, and the mixture has the tails that they make together.
    Sums of several workers may be added or averaged.

    Args:
      x: any array.
      bucket: entries that share a norm.
      norm: "max" or "l2".
      norm_power: 2 weighs entries as they enter the variance of the whole array, 0 all alike.
      block: entries that share a mean and a variance, at most a bucket.

    Returns:
      One row for each of the 20 scales; the last one has all that are smaller.
    """
    (ratios, norms), real = normalized(x, bucket, norm), to_buckets(jnp.ones(x.shape), bucket)
    width = min(block, ratios.shape[1])
    filled = ((0, 0), (0, -ratios.shape[1] % width))
    parts = [jnp.pad(values, filled).reshape(-1, width) for values in (real, ratios, ratios**2)]
    sums = jnp.stack([jnp.sum(part, axis=1) for part in parts], axis=1)
    square = sums[:, 2] / jnp.maximum(sums[:, 0], 1.0)
    scale = -0.5 * jnp.log2(jnp.where(square > 0, square, 1.0))
    component = jnp.where(square > 0, jnp.clip(scale.astype(jnp.int32), 0, SCALES - 1), SCALES - 1)
    # Of norms near 1, or squares overflow or vanish: whoever fits to the sums scales the entries, and checks.
    weights = jnp.where(norms == 0, 0.0, norms**norm_power)
    weights = jnp.repeat(weights, sums.shape[0] // max(ratios.shape[0], 1), axis=0)
    chosen = component[:, None] == jnp.arange(SCALES)[None, :]
    return jnp.matmul(chosen.astype(jnp.float32).T, weights * sums, precision=jax.lax.Precision.HIGHEST)


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

    # Of two scalars, for all components.
    def density(r):
        return jnp.exp(-0.5 * ((r - mean) / sigma) ** 2) * (2 * jnp.pi) ** -0.5

    def between(a, c):
        left, right = ((r - mean) / sigma * 0.5**0.5 for r in (a, c))
        upper = left + right > 0
        near, far = jnp.where(upper, left, -right), jnp.where(upper, right, -left)
        return 0.5 * (jax.lax.erfc(near) - jax.lax.erfc(far))

    weight = mixture.weight / between(jnp.float32(-1), jnp.float32(1))

    def mass(a, c):
        return jnp.sum(weight * between(a, c))

    def first(a, c):
        return jnp.sum(weight * (mean * between(a, c) + sigma * (density(a) - density(c))))

    def second(a, c):
        edges = (a + mean) * density(a) - (c + mean) * density(c)
        return jnp.sum(weight * ((mean**2 + sigma**2) * between(a, c) + sigma * edges))

    return Distribution(*(jnp.vectorize(integral, signature="(),()->()") for integral in (mass, first, second)))


def folded(distribution: Distribution) -> Distribution:
    """The distribution of magnitudes."""
    mass, first, second = distribution

    def fold(integral, sign):
        return lambda a, c: integral(a, c) + sign * integral(-c, -a)

    return Distribution(fold(mass, 1), fold(first, -1), fold(second, 1))


# Of an interval, in steps of bisection.
BISECTIONS = 26
# How near a level may come to its neighbors, of their distance.
MARGIN = 1e-5
MULTIPLIERS = 128


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
    """ALQ: each inner level in turn goes where `dΨ/dl_j = 0` between its neighbors; Ψ never rises.

    The slope grows with the level, so bisection finds its zero where the paper inverts F: no quantiles, and no NaN
    where F has no mass (then the level goes half way). Levels with odd and with even numbers take turns, since those of
    one kind do not see each other: the order differs from the paper's, the fixed points do not.

    Args:
      levels: where to start; the first and the last stay.
      distribution: of the entries.
      sweeps: each moves every level once.

    Returns:
      The levels.

    Example:
      >>> import jax.numpy as jnp
      >>> uniform = Distribution(lambda a, c: c - a, lambda a, c: (c**2 - a**2) / 2, lambda a, c: (c**3 - a**3) / 3)
      >>> coordinate_descent(jnp.array([0.0, 0.1, 0.2, 1.0]), uniform, sweeps=2).round(4).tolist()
      [0.0, 0.2750000059604645, 0.637499988079071, 1.0]
    """

    def best(below, level, above, memory):
        del level

        def halve(_, ends):
            low, high = ends
            middle = (low + high) / 2
            rising = _slope(below, middle, above, distribution) > 0
            return jnp.where(rising, low, middle), jnp.where(rising, middle, high)

        low, high = lax.fori_loop(0, BISECTIONS, halve, (below, above))
        return jnp.where(distribution.mass(below, above) > 0, (low + high) / 2, (below + above) / 2), memory

    return _turns(levels, best, jnp.zeros_like(levels[1:-1]), 2 * sweeps)


def gradient_descent(
    levels: Float[Array, " levels"], distribution: Distribution, *, rate: float | int = 1.0, sweeps: int = 300
) -> Float[Array, " levels"]:
    """ALQ by projected gradient descent: `l_j -= rate dΨ/dl_j`, at most half of the way to a neighbor.

    A level whose slope changes its sign goes on at half its rate: the curvature `(l_{j+1} - l_{j-1}) f(l_j)` is about
    the probability around the level where levels are many, but 40 for four levels and buckets of 8192, and there the
    authors' fixed rate of 0.1 goes back and forth.

    Args:
      levels: where to start; the first and the last stay.
      distribution: of the entries.
      rate: to start with. Too low arrives late, too high loses a few sweeps to halving.
      sweeps: each moves every level once.

    Returns:
      The levels.

    Example:
      >>> import jax.numpy as jnp
      >>> uniform = Distribution(lambda a, c: c - a, lambda a, c: (c**2 - a**2) / 2, lambda a, c: (c**3 - a**3) / 3)
      >>> gradient_descent(jnp.array([0.0, 0.1, 0.2, 1.0]), uniform).round(4).tolist()
      [0.0, 0.33329999446868896, 0.666700005531311, 1.0]
    """

    def step(below, level, above, signed_rate):
        slope = _slope(below, level, above, distribution)
        turned = slope * signed_rate < 0
        size = jnp.abs(signed_rate) * jnp.where(turned, 0.5, 1.0)
        room = jnp.minimum(level - below, above - level) / 2
        moved = level - jnp.sign(slope) * jnp.minimum(size * jnp.abs(slope), room)
        return moved, jnp.where(slope < 0, -size, size)

    first = rate * jnp.sign(loss_gradient(levels, distribution))
    return _turns(levels, step, jnp.where(first == 0, rate, first), 2 * sweeps)


def _turns(levels: Array, move: Callable, memory: Array, turns: int) -> Array:
    """Levels with odd and with even numbers move by turns, and each has a number to remember."""
    odd = jnp.arange(1, levels.shape[0] - 1) % 2

    def turn(number, carry):
        levels, memory = carry
        below, level, above = levels[:-2], levels[1:-1], levels[2:]
        moved, remembered = move(below, level, above, memory)
        margin = MARGIN * (above - below)
        whose = (odd + number) % 2 == 1
        inner = jnp.where(whose, jnp.clip(moved, below + margin, above - margin), level)
        return jnp.concatenate([levels[:1], inner, levels[-1:]]), jnp.where(whose, remembered, memory)

    return lax.fori_loop(0, turns, turn, (levels, memory))[0]


def fit_levels(
    distribution: Distribution, count: int, *, lowest: float | int = -1.0, solver: Literal["coordinate", "gradient"]
) -> Float[Array, " levels"]:
    """The best of three descents: from the quantiles of F, from uniform levels and from powers of 1/2.

    Args:
      distribution: of the entries, or of their magnitudes.
      count: how many levels, the ends included.
      lowest: -1 for a table without a zero level, 0 for magnitudes with one.
      solver: the descent.

    Returns:
      `count` levels from `lowest` to 1.
    """
    uniform = jnp.linspace(lowest, 1.0, count, dtype=jnp.float32)
    starts = jnp.stack([uniform, quantiles(distribution, uniform), powers(count, 0.5, lowest=lowest)])
    descend = coordinate_descent if solver == "coordinate" else gradient_descent
    found = jax.vmap(lambda levels: descend(levels, distribution))(starts)
    losses = jax.vmap(lambda levels: expected_loss(levels, distribution))(found)
    return found[jnp.argmin(losses)]


def quantiles(distribution: Distribution, uniform: Float[Array, " levels"]) -> Float[Array, " levels"]:
    """Equal mass between neighbors, but for a little of the uniform levels mixed in, which keeps them apart."""
    lowest = uniform[:1]
    wanted = (uniform - lowest) / (1 - lowest) * distribution.mass(lowest, uniform[-1:])

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        above = distribution.mass(jnp.broadcast_to(lowest, middle.shape), middle) > wanted
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = lax.fori_loop(0, BISECTIONS, halve, (jnp.full_like(uniform, lowest[0]), jnp.ones_like(uniform)))
    inner = 0.999 * (low + high)[1:-1] / 2 + 0.001 * uniform[1:-1]
    return jnp.concatenate([lowest, inner, uniform[-1:]])


def multiplier_slope(multiplier: Float[Array, ""], distribution: Distribution, count: int) -> Float[Array, ""]:
    """`dΨ/dp = Σ_j dΨ/dl_j dl_j/dp` for the levels `±p^j`."""
    levels, tangents = jax.jvp(lambda p: powers(count, p), (multiplier,), (jnp.ones_like(multiplier),))
    return jnp.sum(loss_gradient(levels, distribution) * tangents[1:-1])


def best_multiplier(distribution: Distribution, count: int) -> Float[Array, ""]:
    """AMQ: the p whose levels `±p^s, ..., ±p, ±1` have the least Ψ.

    Ψ(p) can have several minima, so it is computed for 128 values of p from 0.001 to 0.99, and bisection on dΨ/dp goes
    on between the neighbors of the best. (The authors descend from nine starts with a fixed rate.)

    Args:
      distribution: of the entries.
      count: of levels: even.

    Returns:
      p.
    """
    trials = jnp.geomspace(0.001, 0.99, MULTIPLIERS, dtype=jnp.float32)
    losses = jax.vmap(lambda p: expected_loss(powers(count, p), distribution))(trials)
    best = jnp.argmin(losses)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        rising = multiplier_slope(middle, distribution, count) > 0
        return jnp.where(rising, low, middle), jnp.where(rising, middle, high)

    ends = trials[jnp.maximum(best - 1, 0)], trials[jnp.minimum(best + 1, MULTIPLIERS - 1)]
    low, high = lax.fori_loop(0, BISECTIONS, halve, ends)
    return (low + high) / 2
