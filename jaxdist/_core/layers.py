"""Which leaves of a tree belong to which layer, and the order of the layers."""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from .types import PyTree

Entry = Hashable


def opened(tree: PyTree) -> tuple[dict[Any, PyTree], Callable[[dict[Any, PyTree]], PyTree]]:
    """The entries of the first level that has several, and how to close it again."""
    children, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and not children[0][0]:
        return {"": tree}, lambda entries: entries[""]
    if len(children) == 1:
        inside, close = opened(children[0][1])
        if "" not in inside:
            return inside, lambda entries: structure.unflatten([close(entries)])
    names = [_name(path[0]) for path, _ in children]
    entries = {name: child for name, (_, child) in zip(names, children, strict=True)}
    return entries, lambda entries: structure.unflatten([entries[name] for name in names])


def leaf_entries(tree: PyTree) -> list[Entry]:
    """For each leaf, in the order of the tree, the name of its entry."""
    return [name for name, subtree in opened(tree)[0].items() for _ in jax.tree.leaves(subtree)]


def groups_of(tree: PyTree, layers: Sequence[Any]) -> list[tuple[Entry, ...]]:
    """The entries of each layer.

    Args:
      tree: like the parameters; `None` in place of a subtree is an entry too.
      layers: entries, or tuples of entries that make up one layer, in forward order.

    Raises:
      ValueError: an entry of the tree is missing in `layers`, comes twice, or does not exist.
    """
    groups = [tuple(layer) if isinstance(layer, tuple) else (layer,) for layer in layers]
    given, names = [name for group in groups for name in group], list(opened(tree)[0])
    if sorted(map(repr, given)) != sorted(map(repr, names)):
        raise ValueError(
            f"layers names {listed(given)}, but the parameters have {listed(names)}: every entry must come exactly once"
        )
    return groups


def layer_numbers(tree: PyTree, layers: Sequence[Any] | None) -> list[int]:
    """The number of each leaf's layer, 0 for the first one of the forward pass.

    Args:
      tree: like the parameters.
      layers: as for `groups_of`. `None`: each entry is a layer, in the order of their definition. A dict has lost that:
        there its keys are in the order of the alphabet and of their numbers, `block_2` before `block_10`.
    """
    entries = leaf_entries(tree)
    if layers is None:
        names = dict.fromkeys(entries[i] for i in _in_natural_order(tree))
        groups: list[tuple[Entry, ...]] = [(name,) for name in names]
    else:
        groups = groups_of(tree, layers)
    number = {name: i for i, group in enumerate(groups) for name in group}
    return [number[name] for name in entries]


def forward_positions(tree: PyTree, layers: Sequence[Any] | None = None) -> list[int]:
    """The positions of the leaves, those first that the forward pass uses first; reversed, as backward makes gradients.

    Args:
      tree: like the parameters.
      layers: as for `layer_numbers`. Leaves of one layer keep the natural order of their names.
    """
    numbers = layer_numbers(tree, layers)
    return sorted(_in_natural_order(tree), key=lambda i: numbers[i])


def natural(name: str) -> tuple:
    """A key to sort names by in which numbers are numbers: `block_2` before `block_10`."""
    words = re.split(r"(\d+)", name)
    return tuple((0, int(word), "") if word.isdecimal() else (1, 0, word) for word in words)


def listed(names: Sequence[Any]) -> str:
    """The names for a message, not too many."""
    shown = ", ".join(map(repr, names[:6]))
    return f"{shown}, ... ({len(names)})" if len(names) > 6 else shown


def _in_natural_order(tree: PyTree) -> list[int]:
    """The positions of the leaves: keys of dicts in natural order, and whatever else as it was defined."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    first_seen: dict[tuple, int] = {}

    def key(path):
        keys = []
        for depth, part in enumerate(path, 1):
            place = first_seen.setdefault(path[:depth], len(first_seen))
            by_name = isinstance(part, jax.tree_util.DictKey) and isinstance(part.key, str)
            keys.append((natural(part.key) if by_name else (), place))
        return keys

    keys = [key(path) for path in paths]
    return sorted(range(len(paths)), key=keys.__getitem__)


def _name(key: Any) -> Entry:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
