"""The dtypes in which arithmetic is done."""

import jax.numpy as jnp
from jaxtyping import DTypeLike

from .types import Array


def working_dtype(dtype: DTypeLike) -> DTypeLike:
    """What a code of arrays of `dtype` computes in: float32, or `dtype` itself where that is wider."""
    # Not jnp.promote_types, which refuses half precision under strict dtype promotion.
    return dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32


def saturated(x: Array, dtype: DTypeLike, finite: Array) -> Array:
    """Casts to `dtype`; where x comes from `finite` numbers, at most to its largest number, never to infinity."""
    largest = min(float(jnp.finfo(dtype).max), float(jnp.finfo(x.dtype).max))
    limits = jnp.where(finite, largest, jnp.inf).astype(x.dtype)
    return jnp.clip(x, -limits, limits).astype(dtype)
