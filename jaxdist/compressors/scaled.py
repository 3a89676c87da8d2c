"""A compressor scaled so that it contracts, which error feedback needs."""

from typing import Any

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import saturate, working_dtype
from .._core.types import Array, Float, Like, Payload, PRNGKeyArray, Shape
from .compressor import Compressor, check_compressor

# Up to this ω an unbiased compressor is a contraction as it is, with a δ of at least a half.
SMALL = 0.5
NO_CONTRACTION = (
    "error feedback needs a contraction, and this compressor states neither its contraction δ nor its variance ω: "
    "give the Compressor one of them, or use it without feedback"
)


@with_description
def scaled(compressor: Compressor, *, closest: bool = False) -> Compressor:
    """Shrinks an unbiased compressor until it is a contraction: `C'(x) = s C(x)`.

    Error feedback needs a contraction, and what an unbiased compressor with ω > 1 loses would grow from step to step.
    With s its error is `(s² (1 + ω_x) - 2 s + 1) |x|²`, for an input whose own relative error is `ω_x <= ω`:

    - `qsgd`, `with_levels` and their kin know ω_x of each bucket. They take the largest `s <= 1` with which the error
      is at most that of the worst input, `ω / (1 + ω)`:

          s = min(1, (1 + sqrt(1 - (1 + ω_x) / (1 + ω))) / (1 + ω_x)),   δ = 1 / (1 + ω)

      That is 1 for typical buckets at 3 bits and more, and 0.73 for a Gaussian one at 2 bits, where `1 / (1 + ω)` is
      0.08. A smaller factor delivers late what is there to be delivered, and optimizers with momentum suffer from it.
    - Others have one factor for all inputs: 1 with `δ = 1 - ω` where `ω <= 1/2`, else `s = δ = 1 / (1 + ω)`.

    What is shrunk is biased, which the feedback corrects. Entries that an unbiased compressor cuts off at the largest
    float may lose more than δ says.

    *On the wire*: the payload of `compressor`.

    Args:
      closest: take `s = 1 / (1 + ω_x)`, which has the least error. For methods that build up a copy of something from
        compressed differences to it (`choco`), which an error disturbs more than a delay.

    Examples:
      >>> from jaxdist.compressors import qsgd
      >>> code = scaled(qsgd(2, bucket=64))
      >>> round(code.contraction((1000,)), 3)
      0.222

    References:
      Richtárik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback", arXiv:2106.05203, 2021 (`s = 1 / (1 + ω)`).
    """
    check_compressor(compressor)
    variance, shrink = compressor.variance, compressor.shrink
    choose = closest_factor if closest else largest_factor
    if variance is None:
        raise ValueError(
            f"scaled() needs an unbiased compressor that states its variance, got variance=None in {compressor}; "
            "pass a compressor with a contraction to error feedback as it is"
        )
    if shrink is not None:

        def compress(x: Array, key: PRNGKeyArray) -> Payload:
            return shrink(compressor.compress(x, key), x, choose)

        return compressor._replace(
            compress=compress, shrink=None, variance=None, contraction=lambda shape: 1.0 / (1.0 + variance(shape))
        )

    def decompress(payload: Payload, like: Like) -> Array:
        # At least float32, so that half-precision entries are rounded once.
        wide = jax.ShapeDtypeStruct(like.shape, working_dtype(like.dtype))
        factor = jnp.asarray(_factor_kept(variance(like.shape)), wide.dtype)
        decoded = compressor.decompress(payload, wide)
        return saturate(decoded * factor, like.dtype, jnp.isfinite(decoded))

    # A traced ω gives a traced δ.
    def contraction(shape: Shape) -> Any:
        omega = variance(shape)
        # s² (1 + ω) - 2 s + 1 is ω for s = 1, and ω / (1 + ω) for s = 1 / (1 + ω).
        return _where(omega <= SMALL, 1.0 - omega, _factor_kept(omega))

    return compressor._replace(decompress=decompress, add=None, variance=None, contraction=contraction)


def _factor_kept(omega: Any) -> Any:
    return _where(omega <= SMALL, 1.0, 1.0 / (1.0 + omega))


def _where(condition: Any, x: Any, y: Any) -> Any:
    """`jnp.where` of what is traced, a choice between floats otherwise."""
    return jnp.where(condition, x, y) if isinstance(condition, jax.Array) else x if condition else y


def largest_factor(own: Float[Array, "*shape"], worst: Any) -> Float[Array, "*shape"]:
    """The largest `s <= 1` with `s² (1 + ω_x) - 2 s + 1 <= ω / (1 + ω)`, from an input's own ω_x and the worst, ω.

    Examples:
      >>> import jax.numpy as jnp
      >>> [round(s, 3) for s in largest_factor(jnp.array([0.0, 1.6, 10.8]), 10.8).tolist()]
      [1.0, 0.724, 0.085]
    """
    # Rounding may bring the own error above the worst one.
    rest = jnp.maximum(1.0 - (1.0 + own) / (1.0 + worst), 0.0)
    return jnp.minimum((1.0 + jnp.sqrt(rest)) / (1.0 + own), 1.0)


def closest_factor(own: Float[Array, "*shape"], worst: Any) -> Float[Array, "*shape"]:
    """`1 / (1 + ω_x)`, where `s² (1 + ω_x) - 2 s + 1` is smallest."""
    del worst
    return 1.0 / (1.0 + own)


def contraction_form(compressor: Compressor, *, closest: bool = False) -> Compressor:
    """The compressor to use inside error feedback: itself, or `scaled` of an unbiased one."""
    check_compressor(compressor)
    if compressor.contraction is not None:
        return compressor
    if compressor.variance is not None:
        return scaled(compressor, closest=closest)
    raise ValueError(NO_CONTRACTION)
