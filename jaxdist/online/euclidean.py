"""The Euclidean geometry, on all of space, a ball or a box."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._core.checks import check_range
from .._core.dtypes import widen
from .._core.types import PyTree
from .._core.xla_quirks import largest_entry
from .geometry import Geometry, cast_to, total


def euclidean(project: Callable[[PyTree], PyTree] | None = None) -> Geometry:
    """`R = |x|²/2`: mirror descent is gradient descent, `x = Π(y - η g)`.

    Args:
      project: the projection `Π` onto a convex set: `ball(radius)`, `box(low, high)`, a function of
        `optax.projections`, or another `tree -> tree`. `None`: the whole space.

    Returns:
      The geometry; the norm of `R` is that of the whole tree as one vector.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.online.euclidean(jd.online.ball(1.0))
      >>> geometry.step(jnp.zeros(2), jnp.array([-3.0, -4.0]), jnp.asarray(1.0)).tolist()  # (3, 4), projected
      [0.6000000238418579, 0.800000011920929]

    References:
      Zinkevich, "Online Convex Programming and Generalized Infinitesimal Gradient Ascent", 2003.
    """

    def step(y, gradient, rate):
        # x = Π(y - η g)
        x = jax.tree.map(lambda y, g: y - cast_to(rate, y) * g, y, gradient)
        return x if project is None else project(x)

    def divergence(x, y):
        return total(jax.tree.map(lambda x, y: jnp.square(x - y), x, y)) / 2

    return Geometry(step, divergence)


def ball(radius: float | int, *, center: PyTree | None = None) -> Callable[[PyTree], PyTree]:
    """The projection onto the models within `radius` of `center`, in the norm of the whole tree.

    `center` is a tree like the parameters; `None`: the origin.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.online.ball(2.5)({"a": jnp.array([3.0]), "b": jnp.array([4.0])})["b"].tolist()
      [2.0]
    """
    check_range("radius", radius, 0, ends="(]")

    def project(tree):
        origin = jax.tree.map(jnp.zeros_like, tree) if center is None else center
        offset = jax.tree.map(lambda x, c: x - jnp.asarray(c, x.dtype), tree, origin)
        # Divided by the largest entry, so that no square overflows.
        entries = [widen(largest_entry(jnp.abs(x))) for x in jax.tree.leaves(offset) if x.size]
        if not entries:
            return tree
        largest = largest_entry(jnp.stack(entries))
        unit = jnp.where(largest > 0, largest, 1)
        norm = unit * jnp.sqrt(total(jax.tree.map(lambda x: jnp.square(x / cast_to(unit, x)), offset)))
        # A model inside stays as it is, bit for bit.
        inside = norm <= radius
        scale = radius / jnp.where(inside, radius, norm)
        return jax.tree.map(lambda x, d: jnp.where(inside, x, x - d + cast_to(scale, d) * d), tree, offset)

    return project


def box(low: float | int, high: float | int) -> Callable[[PyTree], PyTree]:
    """The projection onto entries in `[low, high]`, either of which may be infinite.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.online.box(0, 1)(jnp.array([-0.5, 0.5, 1.5])).tolist()
      [0.0, 0.5, 1.0]
    """
    if not low < high:
        raise ValueError(f"low must be below high, got low={low} and high={high}")
    return lambda tree: jax.tree.map(lambda x: jnp.clip(x, low, high), tree)
