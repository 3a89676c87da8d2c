"""Entropy coding of small symbols by interleaved range asymmetric numeral systems (rANS), in NumPy on the host.

A state `x` takes the symbol `s`, whose share of `2**14` is `f_s` and whose predecessors have `c_s` together, by
`x <- (x // f_s) 2**14 + c_s + x mod f_s`, so it grows by `log2(2**14 / f_s)` bits; what exceeds 32 bits is sent in
words of 16. The states of many lanes advance side by side, and their words are interleaved.

The length is within two percent of the entropy `-n Σ p_s log2 p_s` of the symbols' own frequencies, from half a bit for
each symbol on: about three bytes more for each lane, of 4096 bits or 8192 symbols, and 2 for each frequency.

References:
  J. Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of
  arithmetic coding", arXiv:1311.2540, 2013. F. Giesen, "Interleaved entropy coders", arXiv:1402.3392, 2014.
"""

import numpy as np

from .base import DamagedCodeError
from .elias import Reader, number_bytes

SCALE = 14
WHOLE = 2**SCALE
# The lowest value of a state between two symbols; with words of 16 bits the highest is 2**32 - 1.
LOWEST = 2**16
# A lane has at least so many bits, unless it would have more symbols than this.
LANE_BITS, LANE_SYMBOLS = 4096, 8192


def encode_symbols(symbols: np.ndarray, alphabet: int) -> bytes:
    """Encodes u8 symbols below `alphabet`.

    Examples:
      >>> symbols = np.arange(10_000, dtype=np.uint8) % 64 // 63  # one in 64: 0.116 bits each, 145 bytes
      >>> body = encode_symbols(symbols, 2)
      >>> len(body), bool((decode_symbols(Reader(body), 10_000, 2) == symbols).all())
      (160, True)
    """
    if not len(symbols):
        return b""
    counts = np.bincount(symbols, minlength=alphabet)
    shares = _round_shares(counts)
    bits = np.sum(counts * (SCALE - np.log2(np.maximum(shares, 1))))
    lanes = max(1, int(bits) // LANE_BITS, len(symbols) // LANE_SYMBOLS)
    rows = -(-len(symbols) // lanes)
    # Filled up with the most frequent symbol.
    padded = np.full((rows, lanes), np.argmax(counts), np.uint8)
    padded.reshape(-1)[: len(symbols)] = symbols
    share, before = shares.astype(np.uint32), (np.cumsum(shares) - shares).astype(np.uint32)
    state, words = np.full(lanes, LOWEST, np.uint32), []
    # Backwards, since a decoder takes the last symbol first.
    for row in padded[::-1]:
        f = share.take(row)
        full = (state >> np.uint32(32 - SCALE)) >= f
        words.append(state[full].astype("<u2"))
        state = np.where(full, state >> np.uint32(16), state)
        quotient = state // f
        state = (quotient << np.uint32(SCALE)) + (state - quotient * f) + before.take(row)
    stream = np.concatenate(words[::-1])
    head = number_bytes(lanes) + number_bytes(len(stream)) + shares.astype("<u2").tobytes()
    return head + state.astype("<u4").tobytes() + stream.tobytes()


def decode_symbols(reader: Reader, count: int, alphabet: int) -> np.ndarray:
    """Decodes `count` symbols, as u8.

    Raises:
      DamagedCodeError: the bytes are no such code.
    """
    if not count:
        return np.zeros(0, np.uint8)
    lanes, length = reader.take_number(), reader.take_number()
    shares = reader.take_array(alphabet, "<u2").astype(np.int64)
    if shares.sum() != WHOLE or not 1 <= lanes <= count:
        raise DamagedCodeError(f"{lanes} lanes for {count} symbols, whose shares add up to {shares.sum()}, not {WHOLE}")
    state = reader.take_array(lanes, "<u4").astype(np.uint32)
    # Zeros at the end, for damaged bytes that ask for more than there are.
    words = np.append(reader.take_array(length, "<u2"), np.zeros(lanes, np.uint16)).astype(np.uint32)
    # By the lowest bits of a state: its symbol, the share of that, and what is left of the bits.
    symbol = np.repeat(np.arange(alphabet, dtype=np.uint8), shares)
    share = shares.astype(np.uint32)[symbol]
    rest = np.arange(WHOLE, dtype=np.uint32) - (np.cumsum(shares) - shares).astype(np.uint32)[symbol]
    rows, place = -(-count // lanes), 0
    out = np.empty((rows, lanes), np.uint8)
    for row in range(rows):
        slot = (state & np.uint32(WHOLE - 1)).astype(np.intp)
        symbol.take(slot, out=out[row])
        state = share.take(slot) * (state >> np.uint32(SCALE)) + rest.take(slot)
        low = np.flatnonzero(state < LOWEST)
        state[low] = (state[low] << np.uint32(16)) | words[place : place + len(low)]
        place = min(place + len(low), length)
    if place != length or (state != LOWEST).any():
        raise DamagedCodeError(f"{count} symbols in {lanes} lanes do not end where their code does")
    return out.reshape(-1)[:count]


def _round_shares(counts: np.ndarray) -> np.ndarray:
    """Shares of `2**14` in proportion to the counts, at least 1 for a symbol that occurs."""
    shares = np.where(counts > 0, np.maximum(np.rint(counts * (WHOLE / counts.sum())), 1), 0).astype(np.int64)
    # The largest one, where a change matters least, makes the sum exact; of many alike it may be less than the excess.
    while missing := WHOLE - int(shares.sum()):
        largest = np.argmax(shares)
        shares[largest] += max(missing, -int(shares[largest] // 2))
    return shares
