"""Groups built from other groups: a single worker, the product of two groups, and parts of one."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, PyTree
from .base import Comm, check_permutation, map_over_trees


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
        mean=_identity,
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
        mean=lambda x: _sum_in_part(parts, x) / size,
        sum=partial(_sum_in_part, parts),
        max=lambda x: _gather_in_part(parts, x).max(0),
        all_gather=lambda x, *, agreed=True: _gather_in_part(parts, x),
        all_to_all=partial(_exchange_in_part, parts),
        reduce_scatter_mean=lambda x: _exchange_in_part(parts, x).sum(0) / size,
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


def _sum_in_part(parts: _Parts, x: Array) -> Array:
    # Too few entries to give each worker one to sum.
    if x.size < parts.size:
        return _gather_in_part(parts, x).sum(0)
    # A reduce-scatter and a gather: `2(g-1)/g` times the bytes.
    rows = jnp.pad(x.ravel(), (0, -x.size % parts.size)).reshape(parts.size, -1)
    return _gather_in_part(parts, _exchange_in_part(parts, rows).sum(0)).ravel()[: x.size].reshape(x.shape)


def _permute_in_part(parts: _Parts, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    check_permutation(pairs, parts.size)
    all_pairs = [(group[source], group[destination]) for group in parts.groups for source, destination in pairs]
    return parts.comm.ppermute(x, all_pairs)
