"""Gradients of embeddings: the few rows that a batch has touched, instead of the whole table."""

from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.dtypes import working_dtype
from .._core.types import Array, Like, State, Updates
from ..comm.base import Comm
from .exact import exact
from .messages import for_real_numbers, run
from .reducer import NO_EXTRAS, Extras, Messages, Reduced, Reducer, Result


@with_description
def row_sparse(rows: int) -> Reducer:
    """The mean over workers, of which each sends only the rows that are not zero: for gradients of embeddings.

    A batch of `n` tokens touches at most `n` rows of a table, and all others are exactly zero. Workers gather rows and
    their numbers, and add them in the same order. A leaf of `V` rows (its first dimension) of `d` numbers goes this way
    if that takes fewer bytes than an all-reduce, about `rows < 2V/W`; all other leaves are all-reduced.

    *On the wire*: one all-gather, `(W-1) · rows · (d · itemsize + 4)` bytes of a worker for each such leaf, after an
    all-reduce of 4 bytes that asks whether the rows of all workers fit. In a step in which they do not, these leaves
    are all-reduced, as `exact` does; the program holds both branches. Nothing is ever lost.

    *State*: none. The sum over workers is in float32 or wider.

    Args:
      rows: the most rows of a leaf that a worker sends, at least 1: the tokens of its batch, and fewer where tokens
        repeat. A table that is also the output layer has a dense gradient: leave it to `exact`.

    Raises:
      ValueError: `rows` is below 1; at `init`, a leaf is complex or has fewer than 16 bits.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> table = jnp.zeros((2, 9, 4)).at[0, 3].set(1.0).at[1, 7].set(2.0)  # the gradients of two workers
      >>> reducer = jd.reducers.row_sparse(1)
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(table)[0, :, 0].tolist()
      [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0]

    References:
      Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", arXiv:1808.02621, 2018.
    """
    check_count("rows", rows, 1)
    return Reducer(for_real_numbers(lambda like: ()), _RowSparse(rows).reduce)


class _RowSparse(NamedTuple):
    rows: int

    def reduce(self, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS) -> Result:
        leaves, tree = jax.tree.flatten(updates)
        sparse = [i for i, leaf in enumerate(leaves) if self._saves_bytes(leaf, comm.size)]
        dense = [i for i in range(len(leaves)) if i not in sparse]
        means = list(leaves)
        with jax.named_scope("row_sparse"):
            for members, reduce in ((sparse, self._reduce_sparse), (dense, _mean)):
                if members:
                    for i, mean in zip(members, reduce(comm, [leaves[i] for i in members]), strict=True):
                        means[i] = mean
        return Reduced(tree.unflatten(means), updates), state

    def _saves_bytes(self, leaf: Like, workers: int) -> bool:
        if leaf.ndim < 2 or not leaf.size:
            return False
        row = leaf.size // leaf.shape[0] * leaf.dtype.itemsize
        return self.rows * (row + 4) * workers < 2 * leaf.shape[0] * row

    def _reduce_sparse(self, comm: Comm, leaves: list[Array]) -> list[Array]:
        too_many = jnp.any(jnp.stack([jnp.sum(_touched(leaf)) for leaf in leaves]) > self.rows)
        fits = comm.max(too_many.astype(jnp.int32)) == 0
        return comms.cond(fits, lambda comm, leaves: run(self._messages(leaves), comm), _mean, comm, leaves)

    def _messages(self, leaves: list[Array]) -> Generator[Messages, Messages, list[Array]]:
        positions = [self._positions(leaf) for leaf in leaves]
        picked = [leaf.at[at].get(mode="fill", fill_value=0) for leaf, at in zip(leaves, positions)]
        received = (yield Messages(gather=[*positions, *picked])).gather
        gathered = zip(leaves, received[: len(leaves)], received[len(leaves) :], strict=True)
        return [_mean_of_rows(leaf, at, rows) for leaf, at, rows in gathered]

    def _positions(self, leaf: Array) -> Array:
        """The numbers of the rows to send: first those that are touched, then distinct ones past the end."""
        number = leaf.shape[0]
        touched = _touched(leaf)
        (at,) = jnp.nonzero(touched, size=self.rows, fill_value=0)
        order = jnp.arange(self.rows)
        return jnp.where(order < jnp.sum(touched), at, number + order).astype(jnp.int32)


def _touched(leaf: Array) -> Array:
    # NaN is not zero either.
    return jnp.any(leaf.reshape(leaf.shape[0], -1) != 0, axis=1)


def _mean_of_rows(leaf: Like, positions: Array, rows: Array) -> Array:
    """The mean of the tables `[V, ...]` of which each worker has sent some rows, `[W, rows]` and `[W, rows, ...]`."""
    workers, dtype = positions.shape[0], working_dtype(leaf.dtype)

    def add_worker(worker, total):
        # One worker after the other, and each of its rows once: the same order, and the same bits, on all workers.
        new = rows[worker].astype(dtype)
        return total.at[positions[worker]].add(new, mode="drop", unique_indices=True)

    total = jax.lax.fori_loop(0, workers, add_worker, jnp.zeros(leaf.shape, dtype))
    return (total / workers).astype(leaf.dtype)


def _mean(comm: Comm, leaves: list[Array]) -> list[Array]:
    return exact().reduce(leaves, (), comm)[0].mean
