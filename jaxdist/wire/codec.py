"""The keys of a step's draws, and the mean of payloads."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import cast_varying, varying_axes
from .._core.types import Array, Int, Key, Payload
from ..comm.base import Comm


def step_key(key: Key[Array, ""], count: Int[Array, ""], comm: Comm, *, shared: bool) -> Key[Array, ""]:
    """The key of this step; different on each worker unless it is `shared`. Fold the number of a leaf into it.

    Args:
      key: the replicated key in the state.
      count: the replicated number of the step.
      comm: the group of workers.
      shared: the same key on all workers, for codes that all must draw alike.

    Examples:
      >>> import jax, jaxdist as jd
      >>> key = jd.reducers.step_key(jax.random.key(0), jax.numpy.int32(3), jd.comm.alone(), shared=False)
      >>> key.shape
      ()
    """
    # The order of all keys in the library: the count of steps, the worker, the leaf.
    key = jax.random.fold_in(key, count)
    return key if shared else jax.random.fold_in(key, comm.index)


def decode_mean(
    decode: Callable[[Payload], Array], payloads: Payload, *, add: Callable[[Payload, Array], Array] | None = None
) -> Array:
    """Averages decoded payloads `[W, ...]`, one worker after the other: one accumulator, not `W` decoded copies.

    `add(payload, total)`, if there is one, is `total + decode(payload)`.
    """
    first = jax.tree.map(lambda x: x[0], payloads)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    if workers == 1:
        return decode(first)
    extend = add or (lambda payload, total: total + decode(payload))

    def add_all(total: Array, payloads: Payload) -> Array:
        return lax.scan(lambda total, payload: (extend(payload, total), None), total, payloads)[0]

    def sum_from_first(payloads: Payload) -> Array:
        return add_all(decode(first), jax.tree.map(lambda x: x[1:], payloads))

    def sum_from_zero(payloads: Payload) -> Array:
        like = jax.eval_shape(decode, first)
        axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(payloads)))
        return add_all(cast_varying(jnp.zeros(like.shape, like.dtype), axes), payloads)

    # A sum from zero takes a pass more; a second decoder, beside that of the loop, doubles the program of a TPU.
    return lax.platform_dependent(payloads, tpu=sum_from_zero, default=sum_from_first) / workers
