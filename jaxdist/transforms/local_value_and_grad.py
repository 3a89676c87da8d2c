"""The gradient of one worker's loss, without the all-reduce of `jax.grad`, and the parameters it does not reach."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import cast_varying, mesh_axes_being_mapped, vary_like
from .._core.dtypes import working_dtype
from .._core.jaxprs import propagate
from .._core.trees import fold_keys
from .._core.types import Array, AxisNames, PyTree
from ..state.marks import axis_tuple


def to_varying(tree: PyTree, axis: AxisNames) -> PyTree:
    """Types every leaf as differing between the workers of an axis; a no-op outside `shard_map`."""
    names = mesh_axes_being_mapped() & set(axis_tuple(axis))
    return jax.tree.map(lambda leaf: cast_varying(leaf, names), tree)


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

    Under `shard_map`, `jax.grad` with respect to replicated parameters inserts an all-reduce, whose result is the *sum*
    over workers: compressing it afterwards saves nothing. Here the parameters are typed as varying first, so their
    gradient remains local, in the dtype of the parameters.

    With `micro_batches=k` the batch is split into `k` parts along its first dimension, and gradients are summed in one
    float32 buffer inside a loop: the memory of one part, and one communication, after the last (DDP's `no_sync`).

    *On the wire*: nothing.

    Args:
      argnums: the arguments to differentiate. The first other argument is the batch; PRNG keys among the rest are
        folded with the number of the part, and everything else is passed unchanged.
      has_aux: true if the loss also returns auxiliary data. Over micro-batches its floating leaves are averaged and its
        integer ones summed.
      micro_batches: the number of parts. More saves memory and costs time per step.
      scale: multiplies the loss, in float32, before it is differentiated, for parameters in float16:
        `jd.transforms.loss_scale(opt_state)` of a chain in `dynamic_loss_scale`. The returned value is not scaled.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> loss = lambda w, x: jnp.mean(w * x)
      >>> value, gradient = jd.local_value_and_grad(loss, micro_batches=2)(jnp.array(2.0), jnp.array([1.0, 3.0]))
      >>> float(value), float(gradient)
      (4.0, 2.0)
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
    value_and_grad = _value_and_grad(loss, axis, argnums, has_aux, scale)

    def whole(*args):
        differentiated = _positions(argnums, len(args))
        # The cast to varying is transposed to an all-reduce: before `grad` it is outside of what is differentiated.
        args = [to_varying(arg, axis) if i in differentiated else arg for i, arg in enumerate(args)]
        return value_and_grad(*args)

    if micro_batches == 1:
        return whole
    return partial(_sum_over_parts, whole, axis, argnums, micro_batches)


def _positions(argnums: int | Sequence[int], count: int) -> list[int]:
    """The arguments of a call that are differentiated, of which negative numbers count from the end."""
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    if wrong := [number for number in numbers if not -count <= number < count]:
        raise ValueError(f"argnums={argnums} has {wrong[0]}, but the call has {count} positional arguments")
    return [number % count for number in numbers]


def _sum_over_parts(
    value_and_grad: Callable[..., Any], axis: AxisNames, argnums: int | Sequence[int], parts: int, *args: Any
) -> Any:
    """Averages values and gradients over the parts of the batch, in a loop."""
    differentiated = _positions(argnums, len(args))
    batch = next((i for i in range(len(args)) if i not in differentiated), None)
    if batch is None:
        raise ValueError("micro_batches needs a batch argument besides the differentiated ones")

    # Each part draws its own random numbers.
    def evaluate_part(number, part):
        changed = [arg if i in differentiated else fold_keys(arg, number) for i, arg in enumerate(args)]
        changed[batch] = part
        return value_and_grad(*changed)

    def add_part(total, numbered):
        out = evaluate_part(*numbered)
        return jax.tree.map(lambda t, x: t + jnp.asarray(x, t.dtype), total, out), None

    stack = jax.tree.map(lambda x: _split(x, parts), args[batch])
    shapes = jax.eval_shape(lambda part: evaluate_part(0, part), jax.tree.map(lambda x: x[0], stack))
    # Over a further axis each sum differs as its terms do.
    zeros = jax.tree.map(lambda x: vary_like(jnp.zeros(x.shape, _sum_dtype(x.dtype)), x), shapes)
    # The loss of a replicated batch is replicated, but a sum of local ones is not: type all of it as local.
    zeros = to_varying(zeros, axis)
    total, _ = lax.scan(add_part, zeros, (jnp.arange(parts), stack))
    return jax.tree.map(lambda t, x: _finish(t, x.dtype, parts), total, shapes)


def _value_and_grad(
    loss: Callable[..., Any],
    axis: AxisNames,
    argnums: int | Sequence[int],
    has_aux: bool,
    scale: Array | float | int | None,
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad` with the gradients of `scale` times the loss."""

    def scale_loss(*args):
        out = loss(*args)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"with has_aux=True the loss must return (value, aux), got {type(out).__name__}")
        value: Any = out[0] if has_aux else out
        # In float32: S times the loss would overflow float16.
        scaled = value if scale is None else value.astype(working_dtype(value.dtype)) * scale
        # A loss that is a mean over workers is the loss of each of them, not one loss of all.
        return to_varying(scaled, axis), out

    differentiated = jax.value_and_grad(scale_loss, argnums=argnums, has_aux=True)

    def value_and_grad(*args):
        (_, out), gradients = differentiated(*args)
        return out, gradients

    return value_and_grad


def _split(x: Any, parts: int) -> Any:
    if x.ndim == 0 or x.shape[0] % parts:
        raise ValueError(f"micro_batches={parts} must divide the first dimension of the batch, got shape {x.shape}")
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _sum_dtype(dtype: Any) -> Any:
    return working_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _finish(total: Any, dtype: Any, parts: int) -> Any:
    return (total / parts).astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total


def find_unused_parameters(
    loss: Callable[..., Any], params: PyTree, *args: Any, has_aux: bool = False, axis: AxisNames = "data"
) -> PyTree:
    """Finds the parameters whose gradients are zero for every batch: an idle head, or leaves behind `stop_gradient`.

    The gradient is traced, not computed, and followed from the loss to each leaf. It is a static answer for static
    programs: both branches of a `lax.cond` count as used, and so does a leaf that is multiplied by 0. The result is a
    tree of booleans like the parameters, for `recipes.ddp(unused=)`: `True` where no gradient can arrive.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"body": jnp.ones(3), "head": jnp.ones(2)}
      >>> jd.transforms.find_unused_parameters(lambda p, x: jnp.sum(p["body"] * x), params, jnp.ones(3))
      {'body': False, 'head': True}
    """
    leaves, structure = jax.tree.flatten(params)

    # The cotangent is an input of the trace, so that it can be followed.
    def gradient(cotangent, leaves, args):
        value, pull, *_ = jax.vjp(lambda p: loss(structure.unflatten(p), *args), leaves, has_aux=has_aux)
        if value.shape != ():
            raise ValueError(f"loss must return one number, got shape {value.shape}")
        # What is zero by structure does not depend on the cotangent.
        return pull(cotangent.astype(value.dtype))[0]

    # Collectives of the loss, over an axis of no mesh.
    for name in axis_tuple(axis):
        gradient = jax.vmap(gradient, in_axes=None, axis_name=name, axis_size=2)
    traced = jax.make_jaxpr(gradient)(jnp.ones(()), _shapes(leaves), _shapes(args))
    # A single label: the cotangent. A gradient without it is zero.
    labels = [1] + [0] * (len(traced.jaxpr.invars) - 1)
    return structure.unflatten([not reached for reached in propagate(traced, labels, loops=True).masks])


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, tree)
