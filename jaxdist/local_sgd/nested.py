"""Inner optimizers that keep models themselves: gossip on the axis of `local_steps`, or local steps on a faster one."""

from typing import Any

import jax
import optax

from .._core.trees import tree_where
from .._core.types import AxisNames, Flag, PyTree, State, Updates
from ..comm.base import Comm
from ..state.marks import PerWorker, axis_tuple, bind, is_mark
from .state import Buffers, LocalStepsState, update_buffers


def keeps_models(node: Any) -> bool:
    """Returns whether a node is the state of a transformation that keeps models beside the parameters."""
    return hasattr(type(node), "model_fields")


def has_models(state: State) -> bool:
    """Returns whether the state of an inner optimizer contains models that a round outside must replace."""
    return bool(_find(state))


def mark_inner(state: State, axis: AxisNames) -> State:
    """Marks the state of an inner optimizer as per-worker over an axis.

    The counts of transformations that communicate stay replicated: all workers must enter the same collectives.
    """
    if not has_models(state):
        return bind(PerWorker(state), axis)

    def mark_node(node: Any) -> Any:
        if not keeps_models(node):
            return bind(PerWorker(node), axis)
        # Gossip over the same axis has marked its fields.
        if not isinstance(node, LocalStepsState) and _axis(node) == axis_tuple(axis):
            return node
        fields = {name: bind(PerWorker(getattr(node, name)), axis) for name in _per_worker_fields(node)}
        return node._replace(**fields, inner=mark_inner(node.inner, axis))

    return _map_nodes(mark_node, state)


def unmark_inner(state: State, axis: AxisNames) -> State:
    """Removes the marks that `mark_inner` has added: the state as the inner optimizer knows it."""
    if isinstance(state, PerWorker):
        return state.value

    def unmark_node(node: Any) -> Any:
        if not keeps_models(node):
            return node.value
        if not isinstance(node, LocalStepsState) and _axis(node) == axis_tuple(axis):
            return node
        fields = {name: getattr(node, name).value for name in _per_worker_fields(node)}
        return node._replace(**fields, inner=unmark_inner(node.inner, axis))

    return _map_nodes(unmark_node, state)


def inner_anchor(state: State) -> Updates | None:
    """Returns the anchor of local steps inside, the model of this worker's group; `None` without any."""
    for node in _find(state):
        if isinstance(node, LocalStepsState):
            return node.anchor
    return None


def restart_models(due: Flag, comm: Comm, state: State, fresh: State) -> State:
    """Takes the models inside a state (anchors, push-sum weights, trackers, estimates) from `fresh`, if due."""

    def restart_node(node: Any, new: Any) -> Any:
        if not keeps_models(node):
            return node
        fields = {
            name: tree_where(due, comm.varying(getattr(new, name)), getattr(node, name)) for name in node.model_fields
        }
        return node._replace(**fields, inner=restart_models(due, comm, node.inner, new.inner))

    return _map_nodes(restart_node, state, fresh)


def update_inner_buffers(
    mode: Buffers, comm: Comm, due: Flag, inner: optax.GradientTransformation, state: State, params: PyTree
) -> State:
    """As `update_buffers`, without the models inside: of those that mix them, the inner optimizers have buffers."""
    opened = optax.GradientTransformation(lambda params: _open_nodes(inner.init(params)), inner.update)
    return _close_nodes(state, update_buffers(mode, comm, due, opened, _open_nodes(state), params))


def check_nested(state: State, params: PyTree, **options: Any) -> None:
    """Checks that a round may replace the models inside: all of a model at once, as soon as it has arrived.

    Raises:
      ValueError: an option of `local_steps` in `options` is set, or local steps inside keep the parameters they sent,
        or several transformations inside have a part of the model each.
    """
    nodes = [node for node in _find(state) if isinstance(node, LocalStepsState)]
    for name, value in options.items():
        if value:
            raise ValueError(
                f"an inner optimizer that mixes models (gossip, local_steps) restarts from the whole mean model in "
                f"each round, so {name}={value} cannot be used with it; leave {name} out"
            )
    if any(jax.tree.leaves(node.sent_from.value) for node in nodes):
        raise ValueError("local_steps(overlap_correction=True) cannot be inside another local_steps; leave it out")
    if any(jax.tree.structure(node.anchor) != jax.tree.structure(params) for node in nodes):
        raise ValueError(
            "the local_steps inside have a part of the parameters, and those around synchronize all of them; give "
            "each part both: optax.partition({label: local_steps(local_steps(...), ...)}, ...)"
        )


def _open_nodes(state: State) -> State:
    """Replaces the state of each transformation that keeps models by that of its inner optimizer."""
    return jax.tree.map(
        lambda node: _open_nodes(unmark_inner(node.inner, _axis(node))) if keeps_models(node) else node,
        state,
        is_leaf=keeps_models,
    )


def _close_nodes(state: State, opened: State) -> State:
    """Puts the states that `_open_nodes` returned back into `state`."""

    def close_node(node: Any, new: Any) -> Any:
        if not keeps_models(node):
            return new
        inner = _close_nodes(unmark_inner(node.inner, _axis(node)), new)
        return node._replace(inner=mark_inner(inner, _axis(node)))

    return jax.tree.map(close_node, state, opened, is_leaf=keeps_models)


def _axis(node: Any) -> AxisNames:
    return node.examples.axis if isinstance(node, LocalStepsState) else node.inner.axis


def _find(state: State) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=keeps_models) if keeps_models(node)]


def _map_nodes(f: Any, state: State, *rest: State) -> State:
    return jax.tree.map(f, state, *rest, is_leaf=lambda x: keeps_models(x) or is_mark(x))


def _per_worker_fields(node: Any) -> list[str]:
    return [name for name in node._fields if name not in (*node.count_fields, "inner")]
