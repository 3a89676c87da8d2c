"""Makes an unbiased code a contraction."""

from typing import Any

import jax
import jax.numpy as jnp

from .._typing import Array, Like, Payload, Shape
from .base import Compressor, saturated, working_dtype


def scaled(compressor: Compressor) -> Compressor:
    """Multiplies what an unbiased code decodes to by `1 / (1 + ω)`: `C'(x) = C(x) / (1 + ω)`, δ = 1 / (1 + ω).

    What an unbiased code cuts off at the largest float is shrunk with the rest, so such entries lose more than δ says.

    Error feedback needs a contraction, and an unbiased code with ω > 1 enlarges what it is fed. Shrinking it costs the
    unbiasedness, which the feedback makes up for.

    On the wire: what `compressor` sends.

    Args:
      compressor: an unbiased code, which states its `variance` ω.

    Returns:
      A biased compressor with the payload of `compressor`.

    Example:
      >>> from jaxdist.compressors import qsgd
      >>> code = scaled(qsgd(2, bucket=64))
      >>> round(code.contraction((1000,)), 3)
      0.222

    References:
      P. Richtarik, I. Sokolov, I. Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster
      error feedback", arXiv:2106.05203, 2021.
    """
    variance = compressor.variance
    if variance is None:
        raise ValueError(
            f"scaled() needs an unbiased compressor that states its variance, got variance=None in {compressor}; "
            "a compressor with a contraction goes into error feedback as it is"
        )

    def decompress(payload: Payload, like: Like) -> Array:
        # At least float32, so that half-precision entries are rounded once.
        wide = jax.ShapeDtypeStruct(like.shape, working_dtype(like.dtype))
        factor = jnp.asarray(contraction(like.shape), wide.dtype)
        decoded = compressor.decompress(payload, wide)
        return saturated(decoded * factor, like.dtype, jnp.isfinite(decoded))

    def contraction(shape: Shape) -> Any:  # a traced ω gives a traced δ
        return 1.0 / (1.0 + variance(shape))

    return compressor._replace(decompress=decompress, variance=None, contraction=contraction)
