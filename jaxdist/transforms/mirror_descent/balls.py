"""The Euclidean geometry, whole or inside a ball or a box: projected gradient descent."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..._typing import PyTree
from .base import Geometry, cast_like, total


def euclidean(project: Callable[[PyTree], PyTree] | None = None) -> Geometry:
    """`R = |x|²/2`: mirror descent is gradient descent, `x = Π(y - η g)`.

    Args:
      project: the projection `Π` onto a convex set: `ball(radius)`, `box(low, high)`, a function of
        `optax.projections`, or your own `tree -> tree`. `None`: all of space.

    Returns:
      The geometry; the norm of `R` is that of the whole tree as one vector.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.transforms.euclidean(jd.transforms.ball(1.0))
      >>> geometry.step(jnp.zeros(2), jnp.array([-3.0, -4.0]), jnp.asarray(1.0)).tolist()  # (3, 4), brought back
      [0.6000000238418579, 0.800000011920929]

    References:
      Zinkevich, "Online Convex Programming and Generalized Infinitesimal Gradient Ascent", 2003.
    """

    def step(y, gradient, rate):
        x = jax.tree.map(lambda y, g: y - cast_like(rate, y) * g, y, gradient)
        return x if project is None else project(x)

    def divergence(x, y):
        return total(jax.tree.map(lambda x, y: jnp.square(x - y), x, y)) / 2

    return Geometry(step, divergence)


def ball(radius: float | int, *, centre: PyTree | None = None) -> Callable[[PyTree], PyTree]:
    """The projection onto the models within `radius` of `centre`, in the norm of the whole tree.

    Args:
      radius: how far from the centre.
      centre: a tree like the parameters; `None`: the origin.

    Returns:
      The function.

    Raises:
      ValueError: `radius` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.transforms.ball(2.5)({"a": jnp.array([3.0]), "b": jnp.array([4.0])})["b"].tolist()
      [2.0]

    References:
      Parikh, Boyd, "Proximal Algorithms", 2014.
    """
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}")

    def project(tree):
        middle = jax.tree.map(jnp.zeros_like, tree) if centre is None else centre
        away = jax.tree.map(lambda x, c: x - jnp.asarray(c, x.dtype), tree, middle)
        largest = jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in jax.tree.leaves(away) if x.size]).max()
        unit = jnp.where(largest > 0, largest, 1)  # so that no square overflows
        norm = unit * jnp.sqrt(total(jax.tree.map(lambda x: jnp.square(x / cast_like(unit, x)), away)))
        inside = norm <= radius
        shrink = radius / jnp.where(inside, radius, norm)
        return jax.tree.map(lambda x, d: jnp.where(inside, x, x - d + cast_like(shrink, d) * d), tree, away)

    return project


def box(low: float | int, high: float | int) -> Callable[[PyTree], PyTree]:
    """The projection onto entries in `[low, high]`.

    Args:
      low: the least; `-inf` for none.
      high: the largest; `inf` for none.

    Returns:
      The function.

    Raises:
      ValueError: `low` is not below `high`.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.transforms.box(0, 1)(jnp.array([-0.5, 0.5, 1.5])).tolist()
      [0.0, 0.5, 1.0]

    References:
      Parikh, Boyd, "Proximal Algorithms", 2014.
    """
    if not low < high:
        raise ValueError(f"low must be below high, got low={low} and high={high}")
    return lambda tree: jax.tree.map(lambda x: jnp.clip(x, low, high), tree)
