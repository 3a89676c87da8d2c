"""Leaves in rectangular tiles, and the orthonormal cosine transform of each tile."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._typing import Array, Float, Like, Shape


def tile_of(shape: Shape, chunk: int) -> tuple[int, int]:
    """Height and width of a leaf's tiles: the largest divisors up to `chunk` of its rows and of its columns.

    Rows are all dimensions but the last one; a vector is one row.

    Example:
      >>> from jaxdist.transforms.optimizers.tiles import tile_of
      >>> tile_of((768, 3072), 64), tile_of((3, 3, 16, 50), 64), tile_of((100,), 64), tile_of((), 64)
      ((64, 64), (48, 50), (1, 50), (1, 1))
    """
    rows, columns = _matrix(shape)
    return _largest_divisor(rows, chunk), _largest_divisor(columns, chunk)


def to_frequencies(x: Array, tile: tuple[int, int]) -> Float[Array, "tiles size"]:
    """The cosine transforms (DCT-II) of all tiles of a leaf, one a row; lengths are kept."""
    (rows, columns), (height, width) = _matrix(x.shape), tile
    blocks = x.reshape(rows // height, height, columns // width, width)
    vertical, horizontal = _cosines(height, x), _cosines(width, x)
    out = jnp.einsum("ahbw,ih,jw->abij", blocks, vertical, horizontal, precision=lax.Precision.HIGHEST)
    return out.reshape(rows // height * (columns // width), height * width)


def from_frequencies(frequencies: Float[Array, "tiles size"], tile: tuple[int, int], like: Like) -> Array:
    """The inverse: a leaf in the shape of `like`."""
    (rows, columns), (height, width) = _matrix(like.shape), tile
    blocks = frequencies.reshape(rows // height, columns // width, height, width)
    vertical, horizontal = _cosines(height, frequencies), _cosines(width, frequencies)
    out = jnp.einsum("abij,ih,jw->ahbw", blocks, vertical, horizontal, precision=lax.Precision.HIGHEST)
    return out.reshape(like.shape)


def _matrix(shape: Shape) -> tuple[int, int]:
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _largest_divisor(length: int, limit: int) -> int:
    return max((d for d in range(1, min(length, limit) + 1) if length % d == 0), default=1)


def _cosines(size: int, like: Array) -> Array:
    """`[size, size]`: row `k` is `√(2/n) cos(π k (2i+1) / 2n)`, the first one divided by √2."""
    k, i = np.arange(size)[:, None], np.arange(size)[None]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * k * (2 * i + 1) / (2 * size))
    matrix[0] /= np.sqrt(2)
    return jnp.asarray(matrix, like.dtype)
