"""The `Geometry`: how far apart two models are, and the step that this distance makes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..._typing import Array, PyTree, Updates
from ...compressors.base import working_dtype


class Geometry(NamedTuple):
    """A distance generator `R`, 1-strongly convex in some norm, over a convex set `X`, as functions of parameter trees.

    Its Bregman divergence is `D(x, y) = R(x) - R(y) - <∇R(y), x - y>`. A geometry of one's own is any `NamedTuple` of
    these functions; they compute in the dtype that they get (float32 or better) and do not communicate.

    Attributes:
      step: `step(y, gradient, rate) -> argmin over x in X of <gradient, x> + D(x, y) / rate`.
      divergence: `divergence(x, y) -> D(x, y)`, a scalar: never negative, 0 where they are equal.
      check: `check(params)` raises a `ValueError` for shapes that it cannot serve.
    """

    step: Callable[[PyTree, Updates, Array], PyTree]
    divergence: Callable[[PyTree, PyTree], Array]
    check: Callable[[PyTree], None] = lambda params: None


def wide(tree: PyTree) -> PyTree:
    """In float32 or better."""
    return jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), tree)


def total(terms: PyTree) -> Array:
    """The sum of all entries of all leaves."""
    return sum((jnp.sum(x) for x in jax.tree.leaves(terms)), jnp.zeros(()))


def cast_like(rate: Array, x: Array) -> Array:
    """A rate in the dtype of an array."""
    return rate.astype(x.dtype)
