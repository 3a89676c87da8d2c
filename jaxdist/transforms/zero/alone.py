"""A single worker, `axis=None`, has cut leaves whole, as they were written: here as one piece each, and back."""

from typing import Any

import jax

from ..._marks import Sharded, axis_tuple, with_value
from ..._typing import AxisNames, PyTree
from .flat import joined, rows


def cut_alone(tree: PyTree, axis: AxisNames) -> PyTree:
    """Cut leaves flat and padded, if there is no axis."""
    if axis_tuple(axis):
        return tree
    return jax.tree.map(lambda x: with_value(x, rows(x.value, 1)[0]) if _is_cut(x) else x, tree, is_leaf=_is_cut)


def whole_again(tree: PyTree, like: PyTree, axis: AxisNames) -> PyTree:
    """The inverse."""
    if axis_tuple(axis):
        return tree

    def one(x, before):
        return with_value(x, joined(x.value, before.value)) if _is_cut(x) else x

    return jax.tree.map(one, tree, like, is_leaf=_is_cut)


def _is_cut(x: Any) -> bool:
    return isinstance(x, Sharded)
