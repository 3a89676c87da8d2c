"""Compressors made of others: `scaled` makes a contraction (EF21), `chained` sparsifies and quantizes (Qsparse)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import saturate, working_dtype
from .._core.types import Array, Like, Payload, PRNGKeyArray, Shape
from .base import Compressor


@with_description
def scaled(compressor: Compressor) -> Compressor:
    """Shrinks the decoded arrays of an unbiased compressor: `C'(x) = C(x) / (1 + ω)`, δ = 1 / (1 + ω).

    Error feedback needs a contraction, and an unbiased compressor with ω > 1 enlarges its input on average. Shrinking
    makes it biased, which the feedback corrects. Entries that an unbiased compressor cuts off at the largest float are
    shrunk as well, and lose more than δ says.

    On the wire: the payload of `compressor`.

    Examples:
      >>> from jaxdist.compressors import qsgd
      >>> code = scaled(qsgd(2, bucket=64))
      >>> round(code.contraction((1000,)), 3)
      0.222

    References:
      P. Richtarik et al., "EF21: a new, simpler, theoretically better, and practically faster error feedback",
      arXiv:2106.05203, 2021.
    """
    variance = compressor.variance
    if variance is None:
        raise ValueError(
            f"scaled() needs an unbiased compressor that states its variance, got variance=None in {compressor}; "
            "pass a compressor with a contraction to error feedback as it is"
        )

    def decompress(payload: Payload, like: Like) -> Array:
        # At least float32, so that half-precision entries are rounded once.
        wide = jax.ShapeDtypeStruct(like.shape, working_dtype(like.dtype))
        factor = jnp.asarray(contraction(like.shape), wide.dtype)
        decoded = compressor.decompress(payload, wide)
        return saturate(decoded * factor, like.dtype, jnp.isfinite(decoded))

    # A traced ω gives a traced δ.
    def contraction(shape: Shape) -> Any:
        return 1.0 / (1.0 + variance(shape))

    return compressor._replace(decompress=decompress, variance=None, contraction=contraction)


@with_description
def chained(sparse: Compressor, dense: Compressor) -> Compressor:
    """Sparsifies, then compresses the kept values: `C(x) = D_sparse(positions, C_dense(values))`.

    With δ, ω of the sparse compressor for d entries and δ', ω' of the dense one for its k values:

    - contraction, then contraction: `δ δ'`, since the error of the values and the dropped entries are disjoint;
    - contraction, then unbiased: `(1 - ω') δ`; from ω' = 1 on the dense compressor is shrunk by `1 / (1 + ω')`, for
      `δ / (1 + ω')`;
    - unbiased, then unbiased: ω'' = `(1 + ω) (1 + ω') - 1`.

    An unbiased sparse compressor with a biased dense one would be neither, and is refused.

    On the wire: the positions of the sparse compressor, and the payload of the dense one for k values:
    `chained(top_k(0.01), qsgd(4))` takes 12 to 13 bits for an entry, where `top_k` takes 40.

    Args:
      sparse: has a payload with `values`; a biased one keeps entries as they are: `top_k`, `block_top_k`, `random_k`,
        `gspar`.
      dense: any compressor, for the values: `qsgd(4)` to start, `two_means()` for fewer bits, `cast(jnp.bfloat16)` for
        hardly any loss.

    Returns:
      The compressor; summable where both are.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist.compressors import cast, top_k
      >>> code, x = chained(top_k(0.5), cast(jnp.bfloat16)), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0., -4.,  0., 12.], dtype=float32)

    References:
      D. Basu et al., "Qsparse-local-SGD: distributed SGD with quantization, sparsification, and local computations",
      arXiv:1906.02367, 2019.
    """
    if not hasattr(_payload_like(sparse, jax.ShapeDtypeStruct((8,), jnp.float32)), "values"):
        raise ValueError(
            "chained() needs a sparse compressor first, whose payload has `values` (top_k, block_top_k, random_k, "
            f"gspar), got {sparse}"
        )
    if sparse.variance is not None and dense.variance is None:
        raise ValueError(
            "an unbiased sparse compressor and a biased dense one are neither unbiased nor a contraction together: "
            "give the biased form of the sparse one (top_k, random_k(density)), or an unbiased dense one"
        )
    # Both or neither: an average of values needs one seed, and one of the values' codes.
    summable = sparse.summable and dense.summable
    pair = _Pair(sparse, dense)
    return Compressor(
        partial(_compress, pair),
        partial(_decompress, pair),
        summable=summable,
        shared_key=summable and sparse.shared_key,
    )._replace(**_laws(pair))


class _Pair(NamedTuple):
    sparse: Compressor
    dense: Compressor


def _compress(pair: _Pair, x: Array, key: PRNGKeyArray) -> Payload:
    left, right = jax.random.split(key)
    # The values are replaced by their payload, in the place where they were.
    payload = pair.sparse.compress(x, left)
    return payload._replace(values=pair.dense.compress(payload.values, right))


def _decompress(pair: _Pair, payload: Payload, like: Like) -> Array:
    values = _payload_like(pair.sparse, like).values
    dense = pair.dense
    # An unbiased code with ω' >= 1 may keep less than nothing: it is shrunk to a contraction.
    if pair.sparse.contraction is not None and dense.variance is not None and dense.variance(values.shape) >= 1:
        dense = scaled(dense)
    return pair.sparse.decompress(payload._replace(values=dense.decompress(payload.values, values)), like)


def _laws(pair: _Pair) -> dict[str, Callable[[Shape], float]]:
    """The variance or contraction of the chain."""
    sparse, dense = pair

    def values_shape(shape: Shape) -> Shape:
        return _payload_like(sparse, jax.ShapeDtypeStruct(shape, jnp.float32)).values.shape

    if sparse.variance is not None and dense.variance is not None:
        omega, dense_omega = sparse.variance, dense.variance
        return {"variance": lambda shape: (1.0 + omega(shape)) * (1.0 + dense_omega(values_shape(shape))) - 1.0}
    delta = sparse.contraction
    if delta is not None and dense.variance is not None:
        dense_omega = dense.variance
        return {"contraction": lambda shape: delta(shape) * _share_kept(dense_omega(values_shape(shape)))}
    if delta is not None and dense.contraction is not None:
        dense_delta = dense.contraction
        return {"contraction": lambda shape: delta(shape) * dense_delta(values_shape(shape))}
    return {}


def _share_kept(omega: float) -> float:
    """The δ of an unbiased compressor with this variance, shrunk if it is 1 or more."""
    if not math.isfinite(omega):
        return 0.0
    return 1.0 - omega if omega < 1 else 1.0 / (1.0 + omega)


def _payload_like(compressor: Compressor, like: Like) -> Any:
    """The shapes and dtypes of a compressor's payload."""
    return jax.eval_shape(compressor.compress, like, jax.random.key(0))
