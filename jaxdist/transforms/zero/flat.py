"""Trees as the flat pieces that workers own, and back."""

from collections.abc import Sequence

import jax

from ..._typing import Array, Like, Shape
from ...comm import Comm
from ...reducers._fused import fused
from ...reducers._ordered import after
from ...reducers._pieces import joined as joined
from ...reducers._pieces import length as length
from ...reducers._pieces import piece as piece
from ...reducers._pieces import rows as rows


def whole(x: Array, shape: Shape, comm: Comm) -> Array:
    """`[n] -> [*s]`: everybody's pieces, put together again."""
    return joined(comm.all_gather(x), jax.ShapeDtypeStruct(shape, x.dtype))


def gather(
    pieces: Sequence[Array], likes: Sequence[Like], comm: Comm, *, buckets: Sequence[Sequence[int]] | None = None
) -> list[Array]:
    """Everybody's pieces of each leaf, put together again; one collective for each bucket and dtype.

    Each bucket waits for the one before: XLA:TPU would have the results of all of them in memory at once.
    """
    found: dict[int, Array] = {}
    previous: list[Array] = []
    for members in [range(len(pieces))] if buckets is None else buckets:
        sent = [pieces[i] for i in members]
        previous = fused(comm.all_gather, after(sent, previous) if previous else sent)
        found |= {i: joined(rows, likes[i]) for i, rows in zip(members, previous, strict=True)}
    return [found[i] for i in range(len(pieces))]
