"""What every compressor promises: no mesh, no optimizer."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from .._typing import Array, Like, PRNGKeyArray, PyTree, Shape
from ..compressors.base import Compressor

SHAPES = ((), (1,), (0,), (0, 4), (37,), (2, 1, 3, 2, 2))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
DRAWS = 1000
WORKERS = 4


def assert_compressor_laws(
    compressor: Compressor,
    *,
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[DTypeLike] = DTYPES,
    key: PRNGKeyArray | None = None,
) -> None:
    """Asserts that a compressor keeps its promises.

    For every shape and dtype: the decoded array has the shape and dtype it is asked for. For every shape, in float32:
    zeros decode to finite values and NaN does not raise; a stated `variance` ω means unbiased and
    `E|C(x) - x|² <= ω |x|²`; a stated `contraction` δ means `E|C(x) - x|² <= (1 - δ) |x|²`, for Gaussian, equal and
    one-hot entries. For the largest shape: compiled, eager and vmapped results agree; one key gives one result; if
    `summable`, the decoded mean of payloads is the mean of the decoded ones.

    Args:
      compressor: the code under test.
      shapes: input shapes; keep an empty one and a scalar among them.
      dtypes: input dtypes.
      key: of the inputs and of the draws; expectations are over 1000 draws, with a margin of five standard errors.

    Raises:
      AssertionError: naming the law, the shape and the dtype.

    Example:
      >>> from jaxdist.compressors import qsgd
      >>> assert_compressor_laws(qsgd(4), shapes=[(), (0,), (37,)])
    """
    key = jax.random.key(0) if key is None else key
    largest = max(shapes, key=math.prod)
    for shape in shapes:
        for dtype in dtypes:
            _check_types(compressor, jax.ShapeDtypeStruct(shape, dtype), key)
        _check_values(compressor, shape, key)
    _check_calls(compressor, _inputs(largest, key)[0].astype(dtypes[0]), key)
    for dtype in dtypes[1:]:
        _check_zeros(compressor, jnp.zeros(largest, dtype), key)
    if compressor.summable:
        _check_linear(compressor, largest, key)


def _round_trip(compressor: Compressor, x: Array, key: PRNGKeyArray) -> tuple[PyTree, Array]:
    payload = compressor.compress(x, key)
    return payload, compressor.decompress(payload, jax.ShapeDtypeStruct(x.shape, x.dtype))


def _law(name: str, holds: bool | np.bool_, x: Like, detail: str) -> None:
    if not holds:
        raise AssertionError(f"law '{name}' broken for shape {x.shape}, dtype {x.dtype}: {detail}")


def _inputs(shape: Shape, key: PRNGKeyArray) -> Array:
    """Gaussian, equal and one-hot entries (the spread on which the constants of codes differ most), zeros and NaN."""
    gaussian = np.random.default_rng(np.asarray(jax.random.key_data(key))).standard_normal(shape)
    one_hot = np.zeros(shape)
    one_hot.reshape(-1)[:1] = 3.0
    fills = [np.full(shape, -2.0), one_hot, np.zeros(shape), np.full(shape, np.nan)]
    return jnp.asarray(np.stack([gaussian, *fills]), jnp.float32)


def _check_types(compressor: Compressor, x: Like, key: PRNGKeyArray) -> None:
    payload, decoded = jax.eval_shape(lambda x, key: _round_trip(compressor, x, key), x, key)
    same = decoded.shape == x.shape and decoded.dtype == x.dtype
    _law("round trip keeps shape and dtype", same, x, f"decoded to {decoded}")
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    wide = jax.eval_shape(lambda payload: compressor.decompress(payload, like), payload)
    same = wide.shape == like.shape and wide.dtype == like.dtype
    _law("decompress follows `like`", same, x, f"asked for {like}, got {wide}")


def _check_values(compressor: Compressor, shape: Shape, key: PRNGKeyArray) -> None:
    """All inputs by all draws in one compiled call."""
    over_keys = jax.vmap(lambda x, key: _round_trip(compressor, x, key)[1], in_axes=(None, 0))
    inputs, keys = _inputs(shape, key), jax.random.split(key, DRAWS)
    decoded = np.asarray(jax.jit(jax.vmap(over_keys, in_axes=(0, None)))(inputs, keys), np.float64)
    _law("zeros decode to finite values", np.isfinite(decoded[-2]).all(), inputs[-2], f"got {decoded[-2]}")
    for x, draws in zip(inputs[:-2], decoded[:-2], strict=True):
        _check_error(compressor, x, draws.reshape(DRAWS, -1) - np.asarray(x, np.float64).reshape(-1))


def _check_error(compressor: Compressor, x: Array, errors: np.ndarray) -> None:
    energy = float((np.asarray(x, np.float64) ** 2).sum())
    squares = (errors**2).sum(1)
    error, margin = squares.mean(), 5 * squares.std() / DRAWS**0.5 + 1e-6 * energy
    if compressor.variance is not None:
        omega = compressor.variance(x.shape)
        bias = (errors.mean(0) ** 2).sum()
        # The mean of n draws is off by the n-th part of their variance; 25 is five standard errors of one entry.
        _law("unbiased", bias <= 25 * error / DRAWS + 1e-12 * energy, x, f"the mean is off by {bias**0.5:.3g}")
        _law("variance", error <= omega * energy + margin, x, f"{error:.6g} > ω|x|² = {omega * energy:.6g}")
    if compressor.contraction is not None:
        bound = (1 - compressor.contraction(x.shape)) * energy
        _law("contraction", error <= bound + margin, x, f"{error:.6g} > (1 - δ)|x|² = {bound:.6g}")


def _check_zeros(compressor: Compressor, zeros: Array, key: PRNGKeyArray) -> None:
    _, decoded = jax.jit(lambda x, key: _round_trip(compressor, x, key))(zeros, key)
    finite = np.isfinite(np.asarray(decoded, np.float64)).all()
    _law("zeros decode to finite values", finite, zeros, f"got {decoded}")


def _check_calls(compressor: Compressor, x: Array, key: PRNGKeyArray) -> None:
    def round_trip(x, key):
        return _round_trip(compressor, x, key)

    compiled = jax.jit(round_trip)
    first = compiled(x, key)
    _law("one key, one result", _same(first, compiled(x, key), 0.0), x, "two calls differ")
    # A few units in the last place: compilation may fuse a multiplication and an addition.
    tolerance = 4 * float(jnp.finfo(x.dtype).eps)
    _law("jit equals eager", _same(first, round_trip(x, key), tolerance), x, "compiled and eager results differ")
    mapped = jax.jit(jax.vmap(round_trip, in_axes=(0, None)))(x[None], key)
    _law("vmap", _same(first, jax.tree.map(lambda leaf: leaf[0], mapped), tolerance), x, "differs from a single call")


def _check_linear(compressor: Compressor, shape: Shape, key: PRNGKeyArray) -> None:
    x = _inputs((WORKERS, *shape), key)[0]
    keys = jnp.broadcast_to(key, WORKERS) if compressor.shared_key else jax.random.split(key, WORKERS)
    payloads, decoded = jax.jit(jax.vmap(lambda x, key: _round_trip(compressor, x, key)))(x, keys)
    averaged = jax.tree.map(lambda leaf: jnp.mean(leaf, 0, dtype=jnp.float32).astype(leaf.dtype), payloads)
    narrowest = max((float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(payloads)), default=0.0)
    holds = _same(compressor.decompress(averaged, x[0]), decoded.mean(0), max(1e-5, 4 * narrowest))
    _law("summable", holds, x[0], "the decoded mean of payloads is not the mean of the decoded ones")


def _same(left: PyTree, right: PyTree, tolerance: float) -> bool:
    def close(a, b):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        wide = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.allclose(*wide, rtol=tolerance, atol=tolerance, equal_nan=True)

    return jax.tree.all(jax.tree.map(close, left, right))
