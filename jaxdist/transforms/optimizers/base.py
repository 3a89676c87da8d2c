"""What the optimizers that communicate inside share: rates, ranges, float32 state and decoupled weight decay."""

import math

import jax
import jax.numpy as jnp
import optax

from ..._typing import Array, Int, PyTree, Updates
from ...compressors.base import working_dtype

LearningRate = optax.ScalarOrSchedule | int

NO_PARAMS = "this optimizer needs the parameters: tx.update(gradients, state, params)"


def check_range(name: str, value: float | int, low: float | int, high: float | int = math.inf) -> None:
    """Raises unless `low <= value < high`."""
    if not low <= value < high:
        raise ValueError(f"{name} must be in [{low}, {high}), got {value}")


def rate_at(learning_rate: LearningRate, count: Int[Array, ""]) -> Array:
    """The learning rate of this step."""
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate)


def zeros_like(params: PyTree) -> PyTree:
    """Zeros in the shapes of the parameters, in float32 or better."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params)


def descend(
    direction: Updates, rate: Array, weight_decay: float | int, params: PyTree | None, like: Updates
) -> Updates:
    """The updates `-rate · (direction + weight_decay · params)`, each in the dtype of its gradient."""
    if weight_decay:
        if params is None:
            raise ValueError(NO_PARAMS)
        direction = jax.tree.map(lambda d, p: d + weight_decay * p.astype(d.dtype), direction, params)
    return jax.tree.map(lambda d, x: (-rate.astype(d.dtype) * d).astype(x.dtype), direction, like)
