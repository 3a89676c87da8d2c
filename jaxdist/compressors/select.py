"""Positions of the k entries of largest magnitude: by a search for a threshold, or by `lax.top_k`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Float, Int, UInt
from .indices import WORD, first_ones, full, ones, positions, row_sums, to_bitmap
from .random import mix

# Up to this many entries `lax.top_k` is as fast, and compiles faster.
SMALL = 2**13
LARGEST_SAMPLE = 2**16
# Passes of Newton's method; after these every second one halves the bracket, so that the search ends for any data.
FREE_PASSES = 8
# Bits of the smallest normal number and of infinity. Magnitudes below the first count as zero, as on backends that
# flush small numbers.
NORMAL, INFINITY = 0x00800000, 0x7F800000


class _Bracket(NamedTuple):
    """The state of the search: for each row `low <= t < high` for the threshold t, as keys (bits of magnitudes).

    Attributes:
      passes: the number of passes so far.
      low: the lower end.
      high: the upper end.
      low_count: the number of entries from `low` up.
      high_count: the number of entries from `high` up.
      low_words: the bitmap of these entries.
      high_words: the bitmap of these entries.
      guess: the threshold to try next.
      slope: the change of the threshold that gives one more entry.
      tried: the last threshold.
      found: the number of entries from `tried` up.
    """

    passes: Int[Array, ""]
    low: Int[Array, " rows"]
    high: Int[Array, " rows"]
    low_count: Int[Array, " rows"]
    high_count: Int[Array, " rows"]
    low_words: UInt[Array, "rows words"]
    high_words: UInt[Array, "rows words"]
    guess: Int[Array, " rows"]
    slope: Float[Array, " rows"]
    tried: Int[Array, " rows"]
    found: Int[Array, " rows"]


def largest_by_sorting(x: Float[Array, "rows width"], count: int) -> Int[Array, " kept"]:
    """Ascending positions, in the flat array, of the `count` largest magnitudes of each row, by `lax.top_k`."""
    # In float32: the CPU's top_k is ten times slower for any other dtype.
    _, places = lax.top_k(jnp.abs(x.astype(jnp.float32)), count)
    return lax.sort((places + _row_starts(x)).reshape(-1))


def largest_by_threshold(x: Float[Array, "rows width"], count: int, least: int | None = None) -> Int[Array, " kept"]:
    """The same positions by counting entries above a threshold, in a few passes at the speed of memory.

    The bits of `|x|` in float32, as an integer, are monotone in it. Newton's method on the number of entries from t up
    starts at a quantile of a small sample and takes about six passes. Ties at the threshold go to the lower index, as
    with `lax.top_k`; infinite entries and NaN are tied with each other, and magnitudes below 1.2e-38 with zero.

    Args:
      x: rows that are searched at the same time.
      count: the number of entries of each row.
      least: end when this number of entries is known to be among the largest `count`; the rest are the first entries of
        the remaining bracket. `None`: all of them.

    Returns:
      Ascending positions in the flat array, `count` of each row.
    """
    rows, width = x.shape
    if count == width:
        return lax.iota(jnp.int32, x.size)
    if x.size <= SMALL:
        return largest_by_sorting(x, count)
    least = count if least is None else least
    target = (least + count) // 2
    found = lax.while_loop(
        lambda bracket: jnp.any(_is_open(bracket, count, least)),
        lambda bracket: _narrow(bracket, _above(x, bracket.guess), count, target),
        _first_bracket(x, target),
    )
    rest = found.low_words & ~found.high_words
    fill = jax.vmap(first_ones)(rest, count - found.high_count)
    places = positions((found.high_words | fill).reshape(-1), rows * count)
    padded = _align_width(width)
    return places if padded == width else places - places // padded * (padded - width)


def _row_starts(x: Array) -> Int[Array, "rows 1"]:
    return lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0) * x.shape[1]


def _align_width(width: int) -> int:
    return width + -width % WORD


def _keys(x: Float[Array, "..."]) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)


def _above(x: Float[Array, "rows width"], threshold: Int[Array, " rows"]) -> UInt[Array, "rows words"]:
    # Compared as floats and from both sides: XLA would compute |x| or its bits once, before the loop, into newly
    # allocated memory, which takes longer than all passes. NaN is above everything.
    ends = lax.bitcast_convert_type(threshold, jnp.float32)[:, None]
    flags = ~((x.astype(jnp.float32) < ends) & (x.astype(jnp.float32) > -ends))
    return to_bitmap(jnp.pad(flags, [(0, 0), (0, -x.shape[1] % WORD)]))


def _first_bracket(x: Float[Array, "rows width"], target: int) -> _Bracket:
    """The whole range, with a guess from a sample of the array, one entry drawn from each stretch."""
    rows, width = x.shape
    size = min(max(SMALL // 2, x.size // 256), LARGEST_SAMPLE)
    stride = x.size // size
    drawn = lax.iota(jnp.uint32, size)
    drawn = drawn * stride + mix(drawn) % jnp.uint32(stride)
    sample = lax.sort(_keys(x.reshape(-1).at[drawn.astype(jnp.int32)].get(mode="promise_in_bounds")))

    def quantile(part: float) -> Int[Array, ""]:
        return sample[size - 1 - min(size - 1, round(part * size))]

    part = target / width
    spread = 2 * math.sqrt(part / size) + 1 / size
    nearby = quantile(part + spread), quantile(max(part - spread, 0.0))
    slope = (nearby[0] - nearby[1]).astype(jnp.float32) / (2 * spread * width)
    # Zeros computed from the input, so that their type (per-worker or not) is that of the later carries.
    nothing = _keys(x[:, 0]) & 0
    none = jnp.zeros((rows, _align_width(width) // WORD), jnp.uint32) + nothing.astype(jnp.uint32)[:, None]
    return _Bracket(
        passes=jnp.sum(nothing, dtype=jnp.int32),
        low=nothing + NORMAL - 1,
        high=nothing + INFINITY + 1,
        low_count=nothing + width,
        high_count=nothing,
        low_words=~none & full(width)[None],
        high_words=none,
        guess=jnp.clip(nothing + quantile(part), NORMAL, INFINITY),
        slope=nothing.astype(jnp.float32) + slope,
        tried=nothing + NORMAL - 1,
        found=nothing + width,
    )


def _is_open(bracket: _Bracket, count: int, least: int) -> Array:
    """The rows whose threshold is not found: neither end gives enough entries, and there are keys between them."""
    unsettled = (bracket.high_count < least) & (bracket.low_count > count)
    return unsettled & (bracket.high - bracket.low > 1)


def _narrow(bracket: _Bracket, words: Array, count: int, target: int) -> _Bracket:
    """Replaces one end by the guess, whose entries are `words`, and makes the next guess."""
    tried, found = bracket.guess, row_sums(ones(words))
    enough = found >= count
    inside = (tried > bracket.low) & (tried < bracket.high)
    up, down = inside & enough, inside & ~enough
    low, high = jnp.where(up, tried, bracket.low), jnp.where(down, tried, bracket.high)
    # Newton's step with the secant through the last two thresholds, kept inside the bracket.
    moved = (found != bracket.found) & (bracket.passes > 0)
    change = (tried - bracket.tried).astype(jnp.float32)
    slope = jnp.where(moved, change / (found - bracket.found).astype(jnp.float32), bracket.slope)
    step = jnp.clip(jnp.round(slope * (target - found).astype(jnp.float32)), -(2.0**30), 2.0**30).astype(jnp.int32)
    newton = jnp.where(step > 0, tried + jnp.minimum(step, high - tried), tried + jnp.maximum(step, low - tried))
    halve = (bracket.passes >= FREE_PASSES) & (bracket.passes % 2 == 1)
    guess = jnp.where(halve, low + (high - low) // 2, jnp.clip(newton, low + 1, high - 1))
    return _Bracket(
        passes=bracket.passes + 1,
        low=low,
        high=high,
        low_count=jnp.where(up, found, bracket.low_count),
        high_count=jnp.where(down, found, bracket.high_count),
        low_words=jnp.where(up[:, None], words, bracket.low_words),
        high_words=jnp.where(down[:, None], words, bracket.high_words),
        guess=guess,
        slope=slope,
        tried=tried,
        found=found,
    )
