"""ZeRO over global arrays of a plain `jit`, by `PartitionSpec`s, beside axes of the mesh that the compiler shards."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from .._core.checks import NO_PARAMS
from .._core.types import Array, AxisNames, PyTree, State, Updates
from ..reducers.reducer import Reducer
from ..state.marks import axis_tuple, expand_specs, spec_entry
from ..state.parameter_specs import axes_of_specs, without_axes
from ..transforms.all_reduce import AllReduceState, all_reduce
from ..transforms.in_plain_jit import is_outside_map, weights_of_workers
from ..transforms.local_gradients import check_leaves
from ..transforms.weights import keep_unused, zero_unless
from .checks import check_inner
from .state import ZeroState
from .updates import difference


class _PlacedZero(NamedTuple):
    """`zero_redundancy(specs=)`. Its state is of plain global arrays, whose shardings `init_state(specs=)` gives them.

    `averaged` reduce-scatters the mean.
    """

    inner: optax.GradientTransformationExtraArgs
    averaged: optax.GradientTransformationExtraArgs
    specs: PyTree
    stage: int
    master_dtype: Any
    axis: AxisNames

    def init(self, params: PyTree) -> State:
        check_leaves(params)
        optimized = jax.tree.map(lambda x: jnp.array(x, self.master_dtype or x.dtype), params)
        inner = self.inner.init(optimized)
        check_inner(inner)
        averaged: Any = self.averaged.init(params)
        master = () if self.master_dtype is None else optimized
        return ZeroState(inner, master, averaged.empty, averaged.reducer, ())

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree = None,
        *,
        examples: Any = None,
        active: Any = None,
        moved: bool = False,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        if params is None:
            raise ValueError(NO_PARAMS)
        names = axis_tuple(self.axis)
        if not is_outside_map(names):
            raise ValueError(
                f"zero_redundancy(specs=) is for a plain jit under jax.set_mesh(mesh) of a mesh with the axis "
                f"{spec_entry(names)!r}: inside distribute leave specs= out, on a mesh without further axes"
            )
        if moved:
            raise ValueError(
                "moved=True is for local_steps and others around zero_redundancy, which need distribute: leave specs= "
                "out, on a mesh without further axes"
            )
        with jax.named_scope("zero_redundancy"):
            # g = reduce_scatter(g_w), in the codes of the reducer.
            given, weights = AllReduceState(state.reducer, state.empty), {"examples": examples, "active": active}
            reduced: Any
            means, reduced = self.averaged.update(updates, given, params, **weights, **extra_args)
            specs = expand_specs(self.specs, means)
            # u, s = inner(g, s, θ_shard). The constraints keep the compiler from updating whole arrays everywhere.
            optimized = state.master if self.master_dtype is not None else jax.tree.map(place_as, params, specs)
            means = jax.tree.map(lambda x, p: x.astype(p.dtype), means, optimized)
            steps, inner = self.inner.update(means, state.inner, optimized, **extra_args)
            weight = weights_of_workers(names, updates, examples, active)
            if weight is not None:
                # What no worker had an example for stays, even if `inner` decays weights.
                used = (weight > 0).any(0)
                inner = keep_unused(used, inner, state.inner, self.inner.init, optimized)
                steps = zero_unless(used, steps)
            steps = jax.tree.map(place_as, steps, specs)
            # updates = all_gather(u), unless the parameters are sharded as the state is.
            places = specs if self.stage == 3 else jax.tree.map(lambda spec: without_axes(spec, names), specs)
            if self.master_dtype is None:
                out, master = jax.tree.map(place_as, steps, places), state.master
            else:
                master = jax.tree.map(jnp.add, state.master, steps)
                # Only the rounded parameters are sent.
                out = jax.tree.map(
                    lambda m, p, spec: difference(place_as(m.astype(p.dtype), spec), p), master, params, places
                )
        return out, ZeroState(inner, master, reduced.empty, reduced.reducer, ())


def placed_zero(
    inner: optax.GradientTransformationExtraArgs,
    *,
    reducer: Reducer | None,
    specs: PyTree,
    stage: int,
    master_dtype: Any,
    axis: AxisNames,
) -> optax.GradientTransformationExtraArgs:
    """Checks the arguments of `zero_redundancy(specs=)` and makes the transformation."""
    if reducer is None:
        raise ValueError(
            "zero_redundancy(specs=) averages the gradients of per_worker_value_and_grad, and reducer=None takes "
            "means: under plain jit zero.zero_shardings places their optimizer's state"
        )
    averaged = all_reduce(reducer, axis=axis, specs=specs)
    named = axes_of_specs(specs)
    if not named & set(axis_tuple(axis)):
        raise ValueError(
            f"zero_redundancy(specs=) shards the state over axis {spec_entry(axis_tuple(axis))!r}, but no spec names "
            f"it: shard a dimension of large parameters over it, as in P({axis_tuple(axis)[0]!r}, 'model')"
        )
    method = _PlacedZero(inner, averaged, specs, stage, master_dtype, axis)
    return optax.GradientTransformationExtraArgs(method.init, method.update)


def place_as(x: Array, spec: PartitionSpec) -> Array:
    """The same array, sharded like this: on Explicit axes a type, on others a constraint of the compiler."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return jax.reshard(x, spec)
    return lax.with_sharding_constraint(x, spec)
