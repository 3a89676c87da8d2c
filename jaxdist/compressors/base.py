"""The `Compressor`: one array in, packed words out, one array back."""

from collections.abc import Callable
from typing import NamedTuple

from .._core.types import Array, Like, Payload, PRNGKeyArray, Shape


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

    Both hold for finite entries of any magnitude, but for what an entry loses below the smallest normal number (1.2e-38
    for float32: compilers flush such numbers to zero); a format with a range of its own says so. Where an unbiased code
    would decode to more than the largest number of the dtype, it decodes to that number: the error is smaller, and the
    mean too.
    """

    compress: Callable[[Array, PRNGKeyArray], Payload]
    decompress: Callable[[Payload, Like], Array]
    summable: bool = False
    shared_key: bool = False
    variance: Callable[[Shape], float] | None = None
    contraction: Callable[[Shape], float] | None = None
