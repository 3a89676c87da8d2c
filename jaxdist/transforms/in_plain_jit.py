"""Gradients of all workers under plain `jax.jit`, typed `unreduced` or not, and the map that is opened for them."""

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from .._core.compat import cast_unreduced, shard_map, unreduced_axes
from .._core.dtypes import widen
from .._core.types import Array, AxisNames, PyTree, State, Updates
from ..state.marks import PerWorker, axis_tuple, expand_specs, is_mark, is_spec, name_leaf, spec_entry, view_of
from ..state.parameter_specs import spec_axes, without_axes
from ..state.placement import check_placed
from .local_value_and_grad import local_value_and_grad
from .weights import weight_of_leaves

PAGE = "docs/how-to/keep-your-shardings.md"
# The axes of the workers over which functions are being mapped, the outermost first.
_MAPPED: ContextVar[tuple[tuple[str, ...], ...]] = ContextVar("_MAPPED", default=())
WEIGHTS = ("active", "examples")
NO_ACCUMULATION = "pass micro_batches= to per_worker_value_and_grad in place of accumulate, which opens a map"


def per_worker_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis: AxisNames = "data",
    has_aux: bool = False,
    micro_batches: int = 1,
    weights: Callable[[Any], Any] | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of every worker's loss, for a step that is a plain `jax.jit` over global arrays.

    `params, batch [B, ...] -> mean of L_w, PerWorker(g_w [W, ...])`: worker `w` has rows `w B/W` to `(w+1) B/W` of each
    array of the batch. It is a `vmap` over the workers' axis, so that the loss keeps its sharding constraints, over
    the other axes; what all workers share, it does not sum. `all_reduce` and `accumulate` over the same axis take
    the gradients outside of any map, and open their own. Inside `distribute` use `local_value_and_grad`.

    *On the wire*: over the workers' axis the mean of the losses, 4 bytes, and what `aux` takes; a look-up in a table
    that is sharded over rows, or over an axis that shards the batch, may be computed by exchanging rows there (see
    docs/how-to/keep-your-shardings.md).

    Args:
      loss: `loss(params, batch, *rest)`; the other arguments are the same for all workers.
      axis: the mesh axis of the workers, or several, of the mesh that `jax.set_mesh` has set.
      has_aux: whether the loss also returns auxiliary data: its floating leaves are averaged over workers, integers
        summed.
      micro_batches: the parts of each worker's rows, and
      weights: the number of examples of a part, as for `local_value_and_grad`.

    Raises:
      ValueError: there is no mesh with the axis; the axis is mapped already; a batch does not divide; a sharding
        constraint in the loss names the axis.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> tx = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0))
      >>> @jax.jit
      ... def step(w, opt_state, batch):
      ...     value_and_grad = jd.transforms.per_worker_value_and_grad(lambda w, x: jnp.mean(w * x))
      ...     loss, gradients = value_and_grad(w, batch)
      ...     updates, opt_state = tx.update(gradients, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state, loss
      >>> w = jnp.ones(())
      >>> with jax.set_mesh(mesh):
      ...     w, _, loss = step(w, tx.init(w), jnp.array([1.0, 3.0]))
      >>> float(w), float(loss)
      (-1.0, 2.0)
    """
    names = axis_tuple(axis)
    inner = local_value_and_grad(loss, axis=None, has_aux=has_aux, micro_batches=micro_batches, weights=weights)

    def value_and_grad(params: PyTree, batch: PyTree, *rest: Any) -> tuple[Any, Any]:
        rows = split_rows(names, batch)
        is_auto = _has_auto(names)
        # JAX refuses to map over an axis that shards what is not mapped, on Explicit axes.
        params = params if is_auto else jax.tree.map(functools.partial(_gather, names), params)
        mapped = vmap_workers(inner, names, (None, 0, *[None] * len(rest)), what="the loss")
        out, gradients = mapped(params, rows, *rest)
        gradients = jax.tree.map(functools.partial(_keep_apart, names, is_auto), gradients)
        return jax.tree.map(merge_workers, out), jax.tree.map(lambda g: PerWorker(g, axis=names), gradients)

    return value_and_grad


def split_rows(names: Sequence[str], batch: PyTree, *, what: str = "batch") -> PyTree:
    """`[B, ...] -> [W, B/W, ...]` for each array of a batch, sharded over the workers along the first dimension.

    Raises:
      ValueError: there is no mesh with the axes of the workers; they are mapped already; the batch does not divide.
    """
    mesh = _mesh_of_workers(names)
    count = math.prod(mesh.shape[name] for name in names)
    return jax.tree_util.tree_map_with_path(functools.partial(_split_rows, mesh, names, count, what), batch)


def vmap_workers(f: Callable[..., Any], names: Sequence[str], in_axes: Any, *, what: str) -> Callable[..., Any]:
    """`jax.vmap` of a function over the workers of a plain jit, so that its constraints are those over other axes.

    `what` is the name of the function in the error about a constraint over the workers.
    """
    axis = spec_entry(tuple(names))
    # On Explicit axes the types of the mapped arrays say it.
    mapped = jax.vmap(f, in_axes=in_axes, spmd_axis_name=axis if _has_auto(names) else None)

    def call(*args: Any) -> Any:
        token = _MAPPED.set((*_MAPPED.get(), tuple(names)))
        try:
            return mapped(*args)
        except Exception as error:  # on Explicit axes JAX's own class, which is no ValueError
            if "spmd_axis_name" in str(error) or "duplicate entries" in str(error):
                others = jax.sharding.get_abstract_mesh().axis_names
                inside = "".join(others[others.index(names[-1]) + 1 :][:1])
                instead = f", P({inside!r}) in place of P(({names[0]!r}, {inside!r}))" if inside else ""
                raise ValueError(
                    f"a sharding constraint in {what} names axis {axis!r}, along which each worker has rows of its "
                    f"own: leave it out{instead}"
                ) from error
            raise
        finally:
            _MAPPED.reset(token)

    return call


def mapped_workers() -> tuple[tuple[str, ...], ...]:
    """The axes of each `vmap_workers` around what is being traced, the outermost first."""
    return _MAPPED.get()


def _has_auto(names: Sequence[str]) -> bool:
    """Whether the compiler shards along one of the axes by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(kinds[name] == AxisType.Auto for name in names)


def _mesh_of_workers(names: Sequence[str]) -> AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    if missing := [name for name in names if name not in mesh.shape]:
        found = f"has the axes {mesh.axis_names}" if mesh.axis_names else "is not set"
        raise ValueError(
            f"the mesh of a plain jit must have the axis {missing[0]!r}, but it {found}: call jax.set_mesh(mesh), or "
            "run the step with distribute(step, mesh) and local_value_and_grad"
        )
    if mapped := [name for name in names if name in mesh.manual_axes]:
        raise ValueError(
            f"axis {mapped[0]!r} is mapped here, and each worker has its own gradient: use local_value_and_grad inside "
            "distribute and shard_map"
        )
    return mesh


def _split_rows(mesh: AbstractMesh, names: Sequence[str], count: int, what: str, path: Any, x: Array) -> Array:
    if x.ndim == 0 or x.shape[0] % count:
        raise ValueError(
            f"{what}{jax.tree_util.keystr(path)} of shape {tuple(x.shape)} does not divide among {count} workers along "
            "its first dimension"
        )
    shape = (count, x.shape[0] // count, *x.shape[1:])
    first, *others = (*jax.typeof(x).sharding.spec.partitions, *[None] * x.ndim)[: x.ndim]
    rest = tuple(name for name in axis_tuple(first) if name not in names)
    spec = PartitionSpec(spec_entry(tuple(names)), spec_entry(rest) or None, *others)
    if AxisType.Explicit in mesh.axis_types:
        # A dimension that the workers' axis does not shard first is not split in place.
        return lax.reshape(jax.reshard(x, PartitionSpec((*names, *rest), *others)), shape, out_sharding=spec)
    free = PartitionSpec.UNCONSTRAINED
    return lax.with_sharding_constraint(x.reshape(shape), PartitionSpec(spec_entry(tuple(names)), *[free] * x.ndim))


def _gather(names: Sequence[str], x: Array) -> Array:
    spec = PartitionSpec(*jax.typeof(x).sharding.spec.partitions)
    return jax.reshard(x, without_axes(spec, names)) if set(spec_axes(spec)) & set(names) else x


def _keep_apart(names: Sequence[str], is_auto: bool, gradient: Array) -> Array:
    if not is_auto:
        return gradient
    free = [PartitionSpec.UNCONSTRAINED] * (gradient.ndim - 1)
    return lax.with_sharding_constraint(gradient, PartitionSpec(spec_entry(tuple(names)), *free))


def merge_workers(x: Array) -> Array:
    """`[W, ...] -> [...]`: the mean of floating numbers of the workers, the sum of integers, whether any is true."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.any(0) if x.dtype == bool else x.sum(0, dtype=x.dtype)
    return widen(x).mean(0).astype(x.dtype)


def with_own_map(
    tx: optax.GradientTransformationExtraArgs, axis: AxisNames, scattered: PyTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """The transformation, which maps itself over the workers where it gets the gradients of all of them.

    Gradients that JAX types as `unreduced`, those of parameters typed `reduced`, are taken as what they are: terms of a
    sum over workers, inside a map and outside. `scattered` are the specs over this axis of updates that are scattered
    over it, where some are.
    """
    names = axis_tuple(axis)

    def update_fn(
        updates: Updates, state: State, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Updates, State]:
        _check_workers(names, updates)
        if not is_outside_map(names):
            if scattered is not None:
                raise ValueError(
                    f"all_reduce(specs=) names axis {spec_entry(names)!r} of the workers, over which parameters are "
                    f"sharded in a plain jit alone, and {_name_first(scattered)}: inside a map each worker has all of "
                    "them. Leave this axis out of the specs there, or use zero.shard(params) with zero_redundancy in "
                    f"place of all_reduce; under plain jit {NO_ACCUMULATION}"
                )
            return tx.update(take_terms(names, updates), state, params, **extra_args)
        updates = take_terms(names, updates)
        if not any(is_mark(x) for x in jax.tree.leaves(updates, is_leaf=is_mark)):
            raise ValueError(
                f"the gradients are global arrays of a plain jit, over whose axis {spec_entry(names)!r} jax.grad has "
                "summed them already: what is sent between workers is in the program before this transformation, and "
                "nothing is left to compress. Compute the gradient of each worker with "
                f"transforms.per_worker_value_and_grad(loss, axis={spec_entry(names)!r}), or run the step with "
                f"distribute(step, mesh, axis={spec_entry(names)!r}); see {PAGE}"
            )
        return map_update(tx, names, updates, state, params, extra_args, scattered=scattered)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def is_unreduced(x: Any, names: Sequence[str]) -> bool:
    """Returns whether the type of an array says that each worker has a term of it."""
    return bool(names) and unreduced_axes(x).issuperset(names)


def take_terms(names: Sequence[str], updates: Updates) -> Updates:
    """The gradients of the workers, where their types say that they are terms of a sum: each worker's own in a map."""
    if not any(is_unreduced(x, names) for x in jax.tree.leaves(updates)):
        return updates
    if is_outside_map(names):
        return jax.tree_util.tree_map_with_path(functools.partial(_split_sum, tuple(names)), updates)
    return jax.tree.map(functools.partial(_own_gradient, names), updates)


def axes_of_terms(updates: Updates) -> tuple[str, ...]:
    """The axes over whose workers the types of gradients have terms, in the order of the mesh."""
    found = frozenset().union(*(unreduced_axes(x) for x in jax.tree.leaves(updates)))
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in found)


def _own_gradient(names: Sequence[str], x: Array) -> Array:
    """The gradient of one worker: `W` times its term, as the sum of terms is the mean of gradients."""
    return _scale(cast_unreduced(x, names), names) if is_unreduced(x, names) else x


def _scale(x: Array, names: Sequence[str]) -> Array:
    # A loss over all examples has terms `1/W` as large as a worker's own mean.
    return (widen(x) * math.prod(lax.axis_size(name) for name in names)).astype(x.dtype)


def _split_sum(names: tuple[str, ...], path: Any, x: Any) -> PerWorker:
    """`[*s] -> PerWorker([W, *s])`: the gradient of each worker, from a sum that was not taken."""
    if is_mark(x) or not is_unreduced(x, names):
        raise ValueError(
            f"{name_leaf('the gradient', path)} is not typed unreduced over axis {spec_entry(names)!r}, as others are: "
            "jax.grad has summed it already. Keep it out of this transformation with optax.partition, or type its "
            f"parameter as reduced too, jax.reshard(x, P(reduced={set(names)})); see {PAGE}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    parts = jax.typeof(x).sharding.spec.partitions
    split = shard_map(
        lambda term: _scale(cast_unreduced(term, names), names)[None],
        mesh=None,
        in_specs=PartitionSpec(*parts, unreduced=frozenset(names)),
        out_specs=PartitionSpec(spec_entry(names), *parts),
        # All of them: 0.10 has no unreduced operands of a map over some.
        axis_names=set(mesh.axis_names),
        check_vma=True,
    )
    return PerWorker(split(x), axis=names)


def workers_outside_map(updates: Updates) -> tuple[str, ...]:
    """The axes of the workers whose gradients these are, all of them, under plain jit; else `()`."""
    axes = [x.axis for x in jax.tree.leaves(updates, is_leaf=is_mark) if isinstance(x, PerWorker)]
    return next((axis_tuple(axis) for axis in axes if is_outside_map(axis_tuple(axis))), ())


def _check_workers(names: Sequence[str], updates: Updates) -> None:
    found = workers_outside_map(updates)
    if found and set(found) != set(names):
        axis, own = spec_entry(found), spec_entry(tuple(names)) or None
        raise ValueError(
            f"these are the gradients of the workers of axis {axis!r}, but this transformation is over axis {own!r}: "
            f"pass axis={axis!r} to it, as to per_worker_value_and_grad; see {PAGE}"
        )


def is_outside_map(names: Sequence[str]) -> bool:
    """Whether no map binds the axes, and the mesh around a plain jit has them."""
    mesh = jax.sharding.get_abstract_mesh()
    if not names or not set(names) <= set(mesh.shape) or set(names) & set(mesh.manual_axes):
        return False
    try:
        lax.axis_size(names[0])
    except NameError:
        return True
    # Inside `vmap(axis_name=)`.
    return False


def map_update(
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    updates: Updates,
    state: State,
    params: PyTree | None,
    extra_args: dict[str, Any],
    *,
    scattered: PyTree | None = None,
    averages: bool = True,
) -> tuple[Updates, State]:
    """Maps an update over the workers. Its updates are equal on all of them, or each worker's own, and then marked."""
    mesh = jax.sharding.get_abstract_mesh()
    weights = _split_weights(mesh, names, {name: extra_args.get(name) for name in WEIGHTS})
    # Only arrays are mapped: what else is passed, as `sync=`, chooses the program.
    others = {name: x for name, x in extra_args.items() if name not in weights and _has_arrays(x)}
    static = {
        name: _refuse_call(x, name, names) if callable(x) else x
        for name, x in extra_args.items()
        if name not in weights and name not in others
    }
    # A state that `jax.jit(tx.init)` made, as plain JAX does, lacks the workers' dimension.
    check_placed(state, mesh, names)
    if scattered is None:
        _refuse_sharded(names, params)
    view = view_of(state, names)
    specs = jax.tree.structure(state).unflatten(view.specs)
    over_workers = PartitionSpec(spec_entry(names))
    local = jax.tree.map(_open, updates, is_leaf=is_mark)
    of_updates = PartitionSpec() if averages else over_workers
    if scattered is not None:
        of_updates = expand_specs(scattered, local)

    def update_one(updates, state, params, weights, others):
        leaves, structure = jax.tree.flatten(state)
        own = structure.unflatten([*map(jnp.squeeze, leaves, view.dimensions)])
        updates, weights = jax.tree.map(lambda x: x[0], (updates, weights))
        out, new = tx.update(updates, own, params, **weights, **others, **static)
        leaves, structure = jax.tree.flatten(new)
        out = out if averages else jax.tree.map(lambda g: g[None], out)
        return out, structure.unflatten([*map(jnp.expand_dims, leaves, view.dimensions)])

    mapped = shard_map(
        update_one,
        mesh=None,
        in_specs=(over_workers, specs, PartitionSpec(), over_workers, PartitionSpec()),
        out_specs=(of_updates, specs),
        axis_names=set(names),
        check_vma=True,
    )
    # Of scattered parameters a map would gather the others' parts, and `all_reduce` needs none.
    out, state = mapped(local, state, params if scattered is None else None, weights, others)
    return out if averages else jax.tree.map(lambda g: PerWorker(g, axis=names), out), state


def weights_of_workers(names: Sequence[str], updates: Updates, examples: Any, active: Any) -> Array | None:
    """`[W]` or `[W, leaves]`: of each worker what `weight_of_leaves` gives inside of a map; `None` of means."""
    if not any(is_mark(x) for x in jax.tree.leaves(updates, is_leaf=is_mark)):
        return None
    mesh = jax.sharding.get_abstract_mesh()
    weights = _split_weights(mesh, tuple(names), {"examples": examples, "active": active})
    if not weights:
        return None
    rows = jax.tree.map(_open, updates, is_leaf=is_mark)
    return jax.vmap(lambda weights, own: weight_of_leaves(weights.get("examples"), weights.get("active"), own))(
        weights, rows
    )


def _split_weights(mesh: AbstractMesh, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Those that are given, `[W]`, or trees of them."""
    return {
        name: jax.tree.map(functools.partial(_weights_of_all, mesh, names, name), x, is_leaf=_is_row)
        for name, x in given.items()
        if x is not None
    }


def _is_row(x: Any) -> bool:
    """Whether this is one leaf of a tree of weights: a mark, or a list of numbers."""
    numbers = int | float | np.number | jax.Array
    return is_mark(x) or (isinstance(x, list | tuple) and all(isinstance(n, numbers) and jnp.ndim(n) == 0 for n in x))


def _has_arrays(tree: Any) -> bool:
    return any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(tree))


def _refuse_call(f: Callable[..., Any], name: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function of global arrays, for the map of one worker: it may be passed on there, but not called."""
    axis = spec_entry(names)

    @functools.wraps(f)
    def refused(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise ValueError(
            f"{name}= is a function of the global arrays of a plain jit, and is called here in the map of one worker "
            f"of axis {axis!r}: put the optimizer that calls it behind all_reduce, optax.chain(all_reduce(reducer, "
            f"axis={axis!r}), optimizer), without accumulate around it, or run the step with distribute(step, mesh, "
            f"axis={axis!r}); see {PAGE}"
        )

    # What does not call it does not look whether it is a mean either.
    refused.__dict__.update(is_averaged=True, is_weighted=True)
    return refused


def _weights_of_all(mesh: AbstractMesh, names: tuple[str, ...], name: str, x: Any) -> Array:
    """`[W]`: the numbers of all workers, one on each."""
    x = jnp.asarray(x.value if isinstance(x, PerWorker) else x)
    count = math.prod(mesh.shape[axis] for axis in names)
    if x.shape != (count,):
        raise ValueError(
            f"under plain jit {name}= has one number for each of the {count} workers of axis {spec_entry(names)!r}, "
            f"[{count}], but its shape is {x.shape}: the number of one worker alone is for a step of distribute"
        )
    return jax.reshard(x, PartitionSpec(spec_entry(names))) if AxisType.Explicit in mesh.axis_types else x


def _refuse_sharded(names: tuple[str, ...], params: PyTree | None) -> None:
    """Raises for parameters whose types say that they are sharded over the workers, each of which gets them whole."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        spec = jax.typeof(x).sharding.spec
        if set(spec_axes(spec)) & set(names):
            raise ValueError(
                f"{name_leaf('the parameter', path)} is sharded over axis {spec_entry(names)!r} of the workers, "
                f"{spec}: pass specs= to all_reduce or zero_redundancy, and {NO_ACCUMULATION}"
            )


def _name_first(scattered: PyTree) -> str:
    found = jax.tree_util.tree_leaves_with_path(scattered, is_leaf=is_spec)
    return next(f"{name_leaf('the parameter', path)} has {spec}" for path, spec in found if spec_axes(spec))


def _open(gradient: Any) -> Array:
    if not isinstance(gradient, PerWorker):
        raise ValueError(
            f"some gradients are marked PerWorker and others are {type(gradient).__name__}: pass all that "
            "transforms.per_worker_value_and_grad returns"
        )
    return gradient.value
