"""QSGD: unbiased stochastic rounding of each bucket to a few evenly spaced levels."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.types import Array, Float, Like, Shape, UInt
from .codecs import LevelCode, levels_codec
from .compressor import Compressor, Factor
from .one_pass import in_blocks
from .packing import pack, unpack
from .random import KeyOrStream, Noise, uniform_hash
from .rounding import (
    check_buckets,
    from_buckets,
    normalize_buckets,
    shrink_norms,
    to_buckets,
    whole_words,
)


class QuantizedPayload(NamedTuple):
    """Packed codes (the number of a level, the sign in the top bit if there is one) and the norm of each bucket."""

    codes: UInt[Array, " bytes"]
    norms: Float[Array, " buckets"]


@with_description
def qsgd(
    bits: int,
    *,
    bucket: int = 512,
    norm: Literal["max", "l2"] = "max",
    noise: Noise = uniform_hash,
    code: LevelCode | None = None,
) -> Compressor:
    """Rounds each bucket at random to `s = 2**(bits - 1) - 1` levels per sign, so that it is right on average.

    With `r_i = |x_i| / norm` and `j = floor(s r_i)`: `C(x)_i = norm sgn(x_i) (j + [u_i < s r_i - j]) / s`, u uniform in
    [0, 1). The variance of one entry between its levels l and l' is `norm² (l' - r_i) (r_i - l)`. The largest sum over
    a bucket of d entries is `ω |x|²` (attained, except in the last case, which is a bound):

    - "max": `ω = (sqrt(1 + (d - 1) / s²) - 1) / 2`
    - "l2":  `ω = sqrt(d) / s - 1` where `sqrt(d) >= 2 s` or s = 1, else `d / (4 s²)`

    A bucket with NaN or infinity decodes to NaN; one that is longer than the largest float has that for its norm.

    *On the wire*: `ceil(n bits / 8)` bytes of codes (in whole 32-bit words where there are several buckets) and 4 bytes
    of norm per bucket.

    Args:
      bits: 2, 3, 4 or 8, sign included. 4 to start; 8 loses next to nothing; 2 wants error feedback where it is used in
        every step.
      bucket: entries that share a norm. Smaller is more exact and costs 4 bytes per bucket: 128 to 1024.
      norm: "max", with a far smaller typical error, or "l2" for the theory of the paper and sparser codes.
      noise: `(key, shape) -> uniforms` in float32; `jax.random.uniform` for a reference at many times the price.
      code: how islands and asynchronous rules send a payload, see `Codec`: "elias", the code of the paper, or
        "entropy", the shorter. `None`: all payloads of a shape have one length.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = qsgd(4), jnp.array([7.0, -3.0, 0.0, 0.0, 5.0])
      >>> payload = code.compress(x, jax.random.key(0))
      >>> payload.codes.nbytes, payload.norms.nbytes
      (3, 4)
      >>> bool(jnp.allclose(code.decompress(payload, x), x))  # each entry is on one of the levels
      True

    References:
      Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and
      encoding", arXiv:1610.02132, 2016.
    """
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits must be 2, 3, 4 or 8, got {bits}")
    check_buckets(bucket, norm)
    codec = levels_codec(QuantizedPayload, bits, bucket, code)
    levels = 2 ** (bits - 1) - 1

    def compress(x: Array, key: KeyOrStream) -> QuantizedPayload:
        ratios, norms = normalize_buckets(x, bucket, norm)
        levelled = jnp.abs(ratios) * levels
        # C(x) = norm sgn(x) (j + [u < s r - j]) / s.
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
        # Largest magnitude: one entry costs nothing and weighs 1, which gives a quadratic equation for ω.
        if norm == "max":
            return (math.sqrt(1.0 + (size - 1) / levels**2) - 1.0) / 2.0
        root = math.sqrt(size)
        return root / levels - 1.0 if root >= 2 * levels or levels == 1 else size / (4.0 * levels**2)

    def shrink(payload: QuantizedPayload, x: Array, factor: Factor) -> QuantizedPayload:
        ratios, _ = normalize_buckets(x, bucket, norm)
        levelled = jnp.abs(ratios) * levels
        part = levelled - jnp.floor(levelled)
        # (l' - r) (r - l) of the levels l = j / s and l' = (j + 1) / s around r.
        lost = part * (1.0 - part) / levels**2
        return payload._replace(norms=shrink_norms(payload.norms, ratios, lost, variance(x.shape), factor))

    # Parts need noise that can begin anywhere.
    coded = in_blocks(compress, bucket, bits) if noise is uniform_hash else compress
    return Compressor(coded, decompress, variance=variance, codec=codec, shrink=shrink)
