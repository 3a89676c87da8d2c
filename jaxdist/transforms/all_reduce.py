"""The line of an optax chain that talks to the other workers."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import optax

from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, PyTree, State
from ..comm.over import over
from ..reducers.base import Extras, Law, Reducer
from ..state.marks import bind
from .local_gradients import check_leaves, check_local, reduce_weighted, refuse_model_axes
from .model_axes import init_on_shards, reduce_on_shards
from .optax_wrappers import check_shapes, with_gradients


class AllReduceState(NamedTuple):
    """`reducer` as the reducer defines it; `empty` counts steps on which no worker had any example (agreed)."""

    reducer: State
    empty: Int[Array, ""]

    communicates = True


def all_reduce(
    reducer: Reducer,
    *,
    axis: AxisNames = "data",
    specs: PyTree | None = None,
    divisor: Literal["active", "workers"] = "active",
) -> optax.GradientTransformationExtraArgs:
    """Replaces each worker's gradient by the mean that the reducer makes of all of them.

    Put it where the gradient is still local, usually first in the chain; clipping, momentum and weight decay after it
    see what all workers agree on. The gradients must come from `local_value_and_grad`: under `shard_map`, `jax.grad` of
    replicated parameters has already summed them, and reducing again would be `W` times too large.

    *On the wire*: what the reducer sends; with `examples`, four bytes more.

    *State*: that of the reducer, bound to the axis; a count.

    Args:
      reducer: `exact()`, `error_feedback(power_sgd(rank=4))`, ...
      axis: the mesh axis of the workers, or several, slow links first; `None`: a single worker.
      specs: a tree of `PartitionSpec` like the parameters, for meshes with further axes that the compiler shards
        (tensor parallelism): the reducer then runs on each shard by itself. The state must be made by `init_state` (or
        under `jax.set_mesh`), which knows how large the shards are.
      divisor: what `examples` means. `"active"`: the mean over all examples, `Σ n_w g_w / Σ n_w`; workers without any
        have left. `"workers"`: they stay in the mean with a gradient of zero, `Σ_{n_w > 0} g_w / W`, so that the
        step gets smaller as workers finish: what PyTorch does unless told otherwise.

    Returns:
      A gradient transformation. Its `update` takes `examples=`, the number of real examples behind this worker's
      gradient: gradients are weighted by `examples / mean(examples)`, a finished worker passes 0, and when all do, the
      update is zero and the state stays as it is.

    Raises:
      ValueError: the divisor is unknown; at trace time, if a leaf is not floating, not varying over the axis, not of
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
    if divisor not in ("active", "workers"):
        raise ValueError(f'divisor must be "active" or "workers", got {divisor!r}')

    def init(params):
        params = with_gradients(params)
        check_leaves(params)
        state = reducer.init(params) if specs is None else init_on_shards(reducer, params, specs)
        return AllReduceState(bind(state, axis), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, examples=None, **extra_args):
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

        if examples is not None:
            counted = jnp.asarray(examples) if divisor == "active" else jnp.asarray(examples) > 0
            examples = counted.astype(jnp.float32)
        plain = reducer.law == Law.MEAN and specs is None
        mean, reducer_state, some = reduce_weighted(
            reduce, updates, state.reducer, comm, examples, plain=plain, divide=divisor == "active"
        )
        return mean, AllReduceState(reducer_state, jnp.where(some, state.empty, next_count(state.empty)))

    return optax.GradientTransformationExtraArgs(init, update)
