"""One collective for many arrays."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import mesh_axes_left_over
from .._typing import Array
from ._flat import alike, concatenate


def fused(collective: Callable[[Array], Array], arrays: Sequence[Array], *, rows: bool = False) -> list[Array]:
    """`[collective(x) for x in arrays]` with one call for each dtype; `collective` may add a leading dimension.

    With `rows` the arrays have a leading dimension that stays.
    """
    out: list[Any] = [None] * len(arrays)
    # Flattening would gather the axes that the compiler shards by itself.
    apart = bool(mesh_axes_left_over())
    kept = 1 if rows else 0
    for members in alike(range(len(arrays)), lambda i: (arrays[i].dtype, i if apart else 0)):
        shapes = [arrays[i].shape[kept:] for i in members]
        sizes = [math.prod(shape) for shape in shapes]
        if len(members) == 1 or not sum(sizes):
            for i in members:
                out[i] = collective(arrays[i])
            continue
        flat = collective(concatenate([arrays[i] for i in members], rows=rows))
        start = 0
        for i, shape, size in zip(members, shapes, sizes, strict=True):
            part = lax.slice_in_dim(flat, start, start + size, axis=flat.ndim - 1)
            out[i] = part.reshape(*flat.shape[:-1], *shape)
            start += size
    return out


def fused_bytes(collective: Callable[[Array], Array], arrays: Sequence[Array], *, rows: bool = False) -> list[Array]:
    """As `fused`, with one collective for all dtypes together: one of bytes beats one for each."""
    if len({array.dtype for array in arrays}) < 2:
        return fused(collective, arrays, rows=rows)
    to_bytes = jax.vmap(_to_bytes) if rows else _to_bytes
    arrived = fused(collective, [to_bytes(array) for array in arrays], rows=rows)
    return [_from_bytes(words, array[0] if rows else array) for words, array in zip(arrived, arrays, strict=True)]


def _to_bytes(x: Array) -> Array:
    return x.ravel() if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x.ravel(), jnp.uint8).ravel()


def _from_bytes(words: Array, like: Array) -> Array:
    """`[*batch, bytes]` -> `[*batch, *like.shape]`."""
    batch = words.shape[:-1]
    if like.dtype != jnp.uint8:
        width = like.dtype.itemsize
        words = words.reshape(*batch, like.size, *([width] if width > 1 else []))
        words = lax.bitcast_convert_type(words, like.dtype)
    return words.reshape(*batch, *like.shape)
