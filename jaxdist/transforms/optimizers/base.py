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


def check_adam(b1: float | int, b2: float | int, eps: float | int, weight_decay: float | int) -> None:
    """Raises unless these can be the arguments of an Adam."""
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    check_range("weight_decay", weight_decay, 0)


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


def seen(tree: Updates, variance: Updates) -> Updates:
    """Zero where there has been no gradient yet: a code that cannot say zero would be divided by `eps` alone."""
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros_like(x)), tree, variance)


def units(variance: Updates, eps: float | int) -> Updates:
    """`√v + ε`, which all workers have: in this unit entries are of one size, and one scale may serve them all.

    It is at least the least normal number, so that an `eps` of 0 divides nothing by zero.
    """
    return jax.tree.map(lambda v: jnp.maximum(jnp.sqrt(v) + eps, jnp.finfo(v.dtype).tiny), variance)


def divide(tree: Updates, by: Updates) -> Updates:
    """`tree / by`, entry by entry."""
    return jax.tree.map(jnp.divide, tree, by)


def multiply(tree: Updates, by: Updates) -> Updates:
    """`tree · by`, entry by entry."""
    return jax.tree.map(jnp.multiply, tree, by)


def descend(
    direction: Updates, rate: Array, weight_decay: float | int, params: PyTree | None, like: Updates
) -> Updates:
    """The updates `-rate · (direction + weight_decay · params)`, each in the dtype of its gradient."""
    if weight_decay:
        if params is None:
            raise ValueError(NO_PARAMS)
        direction = jax.tree.map(lambda d, p: d + weight_decay * p.astype(d.dtype), direction, params)
    return jax.tree.map(lambda d, x: (-rate.astype(d.dtype) * d).astype(x.dtype), direction, like)
