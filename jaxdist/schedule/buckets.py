"""The layers of a model: their leaves, their order in the forward pass, and the buckets that share a message."""

import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from .._core.checks import check_range
from .._core.compat import Literal
from .._core.jaxprs import RESHAPES, evaluate
from .._core.types import PyTree

Entry = Hashable


def open_entries(tree: PyTree) -> tuple[dict[Any, PyTree], Callable[[dict[Any, PyTree]], PyTree]]:
    """Returns the entries of the first level that has several, and the function that makes a tree of them."""
    children, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and not children[0][0]:
        return {"": tree}, lambda entries: entries[""]
    if len(children) == 1:
        inside, close = open_entries(children[0][1])
        if "" not in inside:
            return inside, lambda entries: structure.unflatten([close(entries)])
    names = [_name(path[0]) for path, _ in children]
    entries = {name: child for name, (_, child) in zip(names, children, strict=True)}
    return entries, lambda entries: structure.unflatten([entries[name] for name in names])


def leaf_entries(tree: PyTree) -> list[Entry]:
    """Returns the name of the entry of each leaf, in the order of the tree."""
    return [name for name, subtree in open_entries(tree)[0].items() for _ in jax.tree.leaves(subtree)]


def groups_of(tree: PyTree, layers: Sequence[Any]) -> list[tuple[Entry, ...]]:
    """Groups the top-level entries of a tree by layer.

    Args:
      tree: like the parameters; `None` in place of a subtree is an entry too.
      layers: entries, or tuples of entries that make up one layer, in forward order.

    Raises:
      ValueError: an entry of the tree is missing in `layers`, comes twice, or does not exist.
    """
    groups = [tuple(layer) if isinstance(layer, tuple) else (layer,) for layer in layers]
    given, names = [name for group in groups for name in group], list(open_entries(tree)[0])
    if sorted(map(repr, given)) != sorted(map(repr, names)):
        raise ValueError(
            f"layers names {list_names(given)}, but the parameters have {list_names(names)}: every entry must come "
            "exactly once"
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
    """Returns the key that sorts numbers in names as numbers: `block_2` before `block_10`."""
    words = re.split(r"(\d+)", name)
    return tuple((0, int(word), "") if word.isdecimal() else (1, 0, word) for word in words)


def list_names(names: Sequence[Any]) -> str:
    """Lists names for a message, the first few of many."""
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


def assign_buckets(
    sizes: Sequence[int],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
    kinds: Sequence[Any] | None = None,
) -> list[list[int]]:
    """Cuts leaves, in order, into buckets of about `bucket_bytes`, and returns the buckets last leaf first.

    A bucket is closed when it reaches its cap, so it may exceed it by one leaf; a leaf larger than the cap has its own
    bucket. The order of buckets is that in which a backward pass computes gradients.

    Args:
      sizes: bytes of each leaf.
      bucket_bytes: the cap. Too small pays latency for every bucket, too large leaves no overlap; PyTorch has
        25 MiB.
      first_bucket_bytes: the cap of the first bucket in definition order, whose gradients come last.
      kinds: one for each leaf; leaves of different kinds (dtypes) are in different buckets.

    Returns:
      Lists of leaf numbers; every leaf is in exactly one.

    Examples:
      >>> from jaxdist.schedule import assign_buckets
      >>> assign_buckets([5, 6, 300, 100, 200], bucket_bytes=250, first_bucket_bytes=10)
      [[3, 4], [2], [0, 1]]

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704, 2020.
    """
    for name, cap in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if cap is not None:
            check_range(name, cap, 1, ends="[]")
    buckets: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    caps = {}
    # A bucket is listed when it is opened, so that buckets are in the order of their first leaves.
    for i, size in enumerate(sizes):
        kind = None if kinds is None else kinds[i]
        members, filled = filling.get(kind, ([], 0))
        if not members:
            buckets.append(members)
            caps[kind] = bucket_bytes if kind in caps or first_bucket_bytes is None else first_bucket_bytes
        members.append(i)
        filled += size
        filling[kind] = ([], 0) if filled >= caps[kind] else (members, filled)
    return buckets[::-1]


# Primitives that only change the form of a parameter, which is used where their result is used.
FORMS = RESHAPES | {"convert_element_type", "transpose", "copy", "pvary", "slice"}

# What does not come from a parameter.
_NO_ENTRY = object()


class LayerSplit(NamedTuple):
    """Parameters as one dict from entry to subtree for each layer; `join` makes parameters of such parts."""

    parts: tuple[dict[Any, PyTree], ...]
    join: Callable[[Sequence[dict[Any, PyTree]]], PyTree]


def forward_order(loss: Callable[..., Any], params: PyTree, batch: PyTree, *rest: Any) -> tuple[Entry, ...]:
    """The top-level entries of the parameters in the order in which a loss first uses them, read from its trace.

    *On the wire*: nothing, and nothing is computed.

    Args:
      loss: `loss(params, batch, *rest)`.
      params: a dict, sequence or NamedTuple of layers, arrays or shapes; a tree with a single entry
        (`{"params": ...}`) is replaced by that entry.
      batch: of the loss, arrays or shapes.
      rest: further arguments of the loss.

    Returns:
      Keys, indices or field names, for `layers=` of `pipelined`, `recipes.ddp`, `bucketed` and `partitioned`. Entries
      that the loss does not use come last.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"head": jnp.ones((4, 2)), "embedding": jnp.ones((3, 4)), "block": jnp.ones((4, 4))}
      >>> def loss(params, x):
      ...     return jnp.mean(x @ params["embedding"] @ params["block"] @ params["head"])
      >>> jd.schedule.forward_order(loss, params, jnp.ones((8, 3)))
      ('embedding', 'block', 'head')
    """
    closed = jax.make_jaxpr(loss)(params, batch, *rest)
    first: dict[Entry, int] = {}
    number = itertools.count()

    def follow(equation: Any, owners: list[Any]) -> list[Any]:
        arrays = [i for i, atom in enumerate(equation.invars) if not isinstance(atom, Literal)]
        if equation.primitive.name in FORMS and len(arrays) == 1:
            return [owners[arrays[0]]]
        here = next(number)
        for owner in owners:
            if owner is not _NO_ENTRY:
                first.setdefault(owner, here)
        return [_NO_ENTRY] * len(equation.outvars)

    owners = leaf_entries(params)
    owners += [_NO_ENTRY] * (len(closed.jaxpr.invars) - len(owners))
    # Calls and loops are followed: a layer is used where its parameters are used inside.
    evaluate(closed, follow, owners, opaque=(), literal=lambda _: _NO_ENTRY, constant=lambda _: _NO_ENTRY)
    return tuple(sorted(open_entries(params)[0], key=lambda name: (name not in first, first.get(name, 0))))


def split_layers(params: PyTree, layers: Sequence[Any] | None) -> LayerSplit:
    """Splits a tree of parameters, as for `forward_order`, into layers.

    `layers` has entries, or tuples of entries that form one layer, in forward order; it may be `None` for sequences and
    NamedTuples, whose order is that of the forward pass.
    """
    entries, close = open_entries(params)
    names = list(entries)
    if layers is None:
        if len(names) > 1 and _is_dict(params):
            raise ValueError(
                f"the parameters are a dict of {list_names(names)}, whose order is alphabetical, not that of the "
                "forward pass: pass layers=jd.schedule.forward_order(loss, params, batch), or name them in that order"
            )
        layers = names
    groups = groups_of(params, layers)

    def join(parts):
        return close({name: subtree for part in parts for name, subtree in part.items()})

    return LayerSplit(tuple({name: entries[name] for name in group} for group in groups), join)


def _is_dict(tree: PyTree) -> bool:
    """Checks whether the first level with several entries is a mapping."""
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and children[0][0]:
        return _is_dict(children[0][1])
    return any(path and isinstance(path[0], jax.tree_util.DictKey) for path, _ in children)
