"""The mean over workers of gradients that the compiler shards along other axes of the mesh."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from .._core.compat import mesh_axes_left_over, shard_map, varying_axes
from .._core.trees import select_leaves
from .._core.types import Array, AxisNames, PyTree, State, Updates
from ..comm.base import Comm, Sent, count_sent, total_bytes
from ..comm.over import over
from ..reducers.reducer import Extras, Law, Reduced, Reducer, shards_of
from ..state.marks import PerWorker, axis_tuple, expand_specs, map_marked, with_value
from ..state.parameter_specs import axes_of_specs, spec_axes, without_axes
from .reduce_scatter import scattered_dimensions, scattering

FLATTENED = (
    "specs= needs a reducer with separate state for each leaf: put error feedback around bucketed, not inside, pass "
    "two_shot(..., server_feedback=False), and do not use hierarchical"
)


def on_shards(reducer: Reducer, specs: PyTree, axis: AxisNames) -> Reducer:
    """The reducer of leaves that the compiler shards, on each shard by itself; of its results, only the mean is whole.

    A plain mean needs no specs, and stays as it is.
    """
    if reducer.law == Law.MEAN:
        return reducer

    def reduce(updates: Updates, state: State, comm: Comm, extras: Extras) -> tuple[Reduced, State]:
        # The parameters of a shard are not those of the drift.
        shard_extras = extras._replace(params=None)
        mean, state = reduce_on_shards(reducer, updates, state, specs, axis, shard_extras, comm.ledger)
        return Reduced(mean, own=None), state

    return reducer._replace(init=partial(init_on_shards, reducer, specs=specs, axis=axis), reduce=reduce)


def init_on_shards(reducer: Reducer, params: PyTree, specs: PyTree, axis: AxisNames) -> State:
    """Returns the reducer's state for one shard of each leaf, one for each kind of leaves if there are several."""
    kinds = _kinds(specs)
    # A placeholder for the parameters, from optax.tree.map_params.
    if jax.tree.leaves(params):
        specs = expand_specs(specs, params)
        chosen = {kind: _select(kind, specs, params, specs) for kind in kinds}
        states = {kind: _init_kind(reducer, own, own_specs, axis) for kind, (own, own_specs) in chosen.items()}
    else:
        # In the form that reduces the leaves of each kind.
        scatters = {kind: set(kind.split("+")) & set(axis_tuple(axis)) for kind in kinds}
        states = {kind: (shards_of(reducer) if scatters[kind] else reducer).init(params) for kind in kinds}
    return states if len(kinds) > 1 else states[kinds[0]]


def _init_kind(reducer: Reducer, params: PyTree, specs: PyTree, axis: AxisNames) -> State:
    """Returns the reducer's state for leaves of one kind; state that differs between shards is `PerWorker`."""
    sizes = _mesh_sizes(specs)
    # Refuses what does not divide, over the workers' own axis too.
    jax.tree.map(lambda leaf, spec: _shard_shape(leaf.shape, spec, sizes), params, specs)
    reducer, specs = _over_others(reducer, specs, axis, sizes)
    local = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(_shard_shape(leaf.shape, spec, sizes), leaf.dtype), params, specs
    )

    def mark(leaf, spec):
        return leaf if not spec_axes(spec) else PerWorker(leaf, axis=spec_axes(spec), resize="copy")

    def mark_node(node, spec):
        return with_value(node, mark(node.value, spec)) if isinstance(node, PerWorker) else mark(node, spec)

    try:
        return optax.tree.map_params(reducer.init, mark_node, reducer.init(local), specs, is_leaf=None)
    except ValueError as error:
        raise ValueError(FLATTENED) from error


def reduce_on_shards(
    reducer: Reducer,
    updates: Updates,
    state: State,
    specs: PyTree,
    axis: AxisNames,
    extras: Extras,
    ledger: list[Sent] | None = None,
) -> tuple[Updates, State]:
    """Runs `reducer.reduce` on each shard, separately for each kind of leaves; returns the mean and the new state.

    What all shards send is appended to `ledger`.
    """
    kinds = _kinds(specs)
    specs = expand_specs(specs, updates)
    names = axes_of_specs(specs) - set(axis_tuple(axis))
    # Axes that shard the batch alone: inside a map over them the compiler divides no flattened leaf.
    names = names or set(mesh_axes_left_over())
    if len(kinds) == 1:
        return _reduce_kind(reducer, updates, state, specs, names, axis, extras, ledger)
    reduced = {}
    for kind in kinds:
        own, own_specs = _select(kind, specs, updates, specs)
        reduced[kind] = _reduce_kind(reducer, own, state[kind], own_specs, names, axis, extras, ledger)
    means = [mean for mean, _ in reduced.values()]
    mean = jax.tree.map(lambda spec, *parts: parts[kinds.index(_kind(spec))], specs, *means)
    return mean, {kind: new for kind, (_, new) in reduced.items()}


def _over_others(reducer: Reducer, specs: PyTree, axis: AxisNames, sizes: dict[str, int]) -> tuple[Reducer, PyTree]:
    """The specs over the other axes than the workers'; where these shard the leaves, a reducer that scatters the mean.

    The leaves are of one kind: all of them are sharded over the workers, or none.
    """
    names = axis_tuple(axis)
    if not any(set(spec_axes(spec)) & set(names) for spec in jax.tree.leaves(specs)):
        return reducer, specs
    workers = math.prod(sizes[name] for name in names)
    scatters = scattering(reducer, scattered_dimensions(specs, names), workers)
    return scatters, jax.tree.map(lambda spec: without_axes(spec, names), specs)


def _kind(spec: PartitionSpec) -> str:
    return "+".join(spec_axes(spec)) or "replicated"


def _kinds(specs: PyTree) -> list[str]:
    """The axes that shard leaves; joined in one buffer, replicated leaves would be typed as differing along them."""
    return sorted({_kind(spec) for spec in jax.tree.leaves(specs)})


def _select(kind: str, specs: PyTree, *trees: PyTree) -> list[PyTree]:
    """The trees with the leaves of one kind, and `None` in place of the others."""
    members = [i for i, spec in enumerate(jax.tree.leaves(specs)) if _kind(spec) == kind]
    return [select_leaves(tree, members) for tree in trees]


def _reduce_kind(
    reducer: Reducer,
    updates: Updates,
    state: State,
    specs: PyTree,
    names: set[str],
    axis: AxisNames,
    extras: Extras,
    ledger: list[Sent] | None,
) -> tuple[Updates, State]:
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    reducer, specs = _over_others(reducer, specs, axis, sizes)
    if not names:
        reduced, state = reducer.reduce(updates, state, _counted(axis, ledger), extras)
        return reduced.mean, state

    # The leading dimension of a leaf counts shards where a mark says so.
    state_specs = map_marked(lambda marks, _: PartitionSpec(*(mark.axis for mark in _shard_marks(names, marks))), state)

    # The worker's numbers, which all of its devices have.
    numbers = {name: x for name, x in extras._asdict().items() if isinstance(x, jax.Array)}

    def reduce_shard(updates, state, numbers):
        squeezed = map_marked(lambda marks, leaf: leaf[0] if _shard_marks(names, marks) else leaf, state)
        plain, sent = _strip_marks(squeezed, names), []
        group = _counted(axis, None if ledger is None else sent)
        reduced, plain = reducer.reduce(updates, plain, group, extras._replace(**numbers))
        new = jax.tree.structure(state).unflatten(jax.tree.leaves(plain))
        sent_bytes = jnp.asarray(total_bytes(sent), jnp.float32)
        return reduced.mean, map_marked(partial(_unsqueeze, names), new), sent_bytes

    mapped = shard_map(
        reduce_shard,
        mesh=None,
        in_specs=(specs, state_specs, PartitionSpec()),
        out_specs=(specs, state_specs, PartitionSpec()),
        axis_names=names,
        check_vma=True,
    )
    mean, state, sent_bytes = mapped(updates, state, numbers)
    if ledger is not None:
        # All leaves are cut by the same axes. Other axes hold copies, which count once, as they do without specs.
        shards = math.prod(sizes[name] for spec in jax.tree.leaves(specs)[:1] for name in spec_axes(spec))
        ledger.append(Sent("shards", shards * sent_bytes))
    return mean, state


def _counted(axis: AxisNames, ledger: list[Sent] | None) -> Comm:
    return over(axis) if ledger is None else count_sent(over(axis), ledger)


def _shard_marks(names: set[str], marks: Sequence[Any]) -> list[PerWorker]:
    return [mark for mark in marks if isinstance(mark, PerWorker) and set(axis_tuple(mark.axis)) & names]


def _unsqueeze(names: set[str], marks: Sequence[Any], leaf: Array) -> Array:
    if _shard_marks(names, marks):
        return leaf[None]
    if varying_axes(leaf) & names:
        raise ValueError(FLATTENED)
    return leaf


def _strip_marks(state: State, names: set[str]) -> State:
    """Removes the marks over the shards' axes, so that the reducer sees the state that it made."""

    def strip_node(node):
        if not isinstance(node, PerWorker):
            return node
        if set(axis_tuple(node.axis)) & names:
            return node.value
        return with_value(node, _strip_marks(node.value, names))

    return jax.tree.map(strip_node, state, is_leaf=lambda x: isinstance(x, PerWorker))


def _mesh_sizes(specs: PyTree) -> dict[str, int]:
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    missing = sorted(axes_of_specs(specs) - set(sizes))
    if missing:
        raise ValueError(
            f"specs name the mesh axes {missing}, which are unknown here; make the state with "
            "init_state(make_state, mesh), or call init under jax.set_mesh(mesh)"
        )
    return sizes


def _shard_shape(shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    if len(spec) > len(shape):
        raise ValueError(f"{spec} is for an array of {len(spec)} dimensions, and a parameter has the shape {shape}")
    out = list(shape)
    for dimension, part in enumerate(spec):
        parts = math.prod(sizes[name] for name in spec_axes(PartitionSpec(part)))
        if out[dimension] % parts:
            raise ValueError(
                f"dimension {dimension} of shape {shape} does not divide into {parts} shards ({spec}): pad the "
                "parameter, or leave this dimension out of its spec"
            )
        out[dimension] //= parts
    return tuple(out)
