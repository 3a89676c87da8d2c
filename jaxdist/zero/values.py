"""The values of an evaluation on shards: a worker's part of an array, and an array of equal entries."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from .._core.types import Array, Shape
from ..comm.base import Comm
from ..wire.shards import clear_padding, shard_of, unshard


@partial(jax.tree_util.register_dataclass, data_fields=("value", "full"), meta_fields=("shape",))
class Part:
    """One worker's shard of an array of this shape: `[n]` of its entries, in row-major order, padded.

    `full` is the whole array, where every worker knows it: it is used instead of a gather. If no result needs it, the
    compiler removes it as dead code.
    """

    def __init__(self, value: Any, shape: Shape, full: Any = None):
        self.value, self.shape, self.full = value, shape, full

    def clear_padding(self, comm: Comm, fill: Any = 0) -> "Part":
        """The same array, with `fill` in place of the results that were computed for the padding."""
        value = clear_padding(self.value, math.prod(self.shape), comm.size, comm.index, fill=fill)
        return Part(value, self.shape, self.full)

    def whole(self, comm: Comm) -> Array:
        """The whole array, gathered unless it is known."""
        return all_gather_shards(self.value, self.shape, comm) if self.full is None else self.full


class Uniform(NamedTuple):
    """An array of this shape whose entries are all one number."""

    value: Array
    shape: Shape


# A bound method of C: JAX calls it at every node of every tree.
is_part: Callable[[Any], bool] = Part.__instancecheck__


def local_shard(x: Any, comm: Comm) -> Array:
    """The shard that this worker owns of a part or of a whole array."""
    return x.value if is_part(x) else shard_of(x, comm)


def all_gather_shards(x: Array, shape: Shape, comm: Comm) -> Array:
    """`[n] -> [*s]`: the whole array, from all workers' shards."""
    return unshard(comm.all_gather(x), jax.ShapeDtypeStruct(shape, x.dtype))
