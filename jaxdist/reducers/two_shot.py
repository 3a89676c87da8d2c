"""Two-phase compressed all-reduce: a compressed reduce-scatter, then a compressed gather."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Int, Key, Like, Payload, PyTree, State, Updates
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..state.marks import Sharded, with_value
from ..wire.encoded import contraction_form, decode_mean, step_key
from ..wire.flat import MULTIPLE, from_vectors, group_alike, vector_likes, vectors
from ..wire.shards import clear_padding, concat_rows, rows, split_leaves, unshard
from .base import (
    Extras,
    Law,
    Messages,
    Protocol,
    Reduced,
    Reducer,
    cast_like,
    forms_of,
    from_generator,
    is_map_params_placeholder,
)


class TwoShotState(NamedTuple):
    """Replicated: a key and a count of reductions. Sharded: a server residual for each dtype, or none."""

    key: Key[Array, ""]
    count: Int[Array, ""]
    residuals: list[Sharded]


def two_shot(
    compressor: Compressor,
    *,
    second: Compressor | None = None,
    server_feedback: bool | Literal["auto"] = "auto",
    seed: int = 0,
) -> Reducer:
    """A two-phase compressed all-reduce: `m = (1/W) Σ_w D(C(x_w))` by an all-to-all, then an all-gather of `C₂(m)`.

    All leaves of a dtype form one vector, split into `W` chunks. Worker `j` receives every worker's payload of chunk
    `j`, averages in float32 and compresses the mean with `C₂` and an independent key; all workers use what that decodes
    to. `own = D(C(x))`. The error of `C₂` is not part of any `own`, so the worker that made it keeps it in a *server
    residual* `e`: `mean = D₂(C₂(m + e))`, `e = m + e - mean`, and the means telescope. An unbiased `C₂` needs none: its
    noise of variance `ω |m|²` is as harmless as that of the gradients, and nothing is delayed.

    *On the wire* for a vector of `n` entries in chunks of `c = 8⌈n / 8W⌉`: one all-to-all and one all-gather,
    `(W-1) (bytes(c) + bytes₂(c))` sent; about `2(W-1)/W · bytes(n)`, like an all-reduce, where `compressed` sends
    `(W-1) · bytes(n)`. Scales travel with the payloads. With two workers both send the same, and `compressed` loses
    less and is faster (on CPU, whose all-to-all is half duplex, by far): prefer it there. The reduce-scatter form is
    the first phase alone, `(W-1) bytes(c)`, with one payload for each worker and dtype.

    *State*: a key and a count, replicated; with server feedback a residual of `n` in float32 or better, sharded.

    Args:
      compressor: compresses a chunk for the worker that averages it.
      second: compresses the mean of a chunk; the same compressor by default. A finer one costs few bytes.
      server_feedback: keep the error of `second`. `"auto"`: unless it is unbiased. `False` with a biased compressor
        (often done with 8-bit rounding) leaves its bias in the model, and error feedback refuses it.
      seed: the seed of the key.

    Returns:
      The reducer. Its law is `TELESCOPING` with a server residual, else `UNBIASED`, or `NONE` for a biased compressor.

    Raises:
      ValueError: server feedback with a compressor that states neither its contraction nor its variance.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.two_shot(jd.qsgd(8))
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> mean = jax.vmap(one_worker, axis_name="data")(jnp.arange(400.0).reshape(4, 100))[0]
      >>> bool(jnp.allclose(mean, jnp.arange(150.0, 250.0), atol=5))
      True

    References:
      Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", arXiv
      2102.02888, 2021. Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499,
      2021.
    """
    if server_feedback not in (True, False, "auto"):
        raise ValueError(f'server_feedback must be True, False or "auto", got {server_feedback!r}')
    back = compressor if second is None else second
    keeps_residual = back.variance is None if server_feedback == "auto" else server_feedback
    cfg = _Config(compressor, contraction_form(back) if keeps_residual else back, keeps_residual, seed)
    forms = forms_of(
        compressor,
        lambda contraction: two_shot(contraction, second=back, server_feedback=server_feedback, seed=seed),
    )
    return from_generator(
        "two_shot",
        partial(_init, cfg),
        partial(_messages, cfg),
        law=_law(back, keeps_residual),
        forms=forms._replace(shards=partial(_shards, cfg)),
    )


class _Config(NamedTuple):
    """`second` is a contraction where its error is kept."""

    compressor: Compressor
    second: Compressor
    keeps_residual: bool
    seed: int


def _law(second: Compressor, keeps_residual: bool) -> Law:
    if keeps_residual:
        return Law.TELESCOPING
    return Law.NONE if second.variance is None else Law.UNBIASED


def _init(cfg: _Config, like: PyTree[Like]) -> State:
    if is_map_params_placeholder(like):
        return 0
    likes = vector_likes(jax.tree.leaves(like)) if cfg.keeps_residual else []
    residuals = [Sharded(jnp.zeros(x.shape, working_dtype(x.dtype)), multiple=MULTIPLE) for x in likes]
    return TwoShotState(jax.random.key(cfg.seed), jnp.zeros((), jnp.int32), residuals)


def _messages(cfg: _Config, updates: Updates, state: TwoShotState, comm: Comm, extras: Extras) -> Protocol:
    del extras
    leaves, tree = jax.tree.flatten(updates)
    flats = vectors(leaves)
    chunks = [rows(flat, comm.size) for flat in flats]
    payloads, means = yield from _average_chunks(cfg.compressor, chunks, state, comm)
    # Scales of the second code must not see what the first one makes of padding.
    means = [clear_padding(mean, flat.size, comm.size, comm.index) for mean, flat in zip(means, flats, strict=True)]
    if cfg.keeps_residual:
        means = [mean + _pad_to(e.value, mean.size) for mean, e in zip(means, state.residuals, strict=True)]

    key = step_key(state.key, state.count, comm, shared=cfg.second.shared_key)
    coded = [
        # Odd numbers: draws independent of those of the first phase.
        cfg.second.compress(mean.astype(flat.dtype), jax.random.fold_in(key, 2 * i + 1))
        for i, (mean, flat) in enumerate(zip(means, flats, strict=True))
    ]
    # e = m + e - D₂(C₂(m + e)), of this worker's chunk.
    residuals = [
        with_value(e, _chunk_error(cfg.second, mean, payload, comm, flat.size)[: e.value.size])
        for e, mean, payload, flat in zip(state.residuals, means, coded, flats)
    ]
    arrays, structure = jax.tree.flatten(coded)
    received = yield Messages(gather=arrays)

    gathered = structure.unflatten(received.gather)
    mean_flats = [_decode_chunks(cfg.second, payload, x) for payload, x in zip(gathered, chunks, strict=True)]
    own_flats = [_decode_chunks(cfg.compressor, payload, x) for payload, x in zip(payloads, chunks, strict=True)]
    mean, own = (cast_like(tree.unflatten(from_vectors(x, leaves)), updates) for x in (mean_flats, own_flats))
    return Reduced(mean, own), TwoShotState(state.key, next_count(state.count), residuals)


def _shards(cfg: _Config, groups: int) -> Reducer:
    init = partial(_init, cfg._replace(keeps_residual=False))
    return from_generator("two_shot_shards", init, partial(_shard_messages, cfg.compressor, groups))


def _shard_messages(
    compressor: Compressor, groups: int, updates: Updates, state: TwoShotState, comm: Comm, extras: Extras
) -> Protocol:
    del extras
    leaves, tree = jax.tree.flatten(updates)
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
    keys = [jax.random.split(jax.random.fold_in(key, 2 * i), comm.size) for i in range(len(chunks))]
    payloads = [jax.vmap(compressor.compress)(*pair) for pair in zip(chunks, keys, strict=True)]
    arrays, structure = jax.tree.flatten(payloads)
    received = yield Messages(exchange=arrays)
    arrived = structure.unflatten(received.exchange)
    means = [decode_mean(_chunk_decoder(compressor, x), payload) for payload, x in zip(arrived, chunks, strict=True)]
    return payloads, means


def _pad_to(flat: Array, size: int) -> Array:
    """Pads a residual that was never placed on a mesh, and has no padding yet."""
    return jnp.pad(flat, (0, size - flat.size))


def _chunk_decoder(compressor: Compressor, chunks: Array) -> Callable[[Payload], Array]:
    wide = jax.ShapeDtypeStruct(chunks.shape[1:], working_dtype(chunks.dtype))
    return lambda payload: compressor.decompress(payload, wide)


def _decode_chunks(compressor: Compressor, payloads: Payload, chunks: Array) -> Array:
    """Decodes all chunks into one vector."""
    return jax.vmap(_chunk_decoder(compressor, chunks))(payloads).ravel()


def _chunk_error(compressor: Compressor, x: Array, payload: Payload, comm: Comm, size: int) -> Array:
    """The compression error of this worker's chunk, with padding entries set to zero."""
    error = x - compressor.decompress(payload, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return clear_padding(error, size, comm.size, comm.index)
