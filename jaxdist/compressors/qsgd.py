"""Unbiased stochastic rounding of each bucket to a few evenly spaced levels (QSGD)."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp

from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .packing import pack, unpack
from .random import Noise, uniform_hash
from .rounding import check_buckets, from_buckets, normalize_buckets, to_buckets, whole_words


class QuantizedPayload(NamedTuple):
    """Packed codes (sign in the top bit, level below it) and the norm of each bucket."""

    codes: UInt[Array, " bytes"]
    norms: Float[Array, " buckets"]


def qsgd(
    bits: int, *, bucket: int = 512, norm: Literal["max", "l2"] = "max", noise: Noise = uniform_hash
) -> Compressor:
    """Rounds each bucket at random to `s = 2**(bits - 1) - 1` levels per sign, so that it is right on average.

    With `r_i = |x_i| / norm` and `j = floor(s r_i)`: `C(x)_i = norm sgn(x_i) (j + [u_i < s r_i - j]) / s`, u uniform
    in [0, 1). The variance of one entry is `norm² (l' - r_i) (r_i - l)` between its two levels l and l'. The largest
    sum of these over a bucket of d entries is `ω |x|²` (attained, except in the last case, which is a bound):

    - "max": `ω = (sqrt(1 + (d - 1) / s²) - 1) / 2`
    - "l2":  `ω = sqrt(d) / s - 1` where `sqrt(d) >= 2 s` or s = 1, else `d / (4 s²)`

    The largest magnitude is the default norm since its ω is about half of the other's and its typical error is far
    smaller: for a bucket of 512 Gaussian entries `|C(x) - x|² / |x|²` is 1.59, 0.20, 0.036, 0.00011 with 2, 3, 4, 8
    bits, against 17.1, 5.02, 1.58, 0.0053 with the Euclidean norm, which spends its levels on values that do not occur
    (but sends many more zeros).

    Arithmetic is float32 whatever the dtype of x. A bucket with NaN or infinity decodes to NaN. One
    that is longer ("l2") than the largest float has that for its norm, and a smaller error.

    On the wire: `ceil(n bits / 8)` bytes of codes (in whole 32-bit words where there are several buckets) and 4 bytes
    of norm per bucket; 4 bits with 512: 7.9 times less than float32.

    Args:
      bits: 2, 3, 4 or 8, sign included. 4 to start; 8 loses next to nothing; 2 wants small buckets or error feedback.
      bucket: entries that share a norm. Smaller is more exact and costs 4 bytes per bucket: 128 to 1024.
      norm: "max", or "l2" for the theory of the paper and sparser codes.
      noise: `(key, shape) -> uniforms`; `uniform_threefry` for a reference at many times the price.

    Returns:
      An unbiased compressor; payloads are gathered, not summed, since each worker has its own norms.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = qsgd(4), jnp.array([7.0, -3.0, 0.0, 0.0, 5.0])
      >>> payload = code.compress(x, jax.random.key(0))
      >>> payload.codes.nbytes, payload.norms.nbytes
      (3, 4)
      >>> bool(jnp.allclose(code.decompress(payload, x), x))  # each entry is on one of the levels
      True

    References:
      D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: communication-efficient SGD via gradient
      quantization and encoding", arXiv:1610.02132, 2017.
    """
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits must be 2, 3, 4 or 8, got {bits}")
    check_buckets(bucket, norm)
    levels = 2 ** (bits - 1) - 1

    def compress(x: Array, key: PRNGKeyArray) -> QuantizedPayload:
        ratios, norms = normalize_buckets(x, bucket, norm)
        levelled = jnp.abs(ratios) * levels
        lower = levelled.astype(jnp.int32)
        up = noise(key, ratios.shape) < levelled - lower.astype(jnp.float32)
        codes = (lower + up.astype(jnp.int32)) | ((ratios < 0).astype(jnp.int32) << (bits - 1))
        flat = codes.astype(jnp.uint8).reshape(-1)[: whole_words(x.size, bits)]
        return QuantizedPayload(pack(flat, bits), norms[:, 0])

    def decompress(payload: QuantizedPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        codes = unpack(payload.codes, bits, size).astype(jnp.int32)
        level = codes & levels
        # Negated as integers, so that level zero with the sign bit set is 0, not -0; divided, so that level s is 1.
        signed = jnp.where(codes > levels, -level, level).astype(jnp.float32) / levels
        return from_buckets(to_buckets(signed, bucket), payload.norms, like)

    def variance(shape: Shape) -> float:
        size = min(bucket, math.prod(shape))
        if size <= 1:
            return 0.0
        if norm == "max":
            return (math.sqrt(1.0 + (size - 1) / levels**2) - 1.0) / 2.0
        root = math.sqrt(size)
        return root / levels - 1.0 if root >= 2 * levels or levels == 1 else size / (4.0 * levels**2)

    return Compressor(compress, decompress, variance=variance)
