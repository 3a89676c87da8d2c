"""The geometry of p-norms, between gradient descent and exponentiated gradients."""

import jax
import jax.numpy as jnp

from ..._typing import Array, PyTree
from .base import Geometry, cast_like, total


def p_norm(p: float | int, *, radius: float | int | None = None) -> Geometry:
    """`R = |x|_p² / (2(p-1))`, `1 < p <= 2`: steps in the dual norm `q = p/(p-1)`, which favour few large entries.

        x = ∇R⁻¹(∇R(y) - η g),   ∇R(x)_j = sign(x_j) |x_j|^(p-1) |x|_p^(2-p) / (p-1)

    `p = 2` is gradient descent. For `n` parameters of which few matter `p = 1 + 1/(2 ln n - 1)` gives a regret that
    grows with `log n` as that of exponentiated gradients, for parameters of any sign and size.

    Args:
      p: the norm. Nearer to 1: sparser models. Start with 2, then with the value above.
      radius: keeps `|x|_p` within it; the Bregman projection onto that ball is a scaling. `None`: all of space.

    Returns:
      The geometry, 1-strongly convex in the p-norm of the whole tree as one vector.

    Raises:
      ValueError: `p` is not in `(1, 2]`, or `radius` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.transforms.p_norm(1.5)
      >>> [round(float(x), 3) for x in geometry.step(jnp.zeros(2), jnp.array([-1.0, -2.0]), jnp.asarray(1.0))]
      [0.24, 0.961]

    References:
      Gentile, "The Robustness of the p-Norm Algorithms", 2003; Beck, Teboulle, "Mirror descent and nonlinear projected
      subgradient methods for convex optimization", 2003.
    """
    if not 1 < p <= 2:
        raise ValueError(f"p must be in (1, 2], got {p}")
    if radius is not None and not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}")
    p = float(p)
    q = p / (p - 1)

    def step(y, gradient, rate):
        dual = jax.tree.map(lambda m, g: m - cast_like(rate, m) * (p - 1) * g, _link(y, p), gradient)
        x = _link(dual, q)
        if radius is None:
            return x
        norm = _norm(x, p)
        shrink = jnp.where(norm > radius, radius / jnp.where(norm > 0, norm, 1), 1)
        return jax.tree.map(lambda x: x * cast_like(shrink, x), x)

    def divergence(x, y):
        inner = total(jax.tree.map(lambda m, x, y: m * (x - y), _link(y, p), x, y))
        return ((jnp.square(_norm(x, p)) - jnp.square(_norm(y, p))) / 2 - inner) / (p - 1)

    return Geometry(step, divergence)


def _norm(tree: PyTree, power: float) -> Array:
    largest = _largest(tree)
    unit = jnp.where(largest > 0, largest, 1)
    return largest * total(jax.tree.map(lambda x: (jnp.abs(x) / cast_like(unit, x)) ** power, tree)) ** (1 / power)


def _largest(tree: PyTree) -> Array:
    return jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in jax.tree.leaves(tree)]).max()


def _link(tree: PyTree, power: float) -> PyTree:
    """`∇(|x|²/2)` in the norm of that power: `sign(x) |x|^(power-1) |x|^(2-power)`, 0 at 0.

    As `norm · (|x|/norm)^(power-1)`, since `power` may be 30 and more.
    """
    norm = _norm(tree, power)
    unit = jnp.where(norm > 0, norm, 1)

    def one(x):
        return jnp.sign(x) * cast_like(norm, x) * (jnp.abs(x) / cast_like(unit, x)) ** (power - 1)

    return jax.tree.map(one, tree)
