"""Variable-length codes as strings of bits, in plain Python, and the bounds of their papers.

arXiv 1610.02132 (QSGD), 1908.06077 (NUQSGD), 1710.09854 (the two-part code).
"""

import math
from itertools import pairwise


def omega(number):
    """Elias's recursive code: `omega(16) == "10100100000"`."""
    code = "0"
    while number > 1:
        digits = f"{number:b}"
        code, number = digits + code, len(digits) - 1
    return code


def read_omega(bits, place):
    """The number whose code begins at `place`, and the place after it."""
    number = 1
    while bits[place] == "1":
        end = place + number + 1
        number, place = int(bits[place:end], 2), end
    return number, place + 1


def level_bits(levels, norms):
    """The bits of QSGD's code of signed levels: a bitmap of what is not zero, or gaps, then signs and levels."""
    where = [i for i, level in enumerate(levels) if level]
    gaps = sum(len(omega(b - a)) for a, b in pairwise([-1, *where]))
    return 32 * norms + min(len(levels), gaps) + sum(1 + len(omega(abs(levels[i]))) for i in where)


def two_part_bits(size, certain, common, value_bits=32):
    """Index and value of certain entries, one magnitude, and index and sign, or a map, of all that have it."""
    index = max(1, math.ceil(math.log2(size)))
    return certain * (value_bits + index) + min(2 * size, (index + 1) * common) + value_bits


def entropy_bits(symbols):
    """`-Σ log2 p(s)` by the frequencies of the symbols."""
    counts = {}
    for symbol in symbols:
        counts[symbol] = counts.get(symbol, 0) + 1
    return -sum(count * math.log2(count / len(symbols)) for count in counts.values())


def qsgd_bound(size, levels):
    """Theorem 3.2 of QSGD without its `o(1)`: the expected bits of a sparse vector with the Euclidean norm."""
    most = levels * (levels + math.sqrt(size))
    return (3 + 1.5 * math.log2(2 * (levels**2 + size) / most)) * most + 32


def nuqsgd_bound(size, powers):
    """The code length of NUQSGD without its `o(1)`, for the levels `0, 2^-s, ..., 1`."""
    most = 4.0**powers + 2.0**powers * math.sqrt(size)
    double_log = math.log2(math.log2(8 * (4.0**powers + size) / most))
    return 32 + 3 * most + most * math.log2(size / most) + most * double_log
