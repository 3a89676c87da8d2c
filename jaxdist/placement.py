"""Whose state is it, and where does it lie? Three marks on leaves of a train state, and what follows from them.

A leaf without a mark is *agreed*: every worker holds the same value. `PerWorker` marks what differs, `Sharded` what is
cut over the workers, `OnHost` what lies in host memory. A state is written as one worker means it (a residual has the
shape of its parameter); `init_state` and `place` turn it into the global arrays of a mesh:

| mark | as written | global array | a worker sees |
|---|---|---|---|
| none | `[*s]` | `[*s]` | `[*s]` |
| `PerWorker` | `[*s]` | `[W, *s]` | `[*s]` |
| `Sharded` | `[*s]` | `[W·n]`, padded | `[n]` |
| `OnHost` | as inside | as inside, memory kind `pinned_host` | a host array |

Marks nest: `PerWorker(Sharded(x, axis="chip"), axis="pod")` is `[pods, chips·n]`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._marks import OnHost as OnHost
from ._marks import PerWorker as PerWorker
from ._marks import Sharded as Sharded
from ._marks import axis_tuple, bind, is_mark, map_marked
from ._typing import Array, AxisNames, PyTree, Shape, State


def spec_of(marks: tuple[Any, ...]) -> PartitionSpec:
    """The PartitionSpec of a leaf inside these marks: one leading dimension for each mark that has an axis."""
    names = [axis_tuple(mark.axis) for mark in marks if not isinstance(mark, OnHost)]
    return PartitionSpec(*(name[0] if len(name) == 1 else name for name in names if name))


def specs(state: State, *, axis: AxisNames = "data") -> PyTree:
    """The tree of PartitionSpecs of a state: `P()` for agreed leaves, `P(axis)` for marked ones.

    Args:
      state: a state with its marks, as written or as placed.
      axis: the axis of marks that name none.

    Returns:
      The same tree with a `PartitionSpec` for every leaf; the marks stay on.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist import PerWorker, placement
      >>> tuple(placement.specs({"w": jnp.zeros(3), "e": PerWorker(jnp.zeros(3))})["e"].value)
      ('data',)
    """
    return map_marked(lambda marks, _: spec_of(marks), bind(state, axis))


def shardings(state: State, mesh: Mesh, *, axis: AxisNames = "data") -> PyTree:
    """As `specs`, with a `NamedSharding` for every leaf; leaves inside `OnHost` get memory kind `pinned_host`."""

    def one(marks, _):
        host = any(isinstance(mark, OnHost) for mark in marks)
        return NamedSharding(mesh, spec_of(marks), memory_kind="pinned_host" if host else None)

    return map_marked(one, bind(state, axis))


class ZeroShardings(NamedTuple):
    """The `NamedSharding` of every leaf; `gradients` is for `jax.lax.with_sharding_constraint` inside the step."""

    params: PyTree
    gradients: PyTree
    opt_state: PyTree


def zero_shardings(
    params: PyTree, opt_state: State, mesh: Mesh, *, stage: int, axis: str = "data", smallest: int = 100_000
) -> ZeroShardings:
    """ZeRO for steps under plain `jit`: where each leaf lies, and the compiler inserts what must be sent.

    Each array is cut along its largest dimension that the axis divides; one without such a dimension stays whole. The
    state may be of any optimizer: what counts is the shape of each of its leaves.

    What compilers make of it: GPUs and TPUs turn the mean of cut gradients into a reduce-scatter. XLA:CPU sends an
    all-reduce and a gather, 3Ψ, and keeps no gradient cut: use `zero_redundancy` where bytes count. For stage 3
    constrain activations to the batch after each layer (`with_sharding_constraint(x, P(axis))`), or the compiler may
    rather cut the contraction and exchange activations.

    Args:
      params: the parameters, or their shapes.
      opt_state: the optimizer's state, or its shapes.
      mesh: the mesh.
      stage: 0: nothing is cut; 1: the state; 2: and gradients; 3: and parameters.
      axis: the mesh axis of the workers.
      smallest: arrays with fewer entries stay whole.

    Returns:
      The shardings, for `in_shardings`, `out_shardings` and `device_put`.

    Raises:
      ValueError: there is no such stage, or no such axis.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> mesh, params = jd.make_mesh({"data": 1}), {"w": jnp.zeros((4, 8)), "b": jnp.zeros(3)}
      >>> state = optax.adam(0.1).init(params)
      >>> found = jd.placement.zero_shardings(params, state, mesh, stage=1, smallest=0)
      >>> tuple(found.opt_state[0].mu["w"].spec), tuple(found.params["w"].spec)
      ((None, 'data'), ())

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020. Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", arXiv
      2004.13336, 2020.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage}")
    count = workers(mesh, axis)

    def one(leaf, is_cut):
        whole = NamedSharding(mesh, PartitionSpec())
        fitting = [d for d, length in enumerate(leaf.shape) if length and length % count == 0]
        if not is_cut or not fitting or math.prod(leaf.shape) < smallest:
            return whole
        largest = max(fitting, key=lambda d: leaf.shape[d])
        return NamedSharding(mesh, PartitionSpec(*(None,) * largest, axis))

    def of(tree, first):
        return jax.tree.map(lambda leaf: one(leaf, stage >= first), tree)

    return ZeroShardings(of(params, 3), of(params, 2), of(opt_state, 1))


# Where a state lies: a mesh, or for simulation the number of workers (along each axis).
Place = Mesh | int | Mapping[str, int]


def workers(mesh: Place, axis: AxisNames) -> int:
    """How many workers the axis has; a `ValueError` names an axis that the mesh lacks."""
    if isinstance(mesh, int):
        return mesh
    sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
    for name in axis_tuple(axis):
        if name not in sizes:
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {tuple(sizes)}")
    return math.prod(sizes[name] for name in axis_tuple(axis))


def padded(mark: Sharded, count: int) -> int:
    """The length of the global flat array of a `Sharded` mark over `count` workers."""
    unit = count * mark.multiple
    return -(-math.prod(mark.shape) // unit) * unit


def _globalise(mesh: Place) -> Callable[[tuple[Any, ...], Array], Array]:
    """As written -> as placed: innermost mark first, each adds or cuts its leading dimension."""

    def one(marks, leaf):
        for mark in reversed(marks):
            if isinstance(mark, PerWorker) and axis_tuple(mark.axis):
                leaf = jnp.broadcast_to(leaf, (workers(mesh, mark.axis), *jnp.shape(leaf)))
            elif isinstance(mark, Sharded) and axis_tuple(mark.axis):
                length = padded(mark, workers(mesh, mark.axis))
                leaf = jnp.pad(jnp.ravel(leaf), (0, length - math.prod(mark.shape)))
        return leaf

    return one


def init_state(make_state: Callable[[], State], mesh: Place, *, axis: AxisNames = "data") -> State:
    """Makes a train state directly in its place: no leaf ever lies whole on one device.

    Args:
      make_state: a function of nothing that builds the state (parameters, optimizer state) as one worker means it.
      mesh: the mesh to lie on; for `simulate`, the number of workers (or a mapping from axis to number), on one device.
      axis: the axis of marks that name none.

    Returns:
      The state as global arrays, marks on. All processes must call it together, with the same function.

    Raises:
      ValueError: a mark names an axis that the mesh lacks.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state = jd.init_state(lambda: {"w": jnp.zeros(3), "e": jd.PerWorker(jnp.zeros(3))}, mesh)
      >>> state["e"].value.shape
      (1, 3)
    """

    def build():
        return map_marked(_globalise(mesh), bind(make_state(), axis))

    if not isinstance(mesh, Mesh):
        return jax.jit(build)()
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(build)
        return jax.jit(build, out_shardings=shardings(shapes, mesh, axis=axis))()


def place(state: State, mesh: Place, *, axis: AxisNames = "data") -> State:
    """Puts a state that exists onto a mesh. Copies, so that donating the result never eats the caller's arrays.

    Args:
      state: as one worker means it: `PerWorker` leaves without the worker dimension (each worker gets a copy).
      mesh: the mesh to lie on; for `simulate`, the number of workers (or a mapping from axis to number), on one device.
      axis: the axis of marks that name none.

    Returns:
      The state as global arrays, marks on.

    Raises:
      ValueError: a mark names an axis that the mesh lacks.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.place({"e": jd.PerWorker(jnp.zeros(3))}, jd.make_mesh({"data": 1}))["e"].value.shape
      (1, 3)
    """
    state = map_marked(_globalise(mesh), bind(state, axis))
    return _put(state, mesh, axis)


def resize(state: State, mesh: Place, *, axis: AxisNames = "data") -> State:
    """Moves a placed state to a mesh with another number of workers.

    Agreed leaves stay, `Sharded` ones are cut anew, `PerWorker` ones follow their `resize` rule: residuals keep their
    mean over workers, which is the update not yet delivered (their sum would move the model).

    Args:
      state: global arrays with marks, as `init_state`, `place` or a step returned them.
      mesh: the new mesh, or the new number of workers in simulation.
      axis: the axis of marks that name none.

    Returns:
      The state on the new mesh.

    Raises:
      ValueError: marks nest over several axes of which more than one changed its size.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state = {"e": jd.PerWorker(jnp.array([[1.0], [3.0]]))}  # two workers' residuals
      >>> jd.resize(state, mesh)["e"].value.tolist()
      [[2.0]]
    """

    def one(marks, leaf):
        marks = cutting(marks)
        counts = [workers(mesh, mark.axis) for mark in marks]
        lengths = [padded(mark, n) if isinstance(mark, Sharded) else n for mark, n in zip(marks, counts, strict=True)]
        return refit(marks, leaf, (*lengths, *leaf.shape[len(marks) :]))

    state = map_marked(one, bind(state, axis))
    return _put(state, mesh, axis)


def cutting(marks: Sequence[Any]) -> list[Any]:
    """Those of a leaf's marks, bound to axes, that stand for a leading dimension of its global array."""
    return [mark for mark in marks if not isinstance(mark, OnHost) and axis_tuple(mark.axis)]


def refit(marks: Sequence[Any], leaf: Array | np.ndarray, shape: Shape) -> Array | np.ndarray:
    """The global array of one leaf, for as many workers as `shape` says: each mark's dimension by the mark's rule.

    Args:
      marks: the marks around the leaf, from the outermost inwards, bound to axes.
      leaf: its global array; one of numpy stays in host memory.
      shape: the global shape on the new mesh.

    Returns:
      The new global array, of the same kind.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> marks = [jd.PerWorker(None, axis="data")]
      >>> jd.placement.refit(marks, jnp.array([[1.0], [3.0]]), (3, 1)).tolist()
      [[2.0], [2.0], [2.0]]
    """
    xp = _numpy_of(leaf)
    for dimension, mark in enumerate(cutting(marks)):
        leaf = xp.moveaxis(leaf, dimension, 0)
        length = shape[dimension]
        leaf = _recut(leaf, mark, length) if isinstance(mark, Sharded) else _rework(leaf, mark, length)
        leaf = xp.moveaxis(leaf, 0, dimension)
    return leaf


def _put(state: State, mesh: Place, axis: AxisNames) -> State:
    # `device_put(may_alias=False)` onto several devices still aliases on the device that the array comes from.
    copies = jax.tree.map(jnp.copy, state)
    if not isinstance(mesh, Mesh):
        return copies
    return jax.tree.map(jax.device_put, copies, shardings(state, mesh, axis=axis))


def _numpy_of(leaf: Array | np.ndarray) -> Any:
    return np if isinstance(leaf, np.ndarray) else jnp


def _recut(leaf: Array | np.ndarray, mark: Sharded, length: int) -> Any:
    """`[W·n, ...]` -> `[W'·n', ...]`: the padding goes, new padding comes."""
    size = math.prod(mark.shape)
    return _numpy_of(leaf).pad(leaf[:size], [(0, length - size)] + [(0, 0)] * (leaf.ndim - 1))


def _rework(leaf: Array | np.ndarray, mark: PerWorker, count: int) -> Any:
    """`[W, ...]` -> `[W', ...]` by the mark's rule; integers and keys have no mean and are copied."""
    if leaf.shape[0] == count:
        return leaf
    xp = _numpy_of(leaf)
    if mark.resize == "mean" and jnp.issubdtype(leaf.dtype, jnp.inexact):
        wide = np.float64 if xp is np else jnp.promote_types(leaf.dtype, jnp.float32)
        mean = leaf.mean(0, dtype=wide).astype(leaf.dtype)
        return xp.broadcast_to(mean, (count, *leaf.shape[1:]))
    if mark.resize == "zero":
        return xp.zeros((count, *leaf.shape[1:]), leaf.dtype)
    return leaf[xp.arange(count) % leaf.shape[0]]


def consensus(state: State) -> State:
    """The one model to evaluate: `PerWorker` leaves averaged over workers, `Sharded` ones made whole, no marks.

    Args:
      state: global arrays with marks (the whole state or a part of it, such as `state.params`).

    Returns:
      The tree without marks. Integer leaves take worker 0's value.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.consensus({"w": jd.PerWorker(jnp.array([[1.0], [3.0]]), axis="data")})["w"].tolist()
      [2.0]
    """

    def one(node):
        if not is_mark(node):
            return node
        inside = node.value
        if isinstance(node, PerWorker) and node.axis != ():
            inside = jax.tree.map(lambda leaf: _rework(leaf, node, 1)[0], inside)
        if isinstance(node, Sharded):
            inside = inside[: math.prod(node.shape)].reshape(node.shape)
        return jax.tree.map(one, inside, is_leaf=is_mark)

    return jax.tree.map(one, state, is_leaf=is_mark)
