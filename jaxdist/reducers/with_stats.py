"""Counts reductions and bytes and measures the compression error, for `stats`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import next_count
from .._core.types import Array, Int, PyTree, State, UInt
from ..comm.base import Sent, count_sent, total_bytes
from ..state.marks import PerWorker, with_value
from .base import NO_EXTRAS, Reducer, forward_forms, weakest


class TrackedState(NamedTuple):
    """`bytes` sent by this worker since the start, as (high, low) 32-bit words; `error` of the last reduction."""

    reducer: State
    syncs: Int[Array, ""]
    bytes: UInt[Array, "2"]
    error: PerWorker


@with_description
def with_stats(reducer: Reducer) -> Reducer:
    """The same reducer, which also counts reductions and bytes and measures `|x - own|² / |x|²` on each worker.

    The error takes one more pass over the updates. Inside `error_feedback` it is the compression error of the corrected
    update; around it, of the raw one.

    *On the wire*: what the reducer sends. Around `hierarchical` the error needs every chip's part of `own`, one
    more gather over the fast axis; inside it, nothing more.

    *State*: that of the reducer, and replicated counts; per worker one float32. `stats(opt_state)` reads them.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.all_reduce(jd.error_feedback(jd.reducers.with_stats(jd.compressed(jd.top_k(0.5)))), axis=None)
      >>> _, state = tx.update(jnp.array([1.0, 2.0]), tx.init(jnp.zeros(2)))
      >>> found = jd.transforms.stats(state)
      >>> int(found["syncs"]), round(float(found["compression_error"]), 2)
      (1, 0.2)
    """
    forms = forward_forms(with_stats, reducer, shards=False)

    def init(like):
        zero = jnp.zeros((), jnp.float32)
        sent = jnp.zeros(2, jnp.uint32)
        return TrackedState(reducer.init(like), jnp.zeros((), jnp.int32), sent, PerWorker(zero))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        ledger: list[Sent] = []
        reduced, inner = reducer.reduce(updates, state.reducer, count_sent(comm, ledger), extras)
        # |x - own|² / |x|²; an update of zeros has no error.
        size = _square(updates)
        error = _square(jax.tree.map(lambda x, own: x.astype(own.dtype) - own, updates, reduced.own)) / size
        error = comm.varying(jnp.where(size > 0, error, jnp.zeros_like(error)))
        sent = add_bytes(state.bytes, total_bytes(ledger))
        return reduced, TrackedState(inner, next_count(state.syncs), sent, with_value(state.error, error))

    return Reducer(init, reduce, weakest(reducer), forms)


def _square(tree: PyTree) -> Array:
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.zeros((), jnp.float32))


def add_bytes(words: Array, sent: Any) -> Array:
    """Adds bytes to (high, low) words; bytes are static unless some are sent under a condition."""
    if isinstance(sent, float):
        high, low = map(jnp.uint32, divmod(round(sent), 1 << 32))
    else:
        high, low = jnp.uint32(0), sent.astype(jnp.uint32)
    # Unsigned words wrap around: a sum below one of its terms has a carry.
    total = words[1] + low
    return jnp.stack([words[0] + high + (total < low).astype(jnp.uint32), total])
