"""Elias's omega code of positive integers, and streams of bits, in NumPy on the host.

The omega code of `k` is that of the number of its binary digits less one (none for 1), followed by these digits; a zero
ends the whole. 1, 2, 3, 4, 8, 16 and 100 take 1, 3, 3, 6, 7, 11 and 13 bits, and `k` at most `1 + 2.5 log2 k`.

A stream is cut into lanes of up to 512 numbers, whose lengths in bits come first, so that all lanes are decoded side by
side: 2 bytes a lane, at most an eighth of a bit for each number.

References:
  P. Elias, "Universal codeword sets and representations of the integers", 1975.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.types import Array, Int
from .base import DamagedCodeError

# The numbers of a lane, and the most groups of digits of a number below 2**32.
LANE = 512
GROUPS = 5
# Codes of up to so many bits are decoded by a table.
HEAD = 16


class Reader:
    """Takes bytes from a body in order.

    Raises:
      DamagedCodeError: fewer are left than should be.
    """

    def __init__(self, body: bytes):
        self._body, self._place = body, 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        part = self._body[self._place : self._place + count]
        if len(part) != count:
            raise DamagedCodeError(f"a code of {len(self._body)} bytes ends {count - len(part)} bytes too early")
        self._place += count
        return part

    def take_number(self) -> int:
        """The next 4 bytes as a number."""
        return int.from_bytes(self.take(4), "little")

    def take_array(self, count: int, dtype: np.typing.DTypeLike) -> np.ndarray:
        """The next `count` entries of an array."""
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def finish(self) -> None:
        """Checks that nothing is left."""
        if self._place != len(self._body):
            raise DamagedCodeError(f"a code of {len(self._body)} bytes has {len(self._body) - self._place} too many")


def number_bytes(value: int) -> bytes:
    """A number as 4 bytes, for `Reader.take_number`."""
    return value.to_bytes(4, "little")


def encode_omega(values: np.ndarray) -> bytes:
    """Encodes positive integers below `2**32`.

    Examples:
      >>> body = encode_omega(np.array([1, 2, 100]))
      >>> len(body), decode_omega(Reader(body), 3).tolist()  # 2 bytes for the lane, and 17 bits
      (5, [1, 2, 100])
    """
    lanes, rows = _lanes(len(values))
    # The last lane is filled up with ones, of one bit each.
    padded = np.append(values, np.ones(lanes * rows - len(values), np.int64))
    codes, lengths = omega(padded)
    per_lane = lengths.reshape(lanes, rows).sum(1).astype("<u2")
    return per_lane.tobytes() + write_bits(codes, lengths)


def decode_omega(reader: Reader, count: int) -> np.ndarray:
    """Decodes `count` integers, as int64.

    Raises:
      DamagedCodeError: the bytes are no such stream.
    """
    lanes, rows = _lanes(count)
    lengths = reader.take_array(lanes, "<u2").astype(np.int64)
    ends = np.cumsum(lengths)
    windows = _windows(reader.take(-(-int(lengths.sum()) // 8)))
    codes, values = _head_tables()
    place, out = ends - lengths, np.empty((rows, lanes), np.int64)
    for row in range(rows):
        # The bits from here on, the first one highest: 57 of them at least, and codes have 43 at most.
        window = windows.take(place >> 3, mode="clip") << (place & 7).astype(np.uint64)
        head = (window >> np.uint64(64 - HEAD)).astype(np.intp)
        taken, found = codes.take(head), values.take(head)
        long = np.flatnonzero(taken == 0)
        if long.size:
            taken[long], found[long] = _decode_windows(window[long])
        out[row] = found
        place += taken
    if (place != ends).any():
        raise DamagedCodeError(
            f"{np.sum(place != ends)} of {lanes} lanes of an omega code do not end where they should"
        )
    return out.T.reshape(-1)[:count]


def omega(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes of positive integers, in the lowest bits of uint64, and their lengths."""
    small = int(values.max(initial=1)) < 2**HEAD
    codes, lengths = _small_codes()
    return (codes[values], lengths[values]) if small else _omega(values)


def omega_length(values: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The lengths of the codes of positive integers, inside jit.

    Examples:
      >>> omega_length(jnp.array([1, 2, 4, 16, 100])).tolist()
      [1, 3, 6, 11, 13]
    """
    total, left = jnp.ones_like(values), values
    for _ in range(GROUPS):
        digits = 32 - lax.clz(left)
        total, left = jnp.where(left > 1, total + digits, total), jnp.where(left > 1, digits - 1, left)
    return total


def write_bits(codes: np.ndarray, lengths: np.ndarray) -> bytes:
    """Joins codes of 1 to 64 bits to one stream, the highest bit of each first; zeros fill the last byte."""
    ends = np.cumsum(lengths)
    if not len(ends):
        return b""
    starts, total = ends - lengths, int(ends[-1])
    words = np.zeros(-(-total // 64) + 1, np.uint64)
    word, room = starts >> 6, 64 - (starts & 63)
    # A code ends inside its word, or goes on in the next one.
    over = lengths - room
    inside = np.where(over > 0, codes >> np.maximum(over, 0).astype(np.uint64), codes)
    inside <<= np.maximum(-over, 0).astype(np.uint64)
    firsts = np.flatnonzero(np.append(True, word[1:] != word[:-1]))
    words[word[firsts]] = np.bitwise_or.reduceat(inside, firsts)
    # At most one code goes on in each word.
    split = np.flatnonzero(over > 0)
    words[word[split] + 1] |= codes[split] << (64 - over[split]).astype(np.uint64)
    return words.astype(">u8").tobytes()[: -(-total // 8)]


def _lanes(count: int) -> tuple[int, int]:
    lanes = -(-count // LANE)
    return lanes, -(-count // lanes) if lanes else 0


def _windows(stream: bytes) -> np.ndarray:
    """The 64 bits from each byte on, the first one highest."""
    padded = np.frombuffer(stream + bytes(8), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(padded, 8).copy().view(">u8")[:, 0].astype(np.uint64)


def _omega(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    left = values.astype(np.int64)
    codes, lengths = np.zeros(left.shape, np.uint64), np.ones(left.shape, np.int64)
    for _ in range(GROUPS):
        active = left > 1
        # In float64 the exponent of an integer below 2**53 is the number of its digits.
        digits = np.where(active, np.frexp(left.astype(np.float64))[1], 0)
        codes |= np.where(active, left, 0).astype(np.uint64) << lengths.astype(np.uint64)
        lengths += digits
        left = np.where(active, digits - 1, left)
    return codes, lengths


def _decode_windows(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths and values of the codes at the highest bits; 0 for what is no code of a number below `2**32`."""
    values, lengths = np.ones(windows.shape, np.int64), np.zeros(windows.shape, np.int64)
    for _ in range(GROUPS + 1):
        rest = windows << lengths.astype(np.uint64)
        active = ((rest >> np.uint64(63)) == 1) & (values < 32)
        digits = np.where(active, values + 1, 1)
        values = np.where(active, (rest >> (64 - digits).astype(np.uint64)).astype(np.int64), values)
        lengths += np.where(active, digits, 0)
    ended = (windows << lengths.astype(np.uint64)) >> np.uint64(63) == 0
    return np.where(ended, lengths + 1, 0), np.where(ended, values, 0)


@functools.cache
def _small_codes() -> tuple[np.ndarray, np.ndarray]:
    return _omega(np.maximum(np.arange(2**HEAD), 1))


@functools.cache
def _head_tables() -> tuple[np.ndarray, np.ndarray]:
    """The length and the value of the code that the first bits of a window begin with; 0 for longer ones."""
    windows = np.arange(2**HEAD, dtype=np.uint64) << np.uint64(64 - HEAD)
    lengths, values = _decode_windows(windows)
    whole = lengths <= HEAD
    return np.where(whole, lengths, 0), np.where(whole, values, 0)
