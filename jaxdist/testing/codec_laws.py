"""What every codec promises: bytes on the host that decode to the payload, and other bytes that are refused."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from .._core.types import Array, Like, Payload, PRNGKeyArray, Shape
from ..compressors.base import Codec, Compressor, DamagedCodeError
from .compressor_laws import DTYPES, check_law, draw_inputs

# The last is large enough that frames and tables do not hide the length of a code.
SHAPES = ((), (0,), (0, 4), (37,), (40, 100))
# How much longer than `expected_bits` a code may be: a share, and bytes for its frame and tables.
SHARE, FRAME_BYTES = 0.05, 64
# The bytes of a code in which one bit is flipped, spread evenly over it.
FLIPS = 32


def assert_codec_laws(
    compressor: Compressor,
    *,
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[DTypeLike] = DTYPES,
    key: PRNGKeyArray | None = None,
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
      key: of the inputs and of the compressor.

    Examples:
      >>> from jaxdist.compressors import qsgd
      >>> assert_codec_laws(qsgd(4, code="entropy"), shapes=[(0,), (37,)], dtypes=["float32"])
    """
    codec = compressor.codec
    if codec is None:
        raise AssertionError(f"law 'a codec' broken: {compressor} has none")
    key = jax.random.key(0) if key is None else key
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
    check_law("decoded payloads decompress alike", _same(arrays, again), like, f"{again}, not {arrays}")
    # The last input is NaN, of which no length is promised.
    for code, bits in zip(codes[:-1], np.asarray(estimated, np.float64), strict=False):
        most = (1 + SHARE) * bits / 8 + FRAME_BYTES
        check_law("expected_bits", math.isfinite(bits) and len(code) <= most, like, f"{bits} for {len(code)} bytes")
    _check_damage(codec, codes[0], like)


def _encode(codec: Codec, payload: Payload, like: Like) -> bytes:
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


def _same(left: Array, right: Array) -> bool:
    return np.array_equal(np.asarray(left, np.float64), np.asarray(right, np.float64), equal_nan=True)
