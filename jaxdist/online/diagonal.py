"""The geometry of a diagonal matrix."""

import math

import jax
import jax.numpy as jnp

from .._core.types import PyTree
from .._core.xla_quirks import smallest_entry
from .geometry import Geometry, cast_to, total


def diagonal(curvature: PyTree, *, low: float | int = -math.inf, high: float | int = math.inf) -> Geometry:
    """`R = Σ h x²/2`: `x = clip(y - η g / h, low, high)`, which is the exact step, since the metric is diagonal.

    All workers must have the same `h`, or they would minimize different functions, so it is fixed here. For AdaGrad's
    `h`, the root of the local summed squares, use optax:
    `optax.chain(jd.transforms.per_worker(optax.scale_by_rss()), mirror_descent(euclidean(box(low, high)), ...))` is the
    same step with `h` from the local gradients.

    Args:
      curvature: `h`, positive: a tree of arrays like the parameters. Entries with more curvature move less.

    Returns:
      The geometry, 1-strongly convex in the norm `sqrt(Σ h x²)`.

    Raises:
      ValueError: an entry of `curvature` is not positive; at trace time, `curvature` is not a tree like the parameters.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.online.diagonal(jnp.array([1.0, 4.0]))
      >>> geometry.step(jnp.zeros(2), jnp.ones(2), jnp.asarray(1.0)).tolist()
      [-1.0, -0.25]

    References:
      Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
    """
    if not low < high:
        raise ValueError(f"low must be below high, got low={low} and high={high}")
    for path, h in jax.tree_util.tree_flatten_with_path(curvature)[0]:
        smallest = float(smallest_entry(jnp.asarray(h))) if jnp.size(h) else 1.0
        if not smallest > 0:
            where = f" of {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(f"curvature must be positive, but the smallest entry{where} is {smallest}")

    def step(y, gradient, rate):
        # x = clip(y - η g / h)
        moved = jax.tree.map(lambda y, g, h: y - cast_to(rate, y) * g / jnp.asarray(h, y.dtype), y, gradient, curvature)
        return jax.tree.map(lambda x: jnp.clip(x, low, high), moved)

    def divergence(x, y):
        return total(jax.tree.map(lambda x, y, h: jnp.asarray(h, x.dtype) * jnp.square(x - y), x, y, curvature)) / 2

    def check(params):
        if jax.tree.structure(params) != jax.tree.structure(curvature):
            raise ValueError(
                f"curvature must be a tree like the parameters, {jax.tree.structure(params)}, got "
                f"{jax.tree.structure(curvature)}"
            )
        for (path, x), h in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(curvature), strict=True):
            if jnp.shape(h) != x.shape:
                raise ValueError(
                    f"curvature{jax.tree_util.keystr(path)} must have the shape {x.shape} of the parameter, got "
                    f"{jnp.shape(h)}"
                )

    return Geometry(step, divergence, check)
