"""Exchanges among three or more workers on CPU at nearly the full rate of a link in both directions.

XLA's all-to-all on CPU posts all sends and receives at once, over gloo's one connection for each pair of workers: the
two directions of each connection take turns (see `pair.py`), and what all send to one worker at once overflows the
queues of its link. So more than two workers exchange in turns: in turn `t`, worker `i` sends to worker `i + t` and
receives from `i - t`, each over a connection that carries data in one direction.

Only the turn `W/2` of an even number of workers swaps. A permutation would take the time of two turns, since it sends
before it receives; a gather of each pair has two parts, takes that of one and a half, and sends the same bytes.

Each turn waits for the one before, so that links with a long delay lose by it.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from .._core.types import Array

# More workers exchange at once: each turn is a collective of the program.
MOST_WORKERS = 16


def exchange_in_turns(
    axes: tuple[str, ...], x: Array, *, permute: Callable[[Array, list[tuple[int, int]]], Array]
) -> Array:
    """`lax.all_to_all` of three or more workers: row `j` of `[W, *s]` goes to worker `j`, and each keeps its own.

    Args:
      axes: those of the workers.
      x: the rows.
      permute: `lax.ppermute`, with workers numbered as by `lax.axis_index(axes)`.
    """
    workers, index, received = x.shape[0], lax.axis_index(axes), x
    for turn in range(1, workers):
        row = lax.dynamic_index_in_dim(x, (index + turn) % workers, keepdims=False)
        if 2 * turn == workers:
            other = _swap_opposite(axes, row)
        else:
            other = permute(row, [(i, (i + turn) % workers) for i in range(workers)])
        received = lax.dynamic_update_index_in_dim(received, other, (index - turn) % workers, 0)
    return received


def _swap_opposite(axes: tuple[str, ...], row: Array) -> Array:
    """The row of the worker that is half of all workers away."""
    half = lax.axis_size(axes) // 2
    pair = lax.all_gather(row, axes, axis_index_groups=[[i, i + half] for i in range(half)])
    return jnp.where(lax.axis_index(axes) < half, pair[1], pair[0])
