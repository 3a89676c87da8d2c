"""The `Compressor`: one array in, packed words out, one array back."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._typing import Array, Like, Payload, PRNGKeyArray, Shape


class Compressor(NamedTuple):
    """How one array becomes a payload and an array again. No state, no collectives.

    Attributes:
      compress: `compress(x, key) -> payload`, a pytree of arrays whose shapes follow from `x.shape` alone.
        Whatever is narrower than 32 bits travels as u8, u16 or int8 words, since XLA widens the rest.
      decompress: `decompress(payload, like) -> x`, with the shape and dtype of `like`.
      summable: payloads may be averaged on the wire (the code is linear), so an all-reduce carries them;
        otherwise they are gathered and decoded one by one.
      shared_key: all workers draw the same key (random-k, sketches).
      variance: ω of an unbiased code, as a function of the shape: `E|C(x) - x|² <= ω |x|²`.
      contraction: δ of a biased one: `E|C(x) - x|² <= (1 - δ) |x|²`.
    """

    compress: Callable[[Array, PRNGKeyArray], Payload]
    decompress: Callable[[Payload, Like], Array]
    summable: bool = False
    shared_key: bool = False
    variance: Callable[[Shape], float] | None = None
    contraction: Callable[[Shape], float] | None = None


def working_dtype(dtype: DTypeLike) -> DTypeLike:
    """What a code of arrays of `dtype` computes in: float32, or `dtype` itself where that is wider."""
    # Not jnp.promote_types, which refuses half precision under strict dtype promotion.
    return dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32


def largest_exponent(dtype: DTypeLike) -> int:
    """The exponent of the largest power of two that arrays of `dtype` hold, or float32 if that is narrower."""
    return min(math.frexp(float(jnp.finfo(dtype).max))[1] - 1, 127)
