"""The `Compressor`: one array to a payload of packed words, and back; and compressors made of others.

`scaled` makes a contraction (EF21), `chained` sparsifies and quantizes (Qsparse).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import Portable
from .._core.descriptions import with_description
from .._core.dtypes import saturate, working_dtype
from .._core.types import Array, Float, Like, Payload, PRNGKeyArray, Shape


class DamagedCodeError(Portable, ValueError):
    """Bytes are not what a codec wrote: they were cut or altered, or are the code of another compressor or shape."""


class Codec(NamedTuple):
    """The variable-length form of a payload, as bytes on the host: for messages whose length need not be static.

    Attributes:
      encode: `encode(payload, like) -> bytes` of a payload in host memory, for an array with the shape and dtype of
        `like`.
      decode: `decode(body, like) -> payload`, in NumPy; `decompress` makes the same array of it. Raises
        `DamagedCodeError` for other bytes.
      expected_bits: `expected_bits(payload, like) -> f32[]`, inside jit: the length of the code without the few bytes
        that frame it.
      name: the code and its parameters, so that two sides can compare them.
    """

    encode: Callable[[Payload, Like], bytes]
    decode: Callable[[bytes, Like], Payload]
    expected_bits: Callable[[Payload, Like], Float[Array, ""]]
    name: str


# Of `scaled`: the factor of each bucket, from its own relative error ω_x and the bound ω.
Factor = Callable[[Array, Any], Array]


class Compressor(NamedTuple):
    """Encodes one array as a payload and decodes it again, without state or collectives.

    Attributes:
      compress: `compress(x, key) -> payload`, a pytree of arrays whose shapes depend on `x.shape` alone. Codes narrower
        than 32 bits are u8, u16 or int8 words, since XLA widens other dtypes.
      decompress: `decompress(payload, like) -> x`, with the shape and dtype of `like`.
      summable: payloads may be averaged on the wire (the compressor is linear), by an all-reduce; otherwise they are
        gathered and decoded one by one.
      shared_key: all workers draw the same key (random-k, sketches).
      variance: ω of an unbiased compressor, as a function of the shape: `E|C(x) - x|² <= ω |x|²`.
      contraction: δ of a biased one: `E|C(x) - x|² <= (1 - δ) |x|²`.
      codec: the variable-length form of a payload, for engines that send bytes; shapes inside jit stay as they are.
      add: `add(payload, total) -> total + decompress(payload, total)`, where most entries are zero and it is cheaper to
        touch only the others; else None.
      shrink: `shrink(payload, x, factor) -> payload` of an unbiased compressor that knows its error for the input at
        hand: the payload with its scales times `factor(ω_x, ω)`, from the relative error of their part of `x` and its
        bound; see `scaled`.
      scale_free: decodes to numbers that do not depend on the magnitude of `x`, zero included (`sign`), so that a
        worker cannot be weighted, or left out, by a factor.
      description: the call that made it, such as `qsgd(4)`, for `repr` and error messages.

    Both bounds hold for finite entries of any magnitude, except for losses below the smallest normal number (1.2e-38
    for float32: compilers flush such numbers to zero); docstrings state other limits. Where an unbiased compressor
    would decode to more than the largest number of the dtype, it decodes to that number, with a smaller error and a
    smaller mean.
    """

    compress: Callable[[Array, PRNGKeyArray], Payload]
    decompress: Callable[[Payload, Like], Array]
    summable: bool = False
    shared_key: bool = False
    variance: Callable[[Shape], float] | None = None
    contraction: Callable[[Shape], float] | None = None
    codec: Codec | None = None
    add: Callable[[Payload, Array], Array] | None = None
    scale_free: bool = False
    shrink: Callable[[Payload, Array, Factor], Payload] | None = None
    description: str = ""

    def __repr__(self) -> str:
        return self.description or f"Compressor{tuple(self)}"


# Up to this ω an unbiased compressor is a contraction as it is, with a δ of at least a half.
SMALL = 0.5
NO_CONTRACTION = (
    "error feedback needs a contraction, and this compressor states neither its contraction δ nor its variance ω: "
    "give the Compressor one of them, or use it without feedback"
)


def check_compressor(compressor: Any) -> None:
    """Raises unless the argument is a compressor; a reducer contains one already."""
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"expected a compressor, such as qsgd(4) or top_k(0.01), got {compressor!r}; a reducer is used as it is"
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

    On the wire: the payload of `compressor`.

    Args:
      closest: take `s = 1 / (1 + ω_x)`, which has the least error. For methods that build up a copy of something from
        compressed differences to it (`choco`), which an error disturbs more than a delay.

    Examples:
      >>> from jaxdist.compressors import qsgd
      >>> code = scaled(qsgd(2, bucket=64))
      >>> round(code.contraction((1000,)), 3)
      0.222

    References:
      P. Richtarik et al., "EF21: a new, simpler, theoretically better, and practically faster error feedback",
      arXiv:2106.05203, 2021 (`s = 1 / (1 + ω)`).
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
    if compressor.contraction is not None:
        return compressor
    if compressor.variance is not None:
        return scaled(compressor, closest=closest)
    raise ValueError(NO_CONTRACTION)


@with_description
def chained(sparse: Compressor, dense: Compressor) -> Compressor:
    """Sparsifies, then compresses the kept values: `C(x) = D_sparse(positions, C_dense(values))`.

    With δ, ω of the sparse compressor for d entries and δ', ω' of the dense one for its k values:

    - contraction, then contraction: `δ δ'`, since the error of the values and the dropped entries are disjoint;
    - contraction, then unbiased: the same, with `scaled` of the dense compressor;
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
