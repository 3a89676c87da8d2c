"""The geometry of a diagonal metric: a step size for each entry."""

import math

import jax
import jax.numpy as jnp

from ..._typing import PyTree
from .base import Geometry, cast_like, total


def diagonal(curvature: PyTree, *, low: float | int = -math.inf, high: float | int = math.inf) -> Geometry:
    """`R = Σ h x²/2`: `x = clip(y - η g / h, low, high)`, which is the exact step, since the metric is diagonal.

    All workers must have the same `h`, or they would not minimise the same thing: it is fixed here. AdaGrad's own `h`,
    the root of this worker's summed squares, comes from optax: `optax.chain(jd.per_worker(optax.scale_by_rss()),
    mirror_descent(euclidean(box(low, high)), ...))` is the same step with `h` from this worker's gradients.

    Args:
      curvature: `h`, positive: a tree of arrays like the parameters. An entry that bends more moves less.
      low: the least that an entry may be.
      high: the largest.

    Returns:
      The geometry, 1-strongly convex in the norm `sqrt(Σ h x²)`.

    Raises:
      ValueError: `low` is not below `high`, an entry of `curvature` is not positive; at trace time, if `curvature` is
        not a tree like the parameters.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.transforms.diagonal(jnp.array([1.0, 4.0]))
      >>> geometry.step(jnp.zeros(2), jnp.ones(2), jnp.asarray(1.0)).tolist()
      [-1.0, -0.25]

    References:
      Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
    """
    if not low < high:
        raise ValueError(f"low must be below high, got low={low} and high={high}")
    for path, h in jax.tree_util.tree_flatten_with_path(curvature)[0]:
        least = float(jnp.min(h)) if jnp.size(h) else 1.0
        if not least > 0:
            where = f" of {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(f"curvature must be positive, but the least entry{where} is {least}")

    def step(y, gradient, rate):
        def one(y, g, h):
            return jnp.clip(y - cast_like(rate, y) * g / jnp.asarray(h, y.dtype), low, high)

        return jax.tree.map(one, y, gradient, curvature)

    def divergence(x, y):
        return total(jax.tree.map(lambda x, y, h: jnp.asarray(h, x.dtype) * jnp.square(x - y), x, y, curvature)) / 2

    def check(params):
        if jax.tree.structure(params) != jax.tree.structure(curvature):
            raise ValueError(
                f"curvature must be a tree like the parameters, {jax.tree.structure(params)}, got "
                f"{jax.tree.structure(curvature)}"
            )
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(curvature), strict=True)
        for (path, _), (x, h) in zip(jax.tree_util.tree_flatten_with_path(params)[0], pairs, strict=True):
            if jnp.shape(h) != x.shape:
                raise ValueError(
                    f"curvature{jax.tree_util.keystr(path)} must have the shape {x.shape} of the parameter, got "
                    f"{jnp.shape(h)}"
                )

    return Geometry(step, divergence, check)
