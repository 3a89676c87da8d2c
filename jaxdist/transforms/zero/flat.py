"""Trees as the flat pieces that workers own, and back."""

from collections.abc import Sequence

import jax

from ..._typing import Array, Like, Shape
from ...comm import Comm
from ...reducers._fused import fused
from ...reducers._pieces import cleared as cleared
from ...reducers._pieces import joined as joined
from ...reducers._pieces import length as length
from ...reducers._pieces import piece as piece
from ...reducers._pieces import rows as rows


def whole(x: Array, shape: Shape, comm: Comm) -> Array:
    """`[n] -> [*s]`: everybody's pieces, put together again."""
    return joined(comm.all_gather(x), jax.ShapeDtypeStruct(shape, x.dtype))


def gather(pieces: Sequence[Array], likes: Sequence[Like], comm: Comm) -> list[Array]:
    """Everybody's pieces of each leaf, put together again; one collective for each dtype.

    Not one for each bucket: XLA:TPU begins them all at once, and has more in memory than with one.
    """
    return [joined(rows, like) for rows, like in zip(fused(comm.all_gather, pieces), likes, strict=True)]
