"""A hash of the bits of an array, computed on the host without compiling: it detects copies that differ."""

import numpy as np


def hash_of(x: np.ndarray) -> int:
    """32 bits: a sum of words, each mixed with its place."""
    words = _words(np.ascontiguousarray(x))
    with np.errstate(over="ignore"):  # numpy warns of scalars that wrap around
        place = (np.arange(x.size, dtype=np.uint64) * np.uint64(0x9E3779B1)).astype(np.uint32).reshape(x.shape)
        total = 0
        for number, part in enumerate(words):  # one, or two for a dtype of eight bytes
            mixed = (part ^ (place + np.uint32(number))) * np.uint32(0x85EBCA6B)
            mixed ^= mixed >> 15
            total += int((mixed * np.uint32(0xC2B2AE35)).sum(dtype=np.uint32))
    return total % 2**32


def _words(x: np.ndarray) -> list[np.ndarray]:
    """The bits as one or more arrays of 32-bit words of the same shape."""
    if x.dtype.itemsize < 4:
        return [x.view({1: np.uint8, 2: np.uint16}[x.dtype.itemsize]).astype(np.uint32)]
    words = x.reshape(-1).view(np.uint32).reshape(*x.shape, x.dtype.itemsize // 4)
    return [words[..., number] for number in range(words.shape[-1])]
