"""The gradient of a batch whose size differs between workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.types import Array, AxisNames, PyTree
from ..transforms.local_value_and_grad import local_value_and_grad


def any_batch(losses: Callable[..., Any], *, axis: AxisNames = "data") -> Callable[..., tuple[Any, PyTree]]:
    """The mean loss and gradient of the first `b` examples of a batch of fixed size `B`: an any-batch worker, masked.

    All workers of a mesh run one program, so `b`, which differs between workers and steps, cannot be a shape. The
    examples from `b` on are computed and left out: the statistics are those of a worker that stopped after `b`
    examples, the time is that of `B`. Pass the same `b` to the update as `examples=`.

    To choose `b` without bias, draw examples before they are timed, and finish or drop the last one by a fixed rule.
    Where costly examples differ from cheap ones (long sequences), fewer of them fit: the gradient is then biased
    towards the cheap ones, more so if the last is dropped. All gradients are taken at the same parameters.

    *On the wire*: nothing.

    Args:
      losses: `losses(params, batch) -> [B]`, the loss of each example.

    Returns:
      A function `(params, batch, examples) -> (mean, gradient)`, gradient in the dtype of the parameters. With
      `examples` 0 both are 0; above `B` it counts as `B`. Examples that are left out have no influence, even if they
      contain NaN.

    Raises:
      ValueError: at trace time, if `losses` returns anything but one number for each example.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> value_and_grad = jd.online.any_batch(lambda w, x: w * x)
      >>> value, gradient = value_and_grad(jnp.array(2.0), jnp.array([1.0, 3.0, 50.0]), 2)
      >>> float(value), float(gradient)
      (4.0, 2.0)

    References:
      Ferdinand, Al-Lawati, Draper, Nokleby, "Anytime Minibatch: Exploiting Stragglers in Online Distributed
      Optimization", arXiv:2006.05752, 2019.
    """

    def average_masked(params: PyTree, batch: PyTree, examples: Array) -> Array:
        """The mean loss of the first `examples` examples."""
        size = jax.tree.leaves(batch)[0].shape[0]
        is_used = jnp.arange(size) < examples
        # The first example replaces those left out: their gradient may be NaN, and 0 times NaN is NaN.
        batch = jax.tree.map(lambda x: jnp.where(is_used.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1]), batch)
        values = losses(params, batch)
        if values.shape != (size,):
            raise ValueError(f"losses must return the loss of each of the {size} examples, got shape {values.shape}")
        number = jnp.clip(examples, 1, size).astype(working_dtype(values.dtype))
        return jnp.sum(jnp.where(is_used, values.astype(number.dtype), 0)) / number

    value_and_grad = local_value_and_grad(average_masked, axis=axis)

    def mask_value_and_grad(params: PyTree, batch: PyTree, examples: Any) -> tuple[Any, PyTree]:
        # Without examples the mean is that of the first one, which must not count.
        has_examples = jnp.asarray(examples) > 0
        value_and_gradient = value_and_grad(params, batch, jnp.asarray(examples))
        return jax.tree.map(lambda x: jnp.where(has_examples, x, jnp.zeros_like(x)), value_and_gradient)

    return mask_value_and_grad
