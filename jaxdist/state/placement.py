"""The global arrays of a state on a mesh: shardings, creation, resizing, and the model to evaluate."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._core.checks import check_count
from .._core.compat import is_on_host
from .._core.trees import fold_index, is_key, leaf_name, to_device
from .._core.types import Array, AxisNames, PyTree, Shape, State
from .flax_marks import refuse_lost_marks, refuse_random_streams, refuse_shared_variables, register_with_flax
from .marks import (
    OnHost,
    PerWorker,
    Resize,
    Sharded,
    axis_tuple,
    bind,
    check_usable,
    cutting_marks,
    flatten_marks,
    is_mark,
    map_marked,
    merging_rules,
    spec_entry,
    spec_of,
    warn_if_uneven,
)
from .parameter_specs import join_specs, spec_axes, specs_of_leaves


def specs(state: State, *, axis: AxisNames = "data") -> PyTree:
    """The tree of PartitionSpecs of a state: `P()` for replicated leaves, `P(axis)` for marked ones.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import PerWorker, state
      >>> tuple(state.specs({"w": jnp.zeros(3), "e": PerWorker(jnp.zeros(3))})["e"].value)
      ('data',)
    """
    return map_marked(lambda marks, _: spec_of(marks), bind(state, axis))


def shardings(
    state: State, mesh: Mesh | AbstractMesh, *, axis: AxisNames = "data", specs: PyTree | None = None
) -> PyTree:
    """The tree of `NamedSharding`s of a state; leaves inside `OnHost` get memory kind `pinned_host`.

    Args:
      specs: a tree of `PartitionSpec` like the parameters, over axes other than `axis`, except under plain `jit`.
        An array of the state has the spec of a parameter if its path ends in that of the parameter and it has its
        shape: the parameter itself, moments, masters, and copies of workers. All others are replicated over these axes.

    Raises:
      ValueError: a typed key is inside `OnHost`; `specs` belong to no array.
    """
    state = bind(state, axis)
    own = iter(specs_of_leaves(state, specs))
    # Without types that say otherwise, XLA replicates the empty arrays that a step returns: a step whose first state
    # has them sharded would be compiled again.
    is_auto = AxisType.Explicit not in mesh.axis_types

    def shard(marks, leaf):
        host = any(isinstance(mark, OnHost) for mark in marks)
        if host and is_key(leaf):
            # From a compiled step they come back as arrays on the device whose buffers are on the host.
            raise ValueError(
                f"OnHost around a typed key {leaf.dtype}{list(leaf.shape)}: JAX loses the memory kind of keys on a "
                "mesh. Keep the key on the device, or its words on the host, OnHost(jax.random.key_data(key))"
            )
        spec = join_specs(spec_of(marks), next(own))
        spec = PartitionSpec() if is_auto and 0 in np.shape(leaf) else spec
        return NamedSharding(mesh, spec, memory_kind="pinned_host" if host else None)

    return map_marked(shard, state)


# A mesh (an abstract one to trace only), or for simulation the number of workers (along each axis).
Place = Mesh | AbstractMesh | int | np.integer | Mapping[str, int]


def workers(mesh: Place, axis: AxisNames) -> int:
    """The number of workers along an axis; raises `ValueError` if the mesh has no such axis, or it is not positive."""
    if isinstance(mesh, int | np.integer):
        check_count("the number of workers", int(mesh), 1)
        return int(mesh)
    sizes = mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh
    for name in axis_tuple(axis):
        if name not in sizes:
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {tuple(sizes)}")
        check_count(f"the number of workers along {name!r}", sizes[name], 1)
    return math.prod(sizes[name] for name in axis_tuple(axis))


def check_placed(state: State, mesh: Place, axes: AxisNames | None = None) -> None:
    """Checks that marked leaves have dimensions for the workers of the mesh: of all axes, or of those that are given.

    Raises:
      ValueError: a leaf has none, or those of another number of workers.
    """
    mapped = None if axes is None else set(axis_tuple(axes))
    options = "" if mapped is None else f", axis={spec_entry(axis_tuple(axes))!r}"
    for marks, _, leaf in flatten_marks(state):
        for dimension, mark in enumerate(cutting_marks(marks)):
            if mapped is not None and not mapped.issuperset(axis_tuple(mark.axis)):
                continue
            count = workers(mesh, mark.axis)
            # A state that was never placed lacks the dimension.
            found = leaf.shape[dimension] if dimension < leaf.ndim else 1
            if found % count or (isinstance(mark, PerWorker) and found != count):
                axis = spec_entry(axis_tuple(mark.axis))
                raise ValueError(
                    f"a {type(mark).__name__} leaf of the state has shape {tuple(leaf.shape)}, where dimension "
                    f"{dimension} should be for the {count} workers of axis {axis!r}: make the state with "
                    f"init_state(make_state, mesh{options}), or place it with place(state, mesh{options})"
                )


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


def init_state(
    make_state: Callable[[], State], mesh: Place, *, axis: AxisNames = "data", specs: PyTree | None = None
) -> State:
    """Creates a train state directly on its mesh: no sharded leaf is ever materialized on one device.

    Args:
      make_state: a function without arguments that builds the state (parameters, optimizer state) of one worker.
      mesh: the mesh; for `simulate`, the number of workers (or a mapping from axis to number), on one device.
      specs: the `PartitionSpec` of each parameter over the other axes of the mesh (FSDP, tensor parallelism); moments
        and masters follow their parameters, see `state.shardings`. Without it they are replicated over these axes.

    Returns:
      The state as global arrays, with its marks; typed keys inside `PerWorker` are folded with the worker's number, so
      that workers draw different numbers. All processes must call it together, with the same function.

    Raises:
      ValueError: the mesh lacks the axis; an nnx module has a shared Variable, which would become two, or stores random
        streams; an `nnx.Optimizer` has lost its marks; `specs` belong to no array.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state = jd.init_state(lambda: {"w": jnp.zeros(3), "e": jd.PerWorker(jnp.zeros(3))}, mesh)
      >>> state["e"].value.shape
      (1, 3)
    """

    def build():
        state = make_state()
        _check_flax(state)
        return map_marked(partial(_globalize, mesh), bind(state, axis))

    if not isinstance(mesh, Mesh):
        return jax.jit(build)()
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(build)
        return jax.jit(build, out_shardings=shardings(shapes, mesh, axis=axis, specs=specs))()


def place(state: State, mesh: Place, *, axis: AxisNames = "data") -> State:
    """Copies an existing state onto a mesh; donating the result does not invalidate the caller's arrays.

    Arrays that are sharded along other axes than the workers', by names that the mesh has too, keep these shardings.

    Args:
      state: the state of one worker: `PerWorker` leaves without the worker dimension (each worker gets a copy, with
        typed keys folded with its number).

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.place({"e": jd.PerWorker(jnp.zeros(3))}, jd.make_mesh({"data": 1}))["e"].value.shape
      (1, 3)
    """
    check_usable(state)
    _check_flax(state)
    state = map_marked(partial(_globalize, mesh), bind(state, axis))
    return _place_tree(state, mesh, axis)


def resize(state: State, mesh: Place, *, axis: AxisNames = "data") -> State:
    """Moves a placed state to a mesh with another number of workers.

    Replicated leaves stay, `Sharded` ones are split again, `PerWorker` ones follow their `resize` rule: residuals keep
    their mean over workers, which is the update not yet delivered (keeping their sum would change the model). Workers
    keep their keys, and each new worker folds its number into the key of worker `i mod W`.

    Raises:
      ValueError: the mesh lacks an axis of a mark, or has no workers along it.

    Warns:
      UserWarning: the state is that of a gossip method by which workers do not count alike (`sgp` on a directed graph,
        `osgp`, `relay_sgd`): the mean of the models is not the one that gossip keeps.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state = {"e": jd.PerWorker(jnp.array([[1.0], [3.0]]))}  # two workers' residuals
      >>> jd.resize(state, mesh)["e"].value.tolist()
      [[2.0]]
    """

    def resize_leaf(marks, leaf):
        marks = cutting_marks(marks)
        counts = [workers(mesh, mark.axis) for mark in marks]
        lengths = [
            length_with_padding(mark, n) if isinstance(mark, Sharded) else n
            for mark, n in zip(marks, counts, strict=True)
        ]
        return refit(marks, to_device(leaf), (*lengths, *leaf.shape[len(marks) :]))

    check_usable(state)
    refuse_shared_variables(state)
    state = bind(state, axis)
    leaves = flatten_marks(state)
    warn_if_uneven(state, ((leaf_name(path), _counts(marks, leaf.shape, mesh)) for marks, path, leaf in leaves))
    state = map_marked(resize_leaf, state)
    return _place_tree(state, mesh, axis)


def _counts(marks: Sequence[Any], shape: Shape, mesh: Place) -> Iterator[tuple[int, int]]:
    """The numbers of workers that a leaf is for, and that a mesh has, along each of its cut dimensions."""
    for size, mark in zip(shape, cutting_marks(marks), strict=False):
        yield size, workers(mesh, mark.axis)


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
    for dimension, mark in enumerate(cutting_marks(marks)):
        leaf = xp.moveaxis(leaf, dimension, 0)
        length = shape[dimension]
        leaf = _resize_padding(leaf, mark, length) if isinstance(mark, Sharded) else _resize_workers(leaf, mark, length)
        leaf = xp.moveaxis(leaf, 0, dimension)
    return leaf


def _check_flax(state: State) -> None:
    # Programs may import flax after jaxdist.
    register_with_flax()
    refuse_lost_marks(state)
    # Layers may share a stream.
    refuse_random_streams(state)
    refuse_shared_variables(state)


def _place_tree(state: State, mesh: Place, axis: AxisNames) -> State:
    # `device_put(may_alias=False)` onto several devices still aliases on the device that the array comes from.
    copies = jax.tree.map(jnp.copy, state)
    if not isinstance(mesh, Mesh):
        return copies
    wanted = map_marked(partial(_keep_sharding, axis), copies, shardings(state, mesh, axis=axis))
    return jax.tree.map(place_leaf, copies, wanted)


def _keep_sharding(axis: AxisNames, marks: tuple[Any, ...], leaf: Array, wanted: NamedSharding) -> NamedSharding:
    """The sharding `wanted`, and in the dimensions that no mark added that of the leaf over the other axes."""
    before, added = leaf.sharding, len(cutting_marks(marks))
    if is_key(leaf) or 0 in leaf.shape or not isinstance(before, NamedSharding):
        return wanted
    # What a mark shards is sharded once.
    taken = {*axis_tuple(axis), *spec_axes(wanted.spec)}
    parts = [
        tuple(name for name in axis_tuple(part) if name in wanted.mesh.shape and name not in taken)
        for part in before.spec[added:]
    ]
    sizes = zip(leaf.shape[added:], parts, strict=False)
    kept = [part if size % workers(wanted.mesh, part) == 0 else () for size, part in sizes]
    return wanted.update(spec=join_specs(spec_of(marks), [spec_entry(part) or None for part in kept]))


def place_leaf(leaf: Array, sharding: jax.sharding.Sharding) -> Array:
    """`device_put`, also of a key or an array of one device onto several processes."""
    if sharding.is_fully_addressable or not leaf.is_fully_addressable:
        # JAX fails to move copies to fewer devices and into host memory at once.
        if sharding.memory_kind == "pinned_host" and not is_on_host(leaf) and len(leaf.sharding.device_set) > 1:
            leaf = jax.device_put(leaf, sharding.with_memory_kind("device"))
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
    if mark.resize == "max" and jnp.issubdtype(leaf.dtype, jnp.floating):
        # Row by row: the maximum of an array may lose a NaN on CPU.
        return xp.broadcast_to(functools.reduce(xp.maximum, leaf), (count, *leaf.shape[1:]))
    if mark.resize == "zero":
        return xp.zeros((count, *leaf.shape[1:]), leaf.dtype)
    return leaf[xp.arange(count) % leaf.shape[0]]


def consensus(state: State) -> State:
    """The model to evaluate: `PerWorker` leaves averaged over workers, `Sharded` ones unsharded, without marks.

    Returns:
      The tree without marks. Integer leaves take worker 0's value, and so do encoded arrays; of the fp8 statistics of
      flax, and of leaves marked `resize="max"`, it is the maximum.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.consensus({"w": jd.PerWorker(jnp.array([[1.0], [3.0]]), axis="data")})["w"].tolist()
      [2.0]
    """

    def merge(node, rule):
        if not is_mark(node):
            return node
        # XLA reads parts of an array in the memory of the device alone.
        inside = jax.tree.map(to_device, node.value) if isinstance(node, OnHost) else node.value
        if isinstance(node, PerWorker) and node.axis != ():
            inside = jax.tree.map(partial(_merge_workers, node), inside, rule.value)
        if isinstance(node, Sharded):
            inside = inside.reshape(-1)[: math.prod(node.shape)].reshape(node.shape)
        return jax.tree.map(merge, inside, rule.value, is_leaf=is_mark)

    check_usable(state)
    rules = jax.tree.structure(state).unflatten(merging_rules(state))
    return jax.tree.map(merge, state, rules, is_leaf=is_mark)


def _merge_workers(mark: PerWorker, leaf: Array | np.ndarray, rule: Resize) -> Any:
    """One worker's value of all, whatever the mark says about a change of their number, unless it is the maximum."""
    rule = "max" if mark.resize == "max" else rule
    return _resize_workers(leaf, PerWorker(None, axis=mark.axis, resize=rule), 1)[0]
