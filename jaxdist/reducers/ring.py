"""A ring all-reduce whose partial sums are encoded again at every hop."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .._core.descriptions import with_description
from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Payload, Updates
from ..comm.base import Comm
from ..compressors.compressor import Compressor, check_compressor
from ..wire.buffers import from_vectors, fuse_bytes, vectors
from ..wire.codec import step_key
from ..wire.shards import clear_padding
from .messages import for_real_numbers
from .reducer import NO_EXTRAS, NO_MAGNITUDES, DrawState, Extras, Reduced, Reducer, Result, Use, init_draws
from .trees import cast_like

_NO_FEEDBACK = (
    "error feedback around ring() feeds each worker the errors of whole partial sums, which grow with the number of "
    "workers: use two_shot(), which sends the same bytes"
)


@with_description
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

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.ring(jd.compressors.identity())
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.arange(6.0).reshape(2, 3))[0].tolist()
      [1.5, 2.5, 3.5]

    References:
      Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009.
    """
    check_compressor(compressor)
    limits = {Use.FEEDBACK: _NO_FEEDBACK} | ({Use.EXAMPLES: NO_MAGNITUDES} if compressor.scale_free else {})
    init = for_real_numbers(partial(init_draws, seed))
    return Reducer(init, partial(_reduce_around_ring, compressor), limits=limits)


def _reduce_around_ring(
    compressor: Compressor, updates: Updates, state: DrawState, comm: Comm, extras: Extras = NO_EXTRAS
) -> Result:
    leaves, tree = jax.tree.flatten(updates)
    flats, workers = vectors(leaves), comm.size
    dtypes = [flat.dtype for flat in flats]
    likes = [jax.ShapeDtypeStruct((-(-flat.size // workers),), working_dtype(flat.dtype)) for flat in flats]
    # [W, c]: this worker's contribution to the chunks, to which its errors are added.
    own = [
        jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1).astype(like.dtype)
        for flat, like in zip(flats, likes, strict=True)
    ]
    key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
    onwards = [(i, (i + 1) % workers) for i in range(workers)]
    sums: list[Array] = []
    codes: list[Payload] = []
    for station in range(workers):
        # Chunk i starts at worker i, and is at worker i + k at station k.
        place = (comm.index - station) % workers
        mine = [lax.dynamic_index_in_dim(chunks, place, keepdims=False) for chunks in own]
        sums = [x + y for x, y in zip(sums, mine, strict=True)] if station else mine
        sums = [clear_padding(x, flat.size, workers, place) for x, flat in zip(sums, flats, strict=True)]
        keys = [jax.random.fold_in(jax.random.fold_in(key, station), i) for i in range(len(own))]
        codes = [compressor.compress(x.astype(t), k) for x, t, k in zip(sums, dtypes, keys, strict=True)]
        decoded = [compressor.decompress(code, like) for code, like in zip(codes, likes, strict=True)]
        # own = x + D(C(sum)) - sum
        own = [
            lax.dynamic_update_index_in_dim(chunks, x + after - before, place, 0)
            for chunks, x, after, before in zip(own, mine, decoded, sums, strict=True)
        ]
        if station < workers - 1:
            arrays, structure = jax.tree.flatten(codes)
            codes = structure.unflatten(fuse_bytes(comm, lambda x: comm.ppermute(x, onwards), arrays))
            sums = [compressor.decompress(code, like) for code, like in zip(codes, likes, strict=True)]
    arrays, structure = jax.tree.flatten(codes)
    arrived = structure.unflatten(fuse_bytes(comm, comm.all_gather, arrays))
    # Worker i ends with the sum of chunk i + 1.
    whole = [
        jnp.roll(jax.vmap(lambda code, like=like: compressor.decompress(code, like))(payload), 1, axis=0)
        for payload, like in zip(arrived, likes, strict=True)
    ]
    mean = tree.unflatten(from_vectors([chunks.ravel() / workers for chunks in whole], leaves))
    own = tree.unflatten(from_vectors([chunks.ravel() for chunks in own], leaves))
    reduced = Reduced(cast_like(mean, updates), comm.varying(cast_like(own, updates)))
    return reduced, DrawState(state.key, next_count(state.count))
