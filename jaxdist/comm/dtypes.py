"""Which dtypes the collectives take; others raise `TypeError` before anything is sent."""

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Array

# Scales of blocks, without a sign and a zero.
EXPONENTS = jnp.float8_e8m0fnu


def check_bytes(x: Array, *, has_zero: bool = False) -> None:
    """Checks that an array can be sent, and with `has_zero` that a worker which receives nothing can have zeros."""
    if _bits(x) < (8 if _kind(x) == "float" else 4):
        raise TypeError(
            f"a collective cannot send {x.dtype}, which XLA widens or refuses: pack it into bytes, as "
            "jd.compressors.pack does, and send these"
        )
    if has_zero and x.dtype == EXPONENTS:
        raise TypeError(f"ppermute cannot send {x.dtype}, which has no zero: send its bits as uint8")


def check_number(x: Array, *, inexact: bool = False) -> None:
    """Checks that arrays can be added, and with `inexact` that their mean has their dtype."""
    check_bytes(x)
    if _kind(x) == "key":
        raise TypeError(f"a collective cannot add random keys ({x.dtype}): gather them")
    if x.dtype == EXPONENTS:
        raise TypeError(f"a collective cannot add {x.dtype}, which has no zero: convert it to float32")
    if inexact and _kind(x) == "integer":
        raise TypeError(f"reduce_scatter_mean needs floats, got {x.dtype}: convert it to float32, or exchange the rows")


def check_ordered(x: Array) -> None:
    """Checks that arrays have a maximum: numbers with an order, and floats with NaN above all others as integers."""
    check_bytes(x)
    kind = _kind(x)
    if kind in ("complex", "key"):
        raise TypeError(f"Comm.max needs numbers with an order, got {x.dtype}: take the maximum of their magnitudes")
    if kind == "float":
        word = f"int{_bits(x)}"
        if not np.isnan(np.array(np.iinfo(word).max, word).view(x.dtype)):
            raise TypeError(f"Comm.max does not know the order of {x.dtype}: convert it to float32")


def _kind(x: Array) -> str:
    for kind, parent in (("float", jnp.floating), ("complex", jnp.complexfloating), ("key", jax.dtypes.prng_key)):
        if jnp.issubdtype(x.dtype, parent):
            return kind
    return "integer"


def _bits(x: Array) -> int:
    kind = _kind(x)
    if kind in ("complex", "key") or x.dtype == jnp.bool_:
        return 8 * x.dtype.itemsize
    return (jnp.finfo if kind == "float" else jnp.iinfo)(x.dtype).bits
