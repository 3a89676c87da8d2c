"""The state of `local_steps`, its split into fragments, and what a synchronization does to the inner state.

The inner optimizer may keep models itself: gossip on the axis of `local_steps`, or local steps on a faster one.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._core.checks import NO_PARAMS
from .._core.compat import is_on_host
from .._core.dtypes import working_dtype
from .._core.trees import is_key, leaf_name, to_device, tree_where
from .._core.types import Array, AxisNames, Flag, Float, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm
from ..state.marks import NO_PARAMETER, PerWorker, axis_tuple, beside, bind, is_mark, with_value
from ..transforms.common import check_per_worker
from ..transforms.local_gradients import check_leaves, check_local
from ..transforms.quantized_state import is_coded
from ..wire.flat import gather_marked, split_marked
from .fragments import merge, split
from .synchronize import Fragment, WeighDrift, cond_or_static, exact_mean

Buffers = Literal["maintain", "reset", "average"]


class LocalStepsState(NamedTuple):
    """The state of `local_steps`. A *round* ends when the workers synchronize a fragment.

    Replicated: for each fragment the steps `since` its last round, its number of `rounds` and the sum of learning
    `rates` since then; the bytes `sent` by one worker, as (high, low) words; the `anchor` (the global parameters that
    all workers started the round from), in float32 or better.
    Per worker: for each leaf the `examples` since its last round, in an island -1 until a step counts them; with
    `overlap_correction`, the parameters that were `sent_from`.

    `inner` is one `PerWorker`, or a tree of them if the inner optimizer keeps models. With local steps around, along a
    slower axis, the `count_fields` stay replicated, and a round outside replaces the `model_fields`.
    """

    count: Int[Array, ""]
    since: Int[Array, " fragments"]
    rounds: Int[Array, " fragments"]
    rates: Float[Array, " fragments"]
    sent: UInt[Array, "2"]
    anchor: Updates
    outer: tuple[State, ...]
    inner: State
    examples: PerWorker
    reducer: tuple[State, ...]
    sent_from: PerWorker

    communicates = True
    count_fields = ("count", "since", "rounds", "rates", "sent")
    model_fields = ("anchor",)


def copy_wide(params: PyTree) -> PyTree:
    """Copies parameters in float32 or better: parameters and optimizer state may both be donated."""
    return jax.tree.map(lambda x: jnp.array(x, working_dtype(x.dtype)), params)


def check_step(updates: Updates, params: PyTree | None, axis: AxisNames) -> None:
    """Checks the arguments of a local step: gradients of this worker, and parameters marked as its own."""
    if params is None:
        raise ValueError(NO_PARAMS)
    check_leaves(updates, sharded=True)
    check_local(updates, axis)
    check_per_worker(params, axis)


def split_state(state: LocalStepsState, labels: PyTree) -> list[Fragment]:
    """Splits off the part of each fragment; `labels` has the number of each leaf's fragment."""
    number = len(state.outer)
    anchors, sent_from = split(state.anchor, labels, number), state.sent_from.value
    # `()` without overlap correction
    sent_from = split(sent_from, labels, number) if jax.tree.leaves(sent_from) else [()] * number
    since, rounds, rates = state.since, state.rounds, state.rates
    examples = [state.examples.value[leaves] for leaves in _leaves_of(labels, number)]
    return [
        Fragment(anchors[i], state.outer[i], state.reducer[i], since[i], rounds[i], rates[i], examples[i], sent_from[i])
        for i in range(number)
    ]


def _leaves_of(labels: PyTree, number: int) -> list[Any]:
    """The positions of the leaves of each fragment."""
    owners = np.array(jax.tree.leaves(labels), int)
    return [np.flatnonzero(owners == i) if number > 1 else slice(None) for i in range(number)]


def merge_state(state: LocalStepsState, fragments: Sequence[Fragment], labels: PyTree) -> LocalStepsState:
    """Puts the fragments back in place of those of `state`."""
    keeps_sent = bool(jax.tree.leaves(state.sent_from.value))
    examples = state.examples.value
    for leaves, fragment in zip(_leaves_of(labels, len(fragments)), fragments, strict=True):
        examples = examples.at[leaves].set(fragment.examples)
    sent_from = merge([fragment.sent_from for fragment in fragments], labels) if keeps_sent else ()
    return state._replace(
        since=jnp.stack([fragment.since for fragment in fragments]),
        rounds=jnp.stack([fragment.rounds for fragment in fragments]),
        rates=jnp.stack([fragment.rates for fragment in fragments]),
        anchor=merge([fragment.anchor for fragment in fragments], labels),
        outer=tuple(fragment.outer for fragment in fragments),
        reducer=tuple(fragment.reducer for fragment in fragments),
        examples=with_value(state.examples, examples),
        sent_from=with_value(state.sent_from, sent_from) if keeps_sent else state.sent_from,
    )


def global_params(opt_state: State) -> PyTree:
    """Returns the replicated model inside a state of `local_steps`: the one to evaluate and to keep.

    It is the anchor: a tree like the parameters, in float32 or better. `Sharded` parameters (ZeRO stage 3) have a
    sharded anchor: `jd.consensus` joins it.

    Args:
      opt_state: an optimizer state with `local_steps` anywhere inside, placed or as a worker sees it.

    Raises:
      ValueError: there is no `local_steps` inside, or there are several that are not parts of one model.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=8)
      >>> jd.local_sgd.global_params(tx.init(jnp.ones(2))).tolist()
      [1.0, 1.0]
    """
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, LocalStepsState))
    anchors = {leaf_name(path, "this state"): x.anchor for path, x in nodes if isinstance(x, LocalStepsState)}
    if not anchors:
        raise ValueError("this optimizer state has no local_steps inside, and so no anchor; evaluate the parameters")
    # With `optax.partition` each has a part of the model, and placeholders for the others'.
    try:
        return reduce(_join_parts, anchors.values())
    except _SeveralModelsError:
        raise ValueError(
            f"this state has models of local_steps in {', '.join(map(repr, anchors))}, which are not the parts of one: "
            "pass the state of one of them"
        ) from None


class _SeveralModelsError(Exception):
    """Two trees are not the parts of one."""


def _join_parts(first: PyTree, second: PyTree) -> PyTree:
    """The tree of two that have placeholders for each other's parts, each for one leaf or several."""
    if isinstance(first, optax.MaskedNode):
        return second
    if isinstance(second, optax.MaskedNode):
        return first
    (left, structure), (right, other) = (
        jax.tree.flatten(tree, is_leaf=lambda x, tree=tree: x is not tree) for tree in (first, second)
    )
    if jax.tree_util.all_leaves([first]) or structure != other:
        raise _SeveralModelsError
    return structure.unflatten(map(_join_parts, left, right))


def update_buffers(
    mode: Buffers, comm: Comm, due: Flag, inner: optax.GradientTransformation, state: State, params: PyTree
) -> State:
    """Maintains, resets or averages momentum and the like after a round, if it is due.

    *On the wire* for `"average"`: one all-reduce of all buffers, `2(W-1)/W · 4` bytes an entry; one for the counts.
    """
    if mode == "maintain":
        return state
    if mode == "average" and any(is_coded(x) for x in jax.tree.leaves(state, is_leaf=is_coded)):
        raise ValueError(
            'buffers="average" cannot average the encoded arrays of quantized_state; use buffers="maintain" or "reset"'
        )
    owned = find_buffers(inner, state, params)
    if mode == "average":
        return cond_or_static(due, partial(_average, owned), lambda comm, state: comm.varying(state), comm, state)
    return cond_or_static(
        due, partial(_reset, owned, inner), lambda comm, state, _: comm.varying(state), comm, state, params
    )


def _reset(owned: PyTree, inner: optax.GradientTransformation, comm: Comm, state: State, params: PyTree) -> State:
    """Buffers as `init` makes them, with the counts that belong to them; schedules go on counting."""
    # `init` is written for whole parameters, and makes whole arrays.
    fresh = split_marked(jax.tree.map(to_device, inner.init(gather_marked(params))))

    def restart_leaf(own, new, old):
        if not own:
            return old
        # Wide gradients have made the moments of half-precision parameters wider than `init` does.
        return _place_like(old, new if is_key(new) else new.astype(old.dtype))

    return comm.varying(jax.tree.map(restart_leaf, owned, fresh, state))


def _average(owned: PyTree, comm: Comm, state: State) -> State:
    """Averages buffers over workers; of the counts that belong to them it takes the largest."""

    def select(floating: bool) -> PyTree:
        return jax.tree.map(
            lambda own, x: to_device(x) if own and jnp.issubdtype(x.dtype, jnp.floating) == floating else None,
            owned,
            state,
        )

    def replace_leaf(old, mean, largest):
        new = old if mean is None and largest is None else largest if mean is None else mean
        return comm.varying(_place_like(old, new))

    means, largest = exact_mean(comm, select(True)), comm.max(select(False))
    return jax.tree.map(replace_leaf, state, means, largest, is_leaf=lambda x: x is None)


def _place_like(old: Array, new: Array) -> Array:
    """Moves a new array to the memory of the old one."""
    return jax.device_put(new, jax.memory.Space.Host) if is_on_host(old) else new


def find_buffers(inner: optax.GradientTransformation, state: State, params: PyTree) -> PyTree:
    """Returns a tree of booleans: true for buffers shaped like the parameters and for the counts of such buffers.

    Adam's bias correction counts since its moments were zero, so that count goes with them. A learning-rate schedule
    counts steps and must go on. A count belongs to a buffer if both are fields of the same NamedTuple.
    """
    params = _without_marks(params)
    numbers = beside(inner.init, state, params, is_leaf=is_coded)
    # The hyperparameters of `optax.inject_hyperparams` may have names of parameters, such as `b1`.
    like_params = jax.tree_util.tree_map_with_path(
        lambda path, k: k != NO_PARAMETER and not any(getattr(key, "name", None) == "hyperparams" for key in path),
        numbers,
    )
    return _flag_counts(state, like_params, jax.tree.structure(params))


def _flag_counts(node: Any, flags: Any, structure: Any) -> Any:
    """Extends the flags of buffers to the counts and keys of the NamedTuples that they are in."""
    if jax.tree_util.all_leaves([node]):
        return flags
    # One level down: the children of this node, and the flags below each.
    children, outside = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    pairs = list(zip(children, outside.flatten_up_to(flags), strict=True))
    has_buffers = hasattr(node, "_fields") and any(_is_buffer(*pair, structure) for pair in pairs)

    def flag_child(child: Any, flags: Any) -> Any:
        # A field that is another state, beside master parameters, has counts of its own.
        if has_buffers and jax.tree_util.all_leaves([_without_marks(child)]):
            return jax.tree.map(lambda _: True, flags)
        return _flag_counts(child, flags, structure)

    return outside.unflatten([flag_child(*pair) for pair in pairs])


def _is_buffer(node: Any, flags: Any, structure: Any) -> bool:
    found = jax.tree.leaves(flags)
    like_params = jax.tree.structure(_without_marks(node)) == structure or not isinstance(node, tuple)
    return bool(found) and all(found) and like_params


def _without_marks(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: _without_marks(x.value) if is_mark(x) else x, tree, is_leaf=is_mark)


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
        average = partial(_average, jax.tree.map(lambda _: True, own))
        changed |= cond_or_static(due, average, lambda comm, own: comm.varying(own), comm, own)
    return old._replace(**changed)


def update_inner_buffers(
    mode: Buffers, comm: Comm, due: Flag, inner: optax.GradientTransformation, state: State, params: PyTree
) -> State:
    """As `update_buffers`, without the models inside: of those that mix them, the inner optimizers have buffers."""
    opened = optax.GradientTransformation(lambda params: _open_nodes(inner.init(params)), inner.update)
    return _close_nodes(state, update_buffers(mode, comm, due, opened, _open_nodes(state), params))


def advance_schedules(inner: optax.GradientTransformation, state: State, params: PyTree, steps: Array | int) -> State:
    """Returns the state of an inner optimizer with its schedules so many steps further on.

    A schedule's count is a whole number in a field `count`, beside no buffer: that of Adam's moments stays with them.
    """
    opened_inner = optax.GradientTransformation(lambda params: _open_nodes(inner.init(params)), inner.update)
    opened = _open_nodes(state)
    owned = find_buffers(opened_inner, opened, params)

    def advance_leaf(path: Any, own: bool, count: Array) -> Array:
        is_schedule = getattr(path[-1], "name", None) == "count" if path else False
        if own or not is_schedule or not jnp.issubdtype(count.dtype, jnp.integer):
            return count
        most = jnp.iinfo(count.dtype).max
        return jnp.where(count < most - steps, count + jnp.asarray(steps, count.dtype), most)

    return _close_nodes(state, jax.tree_util.tree_map_with_path(advance_leaf, owned, opened))


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
        raise ValueError("local_steps(overlap_correction=True) cannot be inside another local_steps; leave it out")
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
