"""Which parameters a loss does not reach."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core.jaxprs import propagate
from .._core.types import AxisNames, PyTree
from ..state.marks import axis_tuple


def find_unused_parameters(
    loss: Callable[..., Any], params: PyTree, *args: Any, has_aux: bool = False, axis: AxisNames = "data"
) -> PyTree:
    """Finds the parameters whose gradients are zero for every batch: an idle head, or leaves behind `stop_gradient`.

    The gradient is traced, not computed, and followed from the loss to each leaf. It is a static answer for static
    programs: both branches of a `lax.cond` count as used, and so does a leaf that is multiplied by 0.

    *On the wire*: nothing.

    Args:
      loss: `loss(params, *args) -> scalar`, as for `local_value_and_grad`.
      params: the parameters, or their shapes.
      *args: the batch and the rest, or their shapes.
      has_aux: whether the loss returns something besides.
      axis: the mesh axis, or axes, over which the loss may communicate.

    Returns:
      A tree of booleans like the parameters, for `recipes.ddp(unused=)`: `True` where no gradient can arrive.

    Raises:
      ValueError: the loss is not one number.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"body": jnp.ones(3), "head": jnp.ones(2)}
      >>> jd.transforms.find_unused_parameters(lambda p, x: jnp.sum(p["body"] * x), params, jnp.ones(3))
      {'body': False, 'head': True}

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020
      (`find_unused_parameters`).
    """
    leaves, structure = jax.tree.flatten(params)

    def gradient(cotangent, leaves, args):
        value, pull, *_ = jax.vjp(lambda p: loss(structure.unflatten(p), *args), leaves, has_aux=has_aux)
        if value.shape != ():
            raise ValueError(f"loss must return one number, got shape {value.shape}")
        return pull(cotangent.astype(value.dtype))[0]  # what is zero by structure does not depend on the cotangent

    for name in axis_tuple(axis):  # collectives of the loss, over an axis of no mesh
        gradient = jax.vmap(gradient, in_axes=None, axis_name=name, axis_size=2)
    traced = jax.make_jaxpr(gradient)(jnp.ones(()), _shapes(leaves), _shapes(args))
    # A single label: the cotangent. A gradient without it is zero.
    labels = [1] + [0] * (len(traced.jaxpr.invars) - 1)
    return structure.unflatten([not reached for reached in propagate(traced, labels, loops=True).masks])


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, tree)
