"""A reducer whose bytes and errors are recorded in its state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import next_count
from .._core.types import Array, Int, State, UInt
from ..comm.base import Sent, add_bytes, count_sent, total_bytes
from ..state.marks import PerWorker, with_value
from .reducer import NO_EXTRAS, Reducer, forward_forms, forward_limits, weakest
from .trees import tree_norm


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
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.all_reduce(jd.error_feedback(jd.reducers.with_stats(jd.compressed(jd.top_k(0.5)))), axis=None)
      >>> _, state = jax.jit(tx.update)(jnp.array([1.0, 2.0]), tx.init(jnp.zeros(2)))
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
        # Inside another count the ledger is that one's: a condition corrects the ledger of its own group alone.
        ledger: list[Sent] = [] if comm.ledger is None else comm.ledger
        counted, start = count_sent(comm, ledger) if comm.ledger is None else comm, len(ledger)
        reduced, inner = reducer.reduce(updates, state.reducer, counted, extras)
        # The error uses `own`, and so what was sent for it alone.
        ledger[start:] = [Sent(*sent) for sent in ledger[start:]]
        # |x - own|² / |x|²; an update of zeros has no error.
        size = tree_norm(updates)
        error = tree_norm(jax.tree.map(lambda x, own: x.astype(own.dtype) - own, updates, reduced.own))
        error = jnp.square(error / jnp.where(size == 0, 1, size)).astype(jnp.float32)
        error = comm.varying(jnp.where(size == 0, jnp.zeros_like(error), error))
        sent = add_bytes(state.bytes, total_bytes(ledger[start:]))
        return reduced, TrackedState(inner, next_count(state.syncs), sent, with_value(state.error, error))

    return Reducer(init, reduce, weakest(reducer), forms, limits=forward_limits(reducer))
