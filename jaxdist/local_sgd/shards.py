"""Rounds of parameters of which each worker has a shard."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.jaxprs import CASTS, ELEMENTWISE, evaluate
from .._core.trees import select_leaves
from .._core.types import PyTree, State, Updates
from ..comm.base import Comm
from ..reducers.reducer import Extras, Reducer
from ..state.marks import Sharded, flatten_marks, is_mark, with_value
from ..wire.shards import group_by_sharding, map_groups, whole_likes


class _Entries(NamedTuple):
    """An array of which a worker has some entries, in a trace that is checked."""


def has_shards(tree: PyTree) -> bool:
    """Returns whether a tree has `Sharded` leaves."""
    return any(isinstance(mark, Sharded) for leaf in flatten_marks(tree) for mark in leaf.marks)


def init_reducer(reducer: Reducer, params: PyTree) -> State:
    """The state of a reducer of drifts: one for each group of leaves that are sharded alike, where there are several.

    Raises:
      ValueError: the reducer keeps numbers of sharded leaves that are not shaped as these, which each worker would
        compute from its own shard.
    """
    if not has_shards(params):
        return reducer.init(params)
    # A worker reduces a shard, which is a vector: what a reducer decides by the shape, it decides for vectors.
    flat = jax.tree.map(lambda x: with_value(x, jnp.ravel(x.value)) if is_mark(x) else x, params, is_leaf=is_mark)
    groups = group_by_sharding(flat)
    states = tuple(reducer.init(select_leaves(flat, members)) for members in groups)
    for members, state in zip(groups, states, strict=True):
        if has_shards(select_leaves(params, members)):
            _check_reducer_state(reducer, state)
    return states if len(groups) > 1 else states[0]


def _check_reducer_state(reducer: Reducer, state: State) -> None:
    for leaf in flatten_marks(state):
        # A mark without an axis is the reducer's own: it splits a whole array over its workers.
        own = [mark for mark in leaf.marks if isinstance(mark, Sharded) and mark.axis is not None]
        sizes = [(math.prod(mark.shape),) for mark in own]
        is_floating = jnp.issubdtype(leaf.value.dtype, jnp.floating)
        # Residuals are cut as their parameters are; keys and counts are equal on all workers.
        if is_floating != bool(sizes) or any(leaf.value.shape != size for size in sizes):
            raise ValueError(
                f"{reducer.description or 'this reducer'} keeps {jax.tree_util.keystr(leaf.path)} of shape "
                f"{leaf.value.shape} besides arrays that are shaped as the parameters, and of Sharded parameters each "
                "worker would keep another one: use exact(), compressed(...), two_shot(..., server_feedback=False), or "
                "error_feedback(...) of these, or do not shard the parameters (stages 1 and 2)"
            )


def reduce_groups(
    reducer: Reducer, updates: Updates, state: State, comm: Comm, extras: Extras
) -> tuple[Updates, State]:
    """Averages drifts, each group of leaves that are sharded alike by itself; `state` is that of `init_reducer`."""
    groups = group_by_sharding(updates)
    if len(groups) < 2:
        reduced, state = reducer.reduce(updates, state, comm, extras)
        return reduced.mean, state
    # The same order as in `map_groups`.
    before, after = iter(state), []

    def reduce_group(part: Updates) -> Updates:
        reduced, new = reducer.reduce(part, next(before), comm, extras)
        after.append(new)
        return reduced.mean

    return map_groups(reduce_group, updates), tuple(after)


def check_entrywise(outer: optax.GradientTransformationExtraArgs, anchor: PyTree) -> None:
    """Checks that an outer optimizer treats each entry of sharded parameters by itself: a worker has some of them.

    Raises:
      ValueError: it takes norms, factors or other functions of whole arrays.
    """
    if not has_shards(anchor):
        return
    arguments = whole_likes((anchor, outer.init(anchor), anchor))
    closed = jax.make_jaxpr(lambda *trees: outer.update(*trees, learning_rate=0.1))(*arguments)
    operands = [
        _Entries() if any(isinstance(mark, Sharded) for mark in leaf.marks) else None
        for leaf in flatten_marks(arguments)
    ]
    evaluate(closed, _apply_entrywise, operands)


def _apply_entrywise(equation: Any, operands: list[Any]) -> list[Any]:
    if not any(isinstance(x, _Entries) for x in operands):
        return [None] * len(equation.outvars)
    if equation.primitive.name not in ELEMENTWISE | CASTS:
        raise ValueError(
            f"the outer optimizer computes a `{equation.primitive.name}` of whole arrays, and of Sharded parameters a "
            "worker has a shard: use one that treats each entry by itself, "
            "optax.sgd(0.7, momentum=0.9, nesterov=True)"
        )
    return [_Entries()] * len(equation.outvars)
