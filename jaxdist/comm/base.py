"""The `Comm`: a group of workers as one of them sees it, and the groups that can be made of others.

`count_sent` counts the bytes that a group sends while it is traced, independently of the count read from programs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import varying_axes
from .._core.types import Array, PyTree
from .._core.xla_quirks import add_rows, largest_entry
from .dtypes import check_number


class Comm(NamedTuple):
    """A group of workers. Make one with `over`, `alone`, `nested`, `split_group` or `count_sent`.

    *Gradients*. Each worker has a loss of its own, and its gradient is that of the sum of all workers' losses: a
    collective is differentiated by its transpose (`docs/reference/comm.md`).

    *Dtypes*. All are sent but numbers of less than 4 bits and `float4_e2m1fn`, which raise `TypeError`, as does what
    cannot be added or compared. Integers wrap around in sums, and have a mean in float32.

    Attributes:
      size: the number of workers `W`.
      index: this worker's number, `Int[Array, ""]`.
      mean: the mean over workers, replicated. `2(W-1)/W` times the bytes are sent.
      sum: the sum, replicated; the same bytes.
      max: the maximum, replicated; the same bytes. NaN of one worker is NaN for all, and 0 is larger than -0.
      all_gather: `[*s] -> [W, *s]`, replicated; `W-1` times the bytes. `all_gather(x, agreed=False)` types it as
        varying: then its gradient is a reduce-scatter, and otherwise an all-reduce where types are checked.
      all_to_all: `[W, *s] -> [W, *s]`, row `j` goes to worker `j`; `(W-1)/W` times the bytes.
      reduce_scatter_mean: `[W, *s] -> [*s]`, the mean of all workers' rows for this worker, of floats or complex
        numbers; `(W-1)/W` times the bytes.
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


class SentForOwn(Sent):
    """A collective for a reducer's `own` alone, which compilers drop where nothing uses that, and so do totals."""


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
    return sum((sent.bytes for sent in ledger if not isinstance(sent, SentForOwn)), 0.0)


def add_bytes(words: Array, sent: Any) -> Array:
    """Adds bytes to (high, low) words; bytes are static unless some are sent under a condition."""
    if isinstance(sent, float):
        high, low = map(jnp.uint32, divmod(round(sent), 1 << 32))
    else:
        # Exact, as a division by a power of two; a float beyond the range of words would be their largest.
        high = jnp.floor(sent / 2.0**32)
        high, low = high.astype(jnp.uint32), (sent - high * 2.0**32).astype(jnp.uint32)
    # Unsigned words wrap around: a sum below one of its terms has a carry.
    total = words[1] + low
    return jnp.stack([words[0] + high + (total < low).astype(jnp.uint32), total])


def cond(agreed: Array, on_true: Callable, on_false: Callable, comm: Comm, *operands: Any) -> Any:
    """`lax.cond` whose branches may communicate: `on_true(comm, *operands)` or `on_false(comm, *operands)`.

    The predicate must be equal on all workers of the group: a collective that only some of them enter compiles, and
    then hangs.
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
    # Only the workers of this group meet inside: the chips of a pod may decide differently about collectives of pods.
    if varying_axes(agreed) & varying_axes(comm.index):
        raise ValueError(
            "a condition around a collective must be agreed, but this predicate differs between workers: "
            "derive it from reduced values, a step count or a schedule"
        )
    ledger = comm.ledger
    if ledger is None:
        return choose(agreed, *(partial(branch, comm) for branch in branches), *operands)

    has_own = False

    def run_counted(branch, *xs):
        nonlocal has_own
        # What one branch sends is a result of the condition, which knows which branch ran.
        start = len(ledger)
        out = branch(comm, *xs)
        entries = ledger[start:]
        del ledger[start:]
        own = [entry.bytes for entry in entries if isinstance(entry, SentForOwn)]
        for_own, has_own = sum(own, 0.0), has_own or bool(own)
        return out, jnp.asarray(total_bytes(entries), jnp.float32), jnp.asarray(for_own, jnp.float32)

    out, sent, for_own = choose(agreed, *(partial(run_counted, branch) for branch in branches), *operands)
    ledger.append(Sent(name, sent))
    if has_own:
        ledger.append(SentForOwn(name, for_own))
    return out


def alone() -> Comm:
    """A group of one: nothing is sent.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import comm
      >>> comm.alone().all_gather(jnp.ones(2)).shape
      (1, 2)
    """
    return Comm(
        size=1,
        index=jnp.zeros((), jnp.int32),
        mean=partial(jax.tree.map, divisible),
        sum=_identity,
        max=_identity,
        all_gather=lambda tree, *, agreed=True: jax.tree.map(lambda x: x[None], tree),
        all_to_all=_identity,
        reduce_scatter_mean=partial(jax.tree.map, lambda x: x[0]),
        ppermute=_permute_alone,
        varying=_identity,
    )


def _identity(tree: PyTree) -> PyTree:
    return tree


def _permute_alone(tree: PyTree, pairs: Sequence[tuple[int, int]]) -> PyTree:
    check_permutation(pairs, 1)
    return tree if pairs else jax.tree.map(jnp.zeros_like, tree)


def nested(inner: Comm, outer: Comm) -> Comm:
    """The product of two groups, its collectives composed of theirs.

    A worker's number is `outer.index * inner.size + inner.index`.

    Returns:
      The whole group, with `.inner` and `.outer`. `ppermute` is refused: use the parts, or `over` of all the axes.
    """
    return Comm(
        size=inner.size * outer.size,
        index=outer.index * inner.size + inner.index,
        mean=lambda tree: outer.mean(inner.mean(tree)),
        sum=lambda tree: outer.sum(inner.sum(tree)),
        max=lambda tree: outer.max(inner.max(tree)),
        all_gather=lambda tree, *, agreed=True: jax.tree.map(partial(_gather_nested, inner, outer, agreed), tree),
        all_to_all=partial(jax.tree.map, partial(_exchange_nested, inner, outer)),
        reduce_scatter_mean=partial(jax.tree.map, partial(_scatter_nested, inner, outer)),
        ppermute=_refuse_permutation,
        varying=lambda tree: outer.varying(inner.varying(tree)),
        inner=inner,
        outer=outer,
        remake=lambda wrap: nested(wrap(inner), wrap(outer)),
    )


def _rows_by_group(inner: Comm, outer: Comm, x: Array) -> Array:
    """`[outer · inner, *s] -> [outer, inner, *s]`."""
    return x.reshape(outer.size, inner.size, *x.shape[1:])


def _gather_nested(inner: Comm, outer: Comm, agreed: bool, x: Array) -> Array:
    # Rows in the order of the workers' numbers, in which the inner index varies fastest.
    gathered = outer.all_gather(inner.all_gather(x, agreed=agreed), agreed=agreed)
    return gathered.reshape(outer.size * inner.size, *gathered.shape[2:])


def _exchange_nested(inner: Comm, outer: Comm, x: Array) -> Array:
    # First to the right outer group, then to the right worker in it.
    x = outer.all_to_all(_rows_by_group(inner, outer, x))
    x = jnp.moveaxis(inner.all_to_all(jnp.moveaxis(x, 1, 0)), 0, 1)
    return x.reshape(outer.size * inner.size, *x.shape[2:])


def _scatter_nested(inner: Comm, outer: Comm, x: Array) -> Array:
    # Fast links first: only one row for each outer worker crosses the slow ones.
    rows = jnp.moveaxis(_rows_by_group(inner, outer, x), 1, 0)
    return outer.reduce_scatter_mean(inner.reduce_scatter_mean(rows))


def _refuse_permutation(tree: PyTree, pairs: Sequence[tuple[int, int]]) -> PyTree:
    del tree, pairs
    raise ValueError("nested() has no ppermute: use .inner or .outer, or over() with all the axis names")


def split_group(comm: Comm, groups: Sequence[Sequence[int]]) -> Comm:
    """Splits a group into parts of equal size that communicate among themselves, by rotations of `ppermute`.

    *On the wire* a mean sends `2(g-1)/g` times the bytes and a gather `g-1` times, in parts of `g` workers. The parts
    differ, so every result is typed varying.

    Args:
      groups: the parts, each a sequence of worker numbers; together a partition of the workers. Static.

    Returns:
      This worker's part; `.index` is its position in it.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist import comm
      >>> def mean_of_pair(x):
      ...     return comm.split_group(comm.over("data"), [(0, 2), (1, 3)]).mean(x)
      >>> jax.vmap(mean_of_pair, axis_name="data")(jnp.array([0.0, 1.0, 2.0, 3.0])).tolist()
      [1.0, 2.0, 1.0, 2.0]
    """
    size = len(groups[0]) if groups else 0
    members = sorted(worker for group in groups for worker in group)
    if members != list(range(comm.size)) or any(len(group) != size for group in groups):
        raise ValueError(
            f"groups must split the {comm.size} workers into parts of one size, got {list(map(tuple, groups))}"
        )
    positions = {worker: position for group in groups for position, worker in enumerate(group)}
    index = jnp.array([positions[worker] for worker in range(comm.size)], jnp.int32)[comm.index]
    parts = _Parts(comm, groups, size, index)
    part = Comm(
        size=size,
        index=index,
        mean=partial(_mean_in_part, parts),
        sum=partial(_reduce_in_part, parts, combine_rows),
        max=lambda x: largest_entry(_gather_in_part(parts, x), 0),
        all_gather=lambda x, *, agreed=True: _gather_in_part(parts, x),
        all_to_all=partial(_exchange_in_part, parts),
        reduce_scatter_mean=partial(_scatter_in_part, parts),
        ppermute=partial(_permute_in_part, parts),
        varying=comm.varying,
    )
    return map_over_trees(part)._replace(remake=lambda wrap: split_group(wrap(comm), groups))


class _Parts(NamedTuple):
    """A group split into parts of `size`, and this worker's position in its part."""

    comm: Comm
    groups: Sequence[Sequence[int]]
    size: int
    index: Array


def _rotate(parts: _Parts, x: Array, step: int) -> Array:
    """Sends an array `step` positions ahead in each part."""
    if not step:
        return parts.comm.varying(x)
    positions = range(parts.size)
    pairs = [(group[i], group[(i + step) % parts.size]) for group in parts.groups for i in positions]
    return parts.comm.ppermute(x, pairs)


def _sort_by_sender(parts: _Parts, received: Sequence[Array]) -> Array:
    # received[k] came from position index - k.
    return jnp.stack(received)[(parts.index - jnp.arange(parts.size)) % parts.size]


def _gather_in_part(parts: _Parts, x: Array) -> Array:
    return _sort_by_sender(parts, [_rotate(parts, x, step) for step in range(parts.size)])


def _exchange_in_part(parts: _Parts, x: Array) -> Array:
    rows = [x[(parts.index + step) % parts.size] for step in range(parts.size)]
    return _sort_by_sender(parts, [_rotate(parts, row, step) for step, row in enumerate(rows)])


def _mean_in_part(parts: _Parts, x: Array) -> Array:
    return _reduce_in_part(parts, partial(combine_rows, mean=True), divisible(x))


def _scatter_in_part(parts: _Parts, x: Array) -> Array:
    check_number(x, inexact=True)
    return combine_rows(_exchange_in_part(parts, x), mean=True)


def _reduce_in_part(parts: _Parts, combine: Callable[[Array], Array], x: Array) -> Array:
    check_number(x)
    # Too few entries to give each worker one to combine.
    if x.size < parts.size:
        return combine(_gather_in_part(parts, x))
    # A reduce-scatter and a gather: `2(g-1)/g` times the bytes.
    rows = jnp.pad(x.ravel(), (0, -x.size % parts.size)).reshape(parts.size, -1)
    return _gather_in_part(parts, combine(_exchange_in_part(parts, rows))).ravel()[: x.size].reshape(x.shape)


def combine_rows(x: Array, *, mean: bool = False) -> Array:
    """The sum of this dtype over the first dimension, or the mean: of floats in float32 or better."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.sum(x, axis=0, dtype=x.dtype)
    # Explicit: 8-bit floats have no promotion. A sum of half precision may overflow where the mean does not.
    wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
    total = add_rows(x.astype(wide))
    return (total / x.shape[0] if mean else total).astype(x.dtype)


def divisible(x: Array) -> Array:
    """Integers in float32, whose sum would wrap around before it is divided; other numbers as they are."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x / 1


def _permute_in_part(parts: _Parts, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    check_permutation(pairs, parts.size)
    all_pairs = [(group[source], group[destination]) for group in parts.groups for source, destination in pairs]
    return parts.comm.ppermute(x, all_pairs)
