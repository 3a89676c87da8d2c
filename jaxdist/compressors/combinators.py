"""Makes an unbiased code a contraction."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core.dtypes import saturated, working_dtype
from .._core.types import Array, Like, Payload, PRNGKeyArray, Shape
from .base import Compressor


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


def chained(sparse: Compressor, dense: Compressor) -> Compressor:
    """Sparsifies, then codes the kept values: `C(x) = D_sparse(positions, C_dense(values))`.

    With δ, ω of the sparse code for d entries and δ', ω' of the dense one for its k values:

    - contraction, then contraction: `δ δ'`, since the error of the values lies where the dropped entries do not;
    - contraction, then unbiased: `(1 - ω') δ`; from ω' = 1 on the dense code is shrunk by `1 / (1 + ω')`, for
      `δ / (1 + ω')`;
    - unbiased, then unbiased: ω'' = `(1 + ω) (1 + ω') - 1`.

    An unbiased sparse code with a biased dense one would be neither, and is refused.

    On the wire: the positions of the sparse code, and what the dense one sends for k values: `chained(top_k(0.01),
    qsgd(4))` takes 12 to 13 bits for an entry, where `top_k` takes 40.

    Args:
      sparse: has a payload with `values`; a biased one keeps entries as they are: `top_k`, `block_top_k`, `random_k`,
        `gspar`.
      dense: any code for the values: `qsgd(4)` to start, `two_means()` for fewer bits, `cast(jnp.bfloat16)` for
        hardly any loss.

    Returns:
      The compressor; summable where both are.

    Raises:
      ValueError: the payload of `sparse` has no values, or the two do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist.compressors import cast, top_k
      >>> code, x = chained(top_k(0.5), cast(jnp.bfloat16)), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0., -4.,  0., 12.], dtype=float32)

    References:
      D. Basu, D. Data, C. Karakus, S. Diggavi, "Qsparse-local-SGD: distributed SGD with quantization, sparsification,
      and local computations", arXiv:1906.02367, 2019.
    """
    if not hasattr(_payload_of(sparse, jax.ShapeDtypeStruct((8,), jnp.float32)), "values"):
        raise ValueError(
            "chained() needs a sparse code first, whose payload has `values` for the second code (top_k, block_top_k, "
            f"random_k, gspar), got {sparse}"
        )
    if sparse.variance is not None and dense.variance is None:
        raise ValueError(
            "an unbiased sparse code and a biased dense one are neither unbiased nor a contraction together: give the "
            "biased form of the sparse code (top_k, random_k(density)), or an unbiased dense code"
        )
    # Both or neither: an average of values needs one seed, and one of the values' codes.
    summable = sparse.summable and dense.summable

    def kept_values(like: Like) -> Like:
        return _payload_of(sparse, like).values

    def carrier(values: Like) -> Compressor:
        """The dense code in the form that suits so many values."""
        if sparse.contraction is not None and dense.variance is not None and dense.variance(values.shape) >= 1:
            return scaled(dense)
        return dense

    def compress(x: Array, key: PRNGKeyArray) -> Payload:
        left, right = jax.random.split(key)
        payload = sparse.compress(x, left)
        return payload._replace(values=dense.compress(payload.values, right))

    def decompress(payload: Payload, like: Like) -> Array:
        values = kept_values(like)
        decoded = carrier(values).decompress(payload.values, values)
        return sparse.decompress(payload._replace(values=decoded), like)

    def shapes(shape: Shape) -> Shape:
        return kept_values(jax.ShapeDtypeStruct(shape, jnp.float32)).shape

    delta, omega, dense_delta, dense_omega = sparse.contraction, sparse.variance, dense.contraction, dense.variance
    laws: dict[str, Any] = {}
    if omega is not None and dense_omega is not None:
        laws["variance"] = lambda shape: (1.0 + omega(shape)) * (1.0 + dense_omega(shapes(shape))) - 1.0
    elif delta is not None and dense_omega is not None:
        laws["contraction"] = lambda shape: delta(shape) * _part(dense_omega(shapes(shape)))
    elif delta is not None and dense_delta is not None:
        laws["contraction"] = lambda shape: delta(shape) * dense_delta(shapes(shape))
    return Compressor(compress, decompress, summable, summable and sparse.shared_key, **laws)


def _part(omega: float) -> float:
    """What a code with this variance, shrunk from 1 on, is sure to keep."""
    if not math.isfinite(omega):
        return 0.0
    return 1.0 - omega if omega < 1 else 1.0 / (1.0 + omega)


def _payload_of(code: Compressor, like: Like) -> Any:
    """The shapes and dtypes of its payload."""
    return jax.eval_shape(code.compress, like, jax.random.key(0))
