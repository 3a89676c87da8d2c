"""Laws of the geometries of mirror descent, checked without a mesh or an optimizer."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Array, PyTree, Updates
from ..online.geometry import Geometry

RATE = np.float32(0.1)


def assert_geometry_laws(geometry: Geometry, models: Sequence[PyTree], *, tolerance: float = 1e-5) -> None:
    """Asserts that a geometry is one, as far as the given models show.

    From every model: a gradient of 0 moves nothing; `step` keeps shapes and dtypes, and nothing on the way from where
    it ends to any other model is better; the divergence is 0 to itself, and to others at least half the square of their
    difference in the largest entry (1-strong convexity, in any of the usual norms).

    Args:
      geometry: the geometry under test.
      models: two or more different models of the set `X`, some of them at its edge.
      tolerance: how much rounding may break a law.

    Raises:
      ValueError: fewer than two models, between which most laws are checked.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> from jaxdist.testing import assert_geometry_laws
      >>> assert_geometry_laws(jd.online.euclidean(), [jnp.zeros(2), jnp.ones(2)])
    """
    if len(models) < 2:
        raise ValueError(f"models must be two or more different ones, got {len(models)}")
    step, divergence = jax.jit(geometry.step), jax.jit(geometry.divergence)
    for n, y in enumerate(models):
        geometry.check(y)
        still = step(y, jax.tree.map(jnp.zeros_like, y), RATE)
        _law("a gradient of 0 moves nothing", _largest(still, y) <= tolerance, f"model {n} moves")
        own = float(divergence(y, y))
        _law("divergence(x, x) = 0", abs(own) <= tolerance, f"{own} for model {n}")
        for m, x in enumerate(models):
            found, least = float(divergence(x, y)), _largest(x, y) ** 2 / 2
            _law("divergence is 1-strongly convex", found >= least - tolerance, f"{found} < {least} for {m} from {n}")
        # Towards another model, and with all signs, so that the step ends inside the set or at its edge.
        gradient = jax.tree.map(lambda a, b: a - b + 0.3 * np.sign(a), *map(_numbers, (y, models[n - 1])))
        best = step(y, gradient, RATE)
        kept = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, best, y)
        _law("step keeps shapes and dtypes", all(jax.tree.leaves(kept)), f"not for model {n}")
        objective = partial(_objective, divergence, y, gradient)
        reached = objective(_numbers(best))
        # A point on the way to another model of the set, which is convex, is in the set too.
        for m, x in enumerate(models):
            for part in (0.01, 0.3):
                near = jax.tree.map(lambda a, b, part=part: (1 - part) * a + part * b, *map(_numbers, (best, x)))
                found = objective(near)
                worse = found >= reached - tolerance
                _law("step is the argmin", worse, f"from model {n} towards {m}: {found} < {reached}")


def _numbers(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


def _objective(divergence: Callable[..., Array], y: PyTree, gradient: Updates, x: PyTree) -> float:
    # `step` minimizes ⟨g, x⟩ + D(x, y) / rate.
    linear = jax.tree.leaves(jax.tree.map(lambda g, x: float(np.sum(g * x)), gradient, x))
    return sum(linear) + float(divergence(x, y)) / float(RATE)


def _largest(x: PyTree, y: PyTree) -> float:
    differences = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b), initial=0)), *map(_numbers, (x, y)))
    return max(jax.tree.leaves(differences))


def _law(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise AssertionError(f"law '{name}' broken: {detail}")
