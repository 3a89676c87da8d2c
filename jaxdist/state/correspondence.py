"""The correspondence between the leaves of an optimizer's state and the parameters, by the ends of their paths.

`optax.tree.map_params` calls `init` with a placeholder for the parameters, which has no paths, names or entries:
functions that label the entries of a dict, and states with several arrays for a parameter (SM3), fail there.
"""

from collections.abc import Callable
from typing import Any

import jax

from .._core.types import PyTree
from .marks import is_mark

NONE = -1


def beside(
    init: Callable[[PyTree], PyTree],
    state: PyTree,
    params: PyTree,
    *,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> PyTree:
    """The index of the parameter to which each leaf of a state belongs, or `NONE`; shapes may differ.

    Args:
      init: the optimizer's `init`, to find the paths if the parameters are a single array, without a path.
      state: the state that `init` or an update returned; it may have marks.
      params: the parameters, or their shapes.
      is_leaf: recognizes nodes that replace an array of the state, such as encoded ones.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxdist.state.correspondence import beside
      >>> params, tx = {"a": jnp.zeros(2), "b": jnp.zeros(3)}, optax.trace(0.9)
      >>> beside(tx.init, tx.init(params), params).trace
      {'a': 0, 'b': 1}
    """
    structure = jax.tree.structure(state)
    if jax.tree_util.all_leaves([params]):
        params = {"the only parameter": params}
        state = jax.eval_shape(init, params)
    numbers = {tuple(path): k for k, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    longest = max(map(len, numbers), default=0)

    def number(path: tuple[Any, ...]) -> int:
        # The longest one: `['a']['w']` ends in `['w']` too.
        ends = (path[-length:] for length in range(min(longest, len(path)), 0, -1))
        return next((numbers[end] for end in ends if end in numbers), NONE)

    found: list[int] = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: is_mark(x) or is_leaf(x)):
        found += [number(tuple(path))] * len(jax.tree.leaves(node))
    return structure.unflatten(found)
