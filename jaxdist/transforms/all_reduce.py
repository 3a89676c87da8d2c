"""The transformation of an optax chain that averages gradients over workers."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax

from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, PyTree, State, Updates
from ..comm.over import over
from ..reducers.base import Extras, Law, Reducer
from ..state.marks import bind
from .local_gradients import check_leaves, check_local, reduce_weighted, refuse_model_axes
from .model_axes import init_on_shards, reduce_on_shards
from .optax_wrappers import check_shapes, with_gradients


class AllReduceState(NamedTuple):
    """`reducer` as the reducer defines it; `empty` counts steps without an example on any worker (replicated)."""

    reducer: State
    empty: Int[Array, ""]

    communicates = True


NormalizeBy = Literal["active", "workers"]


class _Config(NamedTuple):
    reducer: Reducer
    axis: AxisNames
    specs: PyTree | None
    normalize_by: NormalizeBy


def all_reduce(
    reducer: Reducer,
    *,
    axis: AxisNames = "data",
    specs: PyTree | None = None,
    normalize_by: NormalizeBy = "active",
) -> optax.GradientTransformationExtraArgs:
    """Replaces each worker's gradient by the reducer's mean over all workers.

    Put it where the gradient is still local, usually first in the chain; clipping, momentum and weight decay after it
    see replicated values. The gradients must come from `local_value_and_grad`: under `shard_map`, `jax.grad` of
    replicated parameters has already summed them, and reducing again would make them `W` times too large.

    *On the wire*: the reducer's collectives; with `examples`, four bytes more.

    *State*: the state of the reducer, bound to the axis; a count.

    Args:
      reducer: `exact()`, `error_feedback(power_sgd(rank=4))`, ...
      axis: the mesh axis of the workers, or several, slow links first; `None`: a single worker.
      specs: a tree of `PartitionSpec` like the parameters, for meshes with further axes that the compiler shards
        (tensor parallelism): the reducer then runs on each shard separately. The state must be made by `init_state`
        (or under `jax.set_mesh`), which knows the sizes of the shards.
      normalize_by: the divisor of the mean with `examples`. `"active"`: the number of examples, `Σ n_w g_w / Σ n_w`;
        workers without any are left out. `"workers"`: the number of workers, `Σ_{n_w > 0} g_w / W`; finished workers
        count with a gradient of zero, so the step gets smaller as workers finish. This is PyTorch's default.

    Returns:
      A gradient transformation. Its `update` takes `examples=`, the number of real examples behind this worker's
      gradient: gradients are weighted by `examples / mean(examples)`, a finished worker passes 0, and when all do, the
      update is zero and the state stays as it is.

    Raises:
      ValueError: `normalize_by` is unknown; at trace time, if a leaf is not floating, not varying over the axis, not of
        its parameter's shape, or `Sharded`; if the axis is not bound; if the mesh has further axes and the reducer
        would gather them.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.5))
      >>> params = jnp.zeros(())
      >>> def step(gradient):
      ...     return tx.update(gradient, tx.init(params), params)[0]
      >>> jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0])).tolist()
      [-1.0, -1.0]

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020.
    """
    if normalize_by not in ("active", "workers"):
        raise ValueError(f'normalize_by must be "active" or "workers", got {normalize_by!r}')
    cfg = _Config(reducer, axis, specs, normalize_by)
    return optax.GradientTransformationExtraArgs(partial(_init, cfg), partial(_update, cfg))


def _init(cfg: _Config, params: PyTree) -> State:
    reducer, specs = cfg.reducer, cfg.specs
    params = with_gradients(params)
    check_leaves(params)
    state = reducer.init(params) if specs is None else init_on_shards(reducer, params, specs)
    return AllReduceState(bind(state, cfg.axis), jnp.zeros((), jnp.int32))


def _update(
    cfg: _Config,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    examples: Any = None,
    **extra_args: Any,
) -> tuple[Updates, State]:
    reducer, axis, specs = cfg.reducer, cfg.axis, cfg.specs
    check_leaves(updates)
    check_shapes(updates, params)
    comm = over(axis)
    check_local(updates, axis)
    extras = Extras(extra_args.get("step"), extra_args.get("learning_rate"))

    def reduce(updates, reducer_state):
        if specs is not None:
            return reduce_on_shards(reducer, updates, reducer_state, specs, axis, extras)
        if reducer.law != Law.MEAN:
            advice = "pass all_reduce(..., specs=) with the PartitionSpec of each parameter, or use exact()"
            refuse_model_axes("this reducer", advice)
        reduced, new_state = reducer.reduce(updates, reducer_state, comm, extras)
        return reduced.mean, new_state

    # The weight of this worker's gradient: its examples, or 1 as long as it has any.
    if examples is not None:
        weight = jnp.asarray(examples) if cfg.normalize_by == "active" else jnp.asarray(examples) > 0
        examples = weight.astype(jnp.float32)
    plain = reducer.law == Law.MEAN and specs is None
    mean, reducer_state, some = reduce_weighted(
        reduce, updates, state.reducer, comm, examples, plain=plain, divide=cfg.normalize_by == "active"
    )
    return mean, AllReduceState(reducer_state, jnp.where(some, state.empty, next_count(state.empty)))
