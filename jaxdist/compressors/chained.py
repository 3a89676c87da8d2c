"""A compressor of the values that another one keeps."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.types import Array, Like, Payload, PRNGKeyArray, Shape
from .compressor import Compressor, check_compressor
from .scaled import scaled


@with_description
def chained(sparse: Compressor, dense: Compressor) -> Compressor:
    """Sparsifies, then compresses the kept values: `C(x) = D_sparse(positions, C_dense(values))`.

    With δ, ω of the sparse compressor for d entries and δ', ω' of the dense one for its k values:

    - contraction, then contraction: `δ δ'`, since the error of the values and the dropped entries are disjoint;
    - contraction, then unbiased: the same, with `scaled` of the dense compressor;
    - unbiased, then unbiased: ω'' = `(1 + ω) (1 + ω') - 1`.

    An unbiased sparse compressor with a biased dense one would be neither, and is refused.

    *On the wire*: the positions of the sparse compressor, and the payload of the dense one for k values:
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
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 0., -4.,  0., 12.], dtype=float32)

    References:
      Basu et al., "Qsparse-local-SGD: distributed SGD with quantization, sparsification, and local computations",
      arXiv:1906.02367, 2019.
    """
    check_compressor(sparse)
    check_compressor(dense)
    # One array of values: those of a chain are encoded already.
    values = getattr(_payload_like(sparse, jax.ShapeDtypeStruct((8,), jnp.float32)), "values", None)
    if not isinstance(values, jax.ShapeDtypeStruct):
        raise ValueError(
            "chained() needs a sparse compressor first, whose payload has `values` (top_k, block_top_k, random_k, "
            f"gspar), got {sparse}"
        )
    if sparse.variance is not None and dense.variance is None:
        raise ValueError(
            "an unbiased sparse compressor and a biased dense one are neither unbiased nor a contraction together: "
            "give the biased form of the sparse one (top_k, random_k(density)), or an unbiased dense one"
        )
    if sparse.contraction is not None and dense.variance is not None:
        dense = scaled(dense)
    # Both or neither: an average of values needs one seed, and one of the values' codes.
    summable = sparse.summable and dense.summable
    pair = _Pair(sparse, dense)
    return Compressor(
        partial(_compress, pair),
        partial(_decompress, pair),
        summable=summable,
        shared_key=summable and sparse.shared_key,
        add=None if sparse.add is None else partial(_add, pair, sparse.add),
        scale_free=dense.scale_free,
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
    return pair.sparse.decompress(_with_values(pair, payload, like), like)


def _add(pair: _Pair, add: Callable[[Payload, Array], Array], payload: Payload, total: Array) -> Array:
    return add(_with_values(pair, payload, total), total)


def _with_values(pair: _Pair, payload: Payload, like: Like) -> Payload:
    """The payload of the sparse compressor alone, for an array with the shape and dtype of `like`."""
    values = _payload_like(pair.sparse, like).values
    return payload._replace(values=pair.dense.decompress(payload.values, values))


def _laws(pair: _Pair) -> dict[str, Callable[[Shape], float]]:
    """The variance or contraction of the chain."""
    sparse, dense = pair

    def values_shape(shape: Shape) -> Shape:
        return _payload_like(sparse, jax.ShapeDtypeStruct(shape, jnp.float32)).values.shape

    if sparse.variance is not None and dense.variance is not None:
        omega, dense_omega = sparse.variance, dense.variance
        return {"variance": lambda shape: (1.0 + omega(shape)) * (1.0 + dense_omega(values_shape(shape))) - 1.0}
    delta, dense_delta = sparse.contraction, dense.contraction
    if delta is not None and dense_delta is not None:
        return {"contraction": lambda shape: delta(shape) * dense_delta(values_shape(shape))}
    return {}


def _payload_like(compressor: Compressor, like: Like) -> Any:
    """The shapes and dtypes of a compressor's payload."""
    return jax.eval_shape(compressor.compress, like, jax.random.key(0))
