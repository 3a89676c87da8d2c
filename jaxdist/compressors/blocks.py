"""Integers in blocks that share a scale."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Float, Like, Shape, UInt
from .._core.xla_quirks import largest_magnitude
from .compressor import Compressor
from .one_pass import in_blocks
from .packing import pack, unpack
from .random import KeyOrStream
from .rounding import (
    TINY,
    Rounding,
    check_block,
    from_buckets,
    largest_error,
    to_buckets,
    to_integers,
    whole_words,
    with_error,
)


class BlockPayload(NamedTuple):
    """Packed codes, and the scale of each block."""

    codes: UInt[Array, " bytes"]
    scales: Float[Array, " blocks"]


def block_integers(bits: int, block: int, rounding: Rounding) -> Compressor:
    """Makes a compressor of integers in blocks that share a scale."""
    check_block(block, rounding)
    # Symmetric: -offset itself is not used.
    most = 2 ** (bits - 1) - 1
    offset = 2 ** (bits - 1)

    def compress(x: Array, key: KeyOrStream) -> BlockPayload:
        blocks = to_buckets(x, block)
        scales = normal_scales(largest_magnitude(blocks), most)
        levels = to_integers(blocks * (1.0 / scales), rounding, key)
        # Clipped, since stochastic rounding errors, and integers made of NaN, must not exceed their bits.
        codes = (jnp.clip(levels, -most, most) + offset).astype(jnp.uint8)
        return BlockPayload(pack(codes.reshape(-1)[: whole_words(x.size, bits)], bits), scales[:, 0])

    def decompress(payload: BlockPayload, like: Like) -> Array:
        codes = unpack(payload.codes, bits, math.prod(like.shape)).astype(jnp.int32)
        levels = to_buckets((codes - offset).astype(jnp.float32), block)
        return from_buckets(levels, payload.scales, like)

    def error(shape: Shape) -> float:
        return largest_error(np.arange(most + 1.0), float(most), min(block, math.prod(shape)), rounding)

    return with_error(Compressor(in_blocks(compress, block, bits), decompress), error, rounding)


def normal_scales(largest: Float[Array, "*shape"], most: float | int) -> Float[Array, "*shape"]:
    """`largest / most`, at least the smallest normal number: a smaller scale would flush the block to zero."""
    return jnp.maximum(largest / most, TINY)
