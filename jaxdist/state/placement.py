"""The global arrays of a state on a mesh: specs and shardings, creation, resizing, and one worker's view of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._core.compat import varying_axes
from .._core.trees import fold_index, is_key, leaf_name
from .._core.types import Array, AxisNames, PyTree, Shape, State
from .flax_marks import refuse_lost_marks
from .marks import OnHost, PerWorker, Sharded, axis_tuple, bind, flatten_marks, is_mark, map_marked, with_value

# The rooms whose NamedTuples are states of reducers and transformations.
ROOMS = ("decentralized", "local_sgd", "offload", "online", "optimizers", "reducers", "transforms", "zero")
STATE_MODULES = tuple(f"{__name__.partition('.')[0]}.{room}." for room in ROOMS)

SHARDED_PARAMETERS = (
    "jaxdist: a Sharded parameter is one worker's part of it. Wrap the function that computes with it in "
    "zero.gathered: local_value_and_grad(zero.gathered(loss))."
)

# `f(x)` is `isinstance(x, PartitionSpec)`; JAX would flatten a spec as a tuple.
is_spec = PartitionSpec.__instancecheck__


def cutting(marks: Sequence[Any]) -> list[Any]:
    """The marks of a leaf, bound to axes, that have a leading dimension in its global array."""
    return [mark for mark in marks if not isinstance(mark, OnHost) and mark.axis]


def spec_of(marks: tuple[Any, ...]) -> PartitionSpec:
    """The PartitionSpec of a leaf inside these marks: one leading dimension for each mark that has an axis."""
    return PartitionSpec(*(spec_entry(mark.axis) for mark in cutting(marks)))


def spec_entry(axis: AxisNames) -> Any:
    """The entry of a PartitionSpec for a dimension that is split over one axis or several."""
    names = axis_tuple(axis)
    return names[0] if len(names) == 1 else names


def expand_specs(specs: PyTree, tree: PyTree) -> PyTree:
    """Expands a prefix of a tree to one PartitionSpec for each leaf."""
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec)


def split_axes(specs: Sequence[PartitionSpec]) -> list[list[tuple[str, ...]]]:
    """The mesh axes along each dimension of each spec."""
    return [[axis_tuple(part) for part in spec] for spec in specs]


def specs(state: State, *, axis: AxisNames = "data") -> PyTree:
    """The tree of PartitionSpecs of a state: `P()` for replicated leaves, `P(axis)` for marked ones.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import PerWorker, state
      >>> tuple(state.specs({"w": jnp.zeros(3), "e": PerWorker(jnp.zeros(3))})["e"].value)
      ('data',)
    """
    return map_marked(lambda marks, _: spec_of(marks), bind(state, axis))


def shardings(state: State, mesh: Mesh, *, axis: AxisNames = "data") -> PyTree:
    """The tree of `NamedSharding`s of a state; leaves inside `OnHost` get memory kind `pinned_host`."""

    def shard(marks, _):
        host = any(isinstance(mark, OnHost) for mark in marks)
        return NamedSharding(mesh, spec_of(marks), memory_kind="pinned_host" if host else None)

    return map_marked(shard, bind(state, axis))


# A mesh (an abstract one to trace only), or for simulation the number of workers (along each axis).
Place = Mesh | AbstractMesh | int | Mapping[str, int]


def workers(mesh: Place, axis: AxisNames) -> int:
    """The number of workers along an axis; raises `ValueError` if the mesh has no such axis."""
    if isinstance(mesh, int):
        return mesh
    sizes = mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh
    for name in axis_tuple(axis):
        if name not in sizes:
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {tuple(sizes)}")
    return math.prod(sizes[name] for name in axis_tuple(axis))


def length_with_padding(mark: Sharded, count: int) -> int:
    """The length of the global flat array of a `Sharded` mark over `count` workers."""
    unit = count * mark.multiple
    return -(-math.prod(mark.shape) // unit) * unit


def _globalize(mesh: Place, marks: tuple[Any, ...], leaf: Any) -> Any:
    """Makes the global array of a leaf as written: each mark, innermost first, adds or pads its leading dimension."""
    # An inner mark's dimension comes after those of the marks around it.
    for mark in reversed(marks):
        if isinstance(mark, PerWorker) and mark.axis:
            leaf = copy_to_workers(leaf, workers(mesh, mark.axis))
        elif isinstance(mark, Sharded) and mark.axis:
            length = length_with_padding(mark, workers(mesh, mark.axis))
            leaf = jnp.pad(jnp.ravel(leaf), (0, length - math.prod(mark.shape)))
    return leaf


def copy_to_workers(leaf: Any, count: int) -> Array | np.ndarray:
    """`[*s]` -> `[W, *s]`: copies for all workers, of keys each folded with its worker's number."""
    copies = _numpy_of(leaf).broadcast_to(leaf, (count, *jnp.shape(leaf)))
    # With equal keys all workers would draw the same noise, whose mean is as large as that of a single worker.
    return fold_index(copies) if is_key(leaf) else copies


def init_state(make_state: Callable[[], State], mesh: Place, *, axis: AxisNames = "data") -> State:
    """Creates a train state directly on its mesh: no sharded leaf is ever materialized on one device.

    Args:
      make_state: a function without arguments that builds the state (parameters, optimizer state) of one worker.
      mesh: the mesh; for `simulate`, the number of workers (or a mapping from axis to number), on one device.

    Returns:
      The state as global arrays, with its marks; typed keys inside `PerWorker` are folded with the worker's number, so
      that workers draw different numbers. All processes must call it together, with the same function.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state = jd.init_state(lambda: {"w": jnp.zeros(3), "e": jd.PerWorker(jnp.zeros(3))}, mesh)
      >>> state["e"].value.shape
      (1, 3)
    """

    def build():
        state = make_state()
        refuse_lost_marks(state)
        return map_marked(partial(_globalize, mesh), bind(state, axis))

    if not isinstance(mesh, Mesh):
        return jax.jit(build)()
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(build)
        return jax.jit(build, out_shardings=shardings(shapes, mesh, axis=axis))()


def place(state: State, mesh: Place, *, axis: AxisNames = "data") -> State:
    """Copies an existing state onto a mesh; donating the result does not invalidate the caller's arrays.

    Args:
      state: the state of one worker: `PerWorker` leaves without the worker dimension (each worker gets a copy, with
        typed keys folded with its number).

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.place({"e": jd.PerWorker(jnp.zeros(3))}, jd.make_mesh({"data": 1}))["e"].value.shape
      (1, 3)
    """
    refuse_lost_marks(state)
    state = map_marked(partial(_globalize, mesh), bind(state, axis))
    return _place_tree(state, mesh, axis)


def resize(state: State, mesh: Place, *, axis: AxisNames = "data") -> State:
    """Moves a placed state to a mesh with another number of workers.

    Replicated leaves stay, `Sharded` ones are split again, `PerWorker` ones follow their `resize` rule: residuals keep
    their mean over workers, which is the update not yet delivered (keeping their sum would change the model). Workers
    keep their keys, and each new worker folds its number into the key of worker `i mod W`.

    Raises:
      ValueError: marks nest over several axes of which more than one changed its size.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state = {"e": jd.PerWorker(jnp.array([[1.0], [3.0]]))}  # two workers' residuals
      >>> jd.resize(state, mesh)["e"].value.tolist()
      [[2.0]]
    """

    def resize_leaf(marks, leaf):
        marks = cutting(marks)
        counts = [workers(mesh, mark.axis) for mark in marks]
        lengths = [
            length_with_padding(mark, n) if isinstance(mark, Sharded) else n
            for mark, n in zip(marks, counts, strict=True)
        ]
        return refit(marks, leaf, (*lengths, *leaf.shape[len(marks) :]))

    state = map_marked(resize_leaf, bind(state, axis))
    return _place_tree(state, mesh, axis)


def refit(marks: Sequence[Any], leaf: Array | np.ndarray, shape: Shape) -> Array | np.ndarray:
    """Resizes the global array of one leaf to another number of workers: each dimension by the rule of its mark.

    Args:
      marks: the marks around the leaf, from the outermost inwards, bound to axes.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> marks = [jd.PerWorker(None, axis="data")]
      >>> jd.state.refit(marks, jnp.array([[1.0], [3.0]]), (3, 1)).tolist()
      [[2.0], [2.0], [2.0]]
    """
    xp = _numpy_of(leaf)
    for dimension, mark in enumerate(cutting(marks)):
        leaf = xp.moveaxis(leaf, dimension, 0)
        length = shape[dimension]
        leaf = _resize_padding(leaf, mark, length) if isinstance(mark, Sharded) else _resize_workers(leaf, mark, length)
        leaf = xp.moveaxis(leaf, 0, dimension)
    return leaf


def _place_tree(state: State, mesh: Place, axis: AxisNames) -> State:
    # `device_put(may_alias=False)` onto several devices still aliases on the device that the array comes from.
    copies = jax.tree.map(jnp.copy, state)
    if not isinstance(mesh, Mesh):
        return copies
    return jax.tree.map(place_leaf, copies, shardings(state, mesh, axis=axis))


def place_leaf(leaf: Array, sharding: jax.sharding.Sharding) -> Array:
    """`device_put`, also of a key or an array of one device onto several processes."""
    if sharding.is_fully_addressable or not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        words = jax.device_put(np.asarray(jax.random.key_data(leaf)), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return jax.device_put(np.asarray(leaf), sharding)


def _numpy_of(leaf: Array | np.ndarray) -> Any:
    return np if isinstance(leaf, np.ndarray) else jnp


def _resize_padding(leaf: Array | np.ndarray, mark: Sharded, length: int) -> Any:
    """`[W·n, ...]` -> `[W'·n', ...]`: replaces the padding."""
    size = math.prod(mark.shape)
    return _numpy_of(leaf).pad(leaf[:size], [(0, length - size)] + [(0, 0)] * (leaf.ndim - 1))


def _resize_workers(leaf: Array | np.ndarray, mark: PerWorker, count: int) -> Any:
    """`[W, ...]` -> `[W', ...]` by the rule of the mark; integers and keys have no mean and are copied."""
    if leaf.shape[0] == count:
        return leaf
    if is_key(leaf):
        copies = leaf[jnp.arange(count) % leaf.shape[0]]
        return jnp.concatenate([leaf[:count], fold_index(copies)[leaf.shape[0] :]])
    xp = _numpy_of(leaf)
    # Half-precision numbers are summed in float32, NumPy's in float64.
    if mark.resize == "mean" and jnp.issubdtype(leaf.dtype, jnp.inexact):
        exact = np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64
        wide = exact if xp is np else jnp.promote_types(leaf.dtype, jnp.float32)
        mean = leaf.mean(0, dtype=wide).astype(leaf.dtype)
        return xp.broadcast_to(mean, (count, *leaf.shape[1:]))
    if mark.resize == "zero":
        return xp.zeros((count, *leaf.shape[1:]), leaf.dtype)
    return leaf[xp.arange(count) % leaf.shape[0]]


def consensus(state: State) -> State:
    """The model to evaluate: `PerWorker` leaves averaged over workers, `Sharded` ones unsharded, without marks.

    Returns:
      The tree without marks. Integer leaves take worker 0's value.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.consensus({"w": jd.PerWorker(jnp.array([[1.0], [3.0]]), axis="data")})["w"].tolist()
      [2.0]
    """

    def merge(node):
        if not is_mark(node):
            return node
        inside = node.value
        if isinstance(node, PerWorker) and node.axis != ():
            inside = jax.tree.map(lambda leaf: _resize_workers(leaf, node, 1)[0], inside)
        if isinstance(node, Sharded):
            inside = inside[: math.prod(node.shape)].reshape(node.shape)
        return jax.tree.map(merge, inside, is_leaf=is_mark)

    return jax.tree.map(merge, state, is_leaf=is_mark)


class WorkerView(NamedTuple):
    """How a state with bound marks is split over mapped axes, one entry for each leaf.

    Attributes:
      specs: the PartitionSpecs over these axes; all other axes are left to the compiler.
      dimensions: those dimensions of a worker's block that have length 1, because they index workers.
    """

    specs: list[PartitionSpec]
    dimensions: list[list[int]]


def view_of(state: State, axes: Sequence[str]) -> WorkerView:
    """Finds out which dimensions of the leaves the mapped axes split."""
    specs, dimensions = [], []
    for leaf in flatten_marks(state):
        marks = cutting(leaf.marks)
        # The axes of a mark are mapped all or not at all.
        entries = [spec_entry(mark.axis) if set(axis_tuple(mark.axis)) <= set(axes) else None for mark in marks]
        specs.append(PartitionSpec(*entries))
        dimensions.append([i for i, mark in enumerate(marks) if entries[i] and isinstance(mark, PerWorker)])
    return WorkerView(specs, dimensions)


def check_usable(state: State) -> None:
    """Checks that no array of the state has been donated: such an array may end the process, without an exception."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            name = f"leaf `{leaf_name(path)}` of the state" if path else "the state"
            raise ValueError(
                f"{name} has been deleted: an earlier call donated it, since distribute() reuses the memory of the "
                "state that it gets. Go on with the state that the step returns, state, metrics = step(state, batch), "
                "or use distribute(..., donate=False)"
            )


def run_in_view(
    step: Callable[..., Any], view: WorkerView, state: State, batch: PyTree, **static: Any
) -> tuple[State, Any]:
    """Runs the step of one worker on its blocks of the state, without worker dimensions and marks around fields."""
    leaves, structure = jax.tree.flatten(state)
    squeezed = structure.unflatten([*map(jnp.squeeze, leaves, view.dimensions)])
    opened = _map_fields(lambda field: field.value if is_mark(field) else field, squeezed)
    try:
        new, metrics = step(opened, batch, **static)
    except AttributeError as error:
        if error.name == "value":
            error.add_note(
                "jaxdist: a mark around the whole state, or around a whole field, is removed before the step sees it. "
                'The state of a transformation or a reducer needs its marks: nest it deeper, {"opt": tx.init(x)}.'
            )
        elif "Sharded" in str(error):
            error.add_note(SHARDED_PARAMETERS)
        raise
    except TypeError as error:
        if "Sharded" in str(error):
            error.add_note(SHARDED_PARAMETERS)
        raise
    return _close_state(new, state, view), metrics


def _close_state(new: State, old: State, view: WorkerView) -> State:
    """Restores the marks and worker dimensions of the old block, whose tree, shapes and dtypes the step must keep."""
    new = _map_fields(
        lambda field, before: with_value(before, field) if is_mark(before) and not is_mark(field) else field, new, old
    )
    leaves, found = jax.tree.flatten(new)
    expected = jax.tree.structure(old)
    if found != expected:
        raise ValueError(
            f"the step returned a state with another tree than it received:\n  received {expected}\n  returned {found}"
        )
    leaves = [*map(jnp.expand_dims, leaves, view.dimensions)]
    for (path, before), leaf in zip(jax.tree_util.tree_leaves_with_path(old), leaves, strict=True):
        if leaf.shape != before.shape or leaf.dtype != before.dtype:
            name = f"leaf `{leaf_name(path)}` of the state" if path else "the state"
            raise ValueError(
                f"{name} was {before.dtype}{list(before.shape)} before the step and is now "
                f"{leaf.dtype}{list(leaf.shape)}: a step must keep shapes and dtypes"
            )
    return found.unflatten(leaves)


def _map_fields(f: Any, state: State, *rest: State) -> State:
    """Maps over the direct children of a state: the fields of a NamedTuple, the entries of a dict."""

    def fields(tree):
        return jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)

    # The states of reducers and transformations keep their marks, which their own functions look for.
    if type(state).__module__.startswith(STATE_MODULES):
        return state
    if is_mark(state) or (rest and is_mark(rest[0])) or jax.tree_util.all_leaves([state]):
        return f(state, *rest)
    children, structure = fields(state)
    others = [fields(tree)[0] for tree in rest]
    # A step that adds or drops fields is reported by `_close_state`.
    if any(len(other) != len(children) for other in others):
        return state
    return structure.unflatten([f(*group) for group in zip(children, *others, strict=True)])


def check_agreed(tree: PyTree, axes: Sequence[str], *, what: str, advise: Callable[[Any], str]) -> None:
    """Checks that no leaf outside marks is typed as differing between workers; `advise(path)` says what to do."""
    for marks, path, leaf in flatten_marks(tree):
        over = {name for mark in cutting(marks) for name in axis_tuple(mark.axis)}
        differs = varying_axes(leaf) & set(axes) - over
        if differs:
            name = f"{what} `{leaf_name(path)}`" if path else what
            raise ValueError(f"{name} differs between workers (axis {', '.join(sorted(differs))}): {advise(path)}")
