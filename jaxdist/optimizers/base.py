"""Helpers of the optimizers that communicate: the start of a step, Adam's preconditioner, weight decay."""

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import NO_PARAMS, check_range
from .._core.types import Array, AxisNames, PyTree, Updates
from ..comm.base import Comm
from ..transforms.common import LearningRate, rate_at
from ..transforms.local_gradients import local_gradients


def check_adam(b1: float | int, b2: float | int, eps: float | int, weight_decay: float | int) -> None:
    """Checks the range of Adam's arguments."""
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    check_range("weight_decay", weight_decay, 0)


def start_step(
    updates: Updates, axis: AxisNames, examples: Array | int | None, learning_rate: LearningRate, count: Array
) -> tuple[Updates, Comm, list[comms.Sent], Array]:
    """Returns gradients in float32 or better, the group of workers, the ledger of the bytes it sends, and the rate."""
    gradients, comm = local_gradients(updates, axis, examples)
    ledger: list[comms.Sent] = []
    return gradients, comms.count_sent(comm, ledger), ledger, rate_at(learning_rate, count)


def mask_unseen(tree: Updates, variance: Updates) -> Updates:
    """Sets entries without any gradient so far to zero: sign codes have no zero, and `eps` alone would divide them."""
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros_like(x)), tree, variance)


def preconditioner(variance: Updates, eps: float | int) -> Updates:
    """Returns `√v + ε`, at least the smallest normal number, so that an `eps` of 0 never divides by zero.

    It is replicated. Divided by it, all entries have about the same size and can share one scale.
    """
    return jax.tree.map(lambda v: jnp.maximum(jnp.sqrt(v) + eps, jnp.finfo(v.dtype).tiny), variance)


def divide(tree: Updates, by: Updates) -> Updates:
    """Returns `tree / by`, entry by entry."""
    return jax.tree.map(jnp.divide, tree, by)


def multiply(tree: Updates, by: Updates) -> Updates:
    """Returns `tree · by`, entry by entry."""
    return jax.tree.map(jnp.multiply, tree, by)


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
