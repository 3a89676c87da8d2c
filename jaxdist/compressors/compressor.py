"""The `Compressor`: one array to a payload of packed words, and back."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .._core.checks import Portable
from .._core.types import Array, Float, Like, Payload, PRNGKeyArray, Shape


class DamagedCodeError(Portable, ValueError):
    """Bytes are not what a codec wrote: they were cut or altered, or are the code of another compressor or shape."""


class Codec(NamedTuple):
    """The variable-length form of a payload, as bytes on the host: for messages whose length need not be static.

    Attributes:
      encode: `encode(payload, like) -> bytes` of a payload in host memory, for an array with the shape and dtype of
        `like`.
      decode: `decode(body, like) -> payload`, in NumPy; `decompress` makes the same array of it. Raises
        `DamagedCodeError` for other bytes.
      expected_bits: `expected_bits(payload, like) -> f32[]`, inside jit: the length of the code without the few bytes
        that frame it.
      name: the code and its parameters, so that two sides can compare them.
    """

    encode: Callable[[Payload, Like], bytes]
    decode: Callable[[bytes, Like], Payload]
    expected_bits: Callable[[Payload, Like], Float[Array, ""]]
    name: str


# Of `scaled`: the factor of each bucket, from its own relative error ω_x and the bound ω.
Factor = Callable[[Array, Any], Array]


class Compressor(NamedTuple):
    """Encodes one array as a payload and decodes it again, without state or collectives.

    Both bounds hold for finite entries of any magnitude, except for losses below the smallest normal number (1.2e-38
    for float32), which compilers flush to zero; docstrings state other limits. Where an unbiased compressor would
    decode to more than the largest number of the dtype, it decodes to that number, with a smaller error and a smaller
    mean.

    Attributes:
      compress: `compress(x, key) -> payload`, a pytree of arrays whose shapes depend on `x.shape` alone. Codes narrower
        than 32 bits are u8, u16 or int8 words, since XLA widens other dtypes.
      decompress: `decompress(payload, like) -> x`, with the shape and dtype of `like`.
      summable: payloads may be averaged on the wire (the compressor is linear), by an all-reduce; otherwise they are
        gathered.
      shared_key: all workers draw the same key (random-k, sketches).
      variance: ω of an unbiased compressor, as a function of the shape: `E|C(x) - x|² <= ω |x|²`.
      contraction: δ of a biased one: `E|C(x) - x|² <= (1 - δ) |x|²`.
      codec: the variable-length form of a payload, for engines that send bytes; shapes inside jit stay as they are.
      add: `add(payload, total) -> total + decompress(payload, total)`, where most entries are zero and it is cheaper to
        touch only the others.
      shrink: `shrink(payload, x, factor) -> payload` of an unbiased compressor that knows its error for the input at
        hand: the payload with its scales times `factor(ω_x, ω)`, from the relative error of their part of `x` and its
        bound; see `scaled`.
      scale_free: decodes to numbers that do not depend on the magnitude of `x`, zero included (`sign`), so that no
        factor can weight a worker or leave it out.
      description: the call that made it, such as `qsgd(4)`, for `repr` and error messages.
    """

    compress: Callable[[Array, PRNGKeyArray], Payload]
    decompress: Callable[[Payload, Like], Array]
    summable: bool = False
    shared_key: bool = False
    variance: Callable[[Shape], float] | None = None
    contraction: Callable[[Shape], float] | None = None
    codec: Codec | None = None
    add: Callable[[Payload, Array], Array] | None = None
    scale_free: bool = False
    shrink: Callable[[Payload, Array, Factor], Payload] | None = None
    description: str = ""

    def __repr__(self) -> str:
        return self.description or f"Compressor{tuple(self)}"


def check_compressor(compressor: Any) -> None:
    """Raises unless the argument is a compressor; a reducer contains one already."""
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"expected a compressor, such as qsgd(4) or top_k(0.01), got {compressor!r}; a reducer is used as it is "
            "where reducers are taken, and elsewhere the compressor inside it"
        )
