"""The three marks, functions that map over trees with marks, and the view that one worker has of a marked state.

`placement` makes the global arrays that the marks mean.
"""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from .._core.checks import check_range
from .._core.compat import varying_axes
from .._core.trees import is_overwritten, leaf_name, leaves_with_collections
from .._core.types import AxisNames, PyTree, Shape, State

Resize = Literal["mean", "copy", "zero", "max"]

# The names and shapes of the leaves whose entries an array has one after another, which its own shape does not show.
LeafOrder = tuple[tuple[str, Shape], ...]

# Of an order, how many leaves a message names.
SHOWN_LEAVES = 4

# Placeholders for the axes of a two-level group, until the state is bound to names: the last axis, and the others.
INNER = "<inner>"
OUTER = "<outer>"

# The index of a leaf of a state that belongs to no parameter.
NO_PARAMETER = -1

SHARDED_PARAMETERS = (
    "jaxdist: a Sharded parameter is one worker's part of it. Wrap the function that computes with it in "
    "zero.gathered: local_value_and_grad(zero.gathered(loss))."
)

# `f(x)` is `isinstance(x, PartitionSpec)`; JAX would flatten a spec as a tuple.
is_spec = PartitionSpec.__instancecheck__


class Mark:
    """The base of the marks: JAX flattens and rebuilds them by the names of their fields."""

    # Every call of a step flattens and rebuilds all marks: without a dict for each that is cheaper.
    __slots__ = ("value",)

    value: Any


# A bound method of C: JAX calls it at every node of every tree.
is_mark: Callable[[Any], bool] = Mark.__instancecheck__


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("axis", "resize", "order"))
class PerWorker(Mark):
    """Marks a leaf, or a tree of leaves, that differs between workers.

    Args:
      value: one worker's array `[*s]` (or a tree of them); globally `[W, *s]`. Typed keys are folded with the worker's
        number when the global arrays are made.
      axis: the mesh axis or axes it differs over; `None`: the axis with which the state is placed.
      resize: what workers get when their number changes: the `"mean"` over the old ones (residuals: the update
        not yet delivered is the mean), a `"copy"` of worker `i mod W`, `"zero"`, or the `"max"` over the old ones.
        Workers keep their keys by any rule; in place of the mean there is a copy of encoded arrays, and the maximum of
        the fp8 statistics of flax (`agree_on_maximum`).
      order: the names and shapes of the leaves, `(("b", (4,)), ("w", (6, 4)))`, that follow one another in a flat
        `value`. A checkpoint records them, and is not restored into a state that has others.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import PerWorker
      >>> PerWorker(jnp.zeros(3), axis="data").value.shape
      (3,)
    """

    __slots__ = ("axis", "order", "resize")

    def __init__(self, value: Any, *, axis: AxisNames = None, resize: Resize = "mean", order: LeafOrder | None = None):
        if resize not in ("mean", "copy", "zero", "max"):
            raise ValueError(f'resize must be "mean", "copy", "zero" or "max", got {resize!r}')
        self.value, self.axis, self.order = value, axis, order
        self.resize: Resize = resize

    def __repr__(self) -> str:
        return f"PerWorker({self.value!r}, axis={self.axis!r})"


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("shape", "axis", "multiple", "order"))
class Sharded(Mark):
    """Marks one array that is flattened, padded and split over the workers.

    Args:
      value: the whole array as written, `[*s]`; globally `[W·n]`; as a worker sees it, `[n]`.
      shape: the logical shape `s`; taken from `value` when it is left out.
      axis: the mesh axis or axes it is split over; `None`: the axis with which the state is placed.
      multiple: `n` is padded to a multiple of this (block sizes of a quantizer).
      order: the leaves that a flat `value` consists of, as in `PerWorker`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import Sharded
      >>> Sharded(jnp.zeros((3, 5)), axis="data").shape
      (3, 5)
    """

    __slots__ = ("axis", "multiple", "order", "shape")

    def __init__(
        self,
        value: Any,
        *,
        shape: Shape | None = None,
        axis: AxisNames = None,
        multiple: int = 1,
        order: LeafOrder | None = None,
    ):
        check_range("multiple", multiple, 1, ends="[]")
        self.value, self.axis, self.multiple, self.order = value, axis, multiple, order
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
            return PerWorker(value, axis=over, resize=node.resize, order=node.order)
        if isinstance(node, Sharded):
            over = _resolve_axis(node.axis, axes)
            return Sharded(node.value, shape=node.shape, axis=over, multiple=node.multiple, order=node.order)
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
                "zero_redundancy(..., axis='chip') or per_worker(..., axis='chip') inside local_steps(..., axis='pod')"
            )


def with_value(mark: Any, value: Any) -> Any:
    """Puts the same mark, with its axis and its other fields, around another value.

    Examples:
      >>> from jaxdist import PerWorker
      >>> from jaxdist.state import with_value
      >>> with_value(PerWorker(1.0, axis="data", resize="zero"), 2.0)
      PerWorker(2.0, axis='data')
    """
    # A copy keeps the other fields, whatever the kind of mark.
    new = copy.copy(mark)
    new.value = value
    return new


def record_order(state: State, order: LeafOrder) -> State:
    """Records of which leaves the vectors consist whose state this is, in all marks that do not hold numbers alone."""

    def record(node: Any) -> Any:
        if not is_mark(node):
            return node
        new = with_value(node, jax.tree.map(record, node.value, is_leaf=is_mark))
        # Whatever the shape: it may be that of codes.
        if not isinstance(new, OnHost) and any(x.ndim for x in jax.tree.leaves(new.value)):
            new.order = order
        return new

    return jax.tree.map(record, state, is_leaf=is_mark)


def order_of(marks: Sequence[Any]) -> LeafOrder | None:
    """The order of leaves that is recorded in the marks around an array, or `None`."""
    found = [mark.order for mark in marks if not isinstance(mark, OnHost) and mark.order is not None]
    return found[-1] if found else None


def read_order(described: Sequence[Any]) -> LeafOrder:
    """The order of leaves that JSON holds as lists of a name and a shape."""
    return tuple((name, tuple(shape)) for name, shape in described)


def show_orders(order: LeafOrder, other: LeafOrder) -> tuple[str, str]:
    """Two orders of leaves for a message: both from their first difference on, as far as there is room."""
    first = next(i for i, pair in enumerate(itertools.zip_longest(order, other)) if len({*pair}) > 1)
    return _show_order(order, first), _show_order(other, first)


def _show_order(order: LeafOrder, first: int) -> str:
    shown = [f"{name} {list(shape)}" for name, shape in order[first : first + SHOWN_LEAVES]]
    return ", ".join(["..."] * (first > 0) + shown + ["..."] * (first + SHOWN_LEAVES < len(order)))


class MarkedLeaf(NamedTuple):
    """A leaf, the marks around it from the outermost inwards, and its path, in which marks do not count."""

    marks: tuple[Any, ...]
    path: tuple[Any, ...]
    value: Any


class Inseparable:
    """A base of nodes whose arrays belong together, as codes and their scales do: no mean is taken of them."""

    __slots__ = ()


def flatten_marks(tree: PyTree) -> list[MarkedLeaf]:
    """The leaves of a tree, in the order of `jax.tree.leaves`, with the marks around each."""
    return [leaf for leaf, *_ in _flatten_marks(tree, together=False)]


def merging_rules(tree: PyTree) -> list[Resize]:
    """What becomes of each leaf, in the order of `jax.tree.leaves`, where workers are merged into one.

    Usually the mean; of arrays that belong together a copy, and of the fp8 statistics of flax the maximum.
    """
    return [
        "copy" if bound else "max" if is_overwritten(named) else "mean"
        for _, bound, named in _flatten_marks(tree, together=False)
    ]


def _flatten_marks(tree: PyTree, *, together: bool) -> list[tuple[MarkedLeaf, bool, Any]]:
    """Also returns whether a leaf is inside a `Inseparable`, and the path by which `is_overwritten` knows it."""

    def is_end(node: Any) -> bool:
        return is_mark(node) or (isinstance(node, Inseparable) and not together)

    found: list[tuple[MarkedLeaf, bool, Any]] = []
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_end)
    for (path, node), (above, _) in zip(nodes, leaves_with_collections(tree, is_end, nodes), strict=True):
        if is_mark(node):
            for leaf, bound, inside in _flatten_marks(node.value, together=together):
                named = (*above, *inside)
                rule: Resize | None = "copy" if bound else "max" if is_overwritten(named) else None
                marks = (node if rule is None else _instead_of_mean(node, rule), *leaf.marks)
                found.append((MarkedLeaf(marks, path + leaf.path, leaf.value), bound, named))
        elif is_end(node):
            found += [
                (x._replace(path=path + x.path), True, (*above, *inside))
                for x, _, inside in _flatten_marks(node, together=True)
            ]
        else:
            found.append((MarkedLeaf((), path, node), together, above))
    return found


def _instead_of_mean(mark: Any, rule: Resize) -> Any:
    """The mark, with another rule in place of the mean."""
    is_mean = isinstance(mark, PerWorker) and mark.resize == "mean"
    return PerWorker(mark.value, axis=mark.axis, resize=rule, order=mark.order) if is_mean else mark


def find_uneven(tree: PyTree) -> list[bool]:
    """Whether each leaf belongs to a state by which the workers' models do not count alike, in their order.

    Such a state has a method `weigh_drift`: push-sum weights, and messages under way. Neither its mean over workers nor
    that of the models beside it means anything for another number of workers.
    """

    def is_uneven(node: Any) -> bool:
        return hasattr(node, "weigh_drift")

    return jax.tree.leaves(
        jax.tree.map(lambda node: jax.tree.map(lambda _: is_uneven(node), node), tree, is_leaf=is_uneven)
    )


def warn_if_uneven(state: PyTree, counts: Iterable[tuple[str, Iterable[tuple[int, int]]]]) -> None:
    """Warns once if the number of workers changes of a leaf that `find_uneven` finds.

    Args:
      state: the state.
      counts: the name of each leaf, and its numbers of workers before and now; those of other leaves are not read.
    """
    for (name, changes), is_uneven in zip(counts, find_uneven(state), strict=True):
        changed = [(before, now) for before, now in changes if before != now] if is_uneven else []
        if changed:
            before, now = changed[0]
            warnings.warn(
                f"leaf `{name}` is for {before} workers whose models do not count alike in their mean (sgp on a "
                f"directed graph, osgp, relay_sgd), and {now} workers continue from the plain mean, which is another "
                f"model: to keep that of gossip, take decentralized.mean_params(params, opt_state) on {before} workers "
                "as the parameters, and make the state of the method anew with its init",
                stacklevel=3,
            )
            return


def map_marked(f: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` whose function also gets the marks around each leaf: `f(marks, leaf, *other_leaves)`.

    `marks` is ordered from the outermost inwards. The result has the same marks; those of the other trees may differ.
    """
    marks = [leaf.marks for leaf in flatten_marks(tree)]
    return jax.tree.structure(tree).unflatten([*map(f, marks, *map(jax.tree.leaves, (tree, *rest)))])


def cutting_marks(marks: Sequence[Any]) -> list[Any]:
    """The marks of a leaf, bound to axes, that have a leading dimension in its global array."""
    return [mark for mark in marks if not isinstance(mark, OnHost) and mark.axis]


def spec_of(marks: tuple[Any, ...]) -> PartitionSpec:
    """The PartitionSpec of a leaf inside these marks: one leading dimension for each mark that has an axis."""
    return PartitionSpec(*(spec_entry(mark.axis) for mark in cutting_marks(marks)))


def spec_entry(axis: AxisNames) -> Any:
    """The entry of a PartitionSpec for a dimension that is split over one axis or several."""
    names = axis_tuple(axis)
    return names[0] if len(names) == 1 else names


def expand_specs(specs: PyTree, tree: PyTree, name: str = "specs") -> PyTree:
    """Expands a prefix of a tree to one PartitionSpec for each leaf; raises ValueError if it is none."""
    try:
        return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(_explain_specs(name, specs, tree)) from error


def _explain_specs(name: str, specs: PyTree, tree: PyTree) -> str:
    given = [path for path, _ in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)]
    leaves = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    without = [path for path in leaves if not any(path[: len(spec)] == spec for spec in given)]
    unused = [spec for spec in given if not any(path[: len(spec)] == spec for path in leaves)]
    found = [f"there is none for {jax.tree_util.keystr(path)}" for path in without[:1]]
    found += [f"nothing is at {jax.tree_util.keystr(spec)}" for spec in unused[:1]]
    types = f"they are a {type(specs).__name__} for a {type(tree).__name__}"
    return (
        f"{name} must have a PartitionSpec for each array, in a tree like theirs or a prefix of it: "
        f"{', and '.join(found) or types}"
    )


def split_axes(specs: Sequence[PartitionSpec]) -> list[list[tuple[str, ...]]]:
    """The mesh axes along each dimension of each spec."""
    return [[axis_tuple(part) for part in spec] for spec in specs]


def name_leaf(what: str, path: Any) -> str:
    """Names a leaf for messages, `the gradient ['w']`; `the gradient` if the tree is a single leaf."""
    return f"{what} {jax.tree_util.keystr(path)}" if path else what


def parameter_indices(
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
      >>> from jaxdist.state.marks import parameter_indices
      >>> params, tx = {"a": jnp.zeros(2), "b": jnp.zeros(3)}, optax.trace(0.9)
      >>> parameter_indices(tx.init, tx.init(params), params).trace
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


class WorkerView(NamedTuple):
    """How a state with bound marks is split over mapped axes, one entry for each leaf.

    Attributes:
      specs: the PartitionSpecs over these axes; all other axes are left to the compiler.
      dimensions: those dimensions of a worker's block that have length 1, because they index workers.
    """

    specs: list[PartitionSpec]
    dimensions: list[list[int]]


def view_of(state: State, axes: Sequence[str]) -> WorkerView:
    """Finds out which dimensions of the leaves the mapped axes split."""
    specs, dimensions = [], []
    for leaf in flatten_marks(state):
        marks = cutting_marks(leaf.marks)
        # The axes of a mark are mapped all or not at all.
        entries = [spec_entry(mark.axis) if set(axis_tuple(mark.axis)) <= set(axes) else None for mark in marks]
        specs.append(PartitionSpec(*entries))
        dimensions.append([i for i, mark in enumerate(marks) if entries[i] and isinstance(mark, PerWorker)])
    return WorkerView(specs, dimensions)


def check_usable(state: State) -> None:
    """Checks that no array of the state has been donated: such an array may end the process, without an exception."""
    _check_not_deleted(
        state,
        "the state",
        "an earlier call donated it, since distribute() reuses the memory of the state that it gets. Go on with the "
        "state that the step returns, state, metrics = step(state, batch), or use distribute(..., donate=False)",
    )


def check_batch_usable(batch: PyTree) -> None:
    """Checks that no array of a batch has been donated."""
    _check_not_deleted(
        batch,
        "the batch",
        "an earlier call donated it, or was given a state with the same array. Load it again, or copy it, "
        "jnp.copy(x), before that call",
    )


def _check_not_deleted(tree: PyTree, whole: str, advice: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            name = f"leaf `{leaf_name(path)}` of {whole}" if path else whole
            raise ValueError(f"{name} has been deleted: {advice}")


def run_in_view(
    step: Callable[..., Any], view: WorkerView, state: State, batch: PyTree, **static: Any
) -> tuple[State, Any]:
    """Runs the step of one worker on its blocks of the state, without worker dimensions and marks around fields."""
    leaves, structure = jax.tree.flatten(state)
    squeezed = structure.unflatten([*map(jnp.squeeze, leaves, view.dimensions)])
    opened = _map_fields(lambda field: field.value if is_mark(field) else field, squeezed)
    try:
        new, metrics = step(opened, batch, **static)
    except AttributeError as error:
        if error.name == "value":
            error.add_note(
                "jaxdist: a mark around the whole state, or around a whole field, is removed before the step sees it. "
                'The state of a transformation or a reducer needs its marks: nest it deeper, {"opt": tx.init(x)}.'
            )
        elif "Sharded" in str(error):
            error.add_note(SHARDED_PARAMETERS)
        raise
    except TypeError as error:
        if "Sharded" in str(error):
            error.add_note(SHARDED_PARAMETERS)
        raise
    return _close_state(new, state, view), metrics


def _close_state(new: State, old: State, view: WorkerView) -> State:
    """Restores the marks and worker dimensions of the old block, whose tree, shapes and dtypes the step must keep."""
    new = _map_fields(
        lambda field, before: with_value(before, field) if is_mark(before) and not is_mark(field) else field, new, old
    )
    leaves, found = jax.tree.flatten(new)
    expected = jax.tree.structure(old)
    if found != expected:
        trees = f"  received {expected}\n  returned {found}"
        advice = explain_new_tree(old, new)
        raise ValueError(advice or f"the step returned a state with another tree than it received:\n{trees}")
    leaves = [*map(jnp.expand_dims, leaves, view.dimensions)]
    for (path, before), leaf in zip(jax.tree_util.tree_leaves_with_path(old), leaves, strict=True):
        if leaf.shape != before.shape or leaf.dtype != before.dtype:
            name = f"leaf `{leaf_name(path)}` of the state" if path else "the state"
            raise ValueError(
                f"{name} was {before.dtype}{list(before.shape)} before the step and is now "
                f"{leaf.dtype}{list(leaf.shape)}: {_explain_new_type(old, path, before, leaf)}"
            )
    return found.unflatten(leaves)


def explain_new_tree(old: State, new: State) -> str | None:
    """Returns advice if the state of one optimizer in a train state has another tree than before, or `None`."""
    pairs = zip(_optimizer_states(old), _optimizer_states(new), strict=False)
    # The last is the innermost: a chain contains its parts.
    changed = [(a, b) for (_, a), (_, b) in pairs if jax.tree.structure(a) != jax.tree.structure(b)]
    if not changed or type(changed[-1][0]) is not type(changed[-1][1]):
        return None
    name = type(changed[-1][0]).__name__
    return (
        f"the optimizer's state {name} has another tree after the update than before it, and a compiled step must keep "
        "it. optax.monitor begins without its measurements: use optax.snapshot, or return them as metrics of the step, "
        "{'norm': jd.zero.global_norm(gradients)}"
    )


def _explain_new_type(state: State, path: Any, before: Any, after: Any) -> str:
    inside = any(tuple(path[: len(place)]) == place for place, _ in _optimizer_states(state))
    if inside and before.shape == after.shape:
        return (
            "the optimizer keeps it in another dtype from its first update on, as some do for parameters of several "
            "dtypes or of half precision: use zero_redundancy(optimizer, master_dtype=jnp.float32), or parameters in "
            "float32"
        )
    return "a step must keep shapes and dtypes"


def _optimizer_states(state: State) -> list[tuple[Any, Any]]:
    """The states of optax in a train state and their paths, each before its parts."""

    def is_optimizer(node: Any) -> bool:
        return isinstance(node, tuple) and type(node).__module__.startswith("optax")

    found = []
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_optimizer)[0]:
        if is_optimizer(node):
            # As a plain tuple, whose parts are found in turn.
            parts = [((*path, *place), part) for place, part in _optimizer_states(tuple(node))]
            found += [(tuple(path), node), *parts]
    return found


@functools.cache
def _declares_marks(kind: type) -> bool:
    """Whether the fields of a state are typed as marks: its own functions look for these, as a reducer's do."""
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError):  # annotations in strings that name what the module does not have
        hints = getattr(kind, "__annotations__", {})
    return any(hint in MARKS for hint in hints.values())


def _map_fields(f: Any, state: State, *rest: State) -> State:
    """Maps over the direct children of a state: the fields of a NamedTuple, the entries of a dict."""

    def fields(tree):
        return jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)

    if _declares_marks(type(state)):
        return state
    if is_mark(state) or (rest and is_mark(rest[0])) or jax.tree_util.all_leaves([state]):
        return f(state, *rest)
    children, structure = fields(state)
    others = [fields(tree)[0] for tree in rest]
    # A step that adds or drops fields is reported by `_close_state`.
    if any(len(other) != len(children) for other in others):
        return state
    return structure.unflatten([f(*group) for group in zip(children, *others, strict=True)])


def check_agreed(tree: PyTree, axes: Sequence[str], *, what: str, advise: Callable[[Any], str]) -> None:
    """Checks that no leaf outside marks is typed as differing between workers; `advise(path)` says what to do."""
    for marks, path, leaf in flatten_marks(tree):
        over = {name for mark in cutting_marks(marks) for name in axis_tuple(mark.axis)}
        differs = varying_axes(leaf) & set(axes) - over
        if differs:
            name = f"{what} `{leaf_name(path)}`" if path else what
            raise ValueError(f"{name} differs between workers (axis {', '.join(sorted(differs))}): {advise(path)}")
