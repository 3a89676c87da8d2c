"""Two-shot compression: chunks are sent to their owners, averaged there, encoded again and gathered.

`examples/from_scratch/two_shot_quantization.py` is the method in 100 lines of plain JAX.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import narrow, working_dtype
from .._core.trees import next_count
from .._core.types import Array, Int, Key, Like, Payload, PyTree, State, Updates
from ..comm.base import Comm
from ..compressors.compressor import Compressor, check_compressor
from ..compressors.scaled import contraction_form
from ..state.marks import Sharded, with_value
from ..wire.buffers import MULTIPLE, from_vectors, group_alike, vector_likes, vector_orders, vectors
from ..wire.codec import decode_mean, step_key
from ..wire.shards import clear_padding, concat_rows, split_leaves, unshard
from .messages import from_generator
from .reducer import (
    NO_LIMITS,
    NO_MAGNITUDES,
    Extras,
    Law,
    Messages,
    Protocol,
    Reduced,
    Reducer,
    Use,
    forms_of,
    init_draws,
    limits_of,
)
from .trees import cast_like, is_map_params_placeholder

# Chunks of a vector of `LONG` entries or more are whole buckets of any usual size: compressors need not pad them.
LONG, BUCKETS = 2**22, 512


class TwoShotState(NamedTuple):
    """Replicated: a key and a count of reductions. Sharded: a server residual for each dtype, or none."""

    key: Key[Array, ""]
    count: Int[Array, ""]
    residuals: list[Sharded]


@with_description
def two_shot(
    compressor: Compressor,
    *,
    second: Compressor | None = None,
    server_feedback: bool | Literal["auto"] = "auto",
    seed: int = 0,
) -> Reducer:
    """Averages by a two-phase compressed all-reduce: `m = (1/W) Σ_w D(C(x_w))`, then all workers decode `C₂(m)`.

    All leaves of a dtype form one vector in `W` chunks. Worker `j` receives every worker's payload of chunk `j`,
    averages in float32 and compresses the mean with `C₂` and an independent key. `own = D(C(x))`. The error of `C₂` is
    part of no `own`; with server feedback the worker that made it keeps it in a *server residual* `e`:
    `mean = D₂(C₂(m + e))`, `e = m + e - mean`, and the means telescope.

    *On the wire* for a vector of `n` entries in chunks of `c = 8⌈n / 8W⌉`, or `512⌈n / 512W⌉` from `2**22` entries up:
    one all-to-all and one all-gather, `(W-1) (bytes(c) + bytes₂(c))` sent, about `2(W-1)/W · bytes(n)`; `compressed`
    sends `(W-1) · bytes(n)`, the same with two workers. The reduce-scatter form is the first phase alone,
    `(W-1) bytes(c)`, with one payload for each worker and dtype.

    *State*: a key and a count, replicated; with server feedback a residual of `n` in float32 or better, sharded. With
    it the law is `TELESCOPING`, else `UNBIASED`, or `NONE` for a biased compressor.

    Args:
      compressor: compresses a chunk for the worker that averages it.
      second: compresses the mean of a chunk; the same compressor by default. A finer one costs few bytes.
      server_feedback: keep the error of `second`. `"auto"`: unless it is unbiased. `True` around `qsgd(4)` halves what
        a two-shot costs in every step, for the memory of the residual. `False` with a biased compressor leaves its bias
        in the model, and error feedback refuses it.

    Raises:
      ValueError: server feedback with a compressor that states neither its contraction nor its variance.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.two_shot(jd.qsgd(8))
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> mean = jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.arange(400.0).reshape(4, 100))[0]
      >>> bool(jnp.allclose(mean, jnp.arange(150.0, 250.0), atol=5))
      True

    References:
      Server feedback: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
      Speed", arXiv:2102.02888, 2021. The two phases: Gan et al., "BAGUA: Scaling up Distributed Learning with System
      Relaxations", arXiv:2107.01499, 2021.
    """
    if server_feedback not in (True, False, "auto"):
        raise ValueError(f'server_feedback must be True, False or "auto", got {server_feedback!r}')
    back = compressor if second is None else second
    check_compressor(compressor)
    check_compressor(back)
    keeps_residual = back.variance is None if server_feedback == "auto" else server_feedback
    reducer = _TwoShot(compressor, contraction_form(back) if keeps_residual else back, keeps_residual, seed)
    law = Law.TELESCOPING if keeps_residual else Law.NONE if back.variance is None else Law.UNBIASED
    forms = forms_of(compressor, lambda code: two_shot(code, second=back, server_feedback=server_feedback, seed=seed))
    forms = forms._replace(shards=reducer.shards)
    return from_generator(
        "two_shot", reducer.init, reducer.messages, law=law, forms=forms, limits=limits_of(compressor)
    )


class _TwoShot(NamedTuple):
    """`second` is a contraction where its error is kept."""

    compressor: Compressor
    second: Compressor
    keeps_residual: bool
    seed: int

    def init(self, like: PyTree[Like]) -> State:
        if is_map_params_placeholder(like):
            return 0
        likes = vector_likes(jax.tree.leaves(like)) if self.keeps_residual else []
        residuals = [
            Sharded(jnp.zeros(x.shape, working_dtype(x.dtype)), multiple=_multiple(x.size), order=order)
            for x, order in zip(likes, vector_orders(like))
        ]
        return TwoShotState(*init_draws(self.seed), residuals)

    def messages(self, updates: Updates, state: TwoShotState, comm: Comm, extras: Extras) -> Protocol:
        leaves, tree = jax.tree.flatten(updates)
        likes = vector_likes(leaves)
        # Chunks are as long as those of the residual, which hierarchical() makes for whole vectors, not for a chip's.
        multiples = iter([e.multiple for e in state.residuals] or [_multiple(like.size) for like in likes])
        flats = vectors(leaves, padding=lambda size: -size % (comm.size * next(multiples)))
        # Row `j` is the chunk that worker `j` averages.
        chunks = [flat.reshape(comm.size, -1) for flat in flats]
        # m = (1/W) Σ_w D(C(x_w)), of this worker's chunk.
        payloads, means = yield from _average_chunks(self.compressor, chunks, state, comm)
        # Scales of the second code must not see what the first one makes of padding.
        means = [clear_padding(mean, like.size, comm.size, comm.index) for mean, like in zip(means, likes, strict=True)]
        if self.keeps_residual:
            # A residual that was never placed on a mesh has no padding yet.
            means = [
                m + jnp.pad(e.value, (0, m.size - e.value.size)) for m, e in zip(means, state.residuals, strict=True)
            ]

        key = step_key(state.key, state.count, comm, shared=self.second.shared_key)
        coded = [
            # Odd numbers: draws independent of those of the first phase.
            self.second.compress(narrow(mean, like.dtype), jax.random.fold_in(key, 2 * i + 1))
            for i, (mean, like) in enumerate(zip(means, likes, strict=True))
        ]
        # e = m + e - D₂(C₂(m + e))
        residuals = [
            with_value(e, _chunk_error(self.second, mean, payload, comm, like.size)[: e.value.size])
            for e, mean, payload, like in zip(state.residuals, means, coded, likes)
        ]
        arrays, structure = jax.tree.flatten(coded)
        received = yield Messages(gather=arrays)

        # mean = D₂(C₂(m + e)) and own = D(C(x)), chunk by chunk.
        gathered = structure.unflatten(received.gather)
        mean_flats = [_decode_chunks(self.second, payload, x) for payload, x in zip(gathered, chunks, strict=True)]
        own_flats = [_decode_chunks(self.compressor, payload, x) for payload, x in zip(payloads, chunks, strict=True)]
        mean, own = (cast_like(tree.unflatten(from_vectors(x, leaves)), updates) for x in (mean_flats, own_flats))
        return Reduced(mean, own), TwoShotState(state.key, next_count(state.count), residuals)

    def shards(self, groups: int) -> Reducer:
        init = self._replace(keeps_residual=False).init
        limits = {Use.EXAMPLES: NO_MAGNITUDES} if self.compressor.scale_free else NO_LIMITS
        return from_generator("two_shot_shards", init, partial(_shard_messages, self.compressor, groups), limits=limits)


def _multiple(size: int) -> int:
    return BUCKETS if size >= LONG else MULTIPLE


def _shard_messages(
    compressor: Compressor, groups: int, updates: Updates, state: TwoShotState, comm: Comm, extras: Extras
) -> Protocol:
    """The first phase alone: each worker gets the means of its shards of all leaves."""
    leaves, tree = jax.tree.flatten(updates)
    # Shards of leaves, not of one vector: row `j` has worker `j`'s shards of all leaves of a dtype, one payload.
    kinds = group_alike(leaves, lambda leaf: jnp.dtype(leaf.dtype))
    chunks = [concat_rows([leaves[i] for i in members], comm.size, groups=groups) for members in kinds]
    payloads, means = yield from _average_chunks(compressor, chunks, state, comm)
    mean_shards, own_leaves = list(leaves), list(leaves)
    for members, chunk, mean, payload in zip(kinds, chunks, means, payloads, strict=True):
        likes = [leaves[i] for i in members]
        decoded = _decode_chunks(compressor, payload, chunk).reshape(chunk.shape)
        shards, own_rows = (split_leaves(x, likes, comm.size, groups=groups) for x in (mean, decoded))
        for i, shard, own in zip(members, shards, own_rows, strict=True):
            mean_shards[i], own_leaves[i] = shard, unshard(own, leaves[i], groups=groups)
    mean, own = (cast_like(tree.unflatten(x), updates) for x in (mean_shards, own_leaves))
    return Reduced(mean, own), state._replace(count=next_count(state.count))


def _average_chunks(
    compressor: Compressor, chunks: Sequence[Array], state: TwoShotState, comm: Comm
) -> Generator[Messages, Messages, tuple[list[Payload], list[Array]]]:
    """Sends each chunk `[c]` of the arrays `[W, c]` to its worker; returns what was sent, and this worker's means."""
    key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
    # Even numbers; the second phase draws from odd ones.
    keys = [jax.random.split(jax.random.fold_in(key, 2 * i), comm.size) for i in range(len(chunks))]
    payloads = [jax.vmap(compressor.compress)(*pair) for pair in zip(chunks, keys, strict=True)]
    arrays, structure = jax.tree.flatten(payloads)
    received = yield Messages(exchange=arrays)
    arrived = structure.unflatten(received.exchange)
    means = [
        decode_mean(_chunk_decoder(compressor, x), payload, add=compressor.add)
        for payload, x in zip(arrived, chunks, strict=True)
    ]
    return payloads, means


def _chunk_decoder(compressor: Compressor, chunks: Array) -> Callable[[Payload], Array]:
    wide = jax.ShapeDtypeStruct(chunks.shape[1:], working_dtype(chunks.dtype))
    return lambda payload: compressor.decompress(payload, wide)


def _decode_chunks(compressor: Compressor, payloads: Payload, chunks: Array) -> Array:
    return jax.vmap(_chunk_decoder(compressor, chunks))(payloads).ravel()


def _chunk_error(compressor: Compressor, x: Array, payload: Payload, comm: Comm, size: int) -> Array:
    """The compression error of this worker's chunk; zero in the padding, which is no part of the update."""
    error = x - compressor.decompress(payload, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return clear_padding(error, size, comm.size, comm.index)
