"""The mean itself, by one all-reduce."""

from functools import partial

import jax

from .._core.descriptions import with_description
from .._core.types import State, Updates
from ..comm.base import Comm
from ..wire.buffers import rows_of_workers
from .messages import from_generator
from .reducer import Extras, Forms, Law, Messages, Protocol, Reduced, Reducer


@with_description
def exact() -> Reducer:
    """The mean over workers: `mean = (1/W) Σ_w x_w`, bit for bit what `lax.pmean` of the concatenated leaves gives.

    *On the wire*: one all-reduce for each dtype; a worker sends `2(W-1)/W · itemsize · size` bytes. On CPU, where
    XLA would widen bfloat16 and gloo adds float16 slowly, bfloat16 and long arrays of float16 are sent as u16 words and
    added in float32. The reduce-scatter form sends half of that, padded.

    *State*: none.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.exact()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([1.0, 3.0])).tolist()
      [2.0, 2.0]
    """
    return from_generator("exact", lambda like: (), _exact_messages, law=Law.MEAN, forms=Forms(shards=_exact_shards))


def _exact_messages(updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    leaves, tree = jax.tree.flatten(updates)
    received = yield Messages(mean=leaves)
    # Nothing is lost, so a worker's contribution is its updates.
    return Reduced(tree.unflatten(received.mean), updates), state


def _exact_shards(groups: int) -> Reducer:
    return from_generator("exact_shards", lambda like: (), partial(_exact_shard_messages, groups), law=Law.MEAN)


def _exact_shard_messages(groups: int, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    leaves, tree = jax.tree.flatten(updates)
    # Row `j` has the shard of worker `j`, padded as `Sharded` pads it.
    received = yield Messages(scatter=[rows_of_workers(leaf, comm.size, groups=groups) for leaf in leaves])
    return Reduced(tree.unflatten(received.scatter), updates), state
