"""The entries of largest magnitude of a vector, or of each row: a search for a threshold, or `lax.top_k`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.branches import bind
from .._core.types import Array, Float, Int, UInt
from .._core.xla_quirks import sum_counts
from .bitmaps import WORD, first_ones, full, ones, positions, to_bitmap
from .random import mix

# Up to this many entries `lax.top_k` is as fast, and compiles faster.
SMALL = 2**13
LARGEST_SAMPLE = 2**16
# The scale of a row is estimated from the first `PIECE` of each `STRETCH` entries. Up to `NOISE` (in keys, of which an
# octave has `2**23`) two estimates are taken for the same scale, which all rows together give more exactly.
STRETCH, PIECE = 512, 32
NOISE = 3 * 2**20
# Passes of Newton's method; after these every second one halves the bracket, so that the search ends for any data.
FREE_PASSES = 8
# Bits of the smallest normal number and of infinity. Magnitudes below the first count as zero, as on backends that
# flush small numbers.
NORMAL, INFINITY = 0x00800000, 0x7F800000


class _Bracket(NamedTuple):
    """The state of the search: for each row `low <= t < high` for the threshold t, as keys (bits of magnitudes)."""

    passes: Int[Array, ""]
    low: Int[Array, "*rows"]
    high: Int[Array, "*rows"]
    # The number and the bitmap of the entries from each end up.
    low_count: Int[Array, "*rows"]
    high_count: Int[Array, "*rows"]
    low_words: UInt[Array, "*rows words"]
    high_words: UInt[Array, "*rows words"]
    # The threshold to try next, and the change of it for e times as many entries.
    guess: Int[Array, "*rows"]
    slope: Float[Array, "*rows"]
    # The last threshold, and the number of entries from it up.
    tried: Int[Array, "*rows"]
    found: Int[Array, "*rows"]


def largest_by_sorting(x: Float[Array, "*rows width"], count: int) -> Int[Array, " kept"]:
    """Ascending positions, in the flat array, of the `count` largest magnitudes of each row, by `lax.top_k`."""
    # In float32: the CPU's top_k is ten times slower for any other dtype.
    _, places = lax.top_k(jnp.abs(x.astype(jnp.float32)), count)
    places = lax.sort(places, is_stable=False)
    if x.ndim == 1:
        return places
    places = places.reshape(math.prod(x.shape[:-1]), count)
    return (places + lax.broadcasted_iota(jnp.int32, places.shape, 0) * x.shape[-1]).reshape(-1)


def largest_by_threshold(x: Float[Array, "*rows width"], count: int) -> Int[Array, " kept"]:
    """The same positions by counting entries above a threshold, in a few passes at the speed of memory.

    The bits of `|x|` in float32, as an integer, are monotone in it. Newton's method on the number of entries from t up
    starts at a quantile of a small sample. A threshold with exactly `count` entries takes about six passes for a vector
    and twenty until each of thousands of rows has one; one with up to twice as many takes hardly ever more than one for
    a vector, and two to five for rows. Up to a density of a quarter the array is searched for the latter, and the exact
    choice sees only these entries. Ties at the threshold go to the lower index, as with `lax.top_k`; infinite entries
    and NaN are tied with each other, and magnitudes below 1.2e-38 with zero.

    Args:
      x: a vector, or rows that are searched side by side. One row is as good as a vector, except that XLA:CPU copies it
        inside `vmap`.
      count: the number of entries to find in each row.
    """
    width = x.shape[-1]
    if count == width:
        return lax.iota(jnp.int32, x.size)
    search = bind(_largest_by_search, count=count)
    if x.size > SMALL:
        return search(x)
    # XLA:TPU makes a larger program of a sort, which takes longer to compile.
    sort = bind(largest_by_sorting, count=count)
    return lax.platform_dependent(x, tpu=search, default=sort) if x.ndim == 1 else sort(x)


def _largest_by_search(x: Float[Array, "*rows width"], count: int) -> Int[Array, " kept"]:
    all_at_once = bind(_find_candidates, count=count, most=count)
    if x.size <= SMALL or x.shape[-1] < 4 * count:
        return all_at_once(x)
    # A TPU reads the array in a fraction of the time in which it gathers candidates, one number after the other, and
    # the program of two searches is twice as long.
    candidates = bind(_largest_of_candidates, count=count, most=2 * count)
    return lax.platform_dependent(x, tpu=all_at_once, default=candidates)


def _largest_of_candidates(x: Float[Array, "*rows width"], count: int, most: int) -> Int[Array, " kept"]:
    """Finds `most` candidates in each row, and the `count` largest among these alone."""
    where = _find_candidates(x, count, most)
    magnitudes = jnp.abs(x.reshape(-1).at[where].get(mode="promise_in_bounds").astype(jnp.float32))
    # Ties as in the search, if these few are sorted.
    magnitudes = jnp.where(jnp.isnan(magnitudes), jnp.inf, magnitudes)
    magnitudes = jnp.where(magnitudes >= jnp.finfo(jnp.float32).tiny, magnitudes, 0.0)
    chosen = _largest_of_few(magnitudes.reshape(*x.shape[:-1], most), count)
    return where.at[chosen].get(mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)


def _largest_of_few(x: Float[Array, "*rows width"], count: int) -> Int[Array, " kept"]:
    """The same positions as both ways of finding them, by the faster one."""
    search = bind(largest_by_threshold, count=count)
    if x.ndim == 1:
        return search(x)
    # XLA:CPU takes six times as long to sort short rows as to search them, in some twenty passes. On a GPU the host
    # decides after each pass whether another follows, which together takes longer than to sort all rows in one kernel.
    return lax.platform_dependent(x, cpu=search, default=bind(largest_by_sorting, count=count))


def _find_candidates(x: Float[Array, "*rows width"], count: int, most: int) -> Int[Array, " found"]:
    """Ascending positions, in the flat array, of `most` entries of each row, the `count` largest among them."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    places = positions(_mark_candidates(x, count, most).reshape(-1), rows * most)
    padded = _align_width(width)
    return places if padded == width else places - places // padded * (padded - width)


def _mark_candidates(x: Float[Array, "*rows width"], count: int, most: int) -> UInt[Array, "*rows words"]:
    """Bitmaps of `most` entries of each row, the `count` largest among them."""
    found = _search(x, count, most)
    # Either the lower threshold has few enough entries, and the first others are added, whichever they are. Or it has
    # too many, and no key is between both: then all that it has more are tied, and the first of them are added.
    few = found.low_count <= most
    chosen = jnp.where(few[..., None], found.low_words, found.high_words)
    others = jnp.where(few[..., None], ~chosen, found.low_words & ~chosen)
    fill = first_ones if x.ndim == 1 else jax.vmap(first_ones)
    return chosen | fill(others, most - jnp.where(few, found.low_count, found.high_count))


def _search(x: Float[Array, "*rows width"], count: int, most: int) -> _Bracket:
    """Narrows the bracket of each row until its lower end has `count` to `most` entries or only ties are left."""
    # The middle of both on a logarithmic scale, as are the steps.
    target = math.isqrt(count * most)
    return lax.while_loop(
        lambda bracket: jnp.any(_is_open(bracket, most)),
        lambda bracket: _narrow(bracket, _above(x, bracket.guess), count, target),
        _first_bracket(x, target),
    )


def _align_width(width: int) -> int:
    return width + -width % WORD


def _keys(x: Float[Array, "..."]) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)


def _above(x: Float[Array, "*rows width"], threshold: Int[Array, "*rows"]) -> UInt[Array, "*rows words"]:
    # Compared as floats and from both sides: XLA would compute |x| or its bits once, before the loop, into newly
    # allocated memory, which takes longer than all passes. NaN is above everything.
    ends = lax.bitcast_convert_type(threshold, jnp.float32)[..., None]
    flags = ~((x.astype(jnp.float32) < ends) & (x.astype(jnp.float32) > -ends))
    return to_bitmap(jnp.pad(flags, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % WORD)]))


def _first_bracket(x: Float[Array, "*rows width"], target: int) -> _Bracket:
    """The whole range, with a guess from a sample of the array, one entry drawn from each stretch."""
    width = x.shape[-1]
    size = min(max(SMALL // 2, x.size // 256), LARGEST_SAMPLE, x.size)
    stride = x.size // size
    drawn = lax.iota(jnp.uint32, size)
    drawn = (drawn * stride + mix(drawn) % jnp.uint32(stride)).astype(jnp.int32)
    keys = _keys(x.reshape(-1).at[drawn].get(mode="promise_in_bounds"))
    # Zeros computed from the input, so that their type (per-worker or not) is that of the later carries.
    nothing = _keys(x[..., 0]) & 0
    # Rows are sampled as if all had the same scale. To keys, which are nearly logarithms, a scale is added.
    scales = nothing
    if x.ndim > 1:
        scales = _row_scales(x)
        keys = keys - scales.at[drawn // width].get(mode="promise_in_bounds")
    sample = lax.sort(keys, is_stable=False)

    def quantile(part: float) -> Int[Array, ""]:
        return sample[size - 1 - min(size - 1, round(part * size))]

    # The guess is the quantile of the target; two others, at two standard deviations, give the slope.
    part = target / width
    spread = 2 * math.sqrt(part / size) + 1 / size
    more, fewer = part + spread, max(part - spread, 0.5 / size)
    change = quantile(more).astype(jnp.float32) - quantile(fewer).astype(jnp.float32)
    slope = change / math.log(more / fewer)
    none = jnp.zeros((*x.shape[:-1], _align_width(width) // WORD), jnp.uint32) + nothing.astype(jnp.uint32)[..., None]
    return _Bracket(
        passes=jnp.sum(nothing, dtype=jnp.int32),
        low=nothing + NORMAL - 1,
        high=nothing + INFINITY + 1,
        low_count=nothing + width,
        high_count=nothing,
        low_words=~none & jnp.broadcast_to(full(width), none.shape),
        high_words=none,
        # Clipped before the sum, which could overflow.
        guess=scales + jnp.clip(quantile(part), NORMAL - scales, INFINITY - scales),
        slope=nothing.astype(jnp.float32) + slope,
        tried=nothing + NORMAL - 1,
        found=nothing + width,
    )


def _row_scales(x: Float[Array, "rows width"]) -> Int[Array, " rows"]:
    """The key of a typical magnitude of each row, the same for rows of about the same scale."""
    rows, width = x.shape
    step = min(STRETCH, width)
    part = x[:, : width // step * step].reshape(rows, -1, step)[:, :, :PIECE].reshape(rows, -1)
    # The mean of square roots depends less on a few large entries.
    scales = _keys(jnp.square(jnp.mean(jnp.sqrt(jnp.abs(part.astype(jnp.float32))), axis=1)))
    typical = lax.sort(scales, is_stable=False)[rows // 2]
    return jnp.where((jnp.abs(scales - typical) < NOISE) | (scales >= INFINITY), typical, scales)


def _is_open(bracket: _Bracket, most: int) -> Array:
    """The rows whose threshold is not found: the lower end gives too many entries, and there are keys between both."""
    return (bracket.low_count > most) & (bracket.high - bracket.low > 1)


def _log(found: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    return jnp.log(jnp.maximum(found.astype(jnp.float32), 0.5))


def _narrow(bracket: _Bracket, words: Array, count: int, target: int) -> _Bracket:
    """Replaces one end by the guess, whose entries are `words`, and makes the next guess."""
    tried, found = bracket.guess, sum_counts(ones(words))
    enough = found >= count
    inside = (tried > bracket.low) & (tried < bracket.high)
    up, down = inside & enough, inside & ~enough
    low, high = jnp.where(up, tried, bracket.low), jnp.where(down, tried, bracket.high)
    # Newton's step with the secant through the last two thresholds, kept inside the bracket. It is a step on the
    # logarithm of the number, which is nearly linear in the key over a wide range.
    again = bracket.passes > 0
    moved, stuck = again & (found != bracket.found), again & (found == bracket.found)
    change, logarithm = (tried - bracket.tried).astype(jnp.float32), _log(found)
    slope = jnp.where(moved, change / (logarithm - _log(bracket.found)), bracket.slope)
    step = jnp.clip(jnp.round(slope * (math.log(target) - logarithm)), -(2.0**30), 2.0**30).astype(jnp.int32)
    newton = jnp.where(step > 0, tried + jnp.minimum(step, high - tried), tried + jnp.maximum(step, low - tried))
    halve = stuck | ((bracket.passes >= FREE_PASSES) & (bracket.passes % 2 == 1))
    guess = jnp.where(halve, low + (high - low) // 2, jnp.clip(newton, low + 1, high - 1))
    # Two thresholds with the same entries: there may be no others up to the end of all keys (in rows with few nonzeros,
    # or of NaN), which is tried before halving.
    guess = jnp.where(stuck & enough & (high > INFINITY), INFINITY, guess)
    guess = jnp.where(stuck & ~enough & (low < NORMAL), NORMAL, guess)
    return _Bracket(
        passes=bracket.passes + 1,
        low=low,
        high=high,
        low_count=jnp.where(up, found, bracket.low_count),
        high_count=jnp.where(down, found, bracket.high_count),
        low_words=jnp.where(up[..., None], words, bracket.low_words),
        high_words=jnp.where(down[..., None], words, bracket.high_words),
        guess=guess,
        slope=slope,
        tried=tried,
        found=found,
    )
