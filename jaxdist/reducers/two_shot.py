"""Two shots: a coded reduce-scatter, then a coded gather. The bytes of an all-reduce, for any code."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Int, Key, Payload
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..state.marks import Sharded, with_value
from ..wire.encoded import contraction_form, mean_of_decoded, step_key
from ..wire.flat import MULTIPLE, alike, from_vectors, vector_likes, vectors
from ..wire.shards import apart, cleared, joined, rows, side_by_side
from .base import Forms, Law, Messages, Reduced, Reducer, cast_like, forms_of, from_generator, is_map_params_placeholder


class TwoShotState(NamedTuple):
    """Agreed: the key of all draws and a count. Cut over the workers: a server residual for each dtype, or none."""

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
    """Every worker averages one chunk for all: `m = (1/W) Σ_w D(C(x_w))` by an exchange, then a gather of `C₂(m)`.

    All leaves of a dtype are one vector, cut into `W` chunks. Worker `j` gets everybody's code of chunk `j`, averages
    in float32 and codes the mean again, with an independent key; all workers, it too, use what that decodes to.
    `own = D(C(x))`. The second code loses something that no worker's `own` can show, so its worker keeps it in a
    *server residual* `e`, `mean = D₂(C₂(m + e))`, `e = m + e - mean`, and the means telescope. An unbiased second code
    needs none: its noise of variance `ω |m|²` is as harmless as that of the gradients, and no residual lags behind.

    *On the wire* for a vector of `n` entries, cut into chunks of `c = 8⌈n / 8W⌉`: one all-to-all and one all-gather,
    `(W-1) (bytes(c) + bytes₂(c))` sent, with the bytes of both codes; about `2(W-1)/W · bytes(n)`, like an all-reduce,
    where `compressed` sends `(W-1) · bytes(n)`. Scales travel with the codes. With two workers both send the same, and
    `compressed` loses less and is faster (on CPU, whose all-to-all is half duplex, by far): prefer it there. The
    reduce-scatter form is the first shot alone, `(W-1) bytes(c)`, with one code for each worker and dtype.

    *State*: a key and a count, agreed; with server feedback, a float32 (or better) residual of `n`, cut over the
    workers.

    Args:
      compressor: the code of a chunk on its way to the worker that averages it.
      second: the code of the mean on its way back; by default the same. A finer one costs little quality elsewhere.
      server_feedback: keep what the second code loses. `"auto"`: unless it is unbiased. `False` with a biased code
        (8-bit rounding is often used so) leaves its bias in the model for ever, and error feedback refuses it.
      seed: of the key.

    Returns:
      The reducer. Its law is `TELESCOPING` with a server residual, else `UNBIASED`, or `NONE` for a biased code.

    Raises:
      ValueError: server feedback with a code that states neither its contraction nor its variance.

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
    keeps = back.variance is None if server_feedback == "auto" else server_feedback
    last = contraction_form(back) if keeps else back

    def init(like):
        if is_map_params_placeholder(like):
            return 0
        residuals = []
        for flat in vector_likes(jax.tree.leaves(like)) if keeps else []:
            residuals.append(Sharded(jnp.zeros(flat.shape, working_dtype(flat.dtype)), multiple=MULTIPLE))
        return TwoShotState(jax.random.key(seed), jnp.zeros((), jnp.int32), residuals)

    def messages(updates, state, comm, extras):
        del extras
        leaves, tree = jax.tree.flatten(updates)
        flats = vectors(leaves)
        cut = [rows(flat, comm.size) for flat in flats]
        key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
        payloads, means = yield from _first_shot(compressor, cut, key, comm)
        means = [cleared(mean, flat.size, comm.size, comm.index) for mean, flat in zip(means, flats, strict=True)]
        if keeps:
            means = [mean + _fit(e.value, mean.size) for mean, e in zip(means, state.residuals, strict=True)]
        key = step_key(state.key, state.count, comm, shared=last.shared_key)
        coded = [
            last.compress(mean.astype(flat.dtype), jax.random.fold_in(key, 2 * i + 1))
            for i, (mean, flat) in enumerate(zip(means, flats, strict=True))
        ]
        residuals = [
            with_value(e, _lost(last, mean, payload, comm, flat.size)[: e.value.size])
            for e, mean, payload, flat in zip(state.residuals, means, coded, flats)
        ]
        arrays, back_structure = jax.tree.flatten(coded)
        received = yield Messages(gather=arrays)

        delivered = [
            _decode(last, arrived, rows)
            for arrived, rows in zip(back_structure.unflatten(received.gather), cut, strict=True)
        ]
        owns = [_decode(compressor, payload, rows) for payload, rows in zip(payloads, cut, strict=True)]
        mean, own = (cast_like(tree.unflatten(from_vectors(x, leaves)), updates) for x in (delivered, owns))
        return Reduced(mean, own), TwoShotState(state.key, next_count(state.count), residuals)

    def shard_messages(groups, updates, state, comm, extras):
        del extras
        leaves, tree = jax.tree.flatten(updates)
        kinds = alike(leaves, lambda leaf: jnp.dtype(leaf.dtype))
        cut = [side_by_side([leaves[i] for i in members], comm.size, groups=groups) for members in kinds]
        key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
        payloads, means = yield from _first_shot(compressor, cut, key, comm)
        pieces, owns = list(leaves), list(leaves)
        for members, row, mean, payload in zip(kinds, cut, means, payloads, strict=True):
            inside = [leaves[i] for i in members]
            sent = _decode(compressor, payload, row).reshape(row.shape)
            split = (apart(x, inside, comm.size, groups=groups) for x in (mean, sent))
            for i, part, whole in zip(members, *split, strict=True):
                pieces[i], owns[i] = part, joined(whole, leaves[i], groups=groups)
        mean, own = (cast_like(tree.unflatten(x), updates) for x in (pieces, owns))
        return Reduced(mean, own), state._replace(count=next_count(state.count))

    def shards(groups):
        def start(like):
            if is_map_params_placeholder(like):
                return 0
            return TwoShotState(jax.random.key(seed), jnp.zeros((), jnp.int32), [])

        return from_generator("two_shot_shards", start, partial(shard_messages, groups))

    forms: Forms = forms_of(
        compressor,
        lambda contraction: two_shot(contraction, second=back, server_feedback=server_feedback, seed=seed),
    )
    return from_generator("two_shot", init, messages, law=_law(back, keeps), forms=forms._replace(shards=shards))


def _law(second: Compressor, keeps: bool) -> Law:
    if keeps:
        return Law.TELESCOPING
    return Law.UNBIASED if second.variance is not None else Law.NONE


FirstShot = Generator[Messages, Messages, tuple[list[Payload], list[Array]]]


def _first_shot(compressor: Compressor, cut: Sequence[Array], key: Key[Array, ""], comm: Comm) -> FirstShot:
    """Each worker's row of each array to that worker. Returns the payloads that went out, and the means, one row."""
    keys = [jax.random.split(jax.random.fold_in(key, 2 * i), comm.size) for i in range(len(cut))]
    payloads = [jax.vmap(compressor.compress)(rows, draws) for rows, draws in zip(cut, keys, strict=True)]
    arrays, structure = jax.tree.flatten(payloads)
    received = yield Messages(exchange=arrays)
    means = [
        mean_of_decoded(_decoder(compressor, rows), arrived)
        for arrived, rows in zip(structure.unflatten(received.exchange), cut, strict=True)
    ]
    return payloads, means


def _fit(flat: Array, size: int) -> Array:
    """As long as it must be: a state that was never placed on a mesh has no padding yet."""
    return jnp.pad(flat, (0, size - flat.size))


def _decoder(compressor: Compressor, rows: Array) -> Callable[[Payload], Array]:
    """Of one chunk."""
    wide = jax.ShapeDtypeStruct(rows.shape[1:], working_dtype(rows.dtype))
    return lambda payload: compressor.decompress(payload, wide)


def _decode(compressor: Compressor, payloads: Payload, rows: Array) -> Array:
    """All chunks, as one vector."""
    return jax.vmap(_decoder(compressor, rows))(payloads).ravel()


def _lost(compressor: Compressor, x: Array, payload: Payload, comm: Comm, size: int) -> Array:
    """What the code of this worker's chunk leaves out. Padding owes nothing to anybody."""
    lost = x - compressor.decompress(payload, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return cleared(lost, size, comm.size, comm.index)
