"""The gradient of however many examples a worker got through."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.types import AxisNames, PyTree
from ..transforms.local_value_and_grad import local_value_and_grad


def any_batch(losses: Callable[..., Any], *, axis: AxisNames = "data") -> Callable[..., tuple[Any, PyTree]]:
    """The mean loss and gradient of the first `b` examples of a batch of fixed size `B`: an any-batch worker, masked.

    All workers of a mesh run one program, so that `b`, which differs between workers and steps, cannot be a shape. The
    examples from `b` on are computed and left out: the statistics are those of a worker that was stopped, the time is
    that of `B` examples. Give the same `b` to the update as `examples=`.

    Which `b`? Examples must be drawn before they are timed, and the one under way when the time is up finished or
    dropped by a rule. Where costly examples differ from cheap ones (long sequences), fewer of them fit: the gradient
    then leans to the cheap ones, more so if the last is dropped. All gradients are taken at the same parameters.

    *On the wire*: nothing.

    Args:
      losses: `losses(params, batch) -> [B]`, the loss of each example by itself.
      axis: the mesh axis of the workers.

    Returns:
      A function `(params, batch, examples) -> (mean, gradient)`, gradient in the dtype of the parameters. With
      `examples` 0 both are 0; above `B` it counts as `B`. What the left-out examples hold has no influence, NaN
      included.

    Raises:
      ValueError: at trace time, if `losses` returns anything but one number for each example.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> value_and_grad = jd.online.any_batch(lambda w, x: w * x)
      >>> value, gradient = value_and_grad(jnp.array(2.0), jnp.array([1.0, 3.0, 50.0]), 2)
      >>> float(value), float(gradient)
      (4.0, 2.0)

    References:
      Ferdinand, Al-Lawati, Draper, Nokleby, "Anytime Minibatch: Exploiting Stragglers in Online Distributed
      Optimization", arXiv 2006.05752, 2019.
    """

    def mean(params, batch, examples):
        size = jax.tree.leaves(batch)[0].shape[0]
        counted = jnp.arange(size) < examples

        def first(x):  # in place of the left-out ones, whose gradient may be NaN, and 0 times NaN is NaN
            mask = counted.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(mask, x, x[:1])

        found = losses(params, jax.tree.map(first, batch))
        if found.shape != (size,):
            raise ValueError(f"losses must return the loss of each of the {size} examples, got shape {found.shape}")
        number = jnp.clip(examples, 1, size).astype(working_dtype(found.dtype))
        return jnp.sum(jnp.where(counted, found.astype(number.dtype), 0)) / number

    value_and_grad = local_value_and_grad(mean, axis=axis)

    def run(params, batch, examples):
        some = jnp.asarray(examples) > 0
        found = value_and_grad(params, batch, jnp.asarray(examples))
        return jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), found)

    return run
