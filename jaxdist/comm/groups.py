"""Groups made of other groups: none at all, the product of two, parts of one."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from .._core.types import PyTree
from .base import Comm, check_permutation


def alone() -> Comm:
    """A group of one: nothing is sent.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist import comm
      >>> comm.alone().all_gather(jnp.ones(2)).shape
      (1, 2)
    """

    def same(tree):
        return tree

    return Comm(
        size=1,
        index=jnp.zeros((), jnp.int32),
        mean=same,
        sum=same,
        max=same,
        all_gather=lambda tree, *, agreed=True: jax.tree.map(lambda x: x[None], tree),
        all_to_all=same,
        reduce_scatter_mean=partial(jax.tree.map, lambda x: x[0]),
        ppermute=lambda tree, pairs: _stay(tree, pairs),
        varying=same,
    )


def nested(inner: Comm, outer: Comm) -> Comm:
    """The product of two groups, its collectives composed of theirs.

    A worker's number is `outer.index * inner.size + inner.index`.

    Args:
      inner: the group over fast links.
      outer: the group over slow links.

    Returns:
      The whole group, with `.inner` and `.outer`. `ppermute` is refused: use the parts, or `over` of all the axes.
    """
    size = inner.size * outer.size

    def rows(x):
        return x.reshape(outer.size, inner.size, *x.shape[1:])

    def exchange(x):
        x = outer.all_to_all(rows(x))
        return jnp.moveaxis(inner.all_to_all(jnp.moveaxis(x, 1, 0)), 0, 1).reshape(size, *x.shape[2:])

    def gather(x, agreed):
        x = outer.all_gather(inner.all_gather(x, agreed=agreed), agreed=agreed)
        return x.reshape(size, *x.shape[2:])

    def permute(tree, pairs):
        raise ValueError("nested() has no ppermute: use .inner or .outer, or over() with all the axis names")

    return Comm(
        size=size,
        index=outer.index * inner.size + inner.index,
        mean=lambda tree: outer.mean(inner.mean(tree)),
        sum=lambda tree: outer.sum(inner.sum(tree)),
        max=lambda tree: outer.max(inner.max(tree)),
        all_gather=lambda tree, *, agreed=True: jax.tree.map(lambda x: gather(x, agreed), tree),
        all_to_all=partial(jax.tree.map, exchange),
        reduce_scatter_mean=partial(
            jax.tree.map,
            lambda x: outer.reduce_scatter_mean(inner.reduce_scatter_mean(jnp.moveaxis(rows(x), 1, 0))),
        ),
        ppermute=permute,
        varying=lambda tree: outer.varying(inner.varying(tree)),
        inner=inner,
        outer=outer,
        remake=lambda wrap: nested(wrap(inner), wrap(outer)),
    )


def _stay(tree: PyTree, pairs: Sequence[tuple[int, int]]) -> PyTree:
    check_permutation(pairs, 1)
    return tree if pairs else jax.tree.map(jnp.zeros_like, tree)


def grouped(comm: Comm, groups: Sequence[Sequence[int]]) -> Comm:
    """Splits a group into parts of equal size that talk among themselves, by rotations of `ppermute`.

    *On the wire* a mean sends `2(g-1)/g` times the bytes and a gather `g-1` times, in parts of `g` workers. The parts
    differ, so every result is typed varying.

    Args:
      comm: the whole group.
      groups: the parts, each a sequence of worker numbers; together they are a partition. Known when tracing.

    Returns:
      This worker's part, `.index` being its place in it.

    Raises:
      ValueError: the parts are no partition, or not of one size.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist import comm
      >>> def mean_of_pair(x):
      ...     return comm.grouped(comm.over("data"), [(0, 2), (1, 3)]).mean(x)
      >>> jax.vmap(mean_of_pair, axis_name="data")(jnp.array([0.0, 1.0, 2.0, 3.0])).tolist()
      [1.0, 2.0, 1.0, 2.0]
    """
    size = len(groups[0]) if groups else 0
    members = sorted(worker for group in groups for worker in group)
    if members != list(range(comm.size)) or any(len(group) != size for group in groups):
        raise ValueError(
            f"groups must cut the {comm.size} workers into parts of one size, got {list(map(tuple, groups))}"
        )
    places = {worker: place for group in groups for place, worker in enumerate(group)}
    index = jnp.array([places[worker] for worker in range(comm.size)], jnp.int32)[comm.index]

    def rotation(step):
        return [(group[place], group[(place + step) % size]) for group in groups for place in range(size)]

    def sort(received):  # received[k] came from place index - k
        return jnp.stack(received)[(index - jnp.arange(size)) % size]

    def gather(x):
        return sort([comm.ppermute(x, rotation(step)) if step else comm.varying(x) for step in range(size)])

    def exchange(x):
        rows = [x[(index + step) % size] for step in range(size)]
        return sort(
            [comm.ppermute(row, rotation(step)) if step else comm.varying(row) for step, row in enumerate(rows)]
        )

    def scatter_sum(x):
        return exchange(x).sum(0)

    def total(x):
        if x.size < size:
            return gather(x).sum(0)
        rows = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
        return gather(scatter_sum(rows)).ravel()[: x.size].reshape(x.shape)

    def permute(tree, pairs):
        check_permutation(pairs, size)
        whole = [(group[source], group[destination]) for group in groups for source, destination in pairs]
        return comm.ppermute(tree, whole)

    return Comm(
        size=size,
        index=index,
        mean=partial(jax.tree.map, lambda x: total(x) / size),
        sum=partial(jax.tree.map, total),
        max=partial(jax.tree.map, lambda x: gather(x).max(0)),
        all_gather=lambda tree, *, agreed=True: jax.tree.map(gather, tree),
        all_to_all=partial(jax.tree.map, exchange),
        reduce_scatter_mean=partial(jax.tree.map, lambda x: scatter_sum(x) / size),
        ppermute=permute,
        varying=comm.varying,
        remake=lambda wrap: grouped(wrap(comm), groups),
    )
