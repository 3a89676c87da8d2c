"""Several arrays as one vector, so that one collective carries them all."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from .._typing import Array

SMALL = 2**16


def concatenate(arrays: Sequence[Array]) -> Array:
    """The elements of arrays of one dtype in one vector.

    On CPU small arrays are written into their places one by one: XLA would fuse what makes them into the concatenation,
    and such a fusion computes all of them at every element of the result. A few bias gradients made a small step 15
    times slower.
    """
    vectors = [array.ravel() for array in arrays]
    if len(vectors) == 1:
        return vectors[0]
    return lax.platform_dependent(*vectors, cpu=_into_places, default=lambda *vectors: jnp.concatenate(vectors))


def _into_places(*vectors: Array) -> Array:
    """As `jnp.concatenate`; runs of large vectors in one go."""
    small = [vector.size < SMALL for vector in vectors]
    flat = jnp.concatenate([jnp.zeros_like(v) if is_small else v for v, is_small in zip(vectors, small)])
    start = 0
    for vector, is_small in zip(vectors, small):
        if is_small:
            flat = lax.dynamic_update_slice(flat, vector, (start,))
        start += vector.size
    return flat
