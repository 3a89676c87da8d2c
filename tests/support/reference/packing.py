"""The order of packed codes, one bit at a time."""

import numpy as np


def place_of(index, bit, bits, size):
    """The byte, and the bit in it, of one bit of code `index` of `size` codes."""
    total = -(-size * bits // 8)
    # The order depends on the number of bytes alone: zeros follow the last code, as many as fit.
    runs, rest = divmod(total * 8 // bits, 1024)
    run, index = divmod(index, 1024)
    if run < runs:
        # The fields of a code: as many bytes as it has, then four bits, two, one.
        low, width = next((low, width) for low, width in fields_of(bits) if low <= bit < low + width)
        plane, byte = divmod(index, 128 * width)
        return 128 * (bits * run + low) + byte, plane * width + bit - low
    count = total - 128 * bits * runs
    if 8 % bits == 0:
        plane, byte = divmod(index, count)
        return 128 * bits * runs + byte, plane * bits + bit
    # Bit by bit of all codes.
    plane, byte = divmod(bit * rest + index, count)
    return 128 * bits * runs + byte, plane


def fields_of(bits):
    low = 0
    for width in (8, 4, 2, 1):
        while low + width <= bits:
            yield low, width
            low += width


def pack(codes, bits):
    words = np.zeros(-(-len(codes) * bits // 8), np.uint8)
    for index, code in enumerate(codes.tolist()):
        for bit in range(bits):
            byte, place = place_of(index, bit, bits, len(codes))
            words[byte] |= (code >> bit & 1) << place
    return words
