"""A ring all-reduce of compressed partial sums, for comparison: every hop adds an error."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Int, Key, Payload
from ..compressors.base import Compressor
from ..wire.encoded import step_key
from ..wire.flat import from_vectors, fuse_bytes, vectors
from ..wire.shards import clear_padding
from .base import NO_EXTRAS, Forms, Reduced, Reducer, cast_like

_NO_FEEDBACK = (
    "error feedback around ring() feeds each worker the errors of whole partial sums, which grow with the number of "
    "workers: use two_shot(), which sends the same bytes"
)


class RingState(NamedTuple):
    """Replicated: the key of all draws and the number of reductions so far."""

    key: Key[Array, ""]
    count: Int[Array, ""]


def ring(compressor: Compressor, *, seed: int = 0) -> Reducer:
    """A ring all-reduce whose partial sums are decoded, added to and coded again at each of its `W` stations.

    What a narrow dtype inside a collective does, shown in the open: use `two_shot`, which sends the same bytes and
    codes twice whatever `W` is. Station `k` codes a sum of `k` gradients and all earlier errors: with an unbiased code
    and `W` equal gradients `x`, the variance of that sum is `V_k = (1+ω) V_{k-1} + ω k² |x|²`, and that of the mean
    `V_W / W²`, at least `ω |x|² W/3` (`two_shot`: `ω |x|² (1 + (1+ω)/W)`). `own` is `x` plus the errors that this
    worker made, which makes the law exact, but those errors are as large as whole sums: error feedback around it would
    grow them without bound, and is refused.

    *On the wire* for a vector of `n` entries, cut into chunks of `c = ⌈n / W⌉`: `W-1` permutations and one all-gather
    of the code of a chunk, `2 (W-1) bytes(c)` sent, one after the other.

    *State* (replicated): a key and a count.

    Args:
      compressor: compresses a partial sum.
      seed: the seed of the key.

    Returns:
      The reducer.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.ring(jd.compressors.identity())
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.vmap(one_worker, axis_name="data")(jnp.arange(6.0).reshape(2, 3))[0].tolist()
      [1.5, 2.5, 3.5]

    References:
      Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009.
    """

    def init(like):
        del like
        return RingState(jax.random.key(seed), jnp.zeros((), jnp.int32))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        del extras
        leaves, tree = jax.tree.flatten(updates)
        flats = vectors(leaves)
        sizes, own = [flat.size for flat in flats], [_rows(flat, comm.size) for flat in flats]
        likes = [jax.ShapeDtypeStruct(rows.shape[1:], working_dtype(rows.dtype)) for rows in own]
        dtypes = [rows.dtype for rows in own]
        own = [rows.astype(like.dtype) for rows, like in zip(own, likes, strict=True)]
        key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
        onwards = [(i, (i + 1) % comm.size) for i in range(comm.size)]
        sums: list[Array] = []
        codes: list[Payload] = []
        for station in range(comm.size):
            place = (comm.index - station) % comm.size
            mine = [lax.dynamic_index_in_dim(rows, place, keepdims=False) for rows in own]
            sums = [x + y for x, y in zip(sums, mine, strict=True)] if station else mine
            sums = [clear_padding(x, size, comm.size, place) for x, size in zip(sums, sizes, strict=True)]
            keys = [jax.random.fold_in(jax.random.fold_in(key, station), i) for i in range(len(own))]
            codes = [compressor.compress(x.astype(t), k) for x, t, k in zip(sums, dtypes, keys, strict=True)]
            decoded = [compressor.decompress(code, like) for code, like in zip(codes, likes, strict=True)]
            own = [
                lax.dynamic_update_index_in_dim(rows, x + after - before, place, 0)
                for rows, x, after, before in zip(own, mine, decoded, sums, strict=True)
            ]
            if station < comm.size - 1:
                arrays, structure = jax.tree.flatten(codes)
                codes = structure.unflatten(fuse_bytes(lambda x: comm.ppermute(x, onwards), arrays))
                sums = [compressor.decompress(code, like) for code, like in zip(codes, likes, strict=True)]
        arrays, structure = jax.tree.flatten(codes)
        arrived = structure.unflatten(fuse_bytes(comm.all_gather, arrays))
        # Worker i ends with the sum of chunk i + 1.
        whole = [
            jnp.roll(jax.vmap(lambda code, like=like: compressor.decompress(code, like))(payload), 1, axis=0)
            for payload, like in zip(arrived, likes, strict=True)
        ]
        mean = tree.unflatten(from_vectors([rows.ravel() / comm.size for rows in whole], leaves))
        own = tree.unflatten(from_vectors([rows.ravel() for rows in own], leaves))
        reduced = Reduced(cast_like(mean, updates), comm.varying(cast_like(own, updates)))
        return reduced, RingState(state.key, next_count(state.count))

    return Reducer(init, reduce, forms=Forms(no_feedback=_NO_FEEDBACK))


def _rows(flat: Array, workers: int) -> Array:
    return jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1)
