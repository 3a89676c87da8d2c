"""Finds the parameters and the state of `local_steps` in a training state, and puts new ones in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .._core.trees import named_leaves
from .._core.types import PyTree
from ..local_sgd.state import LocalStepsState
from ..state.flax_marks import refuse_modules
from ..state.marks import SHOWN_LEAVES, PerWorker, with_value


def find_model(state: PyTree) -> tuple[LocalStepsState, PyTree]:
    """Returns the only `LocalStepsState` of a training state, and the only tree beside it that is like its anchor.

    Raises:
      ValueError: there is none, as where an nnx module has more Variables, or more than one: an average of parameters,
        for instance, looks like parameters.
    """
    local, params = _find(state)
    params = params.value if isinstance(params, PerWorker) else params
    # Committed to their devices, as those that `enter` compiles for: a step that was compiled ahead of time may return
    # arrays that are not, and then the programs of a meeting would be compiled once more, while others wait.
    mesh = find_mesh(params)
    return _commit(local, mesh), _commit(params, mesh)


def replace_model(state: PyTree, local: LocalStepsState, params: PyTree) -> PyTree:
    """Returns the state with another `LocalStepsState` and other parameters, each leaf placed as the old one was."""
    old_local, old_params = _find(state)
    if isinstance(old_params, PerWorker):
        params = with_value(old_params, params)
    mesh = find_mesh(old_params)
    fresh = {id(old_local): _place(local, old_local, mesh), id(old_params): _place(params, old_params, mesh)}
    nodes, structure = jax.tree.flatten(state, is_leaf=lambda node: id(node) in fresh)
    return structure.unflatten([fresh.get(id(node), node) for node in nodes])


@contextmanager
def automatic_mesh() -> Iterator[None]:
    """Runs a block in the mesh that `jax.set_mesh` has set, with axes that the compiler may use."""
    mesh = jax.sharding.get_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        yield
        return
    with jax.set_mesh(_automatic(mesh)):
        yield


def find_mesh(params: PyTree) -> Mesh | AbstractMesh | None:
    """The mesh that parameters are placed on, or `None` for a single device."""
    shardings = [x.sharding for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    return next((x.mesh for x in shardings if isinstance(x, NamedSharding)), None)


def _sharding_of(x: jax.Array, mesh: Mesh | AbstractMesh | None) -> Sharding:
    """Where an array belongs: on the whole mesh of the parameters if JAX has put it somewhere, and may move it."""
    return x.sharding if x.committed or mesh is None else NamedSharding(mesh, PartitionSpec())


def _commit(tree: PyTree, mesh: Mesh | AbstractMesh | None) -> PyTree:
    """Commits arrays to their devices; sharding axes that are part of types become such as the compiler may use.

    The programs of a meeting reshape and join the leaves of any model. No array is copied but those of NumPy, as a file
    may give them.
    """
    arrays = jax.tree.map(_on_device, tree)
    return jax.tree.map(lambda x: jax.device_put(x, _without_types(_sharding_of(x, mesh))), arrays)


def _on_device(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _without_types(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return sharding
    return NamedSharding(_automatic(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def _automatic(mesh: Any) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _place(new: PyTree, old: PyTree, mesh: Mesh | AbstractMesh | None) -> PyTree:
    # The compiled step expects the placement that it returned.
    return jax.tree.map(lambda x, y: jax.device_put(x, _sharding_of(_on_device(y), mesh)), new, old)


def _find(state: PyTree) -> tuple[LocalStepsState, Any]:
    found = [node for node in _nodes(state) if isinstance(node, LocalStepsState)]
    if len(found) != 1:
        raise ValueError(
            f"the state must contain one LocalStepsState, of local_steps(..., axis=None), got {len(found)}"
        )
    local = found[0]
    structure, shapes = jax.tree.structure(local.anchor), [x.shape for x in jax.tree.leaves(local.anchor)]

    def is_model(node: Any) -> bool:
        tree = node.value if isinstance(node, PerWorker) else node
        return (
            jax.tree.structure(tree) == structure
            and [getattr(x, "shape", None) for x in jax.tree.leaves(tree)] == shapes
        )

    models = [node for node in _nodes(state, stop=lambda node: is_model(node) or node is local) if is_model(node)]
    if not models:
        refuse_modules(state)
        raise ValueError(
            "beside the state of local_steps there is no tree like the parameters that its init got, with leaves "
            f"{_show_leaves(local.anchor)}: keep these in the state that meets, in a tree of their own as tx.init got "
            "it"
        )
    if len(models) > 1:
        raise ValueError(
            f"beside the state of local_steps there must be one tree like its parameters, got {len(models)}; keep "
            "averages of parameters outside of the state that meets"
        )
    return local, models[0]


def _show_leaves(tree: PyTree) -> str:
    named = [f"{name} {list(x.shape)}" for name, x in named_leaves(tree)]
    more = f", and {len(named) - SHOWN_LEAVES} more" if len(named) > SHOWN_LEAVES else ""
    return ", ".join(named[:SHOWN_LEAVES]) + more


def _nodes(tree: PyTree, stop: Any = lambda node: isinstance(node, LocalStepsState)) -> list[Any]:
    """All nodes of a tree from the top, not those below a node where `stop` holds."""
    if stop(tree) or jax.tree_util.all_leaves([tree]):
        return [tree]
    children = jax.tree.leaves(tree, is_leaf=lambda node: node is not tree)
    return [tree, *(node for child in children for node in _nodes(child, stop))]
