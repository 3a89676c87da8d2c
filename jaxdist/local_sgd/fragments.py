"""Fragments of a model that are synchronized at different steps, and the steps at which each of them is due."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_count
from .._core.types import Array, Bool, Int, PyTree
from ..wire.shards import whole_likes

# `H`, or a schedule from the step to `H`.
SyncPeriod = int | Callable[[Int[Array, ""]], Int[Array, ""] | int]


class Fragments(NamedTuple):
    """A partition of a model's leaves into fragments that are synchronized at different steps.

    `assign(params)` returns a tree like `params` with the number of each leaf's fragment, `0` to `number - 1`.
    """

    number: int
    assign: Callable[[PyTree], PyTree]


def balanced(number: int) -> Fragments:
    """Fragments of about equal bytes: leaves in order of size, largest first, each to the smallest fragment so far.

    This keeps the traffic of the busiest step low. More fragments lower the peak further, but latency matters more.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.local_sgd import balanced
      >>> balanced(2).assign({"a": jnp.zeros(4), "b": jnp.zeros(3), "c": jnp.zeros(1)})
      {'a': 0, 'b': 1, 'c': 1}
    """
    _check(number)

    def assign(params):
        leaves, tree = jax.tree.flatten(params)
        # Greedy: the largest leaf first, to the fragment with the fewest bytes.
        sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
        labels, load = [0] * len(leaves), [0] * number
        for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
            labels[i] = min(range(number), key=lambda label: load[label])
            load[labels[i]] += sizes[i]
        return tree.unflatten(labels)

    return Fragments(number, assign)


def strided(number: int) -> Fragments:
    """Layer `l` goes to fragment `l mod number`; leaves outside of layers (embeddings, head) go to fragment 0.

    The layer of a leaf is the first number in its path: `params/block_3/kernel` and `layers[3]["kernel"]` are layer 3.
    A leaf that stacks all layers (`nn.scan`) has no layer: use `balanced`, or a `Fragments` of your own.

    Raises:
      ValueError: in `assign`, a fragment would be empty: the paths of the layers have no numbers, or there are too few.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.local_sgd import strided
      >>> strided(2).assign({"embed": 0.0, "block_0": 0.0, "block_1": 0.0, "block_2": 0.0})
      {'block_0': 0, 'block_1': 1, 'block_2': 0, 'embed': 0}

    References:
      Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
      arXiv:2501.18512, 2025.
    """
    _check(number)

    def label(path, _):
        # The layer is the first number in the path.
        found = re.search(r"\d+", jax.tree_util.keystr(path, simple=True, separator="/"))
        return int(found.group()) % number if found else 0

    def assign(params):
        labels = jax.tree_util.tree_map_with_path(label, params)
        empty = set(range(number)) - set(jax.tree.leaves(labels))
        if empty and jax.tree.leaves(params):
            raise ValueError(
                f"fragments {sorted(empty)} of strided({number}) have no leaves: the model has fewer numbered layers; "
                "use fewer fragments, or balanced(number)"
            )
        return labels

    return Fragments(number, assign)


def _check(number: int) -> None:
    check_count("the number of fragments", number, 1)


def as_fragments(fragments: Fragments | int | None) -> Fragments:
    """Converts a number to balanced fragments, and `None` to a single one."""
    return fragments if isinstance(fragments, Fragments) else balanced(1 if fragments is None else fragments)


def labels_of(fragments: Fragments, params: PyTree) -> PyTree:
    """Returns the number of each leaf's fragment; for sharded leaves, from the shapes of the whole arrays."""
    labels = fragments.assign(whole_likes(params))
    wrong = set(jax.tree.leaves(labels)) - set(range(fragments.number))
    if wrong:
        raise ValueError(f"fragments are numbered from 0 to {fragments.number - 1}, and `assign` returned {wrong}")
    return labels


def split(tree: PyTree, labels: PyTree, number: int) -> list[PyTree]:
    """Returns a tree for each fragment, with `None` in place of the leaves of the others."""
    return [jax.tree.map(lambda x, label, i=i: x if label == i else None, tree, labels) for i in range(number)]


def merge(parts: list[PyTree], labels: PyTree) -> PyTree:
    """Inverts `split`."""
    leaves = [iter(jax.tree.leaves(part)) for part in parts]
    return jax.tree.structure(labels).unflatten([next(leaves[label]) for label in jax.tree.leaves(labels)])


def check_period(sync_period: SyncPeriod | float, offset: int | float, delay: int | float, fragments: int) -> None:
    """Checks that period, offset, delay and number of fragments go together."""
    check_count("offset", offset, 0)
    check_count("delay", delay, 0)
    if callable(sync_period):
        if fragments > 1:
            raise ValueError(
                f"{fragments} fragments divide the steps of a round between them; sync_period must then be a number"
            )
        # The values of a schedule are not known here: `period_at` keeps them positive.
        return
    check_count("sync_period", sync_period, 1)
    if offset >= sync_period > 1:
        raise ValueError(f"offset must be less than sync_period={sync_period}, got {offset}")
    if delay >= sync_period and delay:
        raise ValueError(
            f"delay must be less than sync_period={sync_period}, got {delay}; otherwise a round would start before the "
            "previous one has arrived"
        )
    if fragments > sync_period:
        raise ValueError(f"sync_period={sync_period} must be at least the number of fragments ({fragments})")


def period_at(sync_period: Any, count: Int[Array, ""]) -> Int[Array, ""]:
    """Returns `H` for the round that this step belongs to."""
    period = jnp.asarray(sync_period(count) if callable(sync_period) else sync_period)
    if not jnp.issubdtype(period.dtype, jnp.integer):
        raise ValueError(f"sync_period must be a whole number, got {period.dtype}; round it to jnp.int32")
    return jnp.maximum(period.astype(jnp.int32), 1)


def first_round(sync_period: SyncPeriod, offset: int, fragment: int, fragments: int) -> int:
    """Returns the number of steps before the first round of a fragment; 0 means a whole period."""
    # A schedule has a single fragment; rounds of different fragments are H/P steps apart.
    return offset if callable(sync_period) else (offset + fragment * sync_period // fragments) % sync_period


def is_due(since: Int[Array, ""], rounds: Int[Array, ""], period: Int[Array, ""], first: int) -> Bool[Array, ""]:
    """Returns whether a fragment is due, `since` steps after the last of its `rounds`."""
    return since >= (jnp.where(rounds == 0, first, period) if first else period)


def due_fragments(
    step: int, *, sync_period: int, offset: int = 0, fragments: int = 1, warmup_steps: int = 0, delay: int = 0
) -> tuple[int, ...]:
    """Returns the fragments that are due in a step, for the static `sync=`: other steps then contain no collective.

    Other arguments are those of `local_steps`. In steps of the warm-up do not pass `sync`: they average gradients. With
    a delay, a fragment is sent one step later, at the start of the step.

    Args:
      step: the number of the step, from 0.
      fragments: how many there are.

    Examples:
      >>> from jaxdist.local_sgd import due_fragments
      >>> [due_fragments(step, sync_period=4, fragments=2) for step in range(8)]
      [(), (1,), (), (0,), (), (1,), (), (0,)]
    """
    check_period(sync_period, offset, delay, fragments)
    # Local steps that are complete when the collective runs: at the start of the step with a delay, else at its end.
    done = step - warmup_steps + (0 if delay else 1)
    if done < 1:
        return ()
    firsts = [first_round(sync_period, offset, i, fragments) or sync_period for i in range(fragments)]
    return tuple(i for i, first in enumerate(firsts) if done >= first and (done - first) % sync_period == 0)
