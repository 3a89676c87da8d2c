"""Codes of variable length, in NumPy on the host: Elias's omega code of positive integers, and rANS of small symbols.

The omega code of `k` is that of the number of its binary digits less one (none for 1), followed by these digits; a zero
ends the whole. 1, 2, 3, 4, 8, 16 and 100 take 1, 3, 3, 6, 7, 11 and 13 bits, and `k` at most `1 + 2.5 log2 k`. A stream
is cut into lanes of up to 512 numbers, whose lengths in bits come first, so that all lanes are decoded side by side: 2
bytes a lane, at most an eighth of a bit for each number.

In range asymmetric numeral systems a state `x` takes the symbol `s`, whose share of `2**14` is `f_s` and whose
predecessors have `c_s` together, by `x <- (x // f_s) 2**14 + c_s + x mod f_s`, so it grows by `log2(2**14 / f_s)` bits;
what exceeds 32 bits is sent in words of 16. The states of many lanes advance side by side, and their words are
interleaved. The length is within two percent of the entropy `-n Σ p_s log2 p_s` of the symbols' own frequencies, from
half a bit for each symbol on: about three bytes more for each lane, of 4096 bits or 8192 symbols, and 2 for each
frequency.

References:
  Elias, "Universal codeword sets and representations of the integers", 1975. Duda, "Asymmetric numeral systems: entropy
  coding combining speed of Huffman coding with compression rate of arithmetic coding", arXiv:1311.2540, 2013.
  Giesen, "Interleaved entropy coders", arXiv:1402.3392, 2014.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.types import Array, Int
from .compressor import DamagedCodeError

# The numbers of a lane, and the most groups of digits of a number below 2**32.
LANE = 512
GROUPS = 5
# Codes of up to so many bits are decoded by a table.
HEAD = 16

# Of rANS: shares of symbols are whole multiples of 1 / WHOLE.
SCALE = 14
WHOLE = 2**SCALE
# The lowest value of a state between two symbols; with words of 16 bits the highest is 2**32 - 1.
LOWEST = 2**16
# A lane has at least so many bits, unless it would have more symbols than this.
LANE_BITS, LANE_SYMBOLS = 4096, 8192


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
    small = int(np.max(values, initial=1)) < 2**HEAD
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


class SymbolStream(NamedTuple):
    """Symbols in rANS code, but for their words: how many, the share of each in `2**14`, and the state of each lane."""

    count: int
    shares: np.ndarray
    states: np.ndarray

    @property
    def rows(self) -> int:
        """The most symbols of a lane."""
        return -(-self.count // len(self.states))

    def to_bytes(self) -> bytes:
        """The shares and states, for `take_stream`."""
        return self.shares.astype("<u2").tobytes() + self.states.astype("<u4").tobytes()


def take_stream(reader: Reader, count: int, alphabet: int, lanes: int) -> SymbolStream:
    """Takes `SymbolStream.to_bytes` of `count` symbols.

    Raises:
      DamagedCodeError: the bytes are none.
    """
    shares = reader.take_array(alphabet, "<u2").astype(np.int64)
    if shares.sum() != WHOLE or not 1 <= lanes <= count:
        raise DamagedCodeError(f"{lanes} lanes for {count} symbols, whose shares add up to {shares.sum()}, not {WHOLE}")
    return SymbolStream(count, shares, reader.take_array(lanes, "<u4").astype(np.uint32))


def encode_symbols(symbols: np.ndarray, alphabet: int, *, most: int = LANE_SYMBOLS) -> bytes:
    """Encodes u8 symbols below `alphabet`; a lane has `most` of them, which are as many steps of the decoder.

    Examples:
      >>> symbols = np.arange(10_000, dtype=np.uint8) % 64 // 63  # one in 64: 0.116 bits each, 145 bytes
      >>> body = encode_symbols(symbols, 2)
      >>> len(body), bool((decode_symbols(Reader(body), 10_000, 2) == symbols).all())
      (160, True)
    """
    if not len(symbols):
        return b""
    (stream,), words = encode_streams([symbols], [alphabet], most=most)
    return number_bytes(len(stream.states)) + number_bytes(len(words)) + stream.to_bytes() + words.tobytes()


def decode_symbols(reader: Reader, count: int, alphabet: int) -> np.ndarray:
    """Decodes `count` symbols, as u8.

    Raises:
      DamagedCodeError: the bytes are no such code.
    """
    if not count:
        return np.zeros(0, np.uint8)
    lanes, length = reader.take_number(), reader.take_number()
    stream = take_stream(reader, count, alphabet, lanes)
    return decode_streams([stream], reader.take_array(length, "<u2"))[0]


def encode_streams(
    vectors: Sequence[np.ndarray], alphabets: Sequence[int], *, most: int = LANE_SYMBOLS
) -> tuple[list[SymbolStream], np.ndarray]:
    """Encodes vectors of u8 symbols, none empty, side by side: returns a stream of each, and the words of all as u16.

    The lanes of all advance together, as those of one vector do: with many short vectors a step has more to do, and the
    steps are as many as those of the longest.
    """
    cut = [_cut_into_lanes(*found, most) for found in zip(vectors, alphabets, strict=True)]
    shares = [found for _, found in cut]
    # One alphabet after the other.
    share = np.concatenate(shares).astype(np.uint32)
    before = np.concatenate([np.cumsum(some) - some for some in shares]).astype(np.uint32)
    firsts = np.cumsum([0, *alphabets])
    lanes = [rows.shape[1] for rows, _ in cut]
    states, words = [np.full(count, LOWEST, np.uint32) for count in lanes], []
    # Backwards, since a decoder takes the last symbol first.
    for start, stop, members in _segments([len(rows) for rows, _ in cut])[::-1]:
        state = np.concatenate([states[n] for n in members])
        for row in np.concatenate([cut[n][0][start:stop] + firsts[n] for n in members], axis=1)[::-1]:
            f = share.take(row)
            full = (state >> np.uint32(32 - SCALE)) >= f
            words.append(state[full].astype("<u2"))
            state = np.where(full, state >> np.uint32(16), state)
            quotient = state // f
            state = (quotient << np.uint32(SCALE)) + (state - quotient * f) + before.take(row)
        for n, some in zip(members, np.split(state, np.cumsum([lanes[n] for n in members])[:-1]), strict=True):
            states[n] = some
    streams = [SymbolStream(len(x), *found) for x, *found in zip(vectors, shares, states, strict=True)]
    return streams, np.concatenate([np.zeros(0, "<u2"), *words[::-1]])


def decode_streams(streams: Sequence[SymbolStream], words: np.ndarray) -> list[np.ndarray]:
    """Decodes the vectors of `encode_streams`, as u8.

    Raises:
      DamagedCodeError: these are no such streams.
    """
    states = [stream.states for stream in streams]
    found: list[list[np.ndarray]] = [[] for _ in streams]
    # Zeros at the end, for damaged bytes that ask for more than there are.
    padded = np.append(words, np.zeros(sum(map(len, states)), np.uint16)).astype(np.uint32)
    symbol, share, rest = _decoding_tables(streams)
    place = 0
    for start, stop, members in _segments([stream.rows for stream in streams]):
        lanes = [len(states[n]) for n in members]
        state, table = np.concatenate([states[n] for n in members]), np.repeat(np.multiply(members, WHOLE), lanes)
        rows = np.empty((stop - start, len(state)), np.uint8)
        for row in rows:
            slot = (state & np.uint32(WHOLE - 1)) + table
            symbol.take(slot, out=row)
            state = share.take(slot) * (state >> np.uint32(SCALE)) + rest.take(slot)
            (low,) = (state < LOWEST).nonzero()
            state[low] = (state[low] << np.uint32(16)) | padded[place : place + len(low)]
            place = min(place + len(low), len(words))
        ends = np.cumsum(lanes)[:-1]
        for n, some, part in zip(members, np.split(state, ends), np.split(rows, ends, axis=1), strict=True):
            states[n] = some
            found[n].append(part)
    if place != len(words) or any((state != LOWEST).any() for state in states):
        raise DamagedCodeError(f"{sum(map(len, states))} lanes of symbols do not end where their code does")
    return [np.concatenate(parts).reshape(-1)[: stream.count] for parts, stream in zip(found, streams, strict=True)]


def _cut_into_lanes(symbols: np.ndarray, alphabet: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The symbols in rows, of which each lane is a column, and the shares of the alphabet."""
    counts = np.bincount(symbols, minlength=alphabet)
    shares = _round_shares(counts)
    bits = np.sum(counts * (SCALE - np.log2(np.maximum(shares, 1))))
    lanes = max(1, int(bits) // LANE_BITS, len(symbols) // most)
    # Filled up with the most frequent symbol.
    rows = np.full((-(-len(symbols) // lanes), lanes), np.argmax(counts), np.uint8)
    rows.reshape(-1)[: len(symbols)] = symbols
    return rows, shares


def _segments(rows: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Rows from a start to a stop in which the same vectors have symbols, which have so many rows each."""
    stops = sorted(set(rows))
    return [(start, stop, [n for n, own in enumerate(rows) if own >= stop]) for start, stop in zip([0, *stops], stops)]


def _decoding_tables(streams: Sequence[SymbolStream]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By the lowest bits of a state: its symbol, the share of that, and what is left of the bits; stream by stream."""
    shares = np.concatenate([stream.shares for stream in streams])
    numbers = np.concatenate([np.arange(len(stream.shares), dtype=np.uint8) for stream in streams])
    # Each stream fills its table, so that a sum over all begins anew at a multiple.
    before = (np.cumsum(shares) - shares) % WHOLE
    rest = np.tile(np.arange(WHOLE), len(streams)) - np.repeat(before, shares)
    return np.repeat(numbers, shares), np.repeat(shares, shares).astype(np.uint32), rest.astype(np.uint32)


def _round_shares(counts: np.ndarray) -> np.ndarray:
    """Shares of `2**14` in proportion to the counts, at least 1 for a symbol that occurs."""
    shares = np.where(counts > 0, np.maximum(np.rint(counts * (WHOLE / counts.sum())), 1), 0).astype(np.int64)
    # The largest one, where a change matters least, makes the sum exact; of many alike it may be less than the excess.
    while missing := WHOLE - int(shares.sum()):
        largest = np.argmax(shares)
        shares[largest] += max(missing, -int(shares[largest] // 2))
    return shares
