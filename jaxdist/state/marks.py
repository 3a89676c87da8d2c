"""The three marks, and functions that map over trees with marks. `placement` defines what they mean."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from .._core.types import AxisNames, PyTree, Shape

Resize = Literal["mean", "copy", "zero"]

# Placeholders for the axes of a two-level group, until the state is bound to names: the last axis, and the others.
INNER = "<inner>"
OUTER = "<outer>"


@jax.tree_util.register_pytree_with_keys_class
class PerWorker:
    """Marks a leaf, or a tree of leaves, that differs between workers.

    Args:
      value: one worker's array `[*s]` (or a tree of them); globally `[W, *s]`.
      axis: the mesh axis or axes it differs over; `None`: the axis with which the state is placed.
      resize: what workers get when their number changes: the `"mean"` over the old ones (residuals: the update
        not yet delivered is the mean), a `"copy"` of worker `i mod W`, or `"zero"`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist import PerWorker
      >>> PerWorker(jnp.zeros(3), axis="data").value.shape
      (3,)
    """

    __slots__ = ("axis", "resize", "value")

    def __init__(self, value: Any, *, axis: AxisNames = None, resize: Resize = "mean"):
        if resize not in ("mean", "copy", "zero"):
            raise ValueError(f'resize must be "mean", "copy" or "zero", got {resize!r}')
        self.value, self.axis = value, axis
        self.resize: Resize = resize

    def tree_flatten_with_keys(self):
        """The value is the only child."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), (self.axis, self.resize)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse."""
        return cls(children[0], axis=aux[0], resize=aux[1])

    def __repr__(self) -> str:
        return f"PerWorker({self.value!r}, axis={self.axis!r})"


@jax.tree_util.register_pytree_with_keys_class
class Sharded:
    """Marks one array that is flattened, padded and split over the workers.

    Args:
      value: the whole array as written, `[*s]`; globally `[W·n]`; as a worker sees it, `[n]`.
      shape: the logical shape `s`; taken from `value` when it is left out.
      axis: the mesh axis or axes it is split over; `None`: the axis with which the state is placed.
      multiple: `n` is padded to a multiple of this (block sizes of a quantizer).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist import Sharded
      >>> Sharded(jnp.zeros((3, 5)), axis="data").shape
      (3, 5)
    """

    __slots__ = ("axis", "multiple", "shape", "value")

    def __init__(self, value: Any, *, shape: Shape | None = None, axis: AxisNames = None, multiple: int = 1):
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {multiple}")
        self.value, self.axis, self.multiple = value, axis, multiple
        self.shape = tuple(value.shape) if shape is None else tuple(shape)

    def tree_flatten_with_keys(self):
        """The value is the only child."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), (self.shape, self.axis, self.multiple)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse."""
        return cls(children[0], shape=aux[0], axis=aux[1], multiple=aux[2])

    def __repr__(self) -> str:
        return f"Sharded({self.value!r}, shape={self.shape}, axis={self.axis!r})"


@jax.tree_util.register_pytree_with_keys_class
class OnHost:
    """Marks a leaf, or another mark, whose arrays are in host memory (memory kind `pinned_host`).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist import OnHost, PerWorker
      >>> OnHost(PerWorker(jnp.zeros(3))).value
      PerWorker(Array([0., 0., 0.], dtype=float32), axis=None)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten_with_keys(self):
        """The value is the only child."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse."""
        del aux
        return cls(children[0])

    def __repr__(self) -> str:
        return f"OnHost({self.value!r})"


MARKS = (PerWorker, Sharded, OnHost)


def is_mark(x: Any) -> bool:
    """Checks whether `x` is one of the three marks."""
    return isinstance(x, MARKS)


def axis_tuple(axis: AxisNames) -> tuple[str, ...]:
    """`"data"` -> `("data",)`, `None` -> `()`."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def bind(tree: PyTree, axis: AxisNames) -> PyTree:
    """Sets the axis of every mark without one. `axis=None` (a single worker) binds to `()`: no leading dimension.

    Raises:
      ValueError: a mark is inside another one over the same axis, or a hierarchical reducer has one axis.
    """
    axes = axis_tuple(axis)

    def bind_mark(node):
        if isinstance(node, OnHost):
            return OnHost(bind(node.value, axis))
        if isinstance(node, PerWorker):
            value, over = bind(node.value, axis), _resolve_axis(node.axis, axes)
            _check_nesting(value, over)
            return PerWorker(value, axis=over, resize=node.resize)
        if isinstance(node, Sharded):
            over = _resolve_axis(node.axis, axes)
            return Sharded(node.value, shape=node.shape, axis=over, multiple=node.multiple)
        return node

    return jax.tree.map(bind_mark, tree, is_leaf=is_mark)


def _resolve_axis(name: AxisNames, axes: tuple[str, ...]) -> AxisNames:
    """The axis of a mark whose axis may be missing, or a placeholder."""
    if name is None:
        return axes
    if isinstance(name, tuple):
        return tuple(part for inside in name for part in axis_tuple(_resolve_axis(inside, axes)))
    if name not in (INNER, OUTER):
        return name
    if len(axes) < 2:
        raise ValueError(f"a hierarchical reducer needs two axes, (slow, fast), got axis={axes}")
    return axes[-1:] if name == INNER else axes[:-1]


def _check_nesting(value: PyTree, outer: AxisNames) -> None:
    """Checks that no mark inside a `PerWorker` mark has one of its axes."""
    for inside in jax.tree.leaves(value, is_leaf=is_mark):
        if isinstance(inside, OnHost):
            _check_nesting(inside.value, outer)
        elif is_mark(inside) and (shared := set(axis_tuple(inside.axis)) & set(axis_tuple(outer))):
            raise ValueError(
                f"a {type(inside).__name__} leaf over axis {', '.join(sorted(shared))} is inside a PerWorker one over "
                "the same axis, over which workers differ already; a transformation that communicates inside "
                "local_steps, noloco or gossip needs another axis than they have: "
                "zero_redundancy(..., axis='chip') inside local_steps(..., axis='pod')"
            )


def with_value(mark: Any, value: Any) -> Any:
    """Puts the same mark around another value."""
    _, aux = mark.tree_flatten_with_keys()
    return type(mark).tree_unflatten(aux, (value,))


def map_marked(f: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` whose function also gets the marks around each leaf: `f(marks, leaf, *other_leaves)`.

    `marks` is ordered from the outermost inwards. The result has the same marks.
    """

    def walk(marks, node, *others):
        if not is_mark(node):
            return f(marks, node, *others)
        inside = [node.value, *(other.value for other in others)]
        return with_value(node, jax.tree.map(lambda *nodes: walk((*marks, node), *nodes), *inside, is_leaf=is_mark))

    return jax.tree.map(lambda *nodes: walk((), *nodes), tree, *rest, is_leaf=is_mark)


def named(what: str, path: Any) -> str:
    """Names a leaf for messages, `the gradient ['w']`; `the gradient` if the tree is a single leaf."""
    return f"{what} {jax.tree_util.keystr(path)}" if path else what


class _Named(tuple):
    """A (path, leaf) pair that pytrees treat as a leaf."""


def map_marked_with_path(f: Callable[..., Any], tree: PyTree) -> PyTree:
    """`map_marked` of a single tree whose function also gets the path: `f(marks, path, leaf)`."""
    named = jax.tree_util.tree_map_with_path(lambda path, leaf: _Named((path, leaf)), tree)
    return map_marked(lambda marks, pair: f(marks, *pair), named)
