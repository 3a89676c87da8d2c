"""signSGD's code: one bit an entry, with one scale or several."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.types import Array, Float, Like, PRNGKeyArray, UInt
from .compressor import Compressor
from .one_pass import in_one_pass
from .packing import pack_signs, unpack
from .random import KeyOrStream
from .rounding import UnitRows, from_buckets, from_unit, to_buckets, to_unit


class SignPayload(NamedTuple):
    """Signs, eight to a byte (bit set: not negative), and the decoded magnitude of each bucket."""

    signs: UInt[Array, " bytes"]
    scales: Float[Array, " buckets"]


@with_description
def sign() -> Compressor:
    """Sends the sign of each entry and nothing else: `C(x) = sgn(x)`, with `sgn(0) = +1`.

    For votes, which need no magnitudes, and for sign descent. Neither unbiased nor a contraction, so error feedback
    refuses it, and its reducers refuse `examples=`: zero becomes +1, so that no worker can be left out. NaN counts as
    negative and cannot be detected after the mean: check for it before.

    *On the wire*: `ceil(d / 8)` bytes; 32 times less than float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = sign(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 1., -1.,  1.,  1.], dtype=float32)

    References:
      Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimization for Non-Convex Problems",
      arXiv:1802.04434, 2018.
    """

    def compress(x: Array, key: PRNGKeyArray) -> UInt[Array, " bytes"]:
        del key
        return pack_signs(x.reshape(-1))

    def decompress(payload: UInt[Array, " bytes"], like: Like) -> Array:
        return _unpack_signs(payload, math.prod(like.shape)).reshape(like.shape).astype(like.dtype)

    return Compressor(compress, decompress, scale_free=True)


def signs_and_scales(bucket: int | None, scale_of: Callable[[UnitRows, Array], Array]) -> Compressor:
    """Signs with the scale `scale_of(scaled, counts)` of each bucket; counts of entries exclude the padding."""

    def compress(x: Array, key: KeyOrStream) -> SignPayload:
        del key
        buckets = to_buckets(x, bucket or max(x.size, 1))
        rows, width = buckets.shape
        counts = jnp.float32(width)
        if rows * width > x.size:
            counts = jnp.asarray(np.minimum(width, x.size - width * np.arange(rows)).astype(np.float32)[:, None])
        scaled = to_unit(buckets)
        # A mean is at most the largest magnitude, except for rounding errors.
        scales = from_unit(jnp.minimum(scale_of(scaled, counts), scaled.largest), scaled.unit)
        return SignPayload(pack_signs(x.reshape(-1)), scales[:, 0])

    def decompress(payload: SignPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        signs = to_buckets(_unpack_signs(payload.signs, size), bucket or max(size, 1))
        return from_buckets(signs, payload.scales, like)

    return Compressor(in_one_pass(compress, bucket) if bucket else compress, decompress)


def _unpack_signs(words: UInt[Array, " bytes"], size: int) -> Float[Array, " size"]:
    """±1."""
    return (2 * unpack(words, 1, size).astype(jnp.int32) - 1).astype(jnp.float32)
