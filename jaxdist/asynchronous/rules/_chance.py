"""Choices by chance that follow from whole numbers, so that they are the same in every run, and after a restore."""

from typing import no_type_check

_MASK = (1 << 64) - 1


@no_type_check
def mixed(*words: int) -> int:
    """64 bits that look random and follow from these numbers (SplitMix64)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
