"""Codecs that encode payloads in variable length on the host: of levels, and of sparse entries (Wangni et al.).

A body is a checksum, the kind of code, and its sections. What would be longer than the payload is sent as that is, so a
code costs at most 5 bytes more.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.types import Array, Float, Like
from .._core.xla_quirks import smallest_entry
from .compressor import Codec, DamagedCodeError
from .entropy_codes import (
    Reader,
    decode_omega,
    decode_symbols,
    encode_omega,
    encode_symbols,
    number_bytes,
    omega,
    omega_length,
)
from .packing import bytes_of_codes, pack_on_host, unpack, unpack_on_host
from .positions import decode_host_positions, encode_host_positions
from .rounding import whole_words

LevelCode = Literal["elias", "entropy"]
SparseCode = Literal["two_part", "entropy"]
# The kinds of bodies: a payload as it is; Elias's code with a bitmap or with gaps; symbols by their entropy; the
# two-part code with a list or with a map of the entries of one magnitude.
RAW, BITMAP, GAPS, SYMBOLS, LIST, MAP = range(6)
# What the map says of an entry.
ABSENT, PLUS, MINUS, CERTAIN = range(4)


def levels_codec(
    make: Callable[..., Any], bits: int, bucket: int, code: LevelCode | None, *, zero_level: bool = True
) -> Codec | None:
    """The codec of payloads of packed levels, or `None` without a code.

    "elias": a bit for each entry that says whether it is zero, or Elias's code of the gaps between those that are not,
    whichever is shorter; then their signs, and Elias's code of their levels. "entropy": all codes, by their
    frequencies. Norms are sent as they are. Zeros have no sign in either.

    Args:
      make: the class of the payload, of codes and norms.
      bits: of a code.
      bucket: entries that share a norm.
      code: see above.
      zero_level: whether level 0 is zero, and the highest bit a sign.
    """
    if code is None:
        return None
    if code not in ("elias", "entropy"):
        raise ValueError(f'code must be "elias" or "entropy", or None for payloads of one length, got {code!r}')
    if code == "elias" and not zero_level:
        raise ValueError('code="elias" is for magnitudes that are mostly small, got zero_level=False; use "entropy"')
    made = _Levels(make, bits, bucket, zero_level, code)
    count_bits = made.elias_bits if code == "elias" else made.entropy_bits
    return Codec(made.encode_levels, made.decode_levels, count_bits, f"{code} {bits} {bucket}")


def sparse_codec(make: Callable[..., Any], capacity: Callable[[int], int], code: SparseCode | None) -> Codec | None:
    """The codec of sparse payloads whose smallest magnitude most entries have, or `None` without a code.

    Such entries are sent without their value, and padding of zeros is not sent. "two_part" is the code of the paper:
    index and value of the others, and either index and sign of these or a map of two bits for each entry of the array.
    "entropy": the map of both, by the frequencies of its symbols, and the values of the others.

    Args:
      make: the class of the payload, of values and encoded positions.
      capacity: the number of values for a number of entries.
      code: see above.
    """
    if code is None:
        return None
    if code not in ("two_part", "entropy"):
        raise ValueError(f'code must be "two_part" or "entropy", or None for payloads of one length, got {code!r}')
    made = _Sparse(make, capacity, code)
    return Codec(made.encode_sparse, made.decode_sparse, made.sparse_bits, f"gspar {code}")


# Levels


class _Levels(NamedTuple):
    """The payload of `with_levels`: `QuantizedPayload` itself, to make one, and how its codes are written."""

    make: Callable[..., Any]
    bits: int
    bucket: int
    zero_level: bool
    code: LevelCode

    def encode_levels(self, payload: Any, like: Like) -> bytes:
        size = math.prod(like.shape)
        words, norms = (np.asarray(x) for x in payload)
        codes = unpack_on_host(words, self.bits, size)
        levels = codes & (2 ** (self.bits - 1) - 1)
        if self.zero_level:
            codes = np.where(levels > 0, codes, 0).astype(np.uint8)
        if self.code == "elias":
            kind, coded = _encode_elias(levels, codes)
        else:
            kind, coded = SYMBOLS, encode_symbols(codes, 2**self.bits)
        if len(coded) >= words.nbytes:
            kind, coded = RAW, words.tobytes()
        return _frame(kind, norms.astype("<f4").tobytes() + coded)

    def decode_levels(self, body: bytes, like: Like) -> Any:
        size = math.prod(like.shape)
        width = min(self.bucket, max(size, 1))
        rows = -(-size // width)
        count = min(rows * width, whole_words(size, self.bits))
        kind, reader = _open(body, (RAW, BITMAP, GAPS) if self.code == "elias" else (RAW, SYMBOLS))
        norms = reader.take_array(rows, "<f4").astype(np.float32)
        if kind == RAW:
            words = reader.take_array(bytes_of_codes(count, self.bits), np.uint8)
        else:
            codes = np.zeros(count, np.uint8)
            if kind == SYMBOLS:
                codes[:size] = decode_symbols(reader, size, 2**self.bits)
            else:
                codes[:size] = self._decode_elias(kind, reader, size)
            words = pack_on_host(codes, self.bits)
        reader.finish()
        return self.make(words, norms)

    def _decode_elias(self, kind: int, reader: Reader, size: int) -> np.ndarray:
        count = _check_count(reader.take_number(), size)
        if kind == BITMAP:
            where = np.flatnonzero(np.unpackbits(reader.take_array(-(-size // 8), np.uint8), count=size))
        else:
            where = np.cumsum(decode_omega(reader, count)) - 1
        signs = np.unpackbits(reader.take_array(-(-count // 8), np.uint8), count=count)
        levels = decode_omega(reader, count)
        if len(where) != count or where[-1:].sum() >= size or np.any(levels >= 2 ** (self.bits - 1)):
            raise DamagedCodeError(
                f"a code of {size} entries names {len(where)} of {count} positions, or levels too high"
            )
        codes = np.zeros(size, np.uint8)
        codes[where] = levels + (signs.astype(np.int64) << (self.bits - 1))
        return codes

    def elias_bits(self, payload: Any, like: Like) -> Float[Array, ""]:
        codes = unpack(payload.codes, self.bits, math.prod(like.shape)).astype(jnp.int32)
        levels = codes & (2 ** (self.bits - 1) - 1)
        kept, index = levels > 0, lax.iota(jnp.int32, codes.shape[0])
        # The gap to the last entry before that is not zero.
        last = lax.cummax(jnp.where(kept, index, -1))
        gaps = index - jnp.concatenate([jnp.full((1,), -1, jnp.int32), last])[:-1]
        ones = jnp.ones_like(levels)
        lengths = jnp.stack([omega_length(jnp.where(kept, x, ones)) for x in (levels, gaps)])
        level_bits, gap_bits = jnp.sum(jnp.where(kept, lengths, 0), axis=1, dtype=jnp.float32)
        signs = jnp.sum(kept, dtype=jnp.float32)
        return _norm_bits(payload) + signs + level_bits + jnp.minimum(gap_bits, float(codes.shape[0]))

    def entropy_bits(self, payload: Any, like: Like) -> Float[Array, ""]:
        codes = unpack(payload.codes, self.bits, math.prod(like.shape)).astype(jnp.int32)
        if self.zero_level:
            codes = jnp.where(codes & (2 ** (self.bits - 1) - 1) > 0, codes, 0)
        return _norm_bits(payload) + _entropy(jnp.bincount(codes, length=2**self.bits))


def _encode_elias(levels: np.ndarray, codes: np.ndarray) -> tuple[int, bytes]:
    where = np.flatnonzero(levels)
    kept = levels[where]
    signs = np.packbits(codes[where] != kept).tobytes()
    gaps = np.diff(where, prepend=-1)
    if omega(gaps)[1].sum() < len(levels):
        kind, places = GAPS, encode_omega(gaps)
    else:
        kind, places = BITMAP, np.packbits(levels > 0).tobytes()
    return kind, number_bytes(len(where)) + places + signs + encode_omega(kept)


def _norm_bits(payload: Any) -> float:
    return 32.0 * payload.norms.shape[0]


def _entropy(counts: Array) -> Float[Array, ""]:
    """`-Σ n_s log2(n_s / n)`."""
    counts = counts.astype(jnp.float32)
    shares = counts / jnp.maximum(jnp.sum(counts), 1.0)
    return -jnp.sum(jnp.where(counts > 0, counts * jnp.log2(jnp.where(counts > 0, shares, 1.0)), 0.0))


# Sparse entries


class _Sparse(NamedTuple):
    """The payload of `gspar`: `SparsePayload` itself, and the number of entries of an array of some size."""

    make: Callable[..., Any]
    capacity: Callable[[int], int]
    code: SparseCode

    def encode_sparse(self, payload: Any, like: Like) -> bytes:
        size = math.prod(like.shape)
        values, words = (np.asarray(x) for x in payload)
        where = decode_host_positions(words, len(values), size)
        # Magnitudes as integers, which are in the same order, and NaN is one like any other.
        unsigned = np.dtype(f"u{values.dtype.itemsize}")
        sign_bit = unsigned.type(1 << (8 * unsigned.itemsize - 1))
        raw = np.ascontiguousarray(values).view(unsigned)
        magnitudes, minus = raw & ~sign_bit, raw >= sign_bit
        kept = magnitudes > 0
        scale = np.min(magnitudes[kept]) if kept.any() else unsigned.type(0)
        common, certain = kept & (magnitudes == scale), kept & (magnitudes != scale)
        head = b"".join([scale.tobytes(), number_bytes(int(certain.sum())), number_bytes(int(common.sum()))])
        if self.code == "entropy":
            kind, places = SYMBOLS, encode_symbols(_map_of(size, where, common, certain, minus), 4)
        else:
            width, listed = _index_bits(size), common.sum() * (_index_bits(size) + 1) <= 2 * size
            kind, places = LIST if listed else MAP, pack_on_host(where[certain], width).tobytes()
            if listed:
                places += np.packbits(minus[common]).tobytes() + pack_on_host(where[common], width).tobytes()
            else:
                places += pack_on_host(_map_of(size, where, common, certain & False, minus), 2).tobytes()
        sections = head + places + raw[certain].tobytes()
        if len(sections) >= values.nbytes + words.nbytes:
            kind, sections = RAW, values.tobytes() + words.tobytes()
        return _frame(kind, sections)

    def decode_sparse(self, body: bytes, like: Like) -> Any:
        size, dtype = math.prod(like.shape), np.dtype(like.dtype)
        capacity = self.capacity(size)
        kind, reader = _open(body, (RAW, SYMBOLS) if self.code == "entropy" else (RAW, LIST, MAP))
        if kind == RAW:
            values = reader.take_array(capacity, dtype)
            words = encode_host_positions(np.arange(capacity), size)
            words = reader.take_array(len(words), words.dtype)
            reader.finish()
            return self.make(values, words)
        unsigned = np.dtype(f"u{dtype.itemsize}")
        scale = reader.take_array(1, unsigned)
        certain_count, common_count = reader.take_number(), reader.take_number()
        _check_count(certain_count + common_count, capacity)
        minus, width = np.zeros(common_count, np.uint8), _index_bits(size)
        if kind == SYMBOLS:
            symbols = decode_symbols(reader, size, 4)
            certain = np.flatnonzero(symbols == CERTAIN)
        else:
            certain = _take_codes(reader, certain_count, width)
            symbols = _take_codes(reader, size, 2) if kind == MAP else np.zeros(0, np.uint8)
        if kind == LIST:
            minus = np.unpackbits(reader.take_array(-(-common_count // 8), np.uint8), count=common_count)
            common = _take_codes(reader, common_count, width)
        else:
            common = np.flatnonzero((symbols == PLUS) | (symbols == MINUS))
            minus = symbols[common] == MINUS
        if len(certain) != certain_count or len(common) != common_count:
            raise DamagedCodeError(
                f"a map names {len(certain)} and {len(common)} entries, not {certain_count} and {common_count}"
            )
        raw = reader.take_array(certain_count, unsigned)
        reader.finish()
        # Signs are the highest bits.
        signed = scale | (minus.astype(unsigned) << unsigned.type(8 * unsigned.itemsize - 1))
        return self._fill_payload(size, np.append(certain, common).astype(np.int64), np.append(raw, signed).view(dtype))

    def _fill_payload(self, size: int, where: np.ndarray, values: np.ndarray) -> Any:
        """A payload of these entries, in the order of the array, and zeros at the first other positions."""
        free = np.ones(size, np.bool_)
        if np.any(where >= size):
            raise DamagedCodeError(f"a code of {size} entries names position {np.max(where)}")
        free[where] = False
        others = np.flatnonzero(free)
        if size - len(others) != len(where):
            raise DamagedCodeError(f"a code of {size} entries names {len(where) - size + len(others)} of them twice")
        free[others[: self.capacity(size) - len(where)]] = False
        dense = np.zeros(size, values.dtype)
        dense[where] = values
        places = np.flatnonzero(~free)
        return self.make(dense[places], encode_host_positions(places, size))

    def sparse_bits(self, payload: Any, like: Like) -> Float[Array, ""]:
        size, magnitudes = math.prod(like.shape), jnp.abs(payload.values)
        kept = magnitudes > 0
        scale = smallest_entry(jnp.where(kept, magnitudes, jnp.inf), initial=jnp.inf)
        certain = jnp.sum(kept & (magnitudes > scale), dtype=jnp.float32)
        common = jnp.sum(kept, dtype=jnp.float32) - certain
        value_bits = 8.0 * payload.values.dtype.itemsize
        if self.code == "entropy":
            minus = jnp.sum(kept & (magnitudes <= scale) & (payload.values < 0), dtype=jnp.float32)
            counts = jnp.stack([size - certain - common, common - minus, minus, certain])
            return _entropy(counts) + (certain + 1) * value_bits
        index = float(_index_bits(size))
        return certain * (value_bits + index) + jnp.minimum(2.0 * size, (index + 1) * common) + value_bits


def _map_of(size: int, where: np.ndarray, common: np.ndarray, certain: np.ndarray, minus: np.ndarray) -> np.ndarray:
    symbols = np.zeros(size, np.uint8)
    symbols[where[common]] = np.where(minus[common], MINUS, PLUS)
    symbols[where[certain]] = CERTAIN
    return symbols


def _index_bits(size: int) -> int:
    """`ceil(log2 size)`, the bits of an index; at least 1."""
    return max(1, (size - 1).bit_length())


# Bodies


def encode_all(codec: Codec, payloads: Sequence[Any], likes: Sequence[Like]) -> bytes:
    """The codes of the payloads of several arrays, each after its length in 4 bytes."""
    bodies = [codec.encode(payload, like) for payload, like in zip(payloads, likes, strict=True)]
    return b"".join(number_bytes(len(body)) + body for body in bodies)


def decode_all(codec: Codec, body: bytes, likes: Sequence[Like]) -> list[Any]:
    """The payloads of `encode_all`, in NumPy.

    Raises:
      DamagedCodeError: these are other bytes.
    """
    reader = Reader(body)
    payloads = [codec.decode(reader.take(reader.take_number()), like) for like in likes]
    reader.finish()
    return payloads


def _frame(kind: int, sections: bytes) -> bytes:
    body = bytes([kind]) + sections
    return number_bytes(zlib.crc32(body)) + body


def _open(body: bytes, kinds: tuple[int, ...]) -> tuple[int, Reader]:
    """Checks a body, and returns its kind and its sections."""
    if len(body) < 5 or zlib.crc32(body[4:]) != int.from_bytes(body[:4], "little"):
        raise DamagedCodeError(f"a code of {len(body)} bytes has another checksum than it names: cut or altered")
    if body[4] not in kinds:
        raise DamagedCodeError(f"a code of {len(body)} bytes is of kind {body[4]}, and this compressor has {kinds}")
    return body[4], Reader(body[5:])


def _check_count(count: int, most: int) -> int:
    if count > most:
        raise DamagedCodeError(f"a code names {count} entries, and at most {most} are possible")
    return count


def _take_codes(reader: Reader, count: int, bits: int) -> np.ndarray:
    return unpack_on_host(reader.take_array(bytes_of_codes(count, bits), np.uint8), bits, count)
