"""The geometry of negative entropy: multiplicative steps on the simplex."""

import jax
import jax.numpy as jnp
from jax import lax

from .._core.checks import check_range
from .._core.types import Array
from .._core.xla_quirks import largest_entry
from ..state.marks import name_leaf
from .geometry import Geometry, cast_to, total


def entropy(*, axis: int = -1, share: float | int = 0.0) -> Geometry:
    """`R = Σ x log x` on the simplex: `x ∝ y exp(-η g)`, multiplicative weights. No projection is needed.

    `D(x, y)` is the Kullback-Leibler divergence. Each slice of a leaf along `axis` is a distribution: not negative,
    with sum 1. Start from the uniform one: an entry that is 0 remains 0, and an entry that falls by more than `1e7` in
    one step rounds to 0. If the best model changes with time, use `share`, which keeps all entries positive.

    Args:
      axis: the dimension along which entries sum to 1.
      share: `γ`: after the step `x = (1 - γ) x + γ / n` (fixed share). 0 for a fixed comparator; for one that changes,
        the rate of changes per round, 0.001 to 0.05. Too high keeps the model near uniform.

    Returns:
      The geometry, 1-strongly convex in the sum of absolute values. With `share` its step is no longer an argmin.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.online.entropy()
      >>> x = geometry.step(jnp.array([0.2, 0.3, 0.5]), jnp.array([1.0, 0.0, -1.0]), jnp.asarray(0.1))
      >>> [round(float(entry), 4) for entry in x]
      [0.1751, 0.2903, 0.5346]

    References:
      Kivinen, Warmuth, "Exponentiated Gradient versus Gradient Descent for Linear Predictors", 1997; Herbster, Warmuth,
      "Tracking the Best Expert", 1998 (fixed share).
    """
    check_range("share", share, 0, 1)

    def step(y, gradient, rate):
        return jax.tree.map(lambda y, g: _multiplicative_step(y, cast_to(rate, y) * g, axis, share), y, gradient)

    def divergence(x, y):
        return total(jax.tree.map(_kullback_leibler, x, y))

    def check(params):
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            if not -leaf.ndim <= axis < leaf.ndim:
                raise ValueError(
                    f"entropy(axis={axis}) needs distributions along that dimension, but "
                    f"{name_leaf('the parameter', path)} has shape {leaf.shape}"
                )

    return Geometry(step, divergence, check)


def _multiplicative_step(y: Array, step: Array, axis: int, share: float | int) -> Array:
    # x ∝ y exp(-step), as a softmax: the largest logit is subtracted so that no exponential overflows.
    if not y.size:
        return y
    logits = jnp.log(y) - step
    x = jnp.exp(logits - lax.stop_gradient(largest_entry(logits, axis, keepdims=True)))
    x = x / jnp.sum(x, axis, keepdims=True)
    # Fixed share: x = (1 - γ) x + γ / n
    return (1 - share) * x + share / x.shape[axis] if share else x


def _kullback_leibler(x: Array, y: Array) -> Array:
    """The terms `x log(x/y) - x + y`: the last two vanish for distributions, and keep other sums at a distance too."""
    # 0 log 0 = 0, and x > 0 = y is infinitely far.
    ratio = jnp.where(x > 0, x, 1) / jnp.where(x > 0, y, 1)
    return jnp.where(x > 0, x * jnp.log(ratio), 0) - x + y
