"""Small functions over pytrees and their paths."""

from typing import Any

import jax
import jax.numpy as jnp

from .dtypes import working_dtype
from .types import Array, Flag, Int, PyTree, State


def choose(condition: Flag, yes: PyTree, no: PyTree) -> PyTree:
    """Leaf by leaf, `yes` or `no`."""
    if isinstance(condition, bool):
        return yes if condition else no
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def wide(tree: PyTree) -> PyTree:
    """In float32 or better."""
    return jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), tree)


def plus(tree: PyTree, steps: PyTree) -> PyTree:
    """`tree + steps` in float32 or better."""
    return jax.tree.map(lambda x, u: x.astype(working_dtype(x.dtype)) + u.astype(working_dtype(x.dtype)), tree, steps)


def minus(tree: PyTree, other: PyTree) -> PyTree:
    """`tree - other` in float32 or better."""
    return jax.tree.map(lambda x, y: x.astype(working_dtype(x.dtype)) - y.astype(working_dtype(x.dtype)), tree, other)


def leaf_name(path: Any, whole: str = "state") -> str:
    """`opt_state.0.residual.w`, without the marks' own `value`; `whole` where the tree is one leaf."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return ".".join(part for part in parts if part != "value") or whole


def next_count(count: Int[Array, "..."]) -> Int[Array, "..."]:
    """One more, up to the largest number that there is."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count)


def fold_keys(state: State, data: Array | int) -> State:
    """The keys of a reducer's state, folded with a number; all else stays."""

    def one(leaf):
        return jax.random.fold_in(leaf, data) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(one, state)
