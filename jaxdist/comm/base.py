"""The `Comm`: a group of workers as one of them sees it, a record of functions. `over` and `groups` make them.

`count_sent` counts the bytes that a group sends while it is traced, independently of the count read from programs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, PyTree


class Comm(NamedTuple):
    """A group of workers. Make one with `over`, `alone`, `nested`, `split_group` or `count_sent`.

    On CPU two workers gather, exchange and permute arrays of 256 KiB or more by an all-reduce of words, which sends the
    same bytes and is the only collective that uses both directions of a link at once (`comm/pair.py`).

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
      ledger: the list to which `count_sent` appends what is sent.
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


def count_sent(comm: Comm, ledger: list[Sent]) -> Comm:
    """Makes a group that appends every collective to `ledger` while the program is traced.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist import comm
      >>> ledger = []
      >>> def mean(x):
      ...     return comm.count_sent(comm.over("data"), ledger).mean(x)
      >>> _ = jax.vmap(mean, axis_name="data")(jnp.ones((4, 100)))
      >>> ledger
      [Sent(collective='mean', bytes=600.0)]
    """
    # A composed group sends what its parts send.
    if comm.remake is not None:
        return comm.remake(lambda part: count_sent(part, ledger))._replace(ledger=ledger)
    # Bytes sent by each of `w` workers in a ring, per byte of the argument.
    w = comm.size
    factors = {
        "mean": 2 * (w - 1) / w,
        "sum": 2 * (w - 1) / w,
        "max": 2 * (w - 1) / w,
        "all_gather": w - 1,
        "all_to_all": (w - 1) / w,
        "reduce_scatter_mean": (w - 1) / w,
    }

    def collective(name, tree, **options):
        if w > 1:
            ledger.append(Sent(name, factors[name] * _bytes(tree)))
        return getattr(comm, name)(tree, **options)

    def ppermute(tree, pairs):
        # The mean over workers, of which some may send nothing.
        moved = sum(source != destination for source, destination in pairs) / w
        if moved:
            ledger.append(Sent("ppermute", moved * _bytes(tree)))
        return comm.ppermute(tree, pairs)

    return comm._replace(
        **{name: partial(collective, name) for name in factors},
        ppermute=ppermute,
        inner=None if comm.inner is None else count_sent(comm.inner, ledger),
        outer=None if comm.outer is None else count_sent(comm.outer, ledger),
        ledger=ledger,
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def total_bytes(ledger: list[Sent]) -> Array | float:
    """The bytes in a ledger; an array when some were sent under a condition."""
    return sum((sent.bytes for sent in ledger), 0.0)


def cond(agreed: Array, on_true: Callable, on_false: Callable, comm: Comm, *operands: Any) -> Any:
    """`lax.cond` whose branches may communicate: `on_true(comm, *operands)` or `on_false(comm, *operands)`.

    The predicate must be equal on all workers: a collective that only some workers enter compiles, and then hangs.
    """
    return _conditional("cond", lax.cond, agreed, (on_true, on_false), comm, operands)


def switch(agreed: Array, branches: Sequence[Callable], comm: Comm, *operands: Any) -> Any:
    """`lax.switch` whose branches may communicate: `branches[agreed](comm, *operands)`."""

    def choose(agreed, *rest):
        return lax.switch(agreed, rest[: len(branches)], *rest[len(branches) :])

    return _conditional("switch", choose, agreed, branches, comm, operands)


def _conditional(
    name: str, choose: Callable, agreed: Array, branches: Sequence[Callable], comm: Comm, operands: Sequence[Any]
) -> Any:
    if jax.typeof(agreed).manual_axis_type.varying:
        raise ValueError(
            "a condition around a collective must be agreed, but this predicate differs between workers: "
            "derive it from reduced values, a step count or a schedule"
        )
    ledger = comm.ledger
    if ledger is None:
        return choose(agreed, *(partial(branch, comm) for branch in branches), *operands)

    def run_counted(branch, *xs):
        # What one branch sends is a result of the condition, which knows which branch ran.
        start = len(ledger)
        out = branch(comm, *xs)
        sent = total_bytes(ledger[start:])
        del ledger[start:]
        return out, jnp.asarray(sent, jnp.float32)

    out, sent = choose(agreed, *(partial(run_counted, branch) for branch in branches), *operands)
    ledger.append(Sent(name, sent))
    return out
