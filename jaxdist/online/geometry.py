"""The `Geometry` of mirror descent: a distance generator, its Bregman divergence, and the step that they define."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, PyTree, Updates


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


def cast_to(scalar: Array, x: Array) -> Array:
    """Casts a number to the dtype of an array."""
    return scalar.astype(x.dtype)


def total(terms: PyTree) -> Array:
    """The sum of all entries of all leaves."""
    return sum((jnp.sum(x) for x in jax.tree.leaves(terms)), jnp.zeros(()))
