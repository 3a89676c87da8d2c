"""What the optimizers that communicate inside share: rates, ranges, float32 state and decoupled weight decay."""

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
    """Raises unless these can be the arguments of an Adam."""
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    check_range("weight_decay", weight_decay, 0)


def seen(tree: Updates, variance: Updates) -> Updates:
    """Zero where there has been no gradient yet: a code that cannot say zero would be divided by `eps` alone."""
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros_like(x)), tree, variance)


def units(variance: Updates, eps: float | int) -> Updates:
    """`√v + ε`, which all workers have: in this unit entries are of one size, and one scale may serve them all.

    It is at least the least normal number, so that an `eps` of 0 divides nothing by zero.
    """
    return jax.tree.map(lambda v: jnp.maximum(jnp.sqrt(v) + eps, jnp.finfo(v.dtype).tiny), variance)


def divide(tree: Updates, by: Updates) -> Updates:
    """`tree / by`, entry by entry."""
    return jax.tree.map(jnp.divide, tree, by)


def multiply(tree: Updates, by: Updates) -> Updates:
    """`tree · by`, entry by entry."""
    return jax.tree.map(jnp.multiply, tree, by)


def descend(
    direction: Updates, rate: Array, weight_decay: float | int, params: PyTree | None, like: Updates
) -> Updates:
    """The updates `-rate · (direction + weight_decay · params)`, each in the dtype of its gradient."""
    if weight_decay:
        if params is None:
            raise ValueError(NO_PARAMS)
        direction = jax.tree.map(lambda d, p: d + weight_decay * p.astype(d.dtype), direction, params)
    return jax.tree.map(lambda d, x: (-rate.astype(d.dtype) * d).astype(x.dtype), direction, like)


def cleared(state: State, fresh: State, when: Array) -> State:
    """Makes a reducer forget: residuals are zero again, agreed floating leaves those of a `fresh` state as written."""

    def one(marks, leaf, new):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(when, jnp.zeros_like(leaf) if marks else new, leaf)

    return map_marked(one, state, fresh)


def rescaled(state: State, factor: PyTree, comm: Comm) -> State:
    """Multiplies what workers and servers owe, of `error_feedback` and of `two_shot`, by the agreed `factor`.

    Those that are not cut as `factor` is, inside `bucketed`, `per_leaf` or `hierarchical`, stay as they are.
    """
    kinds = (ErrorFeedbackState, TwoShotState)
    flats = vectors(jax.tree.leaves(factor))
    shapes = [leaf.shape for leaf in jax.tree.leaves(factor)]

    def walk(node):
        if isinstance(node, ErrorFeedbackState):
            owed = node.residual.value
            same = jax.tree.structure(owed) == jax.tree.structure(factor)
            if same and [leaf.shape for leaf in jax.tree.leaves(owed)] == shapes:
                owed = jax.tree.map(jnp.multiply, owed, factor)
            return ErrorFeedbackState(inside(node.reducer), with_value(node.residual, owed))
        if isinstance(node, TwoShotState) and [e.shape for e in node.residuals] == [flat.shape for flat in flats]:
            return node._replace(residuals=[_times(e, flat, comm) for e, flat in zip(node.residuals, flats)])
        return node

    def inside(node):
        return jax.tree.map(walk, node, is_leaf=lambda node: isinstance(node, kinds))

    return inside(state)


def _times(residual: Sharded, factor: Array, comm: Comm) -> Sharded:
    """The chunk of this worker."""
    size = residual.value.size
    padded = jnp.pad(factor, (0, size * comm.size - factor.size))
    return with_value(residual, residual.value * lax.dynamic_slice(padded, (comm.index * size,), (size,)))
