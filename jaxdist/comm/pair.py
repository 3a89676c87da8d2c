"""Exchanges between two workers on CPU at the full rate of a link in both directions.

XLA's all-gather, all-to-all and permutation on CPU post the send before the receive, and gloo has one connection for a
pair of workers. The later of the two finds the other one ready, fills the connection with its data, and its own "ready
to receive" waits behind them: the two directions take turns. At 100 Mbit/s a permutation takes twice the time of its
bytes, a gather 1.5 times. The ring of an all-reduce posts the receive first and takes 1.04 times.

So two workers exchange words by adding them up: integers wrap around, so that the sum minus this worker's words is the
other's, bit for bit, and both send what they would send otherwise. The ring has one more hop, which costs more than it
saves where messages are short, or links have a delay of 10 ms and a low rate.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import assume_replicated
from .._core.types import Array

# Below this number of bytes the further hop costs as much as the second direction saves.
LEAST_BYTES = 2**18


def is_compressed(x: Array) -> bool:
    """Returns whether gathers and exchanges of this dtype carry what was compressed for a slow link, as integers.

    Others are usually gradients and parameters of ZeRO: on a fast link a sum takes twice the time of an exchange, and
    its words are as much memory once more.
    """
    return not jnp.issubdtype(x.dtype, jnp.floating)


def is_long(x: Array) -> bool:
    """Returns whether an array of this size is exchanged faster by a sum, and has a dtype whose bits can be summed."""
    number = jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)
    # Numbers of 4 and 2 bits take a byte of memory each, but are no words.
    whole = number and _bits(x) == 8 * x.dtype.itemsize
    return whole and x.size * x.dtype.itemsize >= LEAST_BYTES


def permute_pair(axes: tuple[str, ...], x: Array) -> Array:
    """`lax.ppermute` of two workers that send to each other: the array of the other one."""
    word = jnp.dtype(f"uint{_bits(x)}")
    words = x if x.dtype == word else lax.bitcast_convert_type(x, word)
    other = lax.psum(words, axes) - words
    return other if x.dtype == word else lax.bitcast_convert_type(other, x.dtype)


def gather_pair(axes: tuple[str, ...], x: Array, *, agreed: bool) -> Array:
    """`lax.all_gather` of two workers: `[*s] -> [2, *s]`, typed as replicated if `agreed`."""
    other = permute_pair(axes, x)
    first = lax.axis_index(axes) == 0
    rows = jnp.stack([jnp.where(first, x, other), jnp.where(first, other, x)])
    # Both workers put the same rows in the same order, which types cannot tell.
    return assume_replicated(rows, axes) if agreed else rows


def exchange_pair(axes: tuple[str, ...], x: Array) -> Array:
    """`lax.all_to_all` of two workers: of the rows `[2, *s]` each keeps its own, and sends the other."""
    index = lax.axis_index(axes)
    other = permute_pair(axes, lax.dynamic_index_in_dim(x, 1 - index, keepdims=False))
    return lax.dynamic_update_index_in_dim(x, other, 1 - index, 0)


def choose_faster(x: Array, *, plain: Callable[[Array], Array], cpu: Callable[[Array], Array]) -> Array:
    """`cpu(x)` on CPU, and `plain(x)` elsewhere and as the derivative, since integers have none."""

    def choose(x):
        return lax.platform_dependent(x, cpu=cpu, default=plain)

    if not jnp.issubdtype(x.dtype, jnp.floating):
        return choose(x)
    differentiable = jax.custom_jvp(choose)
    differentiable.defjvp(lambda primals, tangents: (differentiable(*primals), plain(*tangents)))
    return differentiable(x)


def _bits(x: Array) -> int:
    return (jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo)(x.dtype).bits
