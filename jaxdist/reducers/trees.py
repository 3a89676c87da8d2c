"""Norms, dtypes and names of trees of gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from .._core.dtypes import narrow, widen
from .._core.types import Array, Float, PyTree, Updates
from .._core.xla_quirks import largest_entry

# XLA divides by a broadcast number by multiplying with its inverse, which is zero for larger ones.
LARGEST_UNIT = 2.0**126


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts each leaf to the dtype of its counterpart; to float16, what is finite stays finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import cast_like
      >>> float(cast_like(jnp.array(1e6), jnp.zeros((), jnp.float16)))
      65504.0
    """
    return jax.tree.map(lambda x, y: narrow(x, y.dtype), tree, like)


def list_named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves with their paths, as `"layers/0/kernel"`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def tree_norm(tree: Updates) -> Float[Array, ""]:
    """The L2 norm of all leaves together, in float32."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = largest_entry(
        jnp.stack([largest_entry(jnp.abs(leaf), initial=0.0).astype(jnp.float32) for leaf in leaves])
    )
    # Squares of quotients of the largest entry neither vanish nor overflow.
    unit = jnp.where(largest == 0, 1.0, jnp.minimum(largest, LARGEST_UNIT))
    squares = [jnp.sum(jnp.square((widen(leaf) / unit).astype(jnp.float32))) for leaf in leaves]
    return unit * jnp.sqrt(jnp.stack(squares).sum())


def is_map_params_placeholder(like: PyTree) -> bool:
    """Recognizes what `optax.tree.map_params` passes instead of parameters: no leaves, and not a pytree container.

    A reducer whose state does not mirror the parameters leaf by leaf returns a single leaf for it: nothing to map.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import is_map_params_placeholder
      >>> is_map_params_placeholder({"w": jnp.zeros(3)})
      False
    """
    structure = jax.tree.structure(like)
    # A container of parameters has `None` in place of those that are elsewhere, and each is a node.
    return structure.num_nodes == 1 and not structure.num_leaves and not isinstance(like, dict | list | tuple | None)
