"""Inner methods that have models of their own: what a synchronization does to these."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.trees import tree_where
from .._core.types import Array, AxisNames, Flag, PyTree, State, Updates
from ..comm.base import Comm
from ..state.marks import PerWorker, axis_tuple, bind, is_mark, with_value
from .buffers import Buffers, average_buffers, find_buffers, update_buffers
from .counts import count_leaves, passes_on_some, step_counts
from .rounds import WeighDrift, cond_or_static
from .state import LocalStepsState


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


def find_weigh_drift(state: State) -> WeighDrift | None:
    """Returns what turns a drift into a worker's contribution to the mean, if the models inside do not count alike.

    These are the numerators of push-sum and messages under way, whose sum over workers mixing keeps.
    """
    found = [part.weigh_drift for part in _method_parts(state) if hasattr(part, "weigh_drift")]
    return found[0] if found else None


def check_stays(state: State) -> None:
    """Checks that a worker's model inside may be moved by itself, without the average of a round.

    Raises:
      ValueError: a method of gossip keeps a part of its models elsewhere.
    """
    for part in _method_parts(state):
        if hasattr(part, "keeps_apart"):
            raise ValueError(
                "local_slow_momentum moves the model of each worker by itself, and the method of gossip inside keeps "
                f"{part.keeps_apart}: use slowmo, whose round averages them, or a method without, such as d_psgd() "
                "(sgp() has none on a graph whose rows sum to 1)"
            )


def _method_parts(state: State) -> list[Any]:
    """The states of the methods of gossip inside, and of the methods inside these."""
    parts, nodes = [], _find(state)
    while nodes:
        nodes = [
            node.method.value if is_mark(node.method) else node.method for node in nodes if hasattr(node, "method")
        ]
        parts += nodes
    return parts


def restart_models(due: Flag, comm: Comm, state: State, fresh: State, *, buffers: Buffers) -> State:
    """Takes the models inside a state (anchors, push-sum weights, estimates) from `fresh`, if due.

    Of the state of a method of gossip that names its `model_fields`, these alone; its `buffer_fields` are treated as
    `buffers` says, and what is neither stays.
    """

    def restart_node(node: Any, new: Any) -> Any:
        if not keeps_models(node):
            return node
        inner = restart_models(due, comm, node.inner, new.inner, buffers=buffers)
        return _restart(due, comm, node, new, buffers)._replace(inner=inner)

    return _map_nodes(restart_node, state, fresh)


def _restart(due: Flag, comm: Comm, old: Any, new: Any, buffers: Buffers) -> Any:
    if is_mark(old):
        return with_value(old, _restart(due, comm, old.value, new.value, buffers))
    if not keeps_models(old):
        return tree_where(due, comm.varying(new), old)
    kept = getattr(type(old), "buffer_fields", ())
    changed = {name: _restart(due, comm, getattr(old, name), getattr(new, name), buffers) for name in old.model_fields}
    if buffers == "reset":
        changed |= {name: tree_where(due, comm.varying(getattr(new, name)), getattr(old, name)) for name in kept}
    elif buffers == "average" and kept:
        own = {name: getattr(old, name) for name in kept}
        average = partial(average_buffers, jax.tree.map(lambda _: True, own))
        changed |= cond_or_static(due, average, lambda comm, own: comm.varying(own), comm, own)
    return old._replace(**changed)


def update_inner_buffers(
    mode: Buffers, comm: Comm, due: Flag, inner: optax.GradientTransformation, state: State, params: PyTree
) -> State:
    """As `update_buffers`, without the models inside: of those that mix them, the inner optimizers have buffers."""
    opened = optax.GradientTransformation(lambda params: _open_nodes(inner.init(params)), inner.update)
    return _close_nodes(state, update_buffers(mode, comm, due, opened, _open_nodes(state), params))


def advance_schedules(
    inner: optax.GradientTransformationExtraArgs,
    state: State,
    params: PyTree,
    steps: Array | int,
    *,
    from_start: bool = False,
) -> State:
    """Returns the state of an inner optimizer with its schedules so many steps further on, or after so many in all.

    A schedule's count is a whole number in a field `count`, beside no buffer: that of Adam's moments stays with them.
    Inside of `optax.MultiSteps` and `accumulate` it counts the updates that these pass on.
    """
    opened_inner = optax.GradientTransformation(lambda params: _open_nodes(inner.init(params)), inner.update)
    opened = _open_nodes(state)
    owned = find_buffers(opened_inner, opened, params)

    def is_schedule(path: Any, own: bool, is_whole: bool) -> bool:
        name = getattr(path[-1], "name", None) if path else None
        # The number of updates that were passed on decides how many gradients the next one takes.
        return is_whole and (name == "gradient_step" or (name == "count" and not own))

    whole = jax.tree.unflatten(jax.tree.structure(opened), count_leaves(opened))
    moves = jax.tree_util.tree_map_with_path(is_schedule, owned, whole)
    start = opened
    if from_start:
        start = jax.tree.map(lambda x, old, is_whole: x if is_whole else old, opened_inner.init(params), opened, whole)
    # Models inside communicate, and have no accumulation around them that is known here.
    has_steps = passes_on_some(opened) and not _find(state)
    moved = step_counts(inner, start, params, steps) if has_steps else None
    if moved is None:
        moved = jax.tree.map(lambda x, move: _add(x, steps) if move else x, start, moves)
    return _close_nodes(state, jax.tree.map(lambda new, old, move: new if move else old, moved, opened, moves))


def _add(count: Array, steps: Array | int) -> Array:
    most = jnp.iinfo(count.dtype).max
    return jnp.where(count < most - steps, count + jnp.asarray(steps, count.dtype), most)


def check_nested(state: State, params: PyTree, axis: AxisNames, **options: Any) -> None:
    """Checks that a round may replace the models inside: all of a model at once, as soon as it has arrived.

    Raises:
      ValueError: an option of `local_steps` in `options` is set, or local steps inside keep the parameters they sent,
        or several transformations inside have a part of the model each, or gossip inside has other workers.
    """
    _check_gossip(state, axis)
    nodes = [node for node in _find(state) if isinstance(node, LocalStepsState)]
    for name, value in options.items():
        if value:
            raise ValueError(
                f"an inner optimizer that mixes models (gossip, local_steps) restarts from the whole mean model in "
                f"each round, so {name}={value} cannot be used with it; leave {name} out"
            )
    if any(jax.tree.leaves(node.sent_from.value) for node in nodes):
        raise ValueError(
            "local_steps(overlap_correction=True) cannot be inside another local_steps, nor eager=True; leave it out"
        )
    if any(jax.tree.structure(node.anchor) != jax.tree.structure(params) for node in nodes):
        raise ValueError(
            "the local_steps inside have a part of the parameters, and those around synchronize all of them; give "
            "each part both: optax.partition({label: local_steps(local_steps(...), ...)}, ...)"
        )


def _check_gossip(state: State, axis: AxisNames) -> None:
    """Checks that a round of all workers, with all of each model, has what gossip inside keeps of the models."""
    for node in _find(state):
        if hasattr(node, "method") and _axis(node) != axis_tuple(axis):
            raise ValueError(
                f"gossip inside has axis={_axis(node)} and local_steps around it axis={axis!r}, so a round would leave "
                "workers with different models, which it has no anchors for: give both the same axis, or average "
                'inside with all_reduce: optax.chain(jd.all_reduce(jd.exact(), axis="chip"), optax.adamw(1e-3))'
            )
    masked = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.MaskedState) or keeps_models(x))
    for part in [part for node in masked if isinstance(node, optax.MaskedState) for part in _method_parts(node)]:
        if hasattr(part, "weigh_drift"):
            raise ValueError(
                f"the gossip inside has a part of the parameters, and its method keeps {part.keeps_apart}, for this "
                "part alone; give each part both: optax.partition({label: local_steps(gossip(...), ...)}, ...)"
            )
    inside = [node for node in _find(state) if isinstance(node, LocalStepsState)]
    for part in [part for node in inside for part in _method_parts(node.inner)]:
        if hasattr(part, "keeps_apart"):
            raise ValueError(
                f"a round of the local_steps outside may come between two of those inside, and loses what gossip keeps "
                f"then: {part.keeps_apart}; use d_psgd(), choco or another method without, or gossip without the "
                "local_steps around it"
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
