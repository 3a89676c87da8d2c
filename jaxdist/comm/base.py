"""The `Comm`: a group of workers as one of them sees it, a record of functions. `over` and `groups` make them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from .._core.types import Array, PyTree


class Comm(NamedTuple):
    """A group of workers. Make one with `over`, `alone`, `nested`, `grouped` or `counted`.

    Attributes:
      size: the number of workers `W`.
      index: this worker's number, `Int[Array, ""]`.
      mean: the mean over workers, replicated. `2(W-1)/W` times the bytes are sent.
      sum: the sum, replicated; the same bytes.
      max: the maximum, replicated; the same bytes.
      all_gather: `[*s] -> [W, *s]`, replicated; `W-1` times the bytes. `all_gather(x, agreed=False)` types it as
        varying and averages its gradient by `reduce_scatter_mean`.
      all_to_all: `[W, *s] -> [W, *s]`, row `j` goes to worker `j`; `(W-1)/W` times the bytes.
      reduce_scatter_mean: `[W, *s] -> [*s]`, the mean of all workers' rows for this worker; `(W-1)/W` times the bytes.
      ppermute: `ppermute(x, [(source, destination), ...])`; workers that are not a destination receive zeros. Sends
        the array once for each pair of different workers.
      varying: types a value as differing between workers; no bytes.
      inner: the group of the last (fast) axis, when there are several.
      outer: the group of the other (slow) axes.
      ledger: the list to which `counted` appends what is sent.
      uncounted: the same group without its ledger.
      remake: for a group composed of others, `remake(wrap)` rebuilds it from `wrap(other)`.
    """

    size: int
    index: Array
    mean: Callable[[PyTree], PyTree]
    sum: Callable[[PyTree], PyTree]
    max: Callable[[PyTree], PyTree]
    all_gather: Callable[..., PyTree]
    all_to_all: Callable[[PyTree], PyTree]
    reduce_scatter_mean: Callable[[PyTree], PyTree]
    ppermute: Callable[[PyTree, Sequence[tuple[int, int]]], PyTree]
    varying: Callable[[PyTree], PyTree]
    inner: "Comm | None" = None
    outer: "Comm | None" = None
    ledger: "list[Sent] | None" = None
    uncounted: "Comm | None" = None
    remake: "Callable[[Callable[[Comm], Comm]], Comm] | None" = None


class Sent(NamedTuple):
    """One collective: its name and the bytes that this worker sends (ring formulas; an array inside a condition)."""

    collective: str
    bytes: Any


def check_permutation(pairs: Sequence[tuple[int, int]], size: int) -> None:
    """Checks that no worker sends or receives twice."""
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) < len(ends) or not set(ends) <= set(range(size)):
            raise ValueError(
                f"in a ppermute of {size} workers each sends at most once and receives at most once, got {list(pairs)}"
            )


def complete_permutation(pairs: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Extends pairs to a permutation of all workers."""
    sources, destinations = ({pair[end] for pair in pairs} for end in (0, 1))
    left = (sorted(set(range(size)) - ends) for ends in (sources, destinations))
    return [*pairs, *zip(*left, strict=True)]


def map_over_trees(comm: Comm) -> Comm:
    """Makes the functions of a group, which take one array each, functions of pytrees."""
    names = ("mean", "sum", "max", "all_to_all", "reduce_scatter_mean", "varying")
    return comm._replace(
        **{name: partial(jax.tree.map, getattr(comm, name)) for name in names},
        all_gather=lambda tree, *, agreed=True: jax.tree.map(partial(comm.all_gather, agreed=agreed), tree),
        ppermute=lambda tree, pairs: jax.tree.map(lambda x: comm.ppermute(x, pairs), tree),
    )
