"""TernGrad: unbiased stochastic rounding of each bucket to -1, 0 or 1 times its largest magnitude."""

import math

import jax.numpy as jnp

from .._core.checks import check_count, check_range
from .._core.descriptions import with_description
from .._core.types import Array, Like, PRNGKeyArray, Shape
from .compressor import Compressor, Factor
from .qsgd import QuantizedPayload, qsgd
from .rounding import from_unit, norms_of, to_buckets, to_unit


@with_description
def terngrad(*, clip: float | int | None = 2.5, bucket: int | None = None) -> Compressor:
    """Sends each entry as -m, 0 or m, at random: `C(x)_i = m sgn(y_i)` with probability `|y_i| / m`, else 0.

    `m = max|y|`, and `y = clip(x, -c σ, c σ)` with `σ = |x|₂ / sqrt(d)` over the whole array (the paper subtracts the
    mean first, which for one entry, or equal ones, leaves a σ of 0). C is right on average for y,
    `E|C(x) - y|² = m |y|₁ - |y|²`, at most `ω |y|²` with `ω = (sqrt(d) - 1) / 2` for d entries that share m.

    Clipping bounds the noise whatever the size of the array, `E|C(x) - y|² <= c |x|₂ |y|₂ - |y|²`, and cuts off the
    part of the largest entries above c σ, in every step: there is no ω for x itself. Nor is there a δ: for one large
    and many small entries `E|C(x) - x|²` exceeds `|x|²`. So error feedback refuses it with clipping; use `clip=None`
    with small buckets there, or `qsgd`.

    *On the wire*: 2 bits an entry (in whole 32-bit words where there are several buckets) and 4 bytes per bucket; up to
    16 times less than float32.

    Args:
      clip: c, or None for no clipping. 2.5 cuts one in eighty Gaussian entries, `|x - y|² = 0.0024 |x|²`; lower is
        less noise and more bias.
      bucket: entries that share m; None: the whole array. Without clipping take 32 to 512.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = terngrad(), jnp.array([3.0, -4.0, 0.0, 12.0])  # p = 1/4, 1/3, 0, 1
      >>> decoded = jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      >>> sorted(set(jnp.abs(decoded).tolist()))
      [0.0, 12.0]

    References:
      Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", arXiv:1705.07878,
      2017.
    """
    if clip is not None:
        check_range("clip", clip, 0, ends="(]")
    if bucket is not None:
        check_count("bucket", bucket, 1)

    def compress(x: Array, key: PRNGKeyArray) -> QuantizedPayload:
        return _one_level(bucket, x.shape).compress(x if clip is None else _clip(x, clip), key)

    def decompress(payload: QuantizedPayload, like: Like) -> Array:
        return _one_level(bucket, like.shape).decompress(payload, like)

    def variance(shape: Shape) -> float:
        size = max(math.prod(shape), 1)
        # The ω of `qsgd` with s = 1.
        return (math.sqrt(min(size, bucket or size)) - 1.0) / 2.0

    def shrink(payload: QuantizedPayload, x: Array, factor: Factor) -> QuantizedPayload:
        code = _one_level(bucket, x.shape).shrink
        return payload if code is None else code(payload, x, factor)

    if clip is not None:
        return Compressor(compress, decompress)
    return Compressor(compress, decompress, variance=variance, shrink=shrink)


def _one_level(bucket: int | None, shape: Shape) -> Compressor:
    # With two bits QSGD has one level per sign, the largest magnitude: TernGrad's code.
    return qsgd(2, bucket=max(math.prod(shape), 1) if bucket is None else bucket)


def _clip(x: Array, clip: float | int) -> Array:
    scaled = to_unit(to_buckets(x, max(x.size, 1)))
    # c σ, with σ = |x|₂ / sqrt(d) of the scaled entries.
    limit = norms_of(scaled, "l2") * (clip / math.sqrt(max(x.size, 1)))
    return from_unit(jnp.clip(scaled.rows, -limit, limit), scaled.unit).reshape(x.shape)
