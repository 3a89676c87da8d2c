"""Small functions over pytrees and their paths."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .compat import host_compute, is_on_host
from .dtypes import widen, working_dtype
from .types import Array, Flag, Int, PyTree, State


def select_leaves(tree: PyTree, members: Collection[int]) -> PyTree:
    """The tree with `None` in place of all leaves but those at these positions: a leaf keeps its path."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = set(members)
    return structure.unflatten([leaf if i in chosen else None for i, leaf in enumerate(leaves)])


def tree_where(condition: Flag, yes: PyTree, no: PyTree) -> PyTree:
    """`jnp.where` for each leaf of two trees; a static condition returns one of them as it is.

    Arrays in host memory stay there, and the host selects.
    """
    if isinstance(condition, bool):
        return yes if condition else no
    return jax.tree.map(partial(_where, condition), yes, no)


def _where(condition: Array, x: Array, y: Array) -> Array:
    if not is_on_host(x):
        return jnp.where(condition, x, y)
    select = host_compute(lambda *operands: [jnp.where(*operands)], 1)
    return select(jax.device_put(condition, jax.memory.Space.Host), x, y)[0]


def to_device(x: Array) -> Array:
    """Copies an array in host memory to the device; others stay where they are."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def wide(tree: PyTree) -> PyTree:
    """Casts each leaf to float32, unless it is wider."""
    return jax.tree.map(widen, tree)


def plus(tree: PyTree, steps: PyTree) -> PyTree:
    """`tree + steps` in float32 or better."""
    return jax.tree.map(lambda x, u: widen(x) + u.astype(working_dtype(x.dtype)), tree, steps)


def minus(tree: PyTree, other: PyTree) -> PyTree:
    """`tree - other` in float32 or better."""
    return jax.tree.map(lambda x, y: widen(x) - y.astype(working_dtype(x.dtype)), tree, other)


def leaf_name(path: Any, whole: str = "state") -> str:
    """Names a leaf for messages, `opt_state.0.residual.w`, without the `value` of marks; a single leaf is `whole`."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return ".".join(part for part in parts if part != "value") or whole


def named_leaves(
    tree: PyTree, whole: str = "state", is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with a name of its own.

    `leaf_name` leaves out what marks add to a path, and with it a key "value" of the caller, and a dot may be a letter
    of a key. Where two leaves have one name, both get their whole path.

    Examples:
      >>> named_leaves({"b": 1, "value": {"w": 2}})
      [('b', 1), ('w', 2)]
      >>> named_leaves({"w": 1, "value": {"w": 2}})
      [("['value']['w']", 2), ("['w']", 1)]
    """
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    names = [leaf_name(path, whole) for path, _ in found]
    times = Counter(names)
    return [
        (name if times[name] == 1 else jax.tree_util.keystr(path), leaf)
        for name, (path, leaf) in zip(names, found, strict=True)
    ]


# The collection of flax, whose "gradient" is no derivative but the next value of the leaf.
OVERWRITTEN = "_overwrite_with_gradient"
# Where a program that has Variables of nnx has imported them.
VARIABLES = "flax.nnx.variablelib"


def is_overwritten(path: Any) -> bool:
    """Checks whether a leaf is a value that its "gradient" replaces: a statistic of fp8, such as an amax history."""
    return any(jax.tree_util.keystr((key,), simple=True) == OVERWRITTEN for key in path)


def leaves_with_collections(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None, known: list[tuple[Any, Any]] | None = None
) -> list[tuple[Any, Any]]:
    """Returns paths and leaves in which `is_overwritten` also finds those that nnx keeps; `known` are those of JAX.

    A linen layer in nnx (`nnx.bridge`) has Variables of a class with the name of the collection, which no path has.
    """
    module = sys.modules.get(VARIABLES)
    # nnx makes the class for the first such layer.
    if module is None or all(kind.__name__ != OVERWRITTEN for kind in module.Variable.__subclasses__()):
        return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf) if known is None else known

    def is_statistic(node: Any) -> bool:
        return type(node).__name__ == OVERWRITTEN

    def is_end(node: Any) -> bool:
        return is_statistic(node) or (is_leaf is not None and is_leaf(node))

    found: list[tuple[Any, Any]] = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_end):
        if is_statistic(node):
            inside = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_leaf)
            found += [((*path, jax.tree_util.DictKey(OVERWRITTEN), *more), leaf) for more, leaf in inside]
        else:
            found.append((path, node))
    return found


def map_with_collections(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """`jax.tree_util.tree_map_with_path` with the paths of `leaves_with_collections`."""
    structure = jax.tree.structure(tree, is_leaf=is_leaf)
    rows = zip(leaves_with_collections(tree, is_leaf), *map(structure.flatten_up_to, rest), strict=True)
    return structure.unflatten([f(*named, *others) for named, *others in rows])


def next_count(count: Int[Array, "..."]) -> Int[Array, "..."]:
    """Increments a counter, saturating at the largest value of its dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import next_count
      >>> next_count(jnp.array([0, 127], jnp.int8)).tolist()
      [1, 127]
    """
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count)


def describe_structure(tree: PyTree) -> str:
    """Describes the structure of a tree, and the names of its leaves, as text that is the same in all processes."""
    # The static part of a node may hold functions, as that of Flax's `TrainState`, whose text has an address.
    structure = re.sub(r" at 0x[0-9a-fA-F]+", "", str(jax.tree.structure(tree)))
    # Of a NamedTuple it has the name of the class: two of them may have the same fields in another order.
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return f"{structure} of {', '.join(names)}"


def is_key(leaf: Any) -> bool:
    """Checks whether an array is a typed PRNG key."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fold_keys(state: State, data: Array | int) -> State:
    """Folds a number into the keys of a state, so that copies of the state draw different numbers."""
    return jax.tree.map(lambda leaf: _fold_in(leaf, data) if is_key(leaf) else leaf, state)


def fold_index(keys: Array) -> Array:
    """Folds its index along the first dimension into each key of an array `[W, *s]`."""
    return jax.vmap(_fold_in)(keys, jnp.arange(keys.shape[0]))


def _fold_in(keys: Array, data: Array | int) -> Array:
    """`jax.random.fold_in` for an array of keys of any shape."""
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, data)
