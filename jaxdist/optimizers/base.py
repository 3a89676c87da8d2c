"""Helpers of the optimizers that communicate: ranges, Adam's preconditioner, weight decay, a reducer's residuals."""

import jax
import jax.numpy as jnp
from jax import lax

from .._core.checks import NO_PARAMS, check_range
from .._core.types import Array, PyTree, State, Updates
from ..comm.base import Comm
from ..reducers.feedback import ErrorFeedbackState
from ..reducers.two_shot import TwoShotState
from ..state.marks import Sharded, map_marked, with_value
from ..wire.flat import vectors


def check_adam(b1: float | int, b2: float | int, eps: float | int, weight_decay: float | int) -> None:
    """Checks the range of Adam's arguments."""
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    check_range("weight_decay", weight_decay, 0)


def mask_unseen(tree: Updates, variance: Updates) -> Updates:
    """Sets entries without any gradient so far to zero: sign codes have no zero, and `eps` alone would divide them."""
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros_like(x)), tree, variance)


def preconditioner(variance: Updates, eps: float | int) -> Updates:
    """Returns `√v + ε`, at least the smallest normal number, so that an `eps` of 0 never divides by zero.

    It is replicated. Divided by it, all entries have about the same size and can share one scale.
    """
    return jax.tree.map(lambda v: jnp.maximum(jnp.sqrt(v) + eps, jnp.finfo(v.dtype).tiny), variance)


def divide(tree: Updates, by: Updates) -> Updates:
    """Returns `tree / by`, entry by entry."""
    return jax.tree.map(jnp.divide, tree, by)


def multiply(tree: Updates, by: Updates) -> Updates:
    """Returns `tree · by`, entry by entry."""
    return jax.tree.map(jnp.multiply, tree, by)


def descend(
    direction: Updates, rate: Array, weight_decay: float | int, params: PyTree | None, like: Updates
) -> Updates:
    """Returns the updates `-rate · (direction + weight_decay · params)`, each in the dtype of its gradient."""
    # Decoupled weight decay, as in AdamW.
    if weight_decay:
        if params is None:
            raise ValueError(NO_PARAMS)
        direction = jax.tree.map(lambda d, p: d + weight_decay * p.astype(d.dtype), direction, params)
    return jax.tree.map(lambda d, x: (-rate.astype(d.dtype) * d).astype(x.dtype), direction, like)


def reset_reducer(state: State, fresh: State, when: Array) -> State:
    """Sets residuals to zero, and replicated floating leaves to those of a `fresh` state, where `when` is true."""

    def reset_leaf(marks, leaf, new):
        # Keys and counts go on; only what is in the unit of the gradients starts again.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(when, jnp.zeros_like(leaf) if marks else new, leaf)

    return map_marked(reset_leaf, state, fresh)


def rescale_residuals(state: State, factor: PyTree, comm: Comm) -> State:
    """Multiplies the residuals of `error_feedback` and `two_shot` by the replicated `factor`, a tree like the updates.

    Residuals of another structure, inside `bucketed`, `per_leaf` or `hierarchical`, stay as they are.
    """

    def rescale_node(node):
        if isinstance(node, ErrorFeedbackState):
            residual = node.residual.value
            if _shapes(residual) == _shapes(factor):
                residual = jax.tree.map(jnp.multiply, residual, factor)
            inner = rescale_residuals(node.reducer, factor, comm)
            return ErrorFeedbackState(inner, with_value(node.residual, residual))
        # The server residual is sharded over the workers as flat chunks.
        if isinstance(node, TwoShotState):
            flats = vectors(jax.tree.leaves(factor))
            if [residual.shape for residual in node.residuals] == [flat.shape for flat in flats]:
                return node._replace(residuals=[_rescale_chunk(e, f, comm) for e, f in zip(node.residuals, flats)])
        return node

    kinds = (ErrorFeedbackState, TwoShotState)
    return jax.tree.map(rescale_node, state, is_leaf=lambda node: isinstance(node, kinds))


def _shapes(tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf.shape for leaf in leaves]


def _rescale_chunk(residual: Sharded, factor: Array, comm: Comm) -> Sharded:
    """Multiplies this worker's chunk by the matching part of the whole factor, padded as the chunks are."""
    # Chunks are of equal size, the last one padded with zeros.
    size = residual.value.size
    padded = jnp.pad(factor, (0, size * comm.size - factor.size))
    return with_value(residual, residual.value * lax.dynamic_slice(padded, (comm.index * size,), (size,)))
