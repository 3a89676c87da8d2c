"""Which leaves meet together: the fragments of streaming DiLoCo."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, Bool, Int, PyTree
from ..schedule.periods import check_whole


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


SyncPeriod = int | Callable[[Int[Array, ""]], Int[Array, ""] | int]


def check_period(sync_period: SyncPeriod | float, offset: int | float, delay: int | float, fragments: int) -> None:
    """Raises for periods, offsets and delays that make no sense together."""
    check_whole("offset", offset)
    check_whole("delay", delay)
    if offset < 0 or delay < 0:
        raise ValueError(f"offset and delay must not be negative, got {offset} and {delay}")
    if callable(sync_period):
        if fragments > 1:
            raise ValueError("several fragments share out the steps of a round: sync_period must then be a number")
        return
    check_whole("sync_period", sync_period)
    if sync_period < 1:
        raise ValueError(f"sync_period must be at least 1, got {sync_period}")
    if offset >= sync_period > 1:
        raise ValueError(f"offset must be less than sync_period={sync_period}, got {offset}")
    if delay >= sync_period and delay:
        raise ValueError(
            f"delay must be less than sync_period={sync_period}, got {delay}: the next round would start before the "
            "last one has arrived"
        )
    if fragments > sync_period:
        raise ValueError(
            f"{fragments} fragments cannot each meet once in sync_period={sync_period} steps at steps of their own"
        )


def period_at(sync_period: Any, count: Int[Array, ""]) -> Int[Array, ""]:
    """`H` for the round that this step belongs to."""
    period = jnp.asarray(sync_period(count) if callable(sync_period) else sync_period)
    if not jnp.issubdtype(period.dtype, jnp.integer):
        raise ValueError(f"sync_period must be a whole number of steps, got {period.dtype}: round it to jnp.int32")
    return jnp.maximum(period.astype(jnp.int32), 1)


def first_round(sync_period: SyncPeriod, offset: int, fragment: int, fragments: int) -> int:
    """After how many steps a fragment meets first; 0: after a whole period."""
    spread = 0 if callable(sync_period) else fragment * sync_period // fragments
    return (offset + spread) if callable(sync_period) else (offset + spread) % sync_period


def is_due(since: Int[Array, ""], rounds: Int[Array, ""], period: Int[Array, ""], first: int) -> Bool[Array, ""]:
    """Whether so many steps since the last of `rounds` rounds are enough."""
    return since >= (jnp.where(rounds == 0, first, period) if first else period)


def due_fragments(
    step: int, *, sync_period: int, offset: int = 0, fragments: int = 1, warmup_steps: int = 0, delay: int = 0
) -> tuple[int, ...]:
    """Which fragments talk in a step: what a host passes as the static `sync=`, so that other steps hold no collective.

    Args:
      step: the number of the step, from 0.
      sync_period: as in `local_steps`, a number.
      offset: as in `local_steps`.
      fragments: how many there are.
      warmup_steps: as in `local_steps`. In these steps leave `sync` out: they average gradients.
      delay: as in `local_steps`: with a delay, a fragment talks one step later, at the start of the step.

    Returns:
      The numbers of the fragments, in ascending order; `()` for a step without any.

    Raises:
      ValueError: the arguments do not go together.

    Example:
      >>> from jaxdist.transforms import due_fragments
      >>> [due_fragments(step, sync_period=4, fragments=2) for step in range(8)]
      [(), (1,), (), (0,), (), (1,), (), (0,)]
    """
    check_period(sync_period, offset, delay, fragments)
    done = step - warmup_steps + (0 if delay else 1)
    if done < 1:
        return ()
    firsts = [first_round(sync_period, offset, i, fragments) or sync_period for i in range(fragments)]
    return tuple(i for i, first in enumerate(firsts) if done >= first and (done - first) % sync_period == 0)
