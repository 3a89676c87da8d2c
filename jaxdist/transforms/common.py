"""Helpers that several methods share: learning rates, moving averages and the step of an inner optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.dtypes import working_dtype
from .._core.trees import choose
from .._core.types import Array, AxisNames, Int, PyTree, State, Updates
from ..state.marks import named
from .local_gradients import varies_nowhere
from .optax_wrappers import extras_of

LearningRate = optax.ScalarOrSchedule | int


def rate_at(learning_rate: LearningRate, count: Int[Array, ""]) -> Array:
    """The learning rate of this step."""
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate)


def zeros_like(params: PyTree) -> PyTree:
    """Zeros in the shapes of the parameters, in float32 or better."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params)


def moving_average(old: Updates, new: Updates, decay: float | int) -> Updates:
    """`decay · old + (1 - decay) · new`."""
    return jax.tree.map(lambda x, y: decay * x + (1 - decay) * y, old, new)


def inner_step(
    inner: optax.GradientTransformationExtraArgs,
    gradients: Updates,
    state: State,
    params: PyTree,
    *,
    active: Array | None,
    **given: Any,
) -> tuple[Updates, State, PyTree]:
    """One step of a worker on its own: its updates, the inner state and where they lead; an inactive worker stays."""
    steps, new = inner.update(gradients, state, params, **extras_of(state, given))
    if active is not None:
        steps = choose(active, steps, jax.tree.map(jnp.zeros_like, steps))
        new = choose(active, new, state)
    return steps, new, optax.apply_updates(params, steps)


def check_per_worker(params: PyTree, axis: AxisNames) -> None:
    """Raises where a parameter is typed as equal on all workers: local steps would be lost."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if varies_nowhere(leaf, axis):
            raise ValueError(
                f"{named('the parameter', path)} is the same on all workers of axis {axis!r}, but workers "
                "that step by themselves hold different ones: mark them in the train state, "
                f"PerWorker(params, axis={axis!r})"
            )
