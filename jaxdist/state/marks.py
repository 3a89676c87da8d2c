"""The three marks, functions that map over trees with marks, and the parameter to which each leaf of a state belongs.

`placement` defines what the marks mean.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax

from .._core.types import AxisNames, PyTree, Shape

Resize = Literal["mean", "copy", "zero"]

# Placeholders for the axes of a two-level group, until the state is bound to names: the last axis, and the others.
INNER = "<inner>"
OUTER = "<outer>"

# The index of a leaf of a state that belongs to no parameter.
NO_PARAMETER = -1


class Mark:
    """The base of the marks: JAX flattens and rebuilds them by the names of their fields."""

    # Every call of a step flattens and rebuilds all marks: without a dict for each that is cheaper.
    __slots__ = ("value",)

    value: Any


# A bound method of C: JAX calls it at every node of every tree.
is_mark: Callable[[Any], bool] = Mark.__instancecheck__


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("axis", "resize"))
class PerWorker(Mark):
    """Marks a leaf, or a tree of leaves, that differs between workers.

    Args:
      value: one worker's array `[*s]` (or a tree of them); globally `[W, *s]`. Typed keys are folded with the worker's
        number when the global arrays are made.
      axis: the mesh axis or axes it differs over; `None`: the axis with which the state is placed.
      resize: what workers get when their number changes: the `"mean"` over the old ones (residuals: the update
        not yet delivered is the mean), a `"copy"` of worker `i mod W`, or `"zero"`. Workers keep their keys by any
        rule.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import PerWorker
      >>> PerWorker(jnp.zeros(3), axis="data").value.shape
      (3,)
    """

    __slots__ = ("axis", "resize")

    def __init__(self, value: Any, *, axis: AxisNames = None, resize: Resize = "mean"):
        if resize not in ("mean", "copy", "zero"):
            raise ValueError(f'resize must be "mean", "copy" or "zero", got {resize!r}')
        self.value, self.axis = value, axis
        self.resize: Resize = resize

    def __repr__(self) -> str:
        return f"PerWorker({self.value!r}, axis={self.axis!r})"


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("shape", "axis", "multiple"))
class Sharded(Mark):
    """Marks one array that is flattened, padded and split over the workers.

    Args:
      value: the whole array as written, `[*s]`; globally `[W·n]`; as a worker sees it, `[n]`.
      shape: the logical shape `s`; taken from `value` when it is left out.
      axis: the mesh axis or axes it is split over; `None`: the axis with which the state is placed.
      multiple: `n` is padded to a multiple of this (block sizes of a quantizer).

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import Sharded
      >>> Sharded(jnp.zeros((3, 5)), axis="data").shape
      (3, 5)
    """

    __slots__ = ("axis", "multiple", "shape")

    def __init__(self, value: Any, *, shape: Shape | None = None, axis: AxisNames = None, multiple: int = 1):
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {multiple}")
        self.value, self.axis, self.multiple = value, axis, multiple
        self.shape = tuple(value.shape) if shape is None else tuple(shape)

    def __repr__(self) -> str:
        return f"Sharded({self.value!r}, shape={self.shape}, axis={self.axis!r})"


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=())
class OnHost(Mark):
    """Marks a leaf, or another mark, whose arrays are in host memory (memory kind `pinned_host`).

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import OnHost, PerWorker
      >>> OnHost(PerWorker(jnp.zeros(3))).value
      PerWorker(Array([0., 0., 0.], dtype=float32), axis=None)
    """

    __slots__ = ()

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return f"OnHost({self.value!r})"


MARKS = (PerWorker, Sharded, OnHost)


def axis_tuple(axis: AxisNames) -> tuple[str, ...]:
    """`"data"` -> `("data",)`, `None` -> `()`."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def bind(tree: PyTree, axis: AxisNames) -> PyTree:
    """Sets the axis of every mark without one. `axis=None` (a single worker) binds to `()`: no leading dimension."""
    axes = axis_tuple(axis)

    def bind_mark(node):
        if isinstance(node, OnHost):
            return OnHost(bind(node.value, axis))
        if isinstance(node, PerWorker):
            # From the inside out, so that nested marks are compared by their final axes.
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
    # Slow links come first, and the fast axis last.
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
    # A copy keeps the other fields, whatever the kind of mark.
    new = copy.copy(mark)
    new.value = value
    return new


class MarkedLeaf(NamedTuple):
    """A leaf, the marks around it from the outermost inwards, and its path, in which marks do not count."""

    marks: tuple[Any, ...]
    path: tuple[Any, ...]
    value: Any


def flatten_marks(tree: PyTree) -> list[MarkedLeaf]:
    """The leaves of a tree, in the order of `jax.tree.leaves`, with the marks around each."""
    found: list[MarkedLeaf] = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_mark):
        if is_mark(node):
            found += [
                MarkedLeaf((node, *marks), path + inside, leaf) for marks, inside, leaf in flatten_marks(node.value)
            ]
        else:
            found.append(MarkedLeaf((), path, node))
    return found


def map_marked(f: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` whose function also gets the marks around each leaf: `f(marks, leaf, *other_leaves)`.

    `marks` is ordered from the outermost inwards. The result has the same marks; those of the other trees may differ.
    """
    marks = [leaf.marks for leaf in flatten_marks(tree)]
    return jax.tree.structure(tree).unflatten([*map(f, marks, *map(jax.tree.leaves, (tree, *rest)))])


def name_leaf(what: str, path: Any) -> str:
    """Names a leaf for messages, `the gradient ['w']`; `the gradient` if the tree is a single leaf."""
    return f"{what} {jax.tree_util.keystr(path)}" if path else what


def beside(
    init: Callable[[PyTree], PyTree], state: PyTree, params: PyTree, *, is_leaf: Callable[[Any], bool] = lambda _: False
) -> PyTree:
    """The index of the parameter to which each leaf of a state belongs, or `NO_PARAMETER`; shapes may differ.

    Args:
      init: the optimizer's `init`, to find the paths if the parameters are a single array, without a path.
      state: the state that `init` or an update returned; it may have marks.
      params: the parameters, or their shapes.
      is_leaf: recognizes nodes that replace an array of the state, such as encoded ones.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from jaxdist.state.marks import beside
      >>> params, tx = {"a": jnp.zeros(2), "b": jnp.zeros(3)}, optax.trace(0.9)
      >>> beside(tx.init, tx.init(params), params).trace
      {'a': 0, 'b': 1}
    """
    # Paths are compared by their ends. `optax.tree.map_params` calls `init` with a placeholder without paths, names or
    # entries: functions that label the entries of a dict, and states with several arrays for a parameter (SM3), fail.
    structure = jax.tree.structure(state)
    if jax.tree_util.all_leaves([params]):
        # A single array has no path; any name gives it one, in the state too.
        params = {"the only parameter": params}
        state = jax.eval_shape(init, params)
    numbers = {tuple(path): k for k, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    longest = max(map(len, numbers), default=0)

    def number(path: tuple[Any, ...]) -> int:
        # The longest one: `['a']['w']` ends in `['w']` too.
        ends = (path[-length:] for length in range(min(longest, len(path)), 0, -1))
        return next((numbers[end] for end in ends if end in numbers), NO_PARAMETER)

    found: list[int] = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: is_mark(x) or is_leaf(x)):
        # A mark or an encoded array may have several leaves, which all belong to its parameter.
        found += [number(tuple(path))] * len(jax.tree.leaves(node))
    return structure.unflatten(found)
