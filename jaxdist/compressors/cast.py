"""Casts to narrower floats."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._core.descriptions import with_description
from .._core.dtypes import saturate, working_dtype
from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .._core.xla_quirks import largest_magnitude
from .blocks import normal_scales
from .compressor import Compressor
from .packing import from_words, to_words
from .random import hash_words
from .rounding import Rounding

FLOATS = ("bfloat16", "float16")
FLOATS8 = ("float8_e4m3fn", "float8_e5m2")


@with_description
def cast(dtype: DTypeLike, *, rounding: Rounding = "nearest") -> Compressor:
    """Rounds to a narrower float: saturating, never NaN or infinite for finite input.

    `C(x) = round(clip(x, -max, max))`; for the 8-bit floats `C(x) = s round(x / s)` with one scale `s = max|x| / max`
    per array, so that a gradient of any magnitude uses the top of their few exponents. Infinite entries stay
    infinite (8-bit: the array becomes NaN), so that a check for them behind the mean still sees them.

    With p significant bits (bfloat16 8, float16 11, e4m3 4, e5m2 3) an entry changes by at most `2^-p |x_i|`, hence
    δ = 1 - 4^-p. For float16 and bfloat16 this holds for arrays whose nonzero entries are between the dtype's smallest
    normal number (6e-5 for float16) and its largest (65504): smaller ones lose digits, up to all of them. The
    8-bit floats are scaled, so only entries far below the largest one underflow, and δ accounts for them:
    `δ = 1 - 4^-p - d (t / max)²` for d entries and t half of the smallest subnormal, for arrays of any magnitude.

    At random an entry becomes one of the two bfloat16 around it, ω = 2^-16: for a running average, which with rounding
    to nearest would not change where a step moves it by less than a 512th.

    *On the wire*: 2 bytes an entry, as an array of `dtype` (summable); 8-bit: 1 byte an entry and 4 for the scale.

    Args:
      dtype: bfloat16 (any magnitude, 2 to 3 digits: start here), float16 (3 to 4 digits, but 6e-5 to 65504 only),
        float8_e4m3fn (1 to 2 digits) or float8_e5m2 (1 digit, wider range); the last two inside error feedback.
      rounding: "nearest", or for bfloat16 "stochastic".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = cast(jnp.bfloat16), jnp.array([1.0, 1.001, -3.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 1.,  1., -3.], dtype=float32)

    References:
      Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433, 2022.
    """
    dtype = jnp.dtype(dtype)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'rounding must be "nearest" or "stochastic", got {rounding!r}')
    if rounding == "stochastic":
        if dtype.name != "bfloat16":
            raise ValueError(
                f'rounding="stochastic" needs dtype=bfloat16, got {dtype.name}; fp8(rounding="stochastic") has 8 bits'
            )
        return _bfloat16_at_random()
    if dtype.name in FLOATS:
        return _cast16(dtype)
    if dtype.name in FLOATS8:
        return _cast8(dtype)
    raise ValueError(f"dtype must be one of {', '.join(FLOATS + FLOATS8)}, got {dtype.name}; identity() sends others")


def _cast16(dtype: jnp.dtype) -> Compressor:
    def compress(x: Array, key: PRNGKeyArray) -> Array:
        del key
        wide = x.astype(working_dtype(x.dtype))
        return saturate(wide, dtype, jnp.isfinite(wide))

    contraction = 1.0 - float(jnp.finfo(dtype).eps / 2) ** 2
    return Compressor(compress, _widen, summable=True, contraction=lambda shape: contraction)


def _widen(payload: Array, like: Like) -> Array:
    # Saturates too: the largest float16 may have been rounded up to a bfloat16 beyond its range.
    wide = payload.astype(working_dtype(like.dtype))
    return saturate(wide, like.dtype, jnp.isfinite(wide)).reshape(like.shape)


def _bfloat16_at_random() -> Compressor:
    largest = float(jnp.finfo(jnp.bfloat16).max)

    def compress(x: Array, key: PRNGKeyArray) -> Array:
        wide = x.astype(jnp.float32)
        clipped = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -largest, largest), 0.0)
        # Adds 16 random bits to the 16 that are dropped: the carry rounds up, with the probability of the fraction.
        bits = jax.lax.bitcast_convert_type(clipped, jnp.uint32) + (hash_words(key, x.shape) >> 16)
        rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
        return jnp.where(jnp.isfinite(wide), rounded, wide.astype(jnp.bfloat16))

    # ω is that of the worst entry, 1 + 2^-8: halfway between two bfloat16 that are 2^-7 apart.
    return Compressor(compress, _widen, summable=True, variance=lambda shape: 2.0**-16)


def _cast8(dtype: jnp.dtype) -> Compressor:
    info = jnp.finfo(dtype)
    largest, precision, underflow = float(info.max), float(info.eps) / 2, float(info.smallest_subnormal) / 2

    def compress(x: Array, key: PRNGKeyArray) -> tuple[UInt[Array, "..."], Float[Array, ""]]:
        del key
        wide = x.astype(jnp.float32)
        # No entry has the scale of zeros.
        top = largest_magnitude(wide.reshape(1, -1))[0, 0] if x.size else jnp.zeros((), jnp.float32)
        scale = normal_scales(top, largest)
        return to_words(jnp.clip(wide / scale, -largest, largest).astype(dtype)), scale

    def decompress(payload: tuple[Array, Array], like: Like) -> Array:
        words, scale = payload
        values = from_words(words, dtype).astype(jnp.float32) * scale
        return saturate(values, like.dtype, jnp.isfinite(scale)).reshape(like.shape)

    def contraction(shape: Shape) -> float:
        # Underflow: each entry loses at most half of the smallest subnormal, in units of the scale.
        return max(0.0, 1.0 - precision**2 - math.prod(shape) * (underflow / largest) ** 2)

    return Compressor(compress, decompress, contraction=contraction)
