"""The geometry of a squared p-norm."""

import jax
import jax.numpy as jnp

from .._core.checks import check_range
from .._core.types import Array, PyTree
from .._core.xla_quirks import largest_entry
from .geometry import Geometry, cast_to, total


def p_norm(p: float | int, *, radius: float | int | None = None) -> Geometry:
    """`R = |x|_p² / (2(p-1))`, `1 < p <= 2`: steps in the dual norm `q = p/(p-1)`, which favor few large entries.

        x = ∇R⁻¹(∇R(y) - η g),   ∇R(x)_j = sign(x_j) |x_j|^(p-1) |x|_p^(2-p) / (p-1)

    `p = 2` is gradient descent. For `n` parameters of which few matter, `p = 1 + 1/(2 ln n - 1)` gives a regret that
    grows with `log n`, as with exponentiated gradients, for parameters of any sign and size.

    Args:
      p: the norm. Nearer to 1 gives sparser models. Start with 2, then try the value above.
      radius: the largest `|x|_p`; the Bregman projection onto that ball is a scaling. `None`: the whole space.

    Returns:
      The geometry, 1-strongly convex in the p-norm of the whole tree as one vector.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> step = jax.jit(jd.online.p_norm(1.5).step)
      >>> [round(float(x), 3) for x in step(jnp.zeros(2), jnp.array([-1.0, -2.0]), jnp.asarray(1.0))]
      [0.24, 0.961]

    References:
      Gentile, "The Robustness of the p-Norm Algorithms", 2003; Beck, Teboulle, "Mirror descent and nonlinear projected
      subgradient methods for convex optimization", 2003.
    """
    check_range("p", p, 1, 2, ends="(]")
    if radius is not None:
        check_range("radius", radius, 0, ends="(]")
    p = float(p)
    q = p / (p - 1)

    def step(y, gradient, rate):
        # x = ∇R⁻¹(∇R(y) - η g); with R (p-1) for R, so that the inverse is the same map in the dual norm.
        dual = jax.tree.map(lambda m, g: m - cast_to(rate, m) * (p - 1) * g, _gradient_of_square(y, p), gradient)
        x = _gradient_of_square(dual, q)
        if radius is None:
            return x
        # The Bregman projection onto the ball is a scaling.
        norm = _norm(x, p)
        scale = jnp.where(norm > radius, radius / jnp.where(norm > 0, norm, 1), 1)
        return jax.tree.map(lambda x: x * cast_to(scale, x), x)

    def divergence(x, y):
        # D(x, y) = R(x) - R(y) - <∇R(y), x - y>
        inner = total(jax.tree.map(lambda m, x, y: m * (x - y), _gradient_of_square(y, p), x, y))
        # Of models that are close, rounding may leave less than nothing.
        return jnp.maximum(((jnp.square(_norm(x, p)) - jnp.square(_norm(y, p))) / 2 - inner) / (p - 1), 0)

    return Geometry(step, divergence)


def _norm(tree: PyTree, power: float) -> Array:
    # Divided by the largest entry, so that no power overflows.
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.zeros(())
    largest = largest_entry(jnp.stack([largest_entry(jnp.abs(x), initial=0) for x in leaves]))
    unit = jnp.where(largest > 0, largest, 1)
    return largest * total(jax.tree.map(lambda x: (jnp.abs(x) / cast_to(unit, x)) ** power, tree)) ** (1 / power)


def _gradient_of_square(tree: PyTree, power: float) -> PyTree:
    """`∇(‖x‖²/2)` in the norm `‖x‖` of that power: `sign(x) |x|^(power-1) ‖x‖^(2-power)`, 0 at 0."""
    norm = _norm(tree, power)
    unit = jnp.where(norm > 0, norm, 1)
    # As ‖x‖ (|x|/‖x‖)^(power-1), since `power` may be 30 and more.
    return jax.tree.map(lambda x: jnp.sign(x) * cast_to(norm, x) * (jnp.abs(x) / cast_to(unit, x)) ** (power - 1), tree)
