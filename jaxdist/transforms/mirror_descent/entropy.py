"""The entropic geometry: exponentiated gradients on the simplex."""

import jax
import jax.numpy as jnp
from jax import lax

from ..._marks import named
from .base import Geometry, cast_like, total


def entropy(*, axis: int = -1, share: float | int = 0.0) -> Geometry:
    """`R = Σ x log x` on the simplex: `x ∝ y exp(-η g)`, multiplicative weights. No projection is needed.

    `D(x, y)` is the Kullback-Leibler divergence. Each line of a leaf along `axis` is a distribution: not negative,
    and of sum 1. Start from the uniform one: `x = 0` is never left again, and an entry that falls by more than `1e7` in
    one step rounds to 0 beside the sum. Where the best model changes with time, `share` keeps all entries in play.

    Args:
      axis: the dimension along which entries sum to 1.
      share: `γ`: after the step `x = (1 - γ) x + γ / n` (fixed share). 0 for a comparator that stays; the rate of its
        changes per round, 0.001 to 0.05, for one that moves. Too high keeps the model near uniform.

    Returns:
      The geometry, 1-strongly convex in the sum of absolute values. With `share` its step is not an argmin any more.

    Raises:
      ValueError: `share` is not in `[0, 1)`; at trace time, if a parameter lacks the dimension.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.transforms.entropy()
      >>> x = geometry.step(jnp.array([0.2, 0.3, 0.5]), jnp.array([1.0, 0.0, -1.0]), jnp.asarray(0.1))
      >>> [round(float(one), 4) for one in x]
      [0.1751, 0.2903, 0.5346]

    References:
      Kivinen, Warmuth, "Exponentiated Gradient versus Gradient Descent for Linear Predictors", 1997; Herbster, Warmuth,
      "Tracking the Best Expert", 1998 (fixed share).
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), got {share}")

    def step(y, gradient, rate):
        def one(y, g):
            logits = jnp.log(y) - cast_like(rate, y) * g
            x = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis, keepdims=True)))
            x = x / jnp.sum(x, axis, keepdims=True)
            return (1 - share) * x + share / x.shape[axis] if share else x

        return jax.tree.map(one, y, gradient)

    def divergence(x, y):
        def one(x, y):
            # 0 log 0 = 0, and x > 0 = y is infinitely far; x - y, so that lines of other sums count too.
            ratio = jnp.where(x > 0, x, 1) / jnp.where(x > 0, y, 1)
            return jnp.where(x > 0, x * jnp.log(ratio), 0) - x + y

        return total(jax.tree.map(one, x, y))

    def check(params):
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            if not -leaf.ndim <= axis < leaf.ndim:
                raise ValueError(
                    f"entropy(axis={axis}) needs distributions along that dimension, but "
                    f"{named('the parameter', path)} has shape {leaf.shape}"
                )

    return Geometry(step, divergence, check)
