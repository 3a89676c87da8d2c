"""Packs codes of 1 to 32 bits into bytes, and floats narrower than 32 bits into unsigned words."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import DTypeLike

from .._core.branches import bind
from .._core.checks import check_range
from .._core.types import Array, Float, Shaped, UInt
from .._core.xla_quirks import run_apart

WORD_DTYPES = {1: jnp.uint8, 2: jnp.uint16}
# Codes of a run, which are eight rows of the lanes of a TPU, and those from which on XLA:CPU packs them by themselves.
RUN, LANES = 1024, 128
SMALL = 2**15


def bytes_of_codes(size: int, bits: int) -> int:
    """The number of bytes that hold `size` codes: `ceil(size * bits / 8)`."""
    return -(-size * bits // 8)


def pack(codes: UInt[Array, "*batch size"], bits: int) -> UInt[Array, "*batch bytes"]:
    """Packs unsigned codes along the last axis, in planes, so that no backend has to move bytes beside each other.

    A code must be below `2**bits`: higher bits may spill into other codes. The last axis of the result has
    `ceil(size * bits / 8)` u8 words; zeros fill the rest of the last ones. Any width from 1 to 32 bits is possible.

    Codes are cut into runs of 1024, each of `128 * bits` bytes. A run has one field of its codes after the other, from
    the lowest bits on: as many whole bytes as fit, then 4 bits, 2 and 1, so 7 bits are fields of 4, 2 and 1. A field of
    w bits is `128 w` bytes, in which byte i has those of the codes `i + 128 w j` from bit `w j` on. What is left after
    the last run, m bytes, is one such field with m in place of `128 w`, of codes that tile a byte; of other widths it
    is a vector of bits, all lowest ones first, with room for `8 m // bits` codes, packed like codes of one bit.

    Examples:
      >>> import jax.numpy as jnp
      >>> pack(jnp.array([1, 15, 7, 8], jnp.uint8), 4), pack(jnp.array([5, 4095], jnp.uint16), 12)
      (Array([113, 143], dtype=uint8), Array([171,  87, 170], dtype=uint8))
    """
    _check_bits(bits)
    if bits > 8 * codes.dtype.itemsize:
        raise ValueError(f"bits must be at most those of the codes' dtype {codes.dtype}, got {bits}")
    return codes.astype(jnp.uint8) if bits == 8 else _pack(lambda codes: codes, codes, bits)


def pack_signs(x: Float[Array, " size"]) -> UInt[Array, " bytes"]:
    """`pack` of the bits `x >= 0` of a vector.

    Examples:
      >>> import jax.numpy as jnp
      >>> pack_signs(jnp.array([2.0, -1.0, 0.0]))
      Array([5], dtype=uint8)
    """
    return _pack(lambda x: (x >= 0).astype(jnp.uint8), x, 1)


def unpack(words: UInt[Array, "*batch bytes"], bits: int, size: int) -> UInt[Array, "*batch size"]:
    """Takes `size` codes of `bits` bits out of u8 words, as u8, u16 or u32: the inverse of `pack`.

    Examples:
      >>> import jax.numpy as jnp
      >>> unpack(jnp.array([113, 15], jnp.uint8), 4, 3), unpack(jnp.array([171, 87, 170], jnp.uint8), 12, 2)
      (Array([ 1, 15,  7], dtype=uint8), Array([   5, 4095], dtype=uint16))
    """
    _check_bits(bits)
    *batch, count = words.shape
    if bits == 8:
        return words[..., :size]
    runs, rest = divmod(_capacity(count, bits), RUN)
    cut = runs * RUN * bits // 8
    parts = []
    if runs or not rest:
        whole = words[..., :cut].reshape(*batch, runs, RUN * bits // 8)
        parts.append(_unpack_runs(whole, bits).reshape(*batch, runs * RUN))
    if rest:
        parts.append(_unpack_rest(words[..., cut:], bits, rest))
    return _concatenate(parts)[..., :size]


def pack_on_host(codes: np.ndarray, bits: int) -> np.ndarray:
    """The words of `pack`, of a vector of codes in host memory.

    Examples:
      >>> pack_on_host(np.array([5, 4095]), 12).tolist()
      [171, 87, 170]
    """
    _check_bits(bits)
    total = bytes_of_codes(len(codes), bits)
    runs, rest = divmod(_capacity(total, bits), RUN)
    codes = np.pad(codes, (0, runs * RUN + rest - len(codes)))
    whole, last = codes[: runs * RUN].reshape(runs, RUN), codes[runs * RUN :]
    fields = [_join_on_host(whole >> low & 2**width - 1, width) for low, width in _fields(bits)]
    width = bits
    if 8 % bits:
        last, width = (last >> np.arange(bits)[:, None] & 1).reshape(-1), 1
    last = np.pad(last, (0, (total - runs * RUN * bits // 8) * 8 // width - len(last)))
    return np.append(np.concatenate(fields, axis=1).reshape(-1), _join_on_host(last, width))


def unpack_on_host(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """The codes of `unpack`, as u8 or u32, of words in host memory.

    Examples:
      >>> unpack_on_host(np.array([171, 87, 170], np.uint8), 12, 2).tolist()
      [5, 4095]
    """
    _check_bits(bits)
    dtype = np.uint8 if bits <= 8 else np.uint32
    runs, rest = divmod(_capacity(len(words), bits), RUN)
    cut = runs * RUN * bits // 8
    whole, last = words[:cut].reshape(runs, RUN * bits // 8), words[cut:]
    codes = np.zeros((runs, RUN), dtype)
    for low, width in _fields(bits):
        field = whole[:, RUN * low // 8 : RUN * (low + width) // 8]
        codes |= _split_on_host(field, width).astype(dtype) << dtype(low)
    if 8 % bits == 0:
        end = _split_on_host(last, bits)
    else:
        ones = _split_on_host(last, 1)[: rest * bits].reshape(bits, rest).astype(dtype)
        end = np.bitwise_or.reduce(ones << np.arange(bits, dtype=dtype)[:, None], axis=0)
    return np.append(codes.reshape(-1), end)[:size]


def _join_on_host(codes: np.ndarray, width: int) -> np.ndarray:
    planes = codes.astype(np.uint8).reshape(*codes.shape[:-1], 8 // width, codes.shape[-1] * width // 8)
    return np.bitwise_or.reduce(planes << np.arange(0, 8, width, dtype=np.uint8)[:, None], axis=-2)


def _split_on_host(words: np.ndarray, width: int) -> np.ndarray:
    planes = words[..., None, :] >> np.arange(0, 8, width, dtype=np.uint8)[:, None] & np.uint8(2**width - 1)
    return planes.reshape(*words.shape[:-1], words.shape[-1] * 8 // width)


def to_words(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The same bits as u8 or u16 words of the same shape, if `x` is narrower than 32 bits; other arrays as they are.

    XLA widens bfloat16 and float8 in the collectives of some backends, but moves words unchanged.

    Examples:
      >>> import jax.numpy as jnp
      >>> to_words(jnp.ones(2, jnp.bfloat16))
      Array([16256, 16256], dtype=uint16)
    """
    word = WORD_DTYPES.get(x.dtype.itemsize)
    return x if word is None else jax.lax.bitcast_convert_type(x, word)


def from_words(words: Shaped[Array, "..."], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """The array of `dtype` whose `to_words` is `words`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from_words(jnp.array([16256], jnp.uint16), jnp.bfloat16)
      Array([1], dtype=bfloat16)
    """
    return words if jnp.dtype(dtype) == words.dtype else jax.lax.bitcast_convert_type(words, dtype)


def _check_bits(bits: int) -> None:
    check_range("bits", bits, 1, 32, ends="[]")


def _capacity(count: int, bits: int) -> int:
    """The number of codes for which words have room: the order depends on that of words alone."""
    return count * 8 // bits


def _code_dtype(bits: int) -> Any:
    return jnp.uint8 if bits <= 8 else jnp.uint16 if bits <= 16 else jnp.uint32


def _wide_dtype(bits: int) -> Any:
    return jnp.int32 if bits <= 16 else jnp.uint32


def _fields(bits: int) -> list[tuple[int, int]]:
    """The lowest bit and the width of each field of a code: bytes, then 4, 2 and 1 bits."""
    fields, low = [], 0
    for width in (8, 4, 2, 1):
        while bits - low >= width:
            fields.append((low, width))
            low += width
    return fields


def _pack(
    codes_of: Callable[[Array], Array], x: Shaped[Array, "*batch size"], bits: int
) -> UInt[Array, "*batch bytes"]:
    """`pack` of the codes `codes_of(x)`, each of one entry of x."""
    *batch, size = x.shape
    runs, rest = divmod(_capacity(bytes_of_codes(size, bits), bits), RUN)
    cut = runs * RUN
    if cut > size:
        codes_of, x = lambda codes: codes, _lengthen(codes_of(x), cut)
    parts = []
    if runs or not rest:
        # Cut, and made into codes, in the branch of `run_apart`: XLA:CPU then neither writes the codes of floats first,
        # nor fuses a cut, which is another division for each entry, with what makes them.
        parts.append(_pack_runs(lambda x: codes_of(x[..., :cut]).reshape(*batch, runs, RUN), x, bits))
        parts = [part.reshape(*batch, cut * bits // 8) for part in parts]
    if rest:
        parts.append(_pack_rest(_lengthen(codes_of(x[..., cut:]), rest), bits))
    return _concatenate(parts)


def _lengthen(codes: Array, size: int) -> Array:
    missing = size - codes.shape[-1]
    return jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]) if missing else codes


def _pack_runs(cut: Callable[[Array], Array], x: Array, bits: int) -> UInt[Array, "*runs bytes"]:
    def pack_cut(pack_codes: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda x: pack_codes(cut(x))

    alone = pack_cut(partial(_pack_fields, bits, _join_slices))
    return lax.platform_dependent(
        x,
        cpu=partial(run_apart, alone) if x.size >= SMALL else alone,
        tpu=pack_cut(partial(_pack_lanes, bits)),
        # The only form that a kernel of Triton can have.
        default=pack_cut(partial(_pack_fields, bits, _join_planes)),
    )


def _unpack_runs(words: UInt[Array, "*runs bytes"], bits: int) -> UInt[Array, "*runs codes"]:
    alone = bind(_unpack_rows, bits)
    return lax.platform_dependent(
        words,
        cpu=bind(run_apart, alone) if words.size * 8 // bits >= SMALL else alone,
        tpu=bind(_unpack_lanes, bits),
        default=bind(_unpack_fields, bits, _split_planes),
    )


def _pack_fields(bits: int, join: Callable[[Array, int], Array], codes: Array) -> Array:
    fields = [join(field.astype(jnp.uint8), width) for field, width in _cut_fields(codes, bits)]
    return fields[0] if len(fields) == 1 else jnp.concatenate(fields, axis=-1)


def _unpack_fields(bits: int, split: Callable[[Array, int], Array], words: Array) -> Array:
    dtype = _code_dtype(bits)
    fields = [
        split(words[..., LANES * low : LANES * (low + width)], width).astype(dtype) << dtype(low)
        for low, width in _fields(bits)
    ]
    return reduce(operator.or_, fields)


def _unpack_rows(bits: int, words: UInt[Array, "*runs bytes"]) -> UInt[Array, "*runs codes"]:
    """In the form that XLA:CPU vectorizes: by the eight rows of a run, each from one row of every field."""
    one, rows = _code_dtype(bits), []
    for row in range(RUN // LANES):
        parts = []
        for low, width in _fields(bits):
            first = LANES * (low + row % width)
            field = words[..., first : first + LANES] >> jnp.uint8(row // width * width)
            parts.append((field & jnp.uint8(2**width - 1)).astype(one) << one(low))
        rows.append(reduce(operator.or_, parts))
    return jnp.stack(rows, axis=-2).reshape(*words.shape[:-1], RUN)


def _pack_lanes(bits: int, codes: UInt[Array, "*runs codes"]) -> UInt[Array, "*runs bytes"]:
    """In 32 bits and the tiles of a vector's layout on TPUs; in rows of bytes the program is several times as long."""
    runs, fields = codes.shape[:-1], []
    wide = codes.astype(_wide_dtype(bits)).reshape(*runs, RUN // LANES, LANES)
    # Several narrow fields row by row: as whole fields the program is a quarter longer.
    by_row = bits < 8 and 8 % bits > 0
    for field, width in _cut_fields(wide, bits):
        one, step = field.dtype.type, 1 if by_row else width
        for row in range(0, width, step):
            rows = [field[..., first : first + step, :] for first in range(row, RUN // LANES, width)]
            fields.append(reduce(operator.or_, [part << one(width * j) for j, part in enumerate(rows)]))
    words = fields[0] if len(fields) == 1 else jnp.concatenate(fields, axis=-2)
    return words.astype(jnp.uint8).reshape(*runs, bits * LANES)


def _unpack_lanes(bits: int, words: UInt[Array, "*runs bytes"]) -> UInt[Array, "*runs codes"]:
    """The inverse of `_pack_lanes`."""
    runs = words.shape[:-1]
    wide = words.astype(_wide_dtype(bits)).reshape(*runs, bits, LANES)
    one, fields = wide.dtype.type, []
    row = lax.broadcasted_iota(wide.dtype, (*runs, RUN // LANES, LANES), len(runs))
    for low, width in _fields(bits):
        field = wide[..., low : low + width, :]
        if width == bits:
            shape = (*runs, 8 // width, width, LANES)
            spread = jnp.broadcast_to(field[..., None, :, :], shape).reshape(row.shape)
        else:
            spread = jnp.concatenate([field] * (8 // width), axis=-2)
        codes = (spread >> (row // one(width) * one(width))) & one(2**width - 1)
        fields.append(codes << one(low))
    return reduce(operator.or_, fields).astype(_code_dtype(bits)).reshape(*runs, RUN)


def _cut_fields(codes: Shaped[Array, "..."], bits: int) -> Iterator[tuple[Shaped[Array, "..."], int]]:
    """The fields of codes, and their widths."""
    one = codes.dtype.type
    for low, width in _fields(bits):
        yield codes if width == bits else (codes >> one(low)) & one(2**width - 1), width


def _join_planes(codes: UInt[Array, "*batch codes"], width: int) -> UInt[Array, "*batch bytes"]:
    """`word_i = Σ_j code_(j m + i) 2^(j width)` for m words."""
    planes = codes.reshape(*codes.shape[:-1], 8 // width, codes.shape[-1] * width // 8)
    return jnp.sum(planes << _shifts(planes.shape, width), axis=-2, dtype=jnp.uint8)


def _join_slices(codes: UInt[Array, "*batch codes"], width: int) -> UInt[Array, "*batch bytes"]:
    """The same, in the form that XLA:CPU vectorizes."""
    planes = codes.reshape(*codes.shape[:-1], 8 // width, codes.shape[-1] * width // 8)
    return reduce(operator.or_, [planes[..., j, :] << jnp.uint8(width * j) for j in range(8 // width)])


def _split_planes(words: UInt[Array, "*batch bytes"], width: int) -> UInt[Array, "*batch codes"]:
    """The inverse of `_join_planes`."""
    *batch, count = words.shape
    spread = jnp.broadcast_to(words[..., None, :], (*batch, 8 // width, count))
    codes = (spread >> _shifts(spread.shape, width)) & jnp.uint8(2**width - 1)
    return codes.reshape(*batch, 8 // width * count)


def _shifts(shape: tuple[int, ...], width: int) -> UInt[Array, "..."]:
    return lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 2) * jnp.uint8(width)


def _pack_rest(codes: UInt[Array, "*batch codes"], bits: int) -> UInt[Array, "*batch bytes"]:
    """Fewer codes than a run: in planes, or bit by bit, all lowest ones first, if codes do not tile a byte."""
    if 8 % bits == 0:
        return _join_planes(codes.astype(jnp.uint8), bits)
    *batch, count = codes.shape
    spread = jnp.broadcast_to(codes[..., None, :], (*batch, bits, count))
    ones = (spread >> lax.broadcasted_iota(codes.dtype, spread.shape, len(batch))) & codes.dtype.type(1)
    ones = ones.astype(jnp.uint8).reshape(*batch, bits * count)
    return _join_planes(jnp.pad(ones, [(0, 0)] * len(batch) + [(0, -bits * count % 8)]), 1)


def _unpack_rest(words: UInt[Array, "*batch bytes"], bits: int, count: int) -> UInt[Array, "*batch codes"]:
    if 8 % bits == 0:
        return _split_planes(words, bits)
    batch, dtype = words.shape[:-1], _code_dtype(bits)
    ones = _split_planes(words, 1)[..., : bits * count].reshape(*batch, bits, count).astype(dtype)
    return jnp.sum(ones << lax.broadcasted_iota(dtype, ones.shape, len(batch)), axis=-2, dtype=dtype)


def _concatenate(parts: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    join = bind(jnp.concatenate, axis=-1)
    # Fused with what follows, XLA:CPU would ask for each entry in which part it is.
    apart = bind(run_apart, join) if sum(part.size for part in parts) >= SMALL // 8 else join
    return lax.platform_dependent(list(parts), cpu=apart, default=join)
