"""Runs a step that is written for one worker on every worker of a mesh."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._core.compat import mixes_collectives, shard_map, with_weak_types
from .._core.hashing import hash_array
from .._core.in_order import in_order
from .._core.trees import leaf_name, to_device
from .._core.types import Array, AxisNames, PyTree, State
from ..comm.over import over
from ..processes.initialize import check_connected
from ..state.marks import (
    WorkerView,
    axis_tuple,
    bind,
    check_agreed,
    check_batch_usable,
    check_usable,
    cutting_marks,
    expand_specs,
    flatten_marks,
    is_spec,
    run_in_view,
    spec_entry,
    view_of,
)
from ..state.placement import Place, check_placed, workers
from ..transforms.mistakes import explain_difference, explain_metric, explain_wrapped_communication
from ..transforms.skip_nonfinite import keep_attributes, with_skip_checks

# The calls between two comparisons of values, with `check="values"`.
CHECK_EVERY = 100

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

    Between CPU processes, collectives wait for loops and branches before them.

    Args:
      mesh: the mesh. Axes other than `axis` (tensor parallelism) are left to the compiler, or, if they are Explicit, to
        the types of the step (see docs/how-to/tensor-parallelism.md).
        With an `AbstractMesh` the step can be traced, for any number of workers and without devices, but not run.
      batch_specs: a PartitionSpec or a prefix tree of them for the batch; by default every leaf is sharded along its
        first dimension. `PartitionSpec(None, "data")` for several steps in one call by `lax.scan`.
      static_argnames: keyword arguments of the step that are Python values; each combination is a separate program.
      check: `"types"` proves while tracing that unmarked state and metrics are equal on all workers, at no cost.
        `"values"` is for losses that JAX cannot type (a flax LSTM, `optax.ctc_loss`): it compares a hash of all
        replicated leaves across workers after calls 1, 2, 4, 8, ... 64, and after every hundredth from 101 on.
      donate: reuses the memory of the state for the result. `False` keeps the state that was passed in usable.

    Returns:
      The compiled step, `(state, batch, **static) -> (state, metrics)`, with `.lower`. The state must come from
      `init_state`, `place` or a step.

    Raises:
      ValueError: before the first collective: the mesh lacks an axis, the batch does not divide, the state was not
        placed or changes its shape, or an unmarked leaf or a metric differs between workers. With `check="values"`,
        afterwards: the name of a leaf whose values differ.

    Examples:
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
    if isinstance(mesh, Mesh):
        check_connected()
    mapped = _Distributed(step, mesh, axis, batch_specs, check).map_step()
    run = jax.jit(mapped, donate_argnums=(0,) if donate else (), static_argnames=tuple(static_argnames))
    # Around the compiled function, since only the host can raise.
    run = with_skip_checks(run, donates=donate)
    return with_value_checks(run, mesh, axis) if check == "values" and isinstance(mesh, Mesh) else run


def evaluate(
    metrics: Callable[..., Any], mesh: Mesh, *, axis: AxisNames = "data", batch_specs: PyTree | None = None
) -> jax.stages.Wrapped:
    """Distributes a function that only reads the state: nothing is donated, and only metrics are returned.

    Args:
      metrics: `metrics(state, batch)`, for one worker; its results must be equal on all workers (`lax.pmean`).

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> mean = jd.evaluate(lambda state, batch: jax.lax.pmean(batch.mean() * state, "data"), mesh)
      >>> float(mean(jd.place(jnp.array(2.0), mesh), jnp.ones(8)))
      2.0
    """
    # The state is an output too, which gives it the checks of a step; XLA drops it, as it is not used.
    step = _Distributed(
        lambda state, batch: (state, metrics(state, batch)), mesh, axis, batch_specs, "types"
    ).map_step()
    run = jax.jit(lambda state, batch: step(state, batch)[1])

    @functools.wraps(run)
    def run_checked(state, batch):
        check_usable(state)
        check_batch_usable(batch)
        return run(state, batch)

    return keep_attributes(run_checked, run)


class _Distributed(NamedTuple):
    step: Callable[..., tuple[State, Any]]
    mesh: Mesh | AbstractMesh
    axis: AxisNames
    batch_specs: PyTree | None
    check: str

    @property
    def axes(self) -> tuple[str, ...]:
        return axis_tuple(self.axis)

    def map_step(self) -> Callable[..., tuple[State, Any]]:
        """Returns the step over global arrays, not yet compiled."""
        # Refuses an axis that the mesh lacks.
        workers(self.mesh, self.axis)

        def run(state, batch, **static):
            return self._run(state, batch, static)

        return run

    def _run(self, state: State, batch: PyTree, static: dict[str, Any]) -> tuple[State, Any]:
        """Checks state and batch, and maps the step over the workers."""
        reason = explain_wrapped_communication(state)
        if reason:
            raise ValueError(reason)
        state = bind(state, self.axis)
        check_placed(state, self.mesh)
        view = view_of(state, self.axes)
        state_specs = jax.tree.structure(state).unflatten(view.specs)
        in_specs = (state_specs, check_batch_specs(batch, self.batch_specs, self.mesh, self.axes))
        # Placement is checked first: resharding would hide a state that was never placed.
        state, batch = _reshard((state, batch), in_specs, self)
        mapped = shard_map(
            partial(self._run_worker, view, static),
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=(state_specs, PartitionSpec()),
            axis_names=set(self.axes),
            check_vma=self.check == "types",
        )
        new, metrics = mapped(state, batch)
        # A leaf whose weak type changed would compile the step a second time.
        return with_weak_types(new, state), metrics

    def _run_worker(self, view: WorkerView, static: dict[str, Any], state: State, batch: PyTree) -> tuple[State, Any]:
        """Runs the step of one worker on its shards, and checks what must be equal on all workers."""
        # JAX reports values that it cannot type, such as a replicated carry that becomes varying, by a TypeError.
        run = partial(run_in_view, self.step, view, **static)
        try:
            new, metrics = (in_order(run) if mixes_collectives() else run)(state, batch)
        except TypeError as error:
            if "manual axis types do not match" in str(error):
                error.add_note(UNTYPABLE)
            raise
        check_agreed(new, self.axes, what="leaf", advise=partial(explain_difference, new))
        check_agreed(metrics, self.axes, what="metric", advise=lambda _: explain_metric(new, self.axis))
        return new, metrics


def check_batch_specs(batch: PyTree, specs: PyTree | None, where: Place, axes: tuple[str, ...]) -> PyTree:
    """Returns the specs of the batch, by default sharded along the first dimension, after checking the shapes."""
    if specs is not None:
        _check_given_specs(batch, specs, where, axes)
        return specs
    if not axes:
        return PartitionSpec()
    count = workers(where, axes)
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        if leaf.ndim == 0 or leaf.shape[0] % count:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} of shape {tuple(leaf.shape)} does not divide among {count} "
                "workers along its first dimension: pad it (and pass examples= to the update), or pass batch_specs="
            )
    return PartitionSpec(spec_entry(axes))


def _check_given_specs(batch: PyTree, specs: PyTree, where: Place, axes: tuple[str, ...]) -> None:
    """Checks that the user's specs name axes of the step and divide the arrays."""

    def check_leaf(leaf, spec):
        for dimension, names in enumerate(spec):
            unknown = set(axis_tuple(names)) - set(axes)
            if unknown:
                raise ValueError(f"batch_specs names the axis {min(unknown)!r}, but the axes of the workers are {axes}")
            if names and (dimension >= leaf.ndim or leaf.shape[dimension] % workers(where, names)):
                raise ValueError(
                    f"an array of shape {tuple(leaf.shape)} in the batch does not divide among the "
                    f"{workers(where, names)} workers of {spec} along dimension {dimension}: pad it, or change "
                    "batch_specs"
                )

    jax.tree.map(check_leaf, batch, expand_specs(specs, batch, "batch_specs"))


def _reshard(trees: Any, specs: Any, distributed: _Distributed) -> Any:
    """Reshards the inputs to their specs on meshes with Explicit axes; on Auto axes the compiler does so."""
    kinds = zip(distributed.mesh.axis_names, distributed.mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return trees

    def reshard_leaf(spec, leaf):
        # Along axes that are not the workers' a leaf stays as it is: `P()` would gather a tensor-parallel parameter.
        own = [
            [name for name in axis_tuple(part) if name not in distributed.axes]
            for part in jax.typeof(leaf).sharding.spec
        ]
        wanted = [axis_tuple(part) for part in (*spec, *[None] * (leaf.ndim - len(spec)))]
        parts = [tuple(name for name in (*a, *b) if name in explicit) for a, b in zip(wanted, own, strict=True)]
        return jax.reshard(leaf, NamedSharding(distributed.mesh, PartitionSpec(*parts)))

    return jax.tree.map(
        lambda spec, part: jax.tree.map(partial(reshard_leaf, spec), part), specs, trees, is_leaf=is_spec
    )


def disagreement(state: State, mesh: Mesh, *, axis: AxisNames = "data") -> tuple[str, ...]:
    """Returns the names of replicated leaves whose values differ between workers. All processes must call it together.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> jd.runtime.disagreement(jd.place({"w": jnp.ones(3)}, mesh), mesh)
      ()
    """
    check_usable(state)
    # Marks that do not cut, such as `OnHost`, say nothing against equal values.
    named = [
        (leaf_name(path), leaf) for marks, path, leaf in flatten_marks(bind(state, axis)) if not cutting_marks(marks)
    ]
    if not named:
        return ()
    # 4 bytes a leaf cross the network, not the values.
    hashes = np.asarray(_hashes(mesh, axis_tuple(axis))([leaf for _, leaf in named]))
    return tuple(name for (name, _), row in zip(named, hashes.T, strict=True) if len(set(row.tolist())) > 1)


@functools.cache
def _hashes(mesh: Mesh, axes: tuple[str, ...]) -> Callable[[list[Array]], Array]:
    """Compiles a function that gathers every worker's hash of its own copy of each leaf, as `[W, leaves]`."""

    def gather_hashes(leaves):
        return over(axes).all_gather(jnp.stack([hash_array(to_device(leaf)) for leaf in leaves]))

    # The leaves are typed as equal, so JAX moves nothing: each worker hashes the copy that it really has.
    mapped = shard_map(
        gather_hashes,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=True,
    )
    return jax.jit(mapped)


def with_value_checks(run: Any, mesh: Mesh, axis: AxisNames) -> Any:
    """Wraps a compiled step with comparisons after more and more calls, and from then on in every `CHECK_EVERY`-th."""
    calls = 0

    @functools.wraps(run)
    def run_and_check(state, batch, **static):
        nonlocal calls
        state, metrics = run(state, batch, **static)
        # Most mistakes show in the first step; in the second those of wrappers that compare it with the first one
        # (mechanize: its first factor is the same on all workers, whatever their gradients); in later ones those of
        # rounds and cycles.
        number = calls + 1
        if calls % CHECK_EVERY == 0 or (number < CHECK_EVERY and number.bit_count() == 1):
            names = disagreement(state, mesh, axis=axis)
            if names:
                raise ValueError(
                    f"replicated state differs between workers after call {calls + 1}: {', '.join(names)}; reduce it "
                    "before it enters the state, or mark it PerWorker"
                )
        calls += 1
        return state, metrics

    return keep_attributes(run_and_check, run)
