"""Which leaves meet together: the fragments of streaming DiLoCo."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax

from ..._typing import PyTree


class Fragments(NamedTuple):
    """The leaves of a model dealt out to groups that meet at different steps.

    Attributes:
      number: how many groups.
      assign: `assign(params)` -> a tree like `params` with each leaf's group, `0` to `number - 1`.
    """

    number: int
    assign: Callable[[PyTree], PyTree]


def balanced(number: int) -> Fragments:
    """Groups of about equal bytes: the largest leaf goes first, each to the group that has least so far.

    The busiest step then sends as little as it can.

    Args:
      number: how many groups. More lowers the peak of the traffic and its latency matters more.

    Returns:
      The fragments.

    Raises:
      ValueError: there is not at least one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.transforms import balanced
      >>> balanced(2).assign({"a": jnp.zeros(4), "b": jnp.zeros(3), "c": jnp.zeros(1)})
      {'a': 0, 'b': 1, 'c': 1}

    References:
      Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", arXiv
      2501.18512, 2025 (which deals out whole layers: `strided`).
    """
    _check(number)

    def assign(params):
        leaves, tree = jax.tree.flatten(params)
        sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
        groups, load = [0] * len(leaves), [0] * number
        for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
            groups[i] = min(range(number), key=lambda group: load[group])
            load[groups[i]] += sizes[i]
        return tree.unflatten(groups)

    return Fragments(number, assign)


def strided(number: int) -> Fragments:
    """Layer `l` goes to group `l mod number`; what belongs to no layer (embeddings, head) to group 0.

    The layer of a leaf is the first number in its path: `params/block_3/kernel` and `layers[3]["kernel"]` are layer 3.
    A leaf that stacks all layers (`nn.scan`) has no layer: use `balanced`, or a `Fragments` of your own.

    Args:
      number: how many groups.

    Returns:
      The fragments.

    Raises:
      ValueError: there is not at least one; in `assign`, a group would stay empty, which means that the layers have no
        numbers in their paths or are too few.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.transforms import strided
      >>> strided(2).assign({"embed": 0.0, "block_0": 0.0, "block_1": 0.0, "block_2": 0.0})
      {'block_0': 0, 'block_1': 1, 'block_2': 0, 'embed': 0}

    References:
      Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", arXiv
      2501.18512, 2025.
    """
    _check(number)

    def one(path, _):
        for key in path:
            found = re.search(r"\d+", jax.tree_util.keystr((key,), simple=True))
            if found:
                return int(found.group()) % number
        return 0

    def assign(params):
        groups = jax.tree_util.tree_map_with_path(one, params)
        empty = set(range(number)) - set(jax.tree.leaves(groups))
        if empty and jax.tree.leaves(params):
            raise ValueError(
                f"fragments {sorted(empty)} of strided({number}) have no leaves: the model has fewer numbered layers; "
                "take fewer fragments, or balanced(number)"
            )
        return groups

    return Fragments(number, assign)


def _check(number: int) -> None:
    if number < 1:
        raise ValueError(f"the number of fragments must be at least 1, got {number}")


def as_fragments(fragments: "Fragments | int | None") -> Fragments:
    """A number means that many balanced groups, `None` a single one."""
    return fragments if isinstance(fragments, Fragments) else balanced(1 if fragments is None else fragments)


def part(tree: PyTree, groups: PyTree, group: int) -> PyTree:
    """The leaves of one group; `None` stands for all others."""
    return jax.tree.map(lambda x, g: x if g == group else None, tree, groups)


def merge(parts: list[PyTree], groups: PyTree) -> PyTree:
    """The inverse of `part` over all groups."""
    tree = jax.tree.structure(groups)
    leaves = [iter(jax.tree.leaves(one)) for one in parts]
    return tree.unflatten([next(leaves[group]) for group in jax.tree.leaves(groups)])
