"""Geometries of mirror descent: a distance generator, its Bregman divergence, and the step that they define.

`euclidean` (gradient descent) with the projections `ball` and `box`; `diagonal` (AdaGrad's metric); `entropy`
(exponentiated gradients, Kivinen and Warmuth); `p_norm` (Gentile; Beck and Teboulle).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.checks import check_range
from .._core.dtypes import widen
from .._core.types import Array, PyTree, Updates
from .._core.xla_quirks import largest_entry, smallest_entry
from ..state.marks import name_leaf


class Geometry(NamedTuple):
    """A distance generator `R`, 1-strongly convex in some norm, over a convex set `X`, as functions of parameter trees.

    Its Bregman divergence is `D(x, y) = R(x) - R(y) - <∇R(y), x - y>`. The functions compute in the dtype of their
    arguments (float32 or better) and do not communicate.

    Attributes:
      step: `step(y, gradient, rate) -> argmin over x in X of <gradient, x> + D(x, y) / rate`.
      divergence: `divergence(x, y) -> D(x, y)`, a scalar: never negative, 0 where they are equal.
      check: `check(params)` raises `ValueError` for shapes that the geometry does not support.
    """

    step: Callable[[PyTree, Updates, Array], PyTree]
    divergence: Callable[[PyTree, PyTree], Array]
    check: Callable[[PyTree], None] = lambda params: None


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
        x = jax.tree.map(lambda y, g: y - _cast(rate, y) * g, y, gradient)
        return x if project is None else project(x)

    def divergence(x, y):
        return _total(jax.tree.map(lambda x, y: jnp.square(x - y), x, y)) / 2

    return Geometry(step, divergence)


def ball(radius: float | int, *, center: PyTree | None = None) -> Callable[[PyTree], PyTree]:
    """The projection onto the models within `radius` of `center`, in the norm of the whole tree.

    `center` is a tree like the parameters; `None`: the origin.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.online.ball(2.5)({"a": jnp.array([3.0]), "b": jnp.array([4.0])})["b"].tolist()
      [2.0]
    """
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}")

    def project(tree):
        origin = jax.tree.map(jnp.zeros_like, tree) if center is None else center
        offset = jax.tree.map(lambda x, c: x - jnp.asarray(c, x.dtype), tree, origin)
        # Divided by the largest entry, so that no square overflows.
        entries = [widen(largest_entry(jnp.abs(x))) for x in jax.tree.leaves(offset) if x.size]
        if not entries:
            return tree
        largest = largest_entry(jnp.stack(entries))
        unit = jnp.where(largest > 0, largest, 1)
        norm = unit * jnp.sqrt(_total(jax.tree.map(lambda x: jnp.square(x / _cast(unit, x)), offset)))
        # A model inside stays as it is, bit for bit.
        inside = norm <= radius
        scale = radius / jnp.where(inside, radius, norm)
        return jax.tree.map(lambda x, d: jnp.where(inside, x, x - d + _cast(scale, d) * d), tree, offset)

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
        moved = jax.tree.map(lambda y, g, h: y - _cast(rate, y) * g / jnp.asarray(h, y.dtype), y, gradient, curvature)
        return jax.tree.map(lambda x: jnp.clip(x, low, high), moved)

    def divergence(x, y):
        return _total(jax.tree.map(lambda x, y, h: jnp.asarray(h, x.dtype) * jnp.square(x - y), x, y, curvature)) / 2

    return Geometry(step, divergence, partial(_check_curvature, curvature))


def _check_curvature(curvature: PyTree, params: PyTree) -> None:
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
        return jax.tree.map(lambda y, g: _multiplicative_step(y, _cast(rate, y) * g, axis, share), y, gradient)

    def divergence(x, y):
        return _total(jax.tree.map(_kullback_leibler, x, y))

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
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> geometry = jd.online.p_norm(1.5)
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
        # x = ∇R⁻¹(∇R(y) - η g); with R (p-1) for R, so that the inverse is the same map in the dual norm.
        dual = jax.tree.map(lambda m, g: m - _cast(rate, m) * (p - 1) * g, _gradient_of_square(y, p), gradient)
        x = _gradient_of_square(dual, q)
        if radius is None:
            return x
        # The Bregman projection onto the ball is a scaling.
        norm = _norm(x, p)
        scale = jnp.where(norm > radius, radius / jnp.where(norm > 0, norm, 1), 1)
        return jax.tree.map(lambda x: x * _cast(scale, x), x)

    def divergence(x, y):
        # D(x, y) = R(x) - R(y) - <∇R(y), x - y>
        inner = _total(jax.tree.map(lambda m, x, y: m * (x - y), _gradient_of_square(y, p), x, y))
        # Of models that are close, rounding may leave less than nothing.
        return jnp.maximum(((jnp.square(_norm(x, p)) - jnp.square(_norm(y, p))) / 2 - inner) / (p - 1), 0)

    return Geometry(step, divergence)


def _cast(scalar: Array, x: Array) -> Array:
    """Casts a number to the dtype of an array."""
    return scalar.astype(x.dtype)


def _total(terms: PyTree) -> Array:
    """The sum of all entries of all leaves."""
    return sum((jnp.sum(x) for x in jax.tree.leaves(terms)), jnp.zeros(()))


def _norm(tree: PyTree, power: float) -> Array:
    # Divided by the largest entry, so that no power overflows.
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.zeros(())
    largest = largest_entry(jnp.stack([largest_entry(jnp.abs(x), initial=0) for x in leaves]))
    unit = jnp.where(largest > 0, largest, 1)
    return largest * _total(jax.tree.map(lambda x: (jnp.abs(x) / _cast(unit, x)) ** power, tree)) ** (1 / power)


def _gradient_of_square(tree: PyTree, power: float) -> PyTree:
    """`∇(‖x‖²/2)` in the norm `‖x‖` of that power: `sign(x) |x|^(power-1) ‖x‖^(2-power)`, 0 at 0."""
    norm = _norm(tree, power)
    unit = jnp.where(norm > 0, norm, 1)
    # As ‖x‖ (|x|/‖x‖)^(power-1), since `power` may be 30 and more.
    return jax.tree.map(lambda x: jnp.sign(x) * _cast(norm, x) * (jnp.abs(x) / _cast(unit, x)) ** (power - 1), tree)
