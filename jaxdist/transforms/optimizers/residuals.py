"""Residuals of a reducer whose inputs change their unit."""

import jax
import jax.numpy as jnp
from jax import lax

from ..._marks import Sharded, map_marked, with_value
from ..._typing import Array, PyTree, State
from ...comm import Comm
from ...reducers._flat import vectors
from ...reducers.feedback import ErrorFeedbackState
from ...reducers.two_shot import TwoShotState


def cleared(state: State, fresh: State, when: Array) -> State:
    """Makes a reducer forget: residuals are zero again, agreed floating leaves those of a `fresh` state as written."""

    def one(marks, leaf, new):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(when, jnp.zeros_like(leaf) if marks else new, leaf)

    return map_marked(one, state, fresh)


def rescaled(state: State, factor: PyTree, comm: Comm) -> State:
    """Multiplies what workers and servers owe, of `error_feedback` and of `two_shot`, by the agreed `factor`.

    Those that are not cut as `factor` is, inside `bucketed`, `by_leaf` or `hierarchical`, stay as they are.
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
