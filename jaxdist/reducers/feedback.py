"""Helpers that methods of error feedback share: for workers without data, and for residuals."""

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.types import Array, Bool, Like, PyTree, Updates
from .reducer import Extras


def is_absent(extras: Extras) -> Bool[Array, ""] | None:
    """Whether this worker does not take part; `None` if all do."""
    return None if extras.examples is None else extras.examples == 0


def zero_where(absent: Bool[Array, ""] | None, tree: Updates) -> Updates:
    """Zeros for a worker that does not take part: a compressor turns them into zeros, so that nothing is sent."""
    return tree if absent is None else jax.tree.map(lambda x: jnp.where(absent, 0, x), tree)


def wide_zeros(like: PyTree[Like]) -> PyTree:
    """Zeros in the dtype of residuals."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), like)
