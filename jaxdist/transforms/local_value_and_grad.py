"""One worker's own gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import mesh_axes_being_mapped, varying_axes
from .._core.dtypes import working_dtype
from .._core.types import Array, AxisNames, PyTree
from ..state.marks import axis_tuple


def to_varying(tree: PyTree, axis: AxisNames) -> PyTree:
    """Types every leaf as differing between the workers of an axis; the values stay. A no-op outside `shard_map`."""
    names = mesh_axes_being_mapped() & set(axis_tuple(axis))

    def one(leaf):
        missing = tuple(sorted(names - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, tree)


def local_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis: AxisNames = "data",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    micro_batches: int = 1,
    scale: Array | float | int | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of this worker's loss: the gradient is local, and nothing is sent.

    Under `shard_map`, differentiating with respect to replicated parameters inserts an all-reduce by itself, whose
    result is the *sum* over workers: compressing it afterwards saves nothing. Here the parameters are typed as varying
    first, so their gradient stays with the worker.

    With `micro_batches=k` the batch is cut into `k` parts along its first dimension, and gradients are summed in one
    float32 buffer inside a loop: the memory of one part, and communication once, after the last (DDP's `no_sync`).

    *On the wire*: nothing.

    Args:
      loss: `loss(params, batch, *rest) -> scalar`, a mean over examples; `(scalar, aux)` with `has_aux`.
      axis: the mesh axis of the workers.
      argnums: what to differentiate. The first argument that is not differentiated is the batch; PRNG keys among the
        rest are folded with the number of the part, and all else is passed as it is.
      has_aux: whether the loss returns something besides. Over micro-batches floating leaves of it are averaged and
        integer ones summed.
      micro_batches: how many parts. More saves memory and costs time per step.
      scale: the gradients are those of so many times the loss, in float32, for parameters in float16:
        `jd.transforms.loss_scale(opt_state)` of a chain in `dynamic_loss_scale`. The value stays that of the loss.

    Returns:
      A function with the arguments of `loss` that returns `(value, gradients)`, gradients in the dtype of the
      parameters.

    Raises:
      ValueError: `micro_batches` is below 1 or does not divide the batch.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> loss = lambda w, x: jnp.mean(w * x)
      >>> value, gradient = jd.local_value_and_grad(loss, micro_batches=2)(jnp.array(2.0), jnp.array([1.0, 3.0]))
      >>> float(value), float(gradient)
      (4.0, 2.0)

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
    differentiated = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    value_and_grad = _value_and_grad(loss, argnums, has_aux, scale)

    def whole(*args):
        args = [to_varying(arg, axis) if i in differentiated else arg for i, arg in enumerate(args)]
        return value_and_grad(*args)

    def in_parts(*args):
        args = [to_varying(arg, axis) if i in differentiated else arg for i, arg in enumerate(args)]
        batch = next((i for i in range(len(args)) if i not in differentiated), None)
        if batch is None:
            raise ValueError("micro_batches needs a batch argument besides the differentiated ones")
        parts = jax.tree.map(lambda x: _cut(x, micro_batches), args[batch])

        def one(number, part):
            def argument(i, arg):
                return part if i == batch else arg if i in differentiated else _fold_keys(arg, number)

            return value_and_grad(*(argument(i, arg) for i, arg in enumerate(args)))

        def add(total, numbered):
            number, part = numbered
            out = one(number, part)
            return jax.tree.map(lambda t, x: t + jnp.asarray(x, t.dtype), total, out), None

        shapes = jax.eval_shape(lambda part: one(0, part), jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _sum_dtype(x.dtype)), shapes)
        # The loss of a replicated batch is replicated, but a sum of local ones is not: type all of it as local.
        zeros = to_varying(zeros, axis)
        total, _ = lax.scan(add, zeros, (jnp.arange(micro_batches), parts))
        return jax.tree.map(lambda t, x: _finish(t, x.dtype, micro_batches), total, shapes)

    return whole if micro_batches == 1 else in_parts


def _value_and_grad(
    loss: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, scale: Array | float | int | None
) -> Callable[..., Any]:
    """`jax.value_and_grad`, whose gradients are those of `scale` times the loss."""
    if scale is None:
        return jax.value_and_grad(loss, argnums=argnums, has_aux=has_aux)

    def scaled(*args):
        out = loss(*args)
        value = out[0] if has_aux else out
        return value.astype(working_dtype(value.dtype)) * scale, out

    differentiated = jax.value_and_grad(scaled, argnums=argnums, has_aux=True)

    def value_and_grad(*args):
        (_, out), gradients = differentiated(*args)
        return out, gradients

    return value_and_grad


def _cut(x: Any, parts: int) -> Any:
    if x.ndim == 0 or x.shape[0] % parts:
        raise ValueError(f"micro_batches={parts} must divide the first dimension of the batch, got shape {x.shape}")
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _fold_keys(tree: PyTree, number: Any) -> PyTree:
    def one(x):
        is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(x, number) if is_key else x

    return jax.tree.map(one, tree)


def _sum_dtype(dtype: Any) -> Any:
    return working_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _finish(total: Any, dtype: Any, parts: int) -> Any:
    return (total / parts).astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total
