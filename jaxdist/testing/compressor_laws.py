"""Laws of compressors and of their codecs, checked without a mesh or an optimizer."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from .._core.types import Array, Key, Like, PRNGKeyArray, PyTree, Shape
from ..compressors.compressor import Codec, Compressor, DamagedCodeError

SHAPES = ((), (1,), (0,), (0, 4), (37,), (2, 1, 3, 2, 2))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
DRAWS = 1000
# Reductions of XLA:CPU lose NaN from 4,096 entries on, whose sign is that of 0/0 on x86.
ENTRIES = 5000
NOT_FINITE = (math.nan, -math.nan, math.inf, -math.inf)
WORKERS = 4
# Of the entries of float32 arrays: what a code without a range of its own promises holds between them.
MAGNITUDES = (1e-38, 3e38)


# What JAX raises where a traced program asks for the values of an array.
VALUES_NEEDED = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)

# The last is large enough that frames and tables do not hide the length of a code.
CODEC_SHAPES = ((), (0,), (0, 4), (37,), (40, 100))
# How much longer than `expected_bits` a code may be: a share, and bytes for its frame and tables.
SHARE, FRAME_BYTES = 0.05, 64
# The bytes of a code in which one bit is flipped, spread evenly over it.
FLIPS = 32


def assert_compressor_laws(
    compressor: Compressor,
    *,
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[DTypeLike] = DTYPES,
    key: PRNGKeyArray | None = None,
    magnitudes: tuple[float, float] = MAGNITUDES,
    loses_nan: bool = False,
) -> None:
    """Asserts that a compressor keeps its promises; a failure names the law, also where the compressor itself raises.

    - For every shape and dtype: the decoded array has the shape and dtype it is asked for.
    - For every shape, in float32: zeros, and whatever is finite, decode to finite values; NaN does not raise. A stated
      `variance` ω means unbiased and `E|C(x) - x|² <= ω |x|²`; a stated `contraction` δ means
      `E|C(x) - x|² <= (1 - δ) |x|²`, for Gaussian, equal and one-hot entries, and for entries of any of the
      `magnitudes`, alone and mixed.
    - For the largest shape: compiled, eager and vmapped results agree; a constant of the program decodes to finite
      values too; one key gives one result; if `summable`, the decoded mean of payloads is the mean of the decoded ones.
    - One entry of 5,000 that is NaN or infinite decodes to something that is not finite.

    Numbers below the smallest normal one (1.2e-38) count as zero, since compilers flush them. Where an unbiased code
    decodes to the largest float, since what it should decode to is larger, the mean is not compared.

    Args:
      compressor: the code under test.
      shapes: input shapes; keep an empty one and a scalar among them.
      dtypes: input dtypes.
      key: of the inputs and of the draws; expectations are over 1000 draws, with a margin of five standard errors.
      magnitudes: the smallest and the largest magnitude for which ω and δ are stated, where the format has a range by
        definition (float16: 6.2e-5 and 65504). Beyond them values must still be finite, and a contraction must lose no
        more than the array.
      loses_nan: true for a code that does not keep NaN and infinity, as its docstring should say.

    Examples:
      >>> from jaxdist.compressors import scaled_sign
      >>> assert_compressor_laws(scaled_sign(), shapes=[(), (0,), (37,)], dtypes=["float32"])
    """
    if not shapes or not dtypes:
        raise ValueError(f"shapes and dtypes must not be empty, got {shapes} and {dtypes}")
    key = jax.random.key(0) if key is None else key
    largest = max(shapes, key=math.prod)
    for shape in shapes:
        for dtype in dtypes:
            _check_types(compressor, jax.ShapeDtypeStruct(shape, dtype), key)
        with law_of_errors("finite values decode to finite ones", f" for shape {shape}"):
            _check_values(compressor, shape, key, magnitudes)
    _check_calls(compressor, draw_inputs(largest, key)[0].astype(dtypes[0]), key)
    with law_of_errors("zeros decode to finite values"):
        for dtype in dtypes[1:]:
            _check_ends(compressor, jax.ShapeDtypeStruct(largest, dtype), key)
    with law_of_errors("add is decompress, added"):
        _check_add(compressor, draw_inputs(largest, key)[0], key)
    if compressor.summable:
        with law_of_errors("summable"):
            _check_linear(compressor, largest, key)
    with law_of_errors("finite values decode to finite ones", " for a constant"):
        _check_constant(compressor, largest, key, magnitudes)
    if not loses_nan:
        with law_of_errors("what is not finite does not decode to finite values"):
            _check_not_finite(compressor, key)


def _round_trip(compressor: Compressor, x: Array, key: PRNGKeyArray) -> tuple[PyTree, Array]:
    payload = compressor.compress(x, key)
    return payload, compressor.decompress(payload, jax.ShapeDtypeStruct(x.shape, x.dtype))


def check_law(name: str, holds: bool | np.bool_, x: Like, detail: str) -> None:
    """Raises the error that names a law, with the input and what was found, if it does not hold."""
    if not holds:
        raise AssertionError(f"law '{name}' broken for shape {x.shape}, dtype {x.dtype}: {detail}")


@contextmanager
def law_of_errors(name: str, where: str = "") -> Iterator[None]:
    """Reports what the code under test raises as a breach of this law, unless a law is named already."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise AssertionError(f"law '{name}' broken{where}: it raises {type(error).__name__}: {first}") from error


def draw_inputs(shape: Shape, key: PRNGKeyArray) -> Array:
    """Gaussian, equal and one-hot entries (the spread on which the constants of codes differ most), zeros and NaN."""
    gaussian = np.random.default_rng(np.asarray(jax.random.key_data(key))).standard_normal(shape)
    one_hot = np.zeros(shape)
    one_hot.reshape(-1)[:1] = 3.0
    fills = [np.full(shape, -2.0), one_hot, np.zeros(shape), np.full(shape, np.nan)]
    return jnp.asarray(np.stack([gaussian, *fills]), jnp.float32)


def _check_types(compressor: Compressor, x: Like, key: PRNGKeyArray) -> None:
    # By shapes alone: nothing is computed, so all shapes and dtypes are cheap.
    where = f" for shape {x.shape}, dtype {x.dtype}"
    try:
        with law_of_errors("round trip keeps shape and dtype", where):
            payload, decoded = jax.eval_shape(lambda x, key: _round_trip(compressor, x, key), x, key)
    except AssertionError as broken:
        if not isinstance(error := broken.__cause__, VALUES_NEEDED):
            raise
        detail = f"a shape or a branch depends on values: {str(error).splitlines()[0]}"
        raise AssertionError(f"law 'static shapes' broken{where}: {detail}") from error
    same = decoded.shape == x.shape and decoded.dtype == x.dtype
    check_law("round trip keeps shape and dtype", same, x, f"decoded to {decoded}")
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    with law_of_errors("decompress follows `like`", where):
        wide = jax.eval_shape(lambda payload: compressor.decompress(payload, like), payload)
    same = wide.shape == like.shape and wide.dtype == like.dtype
    check_law("decompress follows `like`", same, x, f"asked for {like}, got {wide}")


def _check_add(compressor: Compressor, x: Array, key: PRNGKeyArray) -> None:
    if compressor.add is None:
        return
    total = jax.random.normal(key, x.shape, jnp.float32)
    payload = jax.jit(compressor.compress)(x, key)
    expected = total + jax.jit(compressor.decompress)(payload, total)
    added = jax.jit(compressor.add)(payload, total)
    check_law("add is decompress, added", _same(added, expected, 1e-6), x, f"{compressor}")


def _check_values(compressor: Compressor, shape: Shape, key: PRNGKeyArray, stated: tuple[float, float]) -> None:
    """All inputs by all draws in one compiled call."""
    inputs, keys = draw_inputs(shape, key), jax.random.split(key, DRAWS)
    # All magnitudes of float32 must stay finite; those for which the laws are stated are drawn separately.
    sized = np.concatenate([_of_magnitudes(shape, *ends) for ends in sorted({MAGNITUDES, stated})])
    # One input after another: all of them by all draws may not fit the memory.
    every = jax.jit(lambda inputs, keys: jax.lax.map(lambda x: _over_keys(compressor, x, keys), inputs))
    decoded = np.asarray(every(jnp.concatenate([inputs, sized]), keys), np.float64)
    # The last two inputs are zeros, which have no relative error, and NaN, which must only not raise.
    finite = np.isfinite(decoded[len(inputs) - 2])
    check_law("zeros decode to finite values", finite.all(), inputs[-2], f"got {decoded[len(inputs) - 2]}")
    for x, draws in zip(inputs[:-2], decoded, strict=False):
        _check_error(compressor, x, draws)
    for x, draws in zip(map(np.asarray, sized), decoded[len(inputs) :], strict=True):
        _check_size(compressor, x, draws, stated)


def _check_constant(compressor: Compressor, shape: Shape, key: PRNGKeyArray, stated: tuple[float, float]) -> None:
    """Of two signs and one size, which XLA knows, and computes with beforehand."""
    positions = np.arange(math.prod(shape)).reshape(shape)
    x = np.where(positions % 2 == 1, -1, 1) * np.float32(MAGNITUDES[1])
    decoded = jax.jit(lambda keys: _over_keys(compressor, jnp.asarray(x), keys))(jax.random.split(key, DRAWS))
    _check_size(compressor, x, np.asarray(decoded, np.float64), stated, " of a constant")


def _over_keys(compressor: Compressor, x: Array, keys: Key[Array, " draws"]) -> Array:
    return jax.vmap(lambda key: _round_trip(compressor, x, key)[1])(keys)


def _check_size(
    compressor: Compressor, x: np.ndarray, decoded: np.ndarray, stated: tuple[float, float], kind: str = ""
) -> None:
    """ω and δ for sizes for which they are stated; for others a contraction loses no more than x."""
    sizes = np.abs(x[x != 0])
    detail = f"{kind} from {np.min(sizes):.3g} to {np.max(sizes):.3g}" if sizes.size else kind
    check_law("finite values decode to finite ones", np.isfinite(decoded).all(), x, f"got {decoded[0]}{detail}")
    # Beyond the stated magnitudes ω is not checked, and δ is 0.
    if (sizes < np.float32(stated[0])).any() or (sizes > np.float32(stated[1])).any():
        delta = None if compressor.contraction is None else lambda shape: 0.0
        compressor = compressor._replace(variance=None, contraction=delta)
    _check_error(compressor, x, decoded, rare=True, detail=detail)


def _check_error(
    compressor: Compressor, x: Array | np.ndarray, decoded: np.ndarray, *, rare: bool = False, detail: str = ""
) -> None:
    """ω and δ for the draws `[draws, *x.shape]` of what x decodes to; `rare`: too few to see each entry round up."""
    info = np.finfo(np.float32)
    draws = len(decoded)
    errors = decoded.reshape(draws, -1) - np.asarray(x, np.float64).reshape(-1)
    energy = float((np.asarray(x, np.float64) ** 2).sum())
    squares = (errors**2).sum(1)
    # Five standard errors of the mean of the draws, and rounding.
    error, margin = squares.mean(), 5 * squares.std() / draws**0.5 + 1e-6 * energy

    def add_flushed(bound: float) -> float:
        """Plus what an entry and its decoded value lose below the smallest normal number."""
        return (bound**0.5 + 2 * x.size**0.5 * float(info.tiny)) ** 2

    if compressor.variance is not None:
        omega = float(compressor.variance(x.shape))
        # Where the code saturates at the largest float, the mean is not compared.
        means = np.where((np.abs(decoded) >= info.max).any(0).reshape(-1), 0.0, errors.mean(0))
        bias = (means**2).sum()
        # The mean of n draws is off by the n-th part of their variance; 25 is five standard errors of one entry.
        spread = max(error, omega * energy) if rare else error
        unbiased = bias <= add_flushed(25 * spread / draws + 1e-12 * energy)
        check_law("unbiased", unbiased, x, f"the mean is off by {bias**0.5:.3g}{detail}")
        within = error <= add_flushed(omega * energy + margin)
        check_law("variance", within, x, f"{error:.6g} > ω|x|² = {omega * energy:.6g}{detail}")
    if compressor.contraction is not None:
        bound = (1 - float(compressor.contraction(x.shape))) * energy
        check_law(
            "contraction", error <= add_flushed(bound + margin), x, f"{error:.6g} > (1 - δ)|x|² = {bound:.6g}{detail}"
        )


def _of_magnitudes(shape: Shape, low: float, high: float) -> np.ndarray:
    """Float32 arrays with entries between two magnitudes: of one size, one among smaller ones, and all sizes mixed."""
    rng = np.random.default_rng(0)
    signs, gaussian = rng.choice([-1.0, 1.0], shape), np.clip(rng.standard_normal(shape) / 3, -1, 1)
    sizes = np.concatenate([np.geomspace(low, high, 5), low * np.array([3, 100]), high / np.array([3, 100])])
    arrays = [size * pattern for size in sizes for pattern in (np.ones(shape), gaussian, signs)]
    alone, middle = np.arange(math.prod(shape)).reshape(shape) == 0, low**0.5 * high**0.5
    arrays += [np.where(alone, high, other) * signs for other in (0.0, low, middle, high / 1e3)]
    exponents = rng.uniform(np.log(low), np.log(high), shape)
    arrays += [np.exp(np.minimum(exponents, np.log(most))) * signs for most in (middle, high / 1e3, high)]
    arrays = [np.sign(x) * np.clip(np.abs(x), low, high) for x in arrays]
    return np.stack([*arrays, signs * np.finfo(np.float32).max]).astype(np.float32)


def _check_ends(compressor: Compressor, like: Like, key: PRNGKeyArray) -> None:
    """Zeros, and the largest numbers of a dtype."""
    decode = jax.jit(lambda x, key: _round_trip(compressor, x, key)[1])
    for name, value in (("zeros", 0.0), ("the largest numbers", float(jnp.finfo(like.dtype).max))):
        decoded = decode(jnp.full(like.shape, value, like.dtype), key)
        finite = np.isfinite(np.asarray(decoded, np.float64)).all()
        check_law(f"{name} decode to finite values", finite, like, f"got {decoded}")


def _check_not_finite(compressor: Compressor, key: PRNGKeyArray) -> None:
    decode = jax.jit(lambda x, key: _round_trip(compressor, x, key)[1])
    clean = np.random.default_rng(0).standard_normal(ENTRIES).astype(np.float32)
    for value, place in zip(NOT_FINITE, np.linspace(1, ENTRIES - 2, len(NOT_FINITE), dtype=int), strict=True):
        x = jnp.asarray(np.where(np.arange(ENTRIES) == place, np.float32(value), clean))
        finite = np.isfinite(np.asarray(decode(x, key), np.float64)).all()
        check_law("what is not finite decodes to what is not", not finite, x, f"all is finite for {value} at {place}")


def _check_calls(compressor: Compressor, x: Array, key: PRNGKeyArray) -> None:
    def round_trip(x, key):
        return _round_trip(compressor, x, key)

    compiled = jax.jit(round_trip)
    first = compiled(x, key)
    check_law("one key, one result", _same(first, compiled(x, key), 0.0), x, "two calls differ")
    # A few units in the last place: compilation may fuse a multiplication and an addition.
    tolerance = 4 * float(jnp.finfo(x.dtype).eps)
    with law_of_errors("jit equals eager"):
        eager = round_trip(x, key)
    check_law("jit equals eager", _same(first, eager, tolerance), x, "compiled and eager results differ")
    with law_of_errors("vmap"):
        mapped = jax.jit(jax.vmap(round_trip, in_axes=(0, None)))(x[None], key)
    check_law(
        "vmap", _same(first, jax.tree.map(lambda leaf: leaf[0], mapped), tolerance), x, "differs from a single call"
    )


def _check_linear(compressor: Compressor, shape: Shape, key: PRNGKeyArray) -> None:
    # Workers with one key each, or all with the same, as a reducer would give them.
    x = draw_inputs((WORKERS, *shape), key)[0]
    keys = jnp.broadcast_to(key, WORKERS) if compressor.shared_key else jax.random.split(key, WORKERS)
    payloads, decoded = jax.jit(jax.vmap(lambda x, key: _round_trip(compressor, x, key)))(x, keys)
    averaged = jax.tree.map(lambda leaf: jnp.mean(leaf, 0, dtype=jnp.float32).astype(leaf.dtype), payloads)
    # The average is rounded to the dtype of the payload.
    narrowest = max((float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(payloads)), default=0.0)
    of_mean = jax.jit(compressor.decompress)(averaged, x[0])
    holds = _same(of_mean, decoded.mean(0), max(1e-5, 4 * narrowest))
    check_law("summable", holds, x[0], "the decoded mean of payloads is not the mean of the decoded ones")


def _same(left: PyTree, right: PyTree, tolerance: float) -> bool:
    def close(a, b):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        wide = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.allclose(*wide, rtol=tolerance, atol=tolerance, equal_nan=True)

    return jax.tree.all(jax.tree.map(close, left, right))


def assert_codec_laws(
    compressor: Compressor,
    *,
    shapes: Sequence[Shape] = CODEC_SHAPES,
    dtypes: Sequence[DTypeLike] = DTYPES,
) -> None:
    """Asserts that the codec of a compressor keeps its promises.

    For every shape in the first dtype, and for the largest shape in the others, with Gaussian, equal and one-hot
    entries, zeros and NaN: `encode` returns bytes, the same in each call; `decode` returns a payload with the tree,
    shapes and dtypes of the one that was encoded, and `decompress` makes the same array of both; without NaN,
    `expected_bits` is a finite f32 scalar inside jit, and the code is at most 5 % and 64 bytes longer. With Gaussian
    entries: a code that is cut, extended or has one bit flipped raises `DamagedCodeError`, so it needs a checksum.

    The laws of the compressor itself are those of `assert_compressor_laws`.

    Args:
      compressor: the compressor under test, whose `codec` is not `None`.
      shapes: input shapes; keep an empty one and a scalar among them.
      dtypes: input dtypes.

    Examples:
      >>> from jaxdist.compressors import qsgd
      >>> assert_codec_laws(qsgd(4, code="entropy"), shapes=[(0,), (37,)], dtypes=["float32"])
    """
    codec = compressor.codec
    if codec is None:
        raise AssertionError(f"law 'a codec' broken: {compressor} has none")
    key = jax.random.key(0)
    largest = max(shapes, key=math.prod)
    likes = [jax.ShapeDtypeStruct(shape, dtypes[0]) for shape in shapes]
    for like in [*likes, *(jax.ShapeDtypeStruct(largest, dtype) for dtype in dtypes[1:])]:
        _check_codec(compressor, codec, like, key)


def _check_codec(compressor: Compressor, codec: Codec, like: Like, key: PRNGKeyArray) -> None:
    inputs = draw_inputs(like.shape, key).astype(like.dtype)
    # All inputs in one compiled call each, since compiling takes most of the time.
    payloads = jax.jit(jax.vmap(compressor.compress, in_axes=(0, None)))(inputs, key)
    estimated = jax.jit(jax.vmap(lambda payload: codec.expected_bits(payload, like)))(payloads)
    kind = jnp.dtype(estimated.dtype), estimated.shape[1:]
    check_law("expected_bits is f32[]", kind == (jnp.float32, ()), like, f"got {kind[0]} of shape {kind[1]}")
    on_host = [jax.tree.map(lambda leaf, n=n: np.asarray(leaf[n]), payloads) for n in range(len(inputs))]
    codes = [_encode(codec, payload, like) for payload in on_host]
    found = [codec.decode(code, like) for code in codes]
    for payload, decoded in zip(on_host, found, strict=True):
        sent, got = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (payload, decoded))
        check_law("decode returns a payload", sent == got, like, f"{got}, not {sent}")
    decompress = jax.jit(jax.vmap(lambda payload: compressor.decompress(payload, like)))
    arrays, again = decompress(payloads), decompress(jax.tree.map(lambda *leaves: jnp.stack(leaves), *found))
    check_law("decoded payloads decompress alike", _same_arrays(arrays, again), like, f"{again}, not {arrays}")
    # The last input is NaN, of which no length is promised.
    for code, bits in zip(codes[:-1], np.asarray(estimated, np.float64), strict=False):
        most = (1 + SHARE) * bits / 8 + FRAME_BYTES
        check_law("expected_bits", math.isfinite(bits) and len(code) <= most, like, f"{bits} for {len(code)} bytes")
    _check_damage(codec, codes[0], like)


def _encode(codec: Codec, payload: PyTree, like: Like) -> bytes:
    code = codec.encode(payload, like)
    check_law("encode returns bytes", isinstance(code, bytes), like, f"got {type(code).__name__}")
    check_law("one payload, one code", code == codec.encode(payload, like), like, "two calls differ")
    return code


def _check_damage(codec: Codec, code: bytes, like: Like) -> None:
    damaged = {"extended": code + b"\0"} | {f"cut to {n}": code[:n] for n in {0, len(code) // 2, len(code) - 1}}
    for place in range(0, len(code), -(-len(code) // FLIPS) or 1):
        bit = 1 << place % 8
        damaged[f"bit {bit} of byte {place}"] = code[:place] + bytes([code[place] ^ bit]) + code[place + 1 :]
    for name, body in damaged.items():
        # Half of one byte is none, and an empty code cannot be cut.
        if body != code:
            check_law("other bytes are refused", _refuses(codec, body, like), like, f"{name}: no DamagedCodeError")


def _refuses(codec: Codec, body: bytes, like: Like) -> bool:
    try:
        codec.decode(body, like)
    except DamagedCodeError:
        return True
    except Exception as error:
        error.add_note("law 'other bytes are refused' broken: this is no DamagedCodeError")
        raise
    return False


def _same_arrays(left: Array, right: Array) -> bool:
    return np.array_equal(np.asarray(left, np.float64), np.asarray(right, np.float64), equal_nan=True)
