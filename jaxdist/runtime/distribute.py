"""Runs a step that is written for one worker on every worker of a mesh."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._core.compat import shard_map
from .._core.types import AxisNames, PyTree, State
from ..state.marks import OnHost, PerWorker, axis_tuple, bind, map_marked
from ..state.placement import workers
from ..transforms.optax_wrappers import explain_wrapped_communication
from ..transforms.skip_nonfinite import with_skip_checks
from .agreement import with_value_checks
from .worker_view import as_weak_as, check_agreed, check_same, close_state, is_spec, manual_specs, open_state, run_step

UNTYPABLE = (
    "jaxdist: JAX cannot type this step. If you cannot change the code (a flax LSTM, optax.ctc_loss), use "
    'distribute(step, mesh, check="values"), which compares values instead.'
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
    """`jit(shard_map(step))`: runs a step that is written for one worker on every worker of a mesh.

    The step receives the state without worker dimensions (a field `PerWorker(params)` arrives as plain parameters) and
    this worker's shard of the batch, and returns the state and metrics that are equal on all workers.

    Args:
      step: `step(state, batch, **static) -> (state, metrics)`.
      mesh: the mesh. Axes other than `axis` (tensor parallelism) are left to the compiler. With an `AbstractMesh` the
        step can be traced, for any number of workers and without devices, but not run.
      axis: the axis or axes of the workers.
      batch_specs: a PartitionSpec or a prefix tree of them for the batch; by default every leaf is sharded along its
        first dimension. `PartitionSpec(None, "data")` for several steps in one call by `lax.scan`.
      static_argnames: keyword arguments of the step that are Python values; each combination is a separate program.
      check: `"types"` proves while tracing that unmarked state and metrics are equal on all workers, at no cost.
        `"values"` is for losses that JAX cannot type (a flax LSTM, `optax.ctc_loss`): it compares a hash of all
        replicated leaves across workers after the first call and after every hundredth.
      donate: reuses the memory of the state for the result. `False` keeps the state that was passed in usable.

    Returns:
      The compiled step, `(state, batch, **static) -> (state, metrics)`, with `.lower`. The state must come from
      `init_state`, `place` or a step.

    Raises:
      ValueError: before the first collective: the mesh lacks an axis, the batch does not divide, the state was not
        placed or changes its shape, or an unmarked leaf or a metric differs between workers. With `check="values"`,
        afterwards: the name of a leaf whose values differ.

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
    mapped = _map_step(_Config(step, mesh, axis, batch_specs, check))
    run = jax.jit(mapped, donate_argnums=(0,) if donate else (), static_argnames=tuple(static_argnames))
    run = with_skip_checks(run)
    return with_value_checks(run, mesh, axis) if check == "values" and isinstance(mesh, Mesh) else run


def evaluate(
    metrics: Callable[..., Any], mesh: Mesh, *, axis: AxisNames = "data", batch_specs: PyTree | None = None
) -> jax.stages.Wrapped:
    """Distributes a function that only reads the state: nothing is donated, and only metrics are returned.

    Args:
      metrics: `metrics(state, batch)`, for one worker; its results must be equal on all workers (`lax.pmean`).
      mesh: the mesh.
      axis: the axis or axes of the workers.
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
    step = _map_step(_Config(lambda state, batch: (state, metrics(state, batch)), mesh, axis, batch_specs, "types"))
    return jax.jit(lambda state, batch: step(state, batch)[1])


class _Config(NamedTuple):
    step: Callable[..., tuple[State, Any]]
    mesh: Mesh | AbstractMesh
    axis: AxisNames
    batch_specs: PyTree | None
    check: str

    @property
    def axes(self) -> tuple[str, ...]:
        return axis_tuple(self.axis)


def _map_step(cfg: _Config) -> Callable[..., tuple[State, Any]]:
    """Returns the step over global arrays, not yet compiled."""
    workers(cfg.mesh, cfg.axis)  # refuses an axis that the mesh lacks

    def run(state, batch, **static):
        return _run(cfg, state, batch, static)

    return run


def _run(cfg: _Config, state: State, batch: PyTree, static: dict[str, Any]) -> tuple[State, Any]:
    """Checks state and batch, and maps the step over the workers."""
    reason = explain_wrapped_communication(state)
    if reason:
        raise ValueError(reason)
    state = bind(state, cfg.axis)
    _check_placed(state, cfg.mesh)
    state_specs = manual_specs(state, cfg.axes)
    in_specs = (state_specs, _batch_specs(batch, cfg))
    state, batch = _reshard((state, batch), in_specs, cfg.mesh)
    mapped = shard_map(
        partial(_run_worker, cfg, static),
        mesh=cfg.mesh,
        in_specs=in_specs,
        out_specs=(state_specs, PartitionSpec()),
        axis_names=set(cfg.axes),
        check_vma=cfg.check == "types",
    )
    new, metrics = mapped(state, batch)
    return as_weak_as(new, state), metrics


def _run_worker(cfg: _Config, static: dict[str, Any], state: State, batch: PyTree) -> tuple[State, Any]:
    """Runs the step of one worker on its shards, and checks what must be equal on all workers."""
    # JAX reports values that it cannot type, such as a replicated carry that becomes varying, by a TypeError.
    try:
        new, metrics = run_step(cfg.step, open_state(state, cfg.axes), batch, **static)
    except TypeError as error:
        if "manual axis types do not match" in str(error):
            error.add_note(UNTYPABLE)
        raise
    new = close_state(new, state, cfg.axes)
    check_same(new, state)
    check_agreed(new, cfg.axes, what="leaf", advice="mark it PerWorker, or reduce it before it enters the state")
    check_agreed(metrics, cfg.axes, what="metric", advice=f"average it with jax.lax.pmean(x, {cfg.axis!r})")
    return new, metrics


def _check_placed(state: State, mesh: Mesh | AbstractMesh) -> None:
    """Checks that marked leaves have dimensions for the workers of the mesh."""

    def check_leaf(marks, leaf):
        marks = [mark for mark in marks if not isinstance(mark, OnHost) and mark.axis]
        for dimension, mark in enumerate(marks):
            count = workers(mesh, mark.axis)
            found = leaf.shape[dimension] if dimension < leaf.ndim else 1
            if found % count or (isinstance(mark, PerWorker) and found != count):
                raise ValueError(
                    f"a {type(mark).__name__} leaf of the state has shape {tuple(leaf.shape)}, where dimension "
                    f"{dimension} should be for the {count} workers of axis {mark.axis}: make the state with "
                    "init_state(make_state, mesh), or place it with place(state, mesh)"
                )

    map_marked(check_leaf, state)


def _batch_specs(batch: PyTree, cfg: _Config) -> PyTree:
    """Returns the specs of the batch, by default sharded along the first dimension, after checking the shapes."""
    if cfg.batch_specs is not None:
        _check_batch_specs(batch, cfg)
        return cfg.batch_specs
    count = workers(cfg.mesh, cfg.axes)
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        if leaf.ndim == 0 or leaf.shape[0] % count:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} of shape {tuple(leaf.shape)} does not divide among {count} "
                "workers along its first dimension: pad it (and pass examples= to the update), or pass batch_specs="
            )
    return PartitionSpec(cfg.axes[0] if len(cfg.axes) == 1 else cfg.axes)


def _check_batch_specs(batch: PyTree, cfg: _Config) -> None:
    """Checks that the user's specs name axes of the step and divide the arrays."""

    def check_part(spec, part):
        for leaf, (dimension, names) in itertools.product(jax.tree.leaves(part), enumerate(spec)):
            unknown = set(axis_tuple(names)) - set(cfg.axes)
            if unknown:
                raise ValueError(
                    f"batch_specs names the axis {min(unknown)!r}, but the axes of the workers are {cfg.axes}"
                )
            if names and (dimension >= leaf.ndim or leaf.shape[dimension] % workers(cfg.mesh, names)):
                raise ValueError(
                    f"an array of shape {tuple(leaf.shape)} in the batch does not divide among the "
                    f"{workers(cfg.mesh, names)} workers of {spec} along dimension {dimension}: pad it, or change "
                    "batch_specs"
                )

    jax.tree.map(check_part, cfg.batch_specs, batch, is_leaf=is_spec)


def _reshard(trees: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Reshards the inputs to their specs on meshes with Explicit axes; on Auto axes the compiler does so."""
    if not any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return trees

    def reshard_part(spec, part):
        return jax.tree.map(lambda leaf: jax.reshard(leaf, NamedSharding(mesh, spec)), part)

    return jax.tree.map(reshard_part, specs, trees, is_leaf=is_spec)
