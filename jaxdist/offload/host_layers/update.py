"""The optimizer of one part: its checks, its initial state, and its update as a program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._core.dtypes import widen
from ..._core.jaxprs import propagate
from ..._core.types import Array, Float, PyTree, State
from ...state.marks import NO_PARAMETER, is_mark, parameter_indices
from ...transforms.mistakes import communicates
from ..nvme.model import check_same_dtypes

WHOLE = (
    "the optimizer computes with several parameters at once, such as the norm of all gradients, but it sees one layer "
    "at a time here: clip with host_layers(clip_norm=...), or each parameter with optax.clip_by_block_rms"
)


class PartUpdate(NamedTuple):
    """The programs for parts of any kind.

    Attributes:
      start: `(params) -> state`.
      square: `(grads) -> Σ g²`.
      update: `(params, state, grads, square) -> (params, state)`, in the memory of its first two arguments. `square` is
        the sum over all parts, by which gradients are clipped; `None` clips none.
    """

    start: Callable[[PyTree], State]
    square: Callable[[PyTree], Float[Array, ""]]
    update: Callable[..., tuple[PyTree, State]]


def compile_update(
    inner: optax.GradientTransformationExtraArgs, clip_norm: float | int | None, gradient_dtype: Any | None
) -> PartUpdate:
    """Compiles each function when it is first called; gradients are cast to `gradient_dtype` before all else."""

    def cast(grads: PyTree) -> PyTree:
        return grads if gradient_dtype is None else jax.tree.map(lambda g: g.astype(gradient_dtype), grads)

    def square(grads: PyTree) -> Array:
        return jnp.asarray(sum((jnp.sum(widen(g) ** 2) for g in jax.tree.leaves(cast(grads))), 0.0))

    def update(params: PyTree, state: State, grads: PyTree, total: Array | None) -> tuple[PyTree, State]:
        grads = cast(grads)
        if total is not None and clip_norm is not None:
            grads = _clip(grads, jnp.sqrt(total), clip_norm)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return PartUpdate(jax.jit(inner.init), jax.jit(square), jax.jit(update, donate_argnums=(0, 1)))


def _clip(grads: PyTree, norm: Array, limit: float | int) -> PyTree:
    """As `optax.clip_by_global_norm`: a norm that is not finite shows in the parameters."""

    def clip_leaf(g: Array) -> Array:
        return jnp.where(norm < limit, g, g / norm.astype(g.dtype) * jnp.asarray(limit, g.dtype))

    return jax.tree.map(clip_leaf, grads)


def check_optimizer(inner: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Refuses an optimizer whose updates of a part are others than in an update of the whole model."""
    state = jax.eval_shape(inner.init, params)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: is_mark(x) or communicates(x))
    if any(map(communicates, nodes)):
        raise ValueError(
            "the optimizer communicates, but here gradients are averaged before it: leave all_reduce and "
            "zero_redundancy out, and pass host_layers(mesh=..., reducer=...)"
        )
    if any(map(is_mark, nodes)):
        raise ValueError("the optimizer's state is placed already, by offload.host or per_worker: pass what is inside")
    _, after = jax.eval_shape(inner.update, params, state, params)
    check_same_dtypes(state, after)
    # A norm over all parameters is that of one where a part has one: only a second part shows that it is not its own.
    try:
        trees = (params, params)
        jax.eval_shape(inner.init, trees)
    # What the functions of masks and labels raise for trees of another form than the model's.
    except Exception:
        trees = params
    _check_separate(inner, trees)


def _check_separate(inner: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Raises if what belongs to one parameter depends on another, or a number of the state on any."""
    state = jax.eval_shape(inner.init, params)
    owners = jax.tree.leaves(parameter_indices(inner.init, state, params))
    count = len(jax.tree.leaves(params))
    own = [1 << k for k in range(count)]
    of_state = [0 if k == NO_PARAMETER else own[k] for k in owners]
    closed = jax.make_jaxpr(inner.update)(params, state, params)
    masks = propagate(closed, [*own, *of_state, *own]).masks
    for mask, allowed in zip(masks, [*own, *of_state], strict=True):
        if mask & ~allowed:
            raise ValueError(WHOLE)
