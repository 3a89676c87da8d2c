"""Floats of 4 and 8 bits as integer codes, by arithmetic that every backend vectorizes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Float, Int, PRNGKeyArray, UInt
from .rounding import to_integers

# Of float32.
MANTISSA, BIAS = 23, 127


class Minifloat(NamedTuple):
    """A float format: sign, exponent, `mantissa` bits; the finite magnitudes are the codes 0 to `largest_code`.

    The exponent of the smallest normal number is `emin`, that of the largest number `emax`.
    """

    bits: int
    mantissa: int
    emin: int
    emax: int
    largest_code: int


E4M3 = Minifloat(bits=8, mantissa=3, emin=-6, emax=8, largest_code=0x7E)
E5M2 = Minifloat(bits=8, mantissa=2, emin=-14, emax=15, largest_code=0x7B)
E2M1 = Minifloat(bits=4, mantissa=1, emin=0, emax=2, largest_code=0x7)
# Powers of two and zero. With no mantissa whose last digit could be even, ties go to the larger of two powers.
E3M0 = Minifloat(bits=4, mantissa=0, emin=-2, emax=4, largest_code=0x7)


def magnitudes(form: Minifloat) -> np.ndarray:
    """All finite magnitudes, in the order of their codes."""
    codes = np.arange(form.largest_code + 1)
    doublings = np.maximum((codes >> form.mantissa) - 1, 0)
    return np.ldexp(codes - (doublings << form.mantissa), doublings + form.emin - form.mantissa)


def encode(x: Float[Array, "*shape"], form: Minifloat, rounding: str, key: PRNGKeyArray) -> UInt[Array, "*shape"]:
    """The codes of float32 values, saturating.

    Numbers below `2**(emin + 1)` are k units of `2**(emin - mantissa)`, and k is their code. Each doubling from there
    on doubles the unit and puts `2**mantissa` codes below those numbers: rounding up to the next power of two carries.
    """
    magnitude = jnp.abs(x)
    exponent = jax.lax.bitcast_convert_type(magnitude, jnp.int32) >> MANTISSA
    doublings = jnp.maximum(exponent - (BIAS + form.emin), 0)
    units = to_integers(magnitude * _power_of_two(form.mantissa - form.emin - doublings), rounding, key)
    # From below too: what NaN becomes must not reach into the sign.
    codes = jnp.clip((doublings << form.mantissa) + units, 0, form.largest_code)
    return (codes | jnp.where(x < 0, 1 << (form.bits - 1), 0)).astype(jnp.uint8)


def decode(codes: UInt[Array, "*shape"], form: Minifloat) -> Float[Array, "*shape"]:
    """The float32 values of codes."""
    wide = codes.astype(jnp.int32)
    sign = 1 << (form.bits - 1)
    code = wide & (sign - 1)
    doublings = jnp.maximum((code >> form.mantissa) - 1, 0)
    units = code - (doublings << form.mantissa)
    signed = jnp.where(wide >= sign, -units, units).astype(jnp.float32)
    return signed * _power_of_two(doublings + (form.emin - form.mantissa))


def _power_of_two(exponents: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`2**exponents` for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponents + BIAS) << MANTISSA, jnp.float32)
