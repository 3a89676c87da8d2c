"""How the entries of normalised buckets are distributed: what levels are fitted to."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._typing import Array, Float
from .buckets import normalized, to_buckets

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

    A block of neighbours counts towards component k if the root of its mean square is between `2^-k` and `2^-(k+1)`.
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
