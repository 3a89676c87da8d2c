"""The payloads of a tree: the keys of their draws, encoding, decoding and their mean."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import cast_varying, varying_axes
from .._core.dtypes import narrow, working_dtype
from .._core.types import Array, Int, Key, Like, Payload, PyTree
from ..comm.base import Comm
from ..compressors.compressor import Compressor
from .buffers import map_stack

# On CPU, so many payloads are decoded and added in one pass over the entries.
AT_ONCE = 8


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


class TreeCodec(NamedTuple):
    """One compressor for the leaves of a tree, which `stack_by_shape` has stacked: a program per shape, not per leaf.

    Attributes:
      compressor: of one leaf.
      maps_single: map also over the stacks of a single leaf, which `map_stack` does not.
    """

    compressor: Compressor
    maps_single: bool = False

    def encode(self, groups: Sequence[Sequence[int]], stacks: Sequence[Array], key: Key[Array, ""]) -> list[Payload]:
        """Returns the payloads `[k, ...]` of stacks of `k` leaves; `groups` are the positions of the leaves."""
        # Each leaf draws with its own key, that of its position in the tree.
        keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
        return [self._map(self.compressor.compress, *pair) for pair in zip(stacks, keys, strict=True)]

    def decode(self, payloads: Sequence[Payload], stacks: Sequence[Like], *, wide: bool = False) -> list[Array]:
        """Decodes payloads `[k, ...]` to stacks `[k, *s]` of the same dtypes; with `wide` in float32 or better."""
        return [self.decode_stack(*pair, wide=wide) for pair in zip(payloads, stacks, strict=True)]

    def decode_stack(self, payload: Payload, stack: Like, *, wide: bool = False) -> Array:
        """Decodes the payloads of one stack."""
        like = jax.ShapeDtypeStruct(stack.shape[1:], working_dtype(stack.dtype) if wide else stack.dtype)
        return self._map(lambda payload: self.compressor.decompress(payload, like), payload)

    def decode_rows(self, payload: Payload, stack: Like) -> Array:
        """Decodes the payloads `[W, k, ...]` of one stack of `W` workers to `[W, k, *s]`, by one map for both."""
        workers = jax.tree.leaves(payload)[0].shape[0]
        flat = jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:2]), *x.shape[2:]), payload)
        return self.decode_stack(flat, stack).reshape(workers, *stack.shape)

    def decode_mean(self, payloads: Sequence[Payload], stacks: Sequence[Like]) -> list[Array]:
        """Decodes payloads `[W, k, ...]` of `W` workers to their means `[k, *s]`, summed in float32 or better."""
        add = None if self.compressor.add is None else partial(self._map, self.compressor.add)

        def mean_of_stack(payload: Payload, stack: Like) -> Array:
            mean = decode_mean(lambda payload: self.decode_stack(payload, stack, wide=True), payload, add=add)
            return narrow(mean, stack.dtype)

        return [mean_of_stack(*pair) for pair in zip(payloads, stacks, strict=True)]

    def _map(self, f: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        return jax.vmap(f)(*stacks) if self.maps_single else map_stack(f, *stacks)


def decode_mean(
    decode: Callable[[Payload], Array], payloads: Payload, *, add: Callable[[Payload, Array], Array] | None = None
) -> Array:
    """Averages decoded payloads `[W, ...]`, added in the order of the workers, without `W` decoded copies.

    `add(payload, total)`, if there is one, is `total + decode(payload)`.
    """
    first = jax.tree.map(lambda x: x[0], payloads)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    if workers == 1:
        return decode(first)
    # The decoder is needed up to six times below, beside the sum and inside it for each platform: traced once.
    decode = jax.jit(decode, inline=True)
    extend = add or (lambda payload, total: total + decode(payload))

    def add_all(total: Array, payloads: Payload, unroll: int = 1) -> Array:
        return lax.scan(lambda total, payload: (extend(payload, total), None), total, payloads, unroll=unroll)[0]

    def sum_from_first(payloads: Payload, unroll: int = 1) -> Array:
        return add_all(decode(first), jax.tree.map(lambda x: x[1:], payloads), unroll)

    def sum_from_zero(payloads: Payload) -> Array:
        like = jax.eval_shape(decode, first)
        axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(payloads)))
        return add_all(cast_varying(jnp.zeros(like.shape, like.dtype), axes), payloads)

    # A sum from zero takes a pass more; a second decoder, beside that of the loop, doubles the program of a TPU.
    # XLA:CPU decodes inside a loop several times slower than outside, where it also fuses decoders and their sum. What
    # is scattered gains nothing.
    at_once = {} if add else {"cpu": partial(sum_from_first, unroll=min(workers - 1, AT_ONCE))}
    return lax.platform_dependent(payloads, **at_once, tpu=sum_from_zero, default=sum_from_first) / workers
