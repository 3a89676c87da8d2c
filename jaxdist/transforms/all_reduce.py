"""The transformation of an optax chain that averages gradients over workers."""

import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, PyTree, State, Updates
from ..comm.over import over
from ..reducers.reducer import Extras, Law, Reducer, check_reducer, contraction_of
from ..state.marks import axis_tuple, bind, is_spec
from ..state.parameter_specs import check_specs, spec_axes, without_axes
from .averaged import check_functions
from .in_plain_jit import with_own_map
from .late_reduction import late_reduction
from .local_gradients import (
    check_leaves,
    check_local,
    check_shapes,
    reduce_weighted,
    refuse_model_axes,
    with_gradients,
)
from .on_shards import init_on_shards, reduce_on_shards
from .reduce_scatter import check_scattering, scattered_dimensions
from .weights import weight_of_leaves


class AllReduceState(NamedTuple):
    """`reducer` as the reducer defines it; `empty` counts steps without an example on any worker (replicated)."""

    reducer: State
    empty: Int[Array, ""]

    communicates = True


NormalizeBy = Literal["active", "workers"]


def all_reduce(
    reducer: Reducer,
    *,
    axis: AxisNames = "data",
    specs: PyTree | None = None,
    normalize_by: NormalizeBy = "active",
    delay: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Replaces each worker's gradient by the reducer's mean over all workers.

    Put it where gradients are still local, usually first in the chain. They must come from
    `local_value_and_grad`: `jax.grad` has already summed those of replicated parameters.

    With `delay=1` (Pipe-SGD of width 2) the update of step `t` is the mean gradient of step `t-1`, and the first is
    zero.

    *On the wire*: the reducer's collectives; four bytes more with `examples` or `active`, or four a leaf with a tree.

    *State*: the reducer's, bound to the axis; a count. With `delay=1` also each worker's last gradient and its number
    of examples.

    Args:
      reducer: computes the mean.
      axis: the mesh axis of the workers, or several, slow links first; `None`: a single worker.
      specs: a tree of `PartitionSpec` like the parameters, for axes that the compiler shards (tensor parallelism);
        make the state by `init_state`. If they name `axis` (FSDP), under plain `jit`, gradients are reduce-scattered.
      normalize_by: the divisor of the mean with `examples`. `"active"`: their number, `Σ n_w g_w / Σ n_w`. `"workers"`:
        `Σ_{n_w > 0} g_w / W`, PyTorch's default.
      delay: 0 or 1.

    Returns:
      A transformation. `update` takes `examples=`, the number of examples behind this worker's gradient, its weight (0
      to leave it out), or a tree of numbers, for single leaves; `active=False` leaves the gradient out too. If all are
      out, the update is zero and the state stays.

    Raises:
      ValueError: `normalize_by` or `delay` is unknown; `specs` name the axis of the workers beside another one in a
        dimension, or the reducer cannot scatter. At trace time, `specs` name it inside a map; a leaf is not floating,
        not varying over the axis, not of its parameter's shape, or `Sharded`; the axis is unbound or not that of
        the gradients; the reducer would gather further axes of the mesh.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.5))
      >>> params = jnp.zeros(())
      >>> def step(gradient):
      ...     return tx.update(gradient, tx.init(params), params)[0]
      >>> jax.jit(jax.vmap(step, axis_name="data"))(jnp.array([1.0, 3.0])).tolist()
      [-1.0, -1.0]
      >>> late = jd.all_reduce(jd.exact(), axis=None, delay=1)
      >>> state = late.init(params)
      >>> first, state = late.update(jnp.array(3.0), state)
      >>> second, state = late.update(jnp.array(5.0), state)
      >>> float(first), float(second)
      (0.0, 3.0)

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704, 2020.
      Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training",
      arXiv:1811.03619, 2018. It also pipelines more steps, as `asynchronous.rules.pipe_sgd(width=)` does.
    """
    check_reducer(reducer)
    _warn_of_bias(reducer)
    if normalize_by not in ("active", "workers"):
        raise ValueError(f'normalize_by must be "active" or "workers", got {normalize_by!r}')
    if normalize_by == "workers" and reducer.forms.weighted:
        raise ValueError(
            "a median or a trimmed mean has no divisor, and leaves workers without examples out: normalize_by must be "
            '"active", got "workers"'
        )
    if delay not in (0, 1):
        raise ValueError(
            f"delay must be 0 or 1, got {delay}; for all-reduces over several steps see asynchronous.rules.pipe_sgd"
        )
    check_specs(specs, caller="all_reduce(specs=)")
    scattered = _scattered_specs(reducer, specs, axis)
    method = _AllReduce(reducer, axis, specs, normalize_by)
    tx = optax.GradientTransformationExtraArgs(method.init, method.update)
    return with_own_map(late_reduction(tx, axis) if delay else tx, axis, scattered)


def _scattered_specs(reducer: Reducer, specs: PyTree | None, axis: AxisNames) -> PyTree | None:
    """The specs of the mean over the workers' own axis, along which it is scattered; `None` if it is whole."""
    names = axis_tuple(axis)
    if specs is None or not check_scattering(reducer, specs, names):
        return None
    scattered_dimensions(specs, names)
    return jax.tree.map(lambda spec: without_axes(spec, set(spec_axes(spec)) - set(names)), specs, is_leaf=is_spec)


def _warn_of_bias(reducer: Reducer) -> None:
    """Warns of a reducer that loses most of each gradient for good."""
    # A rounding is biased too, but loses next to nothing: in bfloat16, δ = 1 - 2^-16.
    if reducer.forms.biased is not None and reducer.forms.biased((4096,)) < 0.5:
        name = reducer.description or "reducer"
        try:
            contraction_of(reducer)
            advice = f"use all_reduce(error_feedback({name}))"
        except ValueError as refusal:
            advice = str(refusal)
        warnings.warn(f"{name} is biased, and what it leaves out of a gradient is lost: {advice}", stacklevel=3)


class _AllReduce(NamedTuple):
    reducer: Reducer
    axis: AxisNames
    specs: PyTree | None
    normalize_by: NormalizeBy

    def init(self, params: PyTree) -> State:
        reducer, specs = self.reducer, self.specs
        params = with_gradients(params)
        check_leaves(params)
        state = reducer.init(params) if specs is None else init_on_shards(reducer, params, specs, self.axis)
        return AllReduceState(bind(state, self.axis), jnp.zeros((), jnp.int32))

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        examples: Any = None,
        active: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        reducer, axis, specs = self.reducer, self.axis, self.specs
        check_leaves(updates)
        check_shapes(updates, params)
        check_functions(extra_args, params, axis, is_weighted=examples is not None or active is not None)
        comm = over(axis)
        check_local(updates, axis)
        weight = weight_of_leaves(examples, active, updates)
        # All workers with any examples count alike.
        if weight is not None and self.normalize_by == "workers":
            weight = (weight > 0).astype(jnp.float32)
        # Some reducers depend on the step or its rate: schedules, and feedback that is scaled by it. A worker without
        # examples in a step of all still sends its residual, so that only reducers that weight workers get the number.
        weights = weight if reducer.forms.weighted else None
        # Inside `specs` the updates are shards.
        own = with_gradients(params)
        has_params = specs is None and jax.tree.structure(own) == jax.tree.structure(updates)
        extras = Extras(
            extra_args.get("step"), extra_args.get("learning_rate"), weights, params=own if has_params else None
        )

        def reduce(updates, reducer_state):
            if specs is not None:
                return reduce_on_shards(reducer, updates, reducer_state, specs, axis, extras)
            if reducer.law != Law.MEAN:
                advice = "pass all_reduce(..., specs=) with the PartitionSpec of each parameter, or use exact()"
                refuse_model_axes("this reducer", advice)
            reduced, new_state = reducer.reduce(updates, reducer_state, comm, extras)
            return reduced.mean, new_state

        # Only a plain mean takes the weights as one more leaf, and then needs no second collective.
        plain = reducer.law == Law.MEAN and specs is None
        mean, reducer_state, some = reduce_weighted(
            reduce,
            updates,
            state.reducer,
            comm,
            weight,
            plain=plain,
            divide=self.normalize_by == "active",
            reducer=reducer,
        )
        return mean, AllReduceState(reducer_state, jnp.where(jnp.any(some), state.empty, next_count(state.empty)))
