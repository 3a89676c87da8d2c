"""The global norm of a tree, some leaves of which are sharded over the workers."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core.compat import varying_axes
from .._core.dtypes import working_dtype
from .._core.types import Array, AxisNames, Float, PyTree
from ..comm.over import over
from ..state.marks import Sharded, axis_tuple, is_mark
from ..transforms.averaged import has_types
from ..wire.shards import clear_padding


def global_norm(tree: PyTree, *, axis: AxisNames = "data") -> Float[Array, ""]:
    """The norm of all entries of whole arrays, the same on all workers: for gradients and parameters in any stage.

    `√(Σ |x|²)`, where the squares of `Sharded` leaves are summed over the workers, and other leaves are averaged first
    if they may differ: of the gradients of a step it is the norm of the mean gradient. `optax.tree.norm` of sharded
    gradients is that of this worker's shards, up to `√W` times smaller.

    *On the wire*: four bytes, and an all-reduce of every leaf that is neither `Sharded` nor equal on all workers. With
    `check="values"` nothing says which are equal, so that all such leaves are averaged.

    Args:
      tree: gradients of `local_value_and_grad`, means, parameters or updates, with marks or without.
      axis: the axis of the workers, or the axes; `None` is a single worker.

    Raises:
      ValueError: a leaf has another mark than `Sharded`, or the axis is not bound.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> def step(state, batch):
      ...     return state, jd.zero.global_norm(state["params"])
      >>> state = jd.place({"params": jd.zero.shard({"w": jnp.ones(16), "b": jnp.ones(9)}, smallest=10)}, 2)
      >>> float(jd.simulate(step, workers=2)(state, jnp.zeros(2))[1])
      5.0
    """
    comm, typed = over(axis), has_types(axis)
    whole, parts = [jnp.zeros(())], [jnp.zeros(())]
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_mark):
        if isinstance(leaf, Sharded):
            parts.append(_squares(_shard(leaf, comm)))
        elif is_mark(leaf):
            name = jax.tree_util.keystr(path) or "the tree"
            raise ValueError(f"{name} is marked {type(leaf).__name__}: workers have no common norm of it; unwrap it")
        elif typed and not varying_axes(leaf) & set(axis_tuple(axis)):
            whole.append(_squares(leaf))
        else:
            whole.append(_squares(comm.mean(comm.varying(_widen(leaf)))))
    return jnp.sqrt(sum(whole[1:], whole[0]) + comm.sum(comm.varying(sum(parts[1:], parts[0]))))


def _shard(leaf: Sharded, comm: Any) -> Array:
    """The entries of this worker's shard, without the values of the padding."""
    size = math.prod(leaf.shape)
    # A single worker without an axis keeps arrays as they were written.
    if leaf.value.size == size:
        return leaf.value
    return clear_padding(leaf.value, size, comm.size, comm.index)


def _squares(x: Array) -> Array:
    return jnp.sum(jnp.square(jnp.abs(_widen(x))))


def _widen(x: Array) -> Array:
    return x.astype(working_dtype(x.dtype))
