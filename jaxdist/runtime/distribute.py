"""One worker's step, run by every worker of a mesh."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._core.compat import shard_map
from .._core.types import AxisNames, PyTree, State
from ..state.marks import OnHost, PerWorker, axis_tuple, bind, map_marked
from ..state.placement import workers
from ..transforms.optax_wrappers import explain_wrapped_communication
from ..transforms.skip_nonfinite import with_skip_checks
from .agreement import with_value_checks
from .worker_view import as_weak_as, check_agreed, check_same, close_state, manual_specs, open_state, run_step

UNTYPABLE = (
    "jaxdist: this step cannot be typed as it stands. Where the code is not yours to change (a flax LSTM, "
    'optax.ctc_loss), use distribute(step, mesh, check="values"), which compares values instead.'
)


def distribute(
    step: Callable[..., tuple[State, Any]],
    mesh: Mesh | AbstractMesh,
    *,
    axis: AxisNames = "data",
    batch_specs: PyTree | None = None,
    static_argnames: Sequence[str] = (),
    check: Literal["types", "values"] = "types",
    donate: bool = True,
) -> jax.stages.Wrapped:
    """`jit(shard_map(step))`: runs a step written as one worker sees it on every worker of a mesh.

    The step gets the state without worker dimensions (a field `PerWorker(params)` arrives as plain parameters) and
    this worker's part of the batch, and returns the state and metrics that all workers agree on.

    Args:
      step: `step(state, batch, **static) -> (state, metrics)`.
      mesh: the mesh. Axes other than `axis` (tensor parallelism) are left to the compiler. With an `AbstractMesh` the
        step can be traced, for any number of workers and without devices, but not run.
      axis: the axis or axes that workers lie along.
      batch_specs: a PartitionSpec or a prefix tree of them for the batch; by default every leaf is cut along its first
        dimension. `PartitionSpec(None, "data")` for several steps in one call by `lax.scan`.
      static_argnames: keyword arguments of the step that are Python values; each combination is its own program.
      check: `"types"` proves while tracing that unmarked state and metrics are equal on all workers, and costs nothing.
        `"values"` is for losses that JAX cannot type (a flax LSTM, `optax.ctc_loss`): it compares a hash of all agreed
        leaves across workers after the first call and after every hundredth.
      donate: gives the state's memory to the result. `False` keeps the state that was passed in usable.

    Returns:
      The compiled step, `(state, batch, **static) -> (state, metrics)`, with `.lower`. The state must have been made by
      `init_state` or `place`, or come from a step.

    Raises:
      ValueError: before the first collective: an axis that the mesh lacks, a batch that does not divide, a state that
        was not placed, a leaf that differs between workers without a mark, metrics that differ, a state that changes
        its shape. With `check="values"`, after it: the name of a leaf whose values differ.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> def step(state, batch):
      ...     return {"total": state["total"] + jax.lax.psum(batch.sum(), "data")}, {}
      >>> state = jd.init_state(lambda: {"total": jnp.zeros(())}, mesh)
      >>> state, _ = jd.distribute(step, mesh)(state, jnp.ones((8, 2)))
      >>> float(state["total"])
      16.0
    """
    if check not in ("types", "values"):
        raise ValueError(f'check must be "types" or "values", got {check!r}')
    mapped = _mapped(step, mesh, axis, batch_specs, check)
    run = jax.jit(mapped, donate_argnums=(0,) if donate else (), static_argnames=tuple(static_argnames))
    run = with_skip_checks(run)
    return with_value_checks(run, mesh, axis) if check == "values" and isinstance(mesh, Mesh) else run


def evaluate(
    metrics: Callable[..., Any], mesh: Mesh, *, axis: AxisNames = "data", batch_specs: PyTree | None = None
) -> jax.stages.Wrapped:
    """`distribute` for a function that only reads the state: nothing is donated, and only metrics come back.

    Args:
      metrics: `metrics(state, batch)`, as one worker sees it; what it returns must be agreed (`lax.pmean`).
      mesh: the mesh.
      axis: the axis or axes that workers lie along.
      batch_specs: as for `distribute`.

    Returns:
      The compiled function, `(state, batch) -> metrics`.

    Raises:
      ValueError: as for `distribute`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> mean = jd.evaluate(lambda state, batch: jax.lax.pmean(batch.mean() * state, "data"), mesh)
      >>> float(mean(jd.place(jnp.array(2.0), mesh), jnp.ones(8)))
      2.0
    """
    mapped = _mapped(lambda state, batch: (state, metrics(state, batch)), mesh, axis, batch_specs, "types")
    return jax.jit(lambda state, batch: mapped(state, batch)[1])


def _mapped(step, mesh, axis, batch_specs, check) -> Callable[..., tuple[State, Any]]:
    axes = axis_tuple(axis)
    workers(mesh, axis)  # refuses an axis that the mesh has not
    advice = {
        "state": "mark it PerWorker, or reduce it before it enters the state",
        "metric": f"average it with jax.lax.pmean(x, {axis!r})",
    }

    def run(state, batch, **static):
        reason = explain_wrapped_communication(state)
        if reason:
            raise ValueError(reason)
        state = bind(state, axis)
        _check_placed(state, mesh)
        in_specs = _batch_specs(batch, batch_specs, axes, mesh)
        state, batch = _reshard((state, batch), (manual_specs(state, axes), in_specs), mesh)

        def local(state, batch):
            try:
                new, metrics = run_step(step, open_state(state, axes), batch, **static)
            except TypeError as error:
                if "manual axis types do not match" in str(error):
                    error.add_note(UNTYPABLE)
                raise
            new = close_state(new, state, axes)
            check_same(new, state)
            check_agreed(new, axes, what="leaf", advice=advice["state"])
            check_agreed(metrics, axes, what="metric", advice=advice["metric"])
            return new, metrics

        specs = manual_specs(state, axes)
        mapped = shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, in_specs),
            out_specs=(specs, PartitionSpec()),
            axis_names=set(axes),
            check_vma=check == "types",
        )
        new, metrics = mapped(state, batch)
        return as_weak_as(new, state), metrics

    return run


def _check_placed(state: State, mesh: Mesh | AbstractMesh) -> None:
    def one(marks, leaf):
        marks = [mark for mark in marks if not isinstance(mark, OnHost) and mark.axis]
        for dimension, mark in enumerate(marks):
            count = workers(mesh, mark.axis)
            found = leaf.shape[dimension] if dimension < leaf.ndim else 1
            if found % count or (isinstance(mark, PerWorker) and found != count):
                raise ValueError(
                    f"a {type(mark).__name__} leaf of the state has shape {tuple(leaf.shape)}, where dimension "
                    f"{dimension} should "
                    f"be for the {count} workers of axis {mark.axis}: make the state with "
                    f"init_state(make_state, mesh), or put "
                    "it there with place(state, mesh)"
                )

    map_marked(one, state)


def _batch_specs(batch: PyTree, given: PyTree | None, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> PyTree:
    if given is not None:
        _check_given(batch, given, axes, mesh)
        return given
    count = workers(mesh, axes)
    spec = PartitionSpec(axes[0] if len(axes) == 1 else axes)
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        if leaf.ndim == 0 or leaf.shape[0] % count:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} of shape {tuple(leaf.shape)} does not divide among {count} "
                f"workers along its "
                "first dimension: pad it (and pass examples= to the update), or say otherwise with batch_specs="
            )
    return spec


def _check_given(batch: PyTree, given: PyTree, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> None:
    def one(spec, part):
        for leaf, (dimension, names) in itertools.product(jax.tree.leaves(part), enumerate(spec)):
            unknown = set(axis_tuple(names)) - set(axes)
            if unknown:
                raise ValueError(
                    f"batch_specs names the axis {min(unknown)!r}, and the workers of this step lie along {axes}"
                )
            if names and (dimension >= leaf.ndim or leaf.shape[dimension] % workers(mesh, names)):
                raise ValueError(
                    f"an array of shape {tuple(leaf.shape)} in the batch does not divide among the "
                    f"{workers(mesh, names)} workers of {spec} along dimension {dimension}: pad it, or change "
                    "batch_specs"
                )

    jax.tree.map(one, given, batch, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _reshard(trees: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Meshes with Explicit axes want inputs laid out as the specs say; on Auto axes the compiler sees to it."""
    if not any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return trees

    def one(spec, part):
        return jax.tree.map(lambda leaf: jax.reshard(leaf, NamedSharding(mesh, spec)), part)

    return jax.tree.map(one, specs, trees, is_leaf=lambda x: isinstance(x, PartitionSpec))
