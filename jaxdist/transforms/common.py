"""Helpers that several methods share: learning rates, weight decay, moving averages, the step of an optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.checks import NO_PARAMS
from .._core.dtypes import wider_dtype, working_dtype
from .._core.types import Array, AxisNames, Int, PyTree, State, Updates
from ..state.marks import name_leaf
from .averaged import refuse_communication
from .extra_args import check_searches, filter_extras
from .local_gradients import varies_nowhere
from .weights import keep_unused, zero_unless

LearningRate = optax.ScalarOrSchedule | int


def rate_at(learning_rate: LearningRate, count: Int[Array, ""]) -> Array:
    """Returns the learning rate of this step."""
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    # A schedule may return a Python number.
    return jnp.asarray(rate)


def descend(
    direction: Updates, rate: Array, weight_decay: float | int, params: PyTree | None, like: Updates
) -> Updates:
    """Returns the updates `-rate · (direction + weight_decay · params)`, each in the dtype of its gradient."""
    # Decoupled weight decay, as in AdamW.
    if weight_decay:
        if params is None:
            raise ValueError(NO_PARAMS)
        direction = jax.tree.map(lambda d, p: d + weight_decay * p.astype(d.dtype), direction, params)
    return jax.tree.map(lambda d, x: (-rate.astype(d.dtype) * d).astype(x.dtype), direction, like)


def zeros_like(params: PyTree) -> PyTree:
    """Returns zeros in the shapes of the parameters, in float32 or better."""
    # Moving averages of bfloat16 would not move: a small step is less than half an ulp.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params)


def moving_average(old: Updates, new: Updates, decay: float | int) -> Updates:
    """Returns `decay · old + (1 - decay) · new`."""
    return jax.tree.map(lambda x, y: decay * x + (1 - decay) * y, old, new)


def inner_step(
    inner: optax.GradientTransformationExtraArgs,
    gradients: Updates,
    state: State,
    params: PyTree,
    *,
    axis: AxisNames,
    taken: Array | None,
    **extras: Any,
) -> tuple[Updates, State]:
    """Takes a local step, unless it is not `taken`; returns updates as wide as the parameters, and the inner state.

    `axis` is that of the workers with models of their own, over which no function among `extras` may communicate.
    `taken` is a boolean, or `[leaves]`: then the other leaves and their part of the state stay. `inner` is told by
    `moved=True` that its updates are not all that changes the parameters.
    """
    check_searches(state, axis)
    passed = filter_extras(state, refuse_communication({**extras, "moved": True}, axis))
    # A gradient of no examples may be NaN, which `inner` may send over other axes.
    gradients = gradients if taken is None else zero_unless(taken, gradients)
    steps, new = inner.update(gradients, state, params, **passed)
    # The step is computed in any case, so that the program is the same on all workers.
    if taken is not None:
        steps = zero_unless(taken, steps)
        new = keep_unused(taken, new, state, inner.init, params)
    return widen_updates(steps, params), new


def widen_updates(updates: Updates, params: PyTree) -> Updates:
    """Casts updates that are narrower than their parameters, since workers that merge models must end at one model.

    In bfloat16 the way from float32 parameters to the merged ones would be rounded, on each worker differently.
    """
    return jax.tree.map(lambda u, p: u.astype(wider_dtype(u.dtype, p.dtype)), updates, params)


def check_per_worker(params: PyTree, axis: AxisNames) -> None:
    """Checks that no parameter is typed as equal on all workers, which would lose local steps."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if varies_nowhere(leaf, axis):
            raise ValueError(
                f"{name_leaf('the parameter', path)} is the same on all workers of axis {axis!r}, but local steps "
                "make it differ between workers; mark the parameters in the train state, "
                f"PerWorker(params, axis={axis!r})"
            )
