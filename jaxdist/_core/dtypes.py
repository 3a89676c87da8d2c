"""The dtypes in which to compute."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import DTypeLike

from .types import Array, Like, PyTree


def working_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype in which a compressor of arrays of `dtype` computes: float32, or `dtype` itself where it is wider."""
    # Not jnp.promote_types, which refuses half precision under strict dtype promotion.
    return dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32


def widest_float() -> DTypeLike:
    """The dtype of numbers that must be exact to the last bit of any array: float64 with x64, else float32."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def factor_dtype(tree: PyTree) -> DTypeLike:
    """The dtype of a number that multiplies the leaves of a tree: float64 if one of them has it, else float32."""
    return jnp.float64 if any(x.dtype == jnp.float64 for x in jax.tree.leaves(tree)) else jnp.float32


def explain_dtype(dtype: DTypeLike) -> str | None:
    """The reason why arrays of a dtype of numbers have no mean, sum or code here, and the fix; `None` for the others.

    Integers of 8 bits or more may be codes of a sum, and keys and booleans are no numbers: others refuse those.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (
            "compressors, norms and optimizers are defined for real numbers; keep the real and the imaginary part as "
            "two leaves, and join them in the loss, jax.lax.complex(params['real'], params['imaginary'])"
        )
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 2:
        return (
            "gradients take the dtype of their parameter, and sums of 8 bits or less lose nearly all of them; keep the "
            "parameters in bfloat16 or float32, and cast them in the loss"
        )
    if str(dtype) in ("int4", "uint4", "int2", "uint2"):
        return (
            "quantized parameters have no gradient; train a copy in bfloat16 or float32 and quantize it in the loss, "
            "or leave them out of the parameters that are trained"
        )
    return None


def wider_dtype(dtype: DTypeLike, other: DTypeLike) -> DTypeLike:
    """Returns the dtype of more bytes, the first of two that are alike."""
    return other if jnp.dtype(other).itemsize > jnp.dtype(dtype).itemsize else dtype


def widen(x: Array) -> Array:
    """Casts to the dtype in which to compute: float32, or that of `x` itself where it is wider."""
    return x.astype(working_dtype(x.dtype))


def widen_like(like: Like) -> jax.ShapeDtypeStruct:
    """The shape of an array, in the dtype in which to compute: float32, or that of the array where it is wider.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import widen_like
      >>> widen_like(jnp.zeros(3, jnp.bfloat16))
      ShapeDtypeStruct(shape=(3,), dtype=float32)
    """
    return jax.ShapeDtypeStruct(like.shape, working_dtype(like.dtype))


def saturate(x: Array, dtype: DTypeLike, finite: Array | bool) -> Array:
    """Casts to `dtype`; where x comes from `finite` numbers, at most to its largest number, never to infinity."""
    largest = min(float(jnp.finfo(dtype).max), float(jnp.finfo(x.dtype).max))
    limits = jnp.where(finite, largest, jnp.inf).astype(x.dtype)
    return jnp.clip(x, -limits, limits).astype(dtype)


def narrow(x: Array, dtype: DTypeLike) -> Array:
    """Casts to the dtype of the updates: what is finite to at most the largest number of float16.

    What was computed in float32 may exceed 65504, which gradients in float16 come near to. The other dtypes have the
    range of float32.
    """
    return saturate(x, dtype, jnp.isfinite(x)) if dtype == jnp.float16 != x.dtype else x.astype(dtype)


def round_to(x: Array, dtype: DTypeLike) -> Array:
    """Rounds to the values of another floating dtype, and keeps its own.

    Compilers that allow excess precision drop a cast to bfloat16 and back; they keep `reduce_precision`.
    """
    target, own = jnp.finfo(dtype), jnp.finfo(x.dtype)
    # With fewer exponent bits `reduce_precision` would flush subnormal numbers, which a cast keeps.
    if target.nexp == own.nexp and target.nmant < own.nmant:
        return lax.reduce_precision(x, target.nexp, target.nmant)
    return x.astype(dtype).astype(x.dtype)
