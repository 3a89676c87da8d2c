"""Keeps large entries for certain and small ones at random, so that the result is right on average."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool

from .._typing import Array, Float, Int, PRNGKeyArray, Shape, UInt
from .base import Compressor, saturated, working_dtype
from .bitmaps import WORD, first_ones, full, ones, positions, to_bitmap
from .indices import encode_positions
from .keep_probabilities import newton_rate, probabilities, scaled_magnitudes, total
from .random import key_words
from .sparse import SparsePayload, check_density, decompress, kept

# Probabilities are multiples of 2**-31, so that the chance to be kept is exactly the number that is divided by.
UNIT = 2.0**-31
# Of the budget, against rounding of sums: all that are chosen must fit.
SPARE = 2.0**-14
ROUNDS = 40
# The array is drawn from column after column of so many entries: rows are added as vectors.
COLUMN = 32


def gspar(density: float | None = None, *, variance: float | int | None = None) -> Compressor:
    """Keeps entry i with probability `p_i = min(λ |x_i|, 1)` and sends `x_i / p_i`: unbiased, of the least variance.

    λ is such that `Σ p_i` is `k = max(1, round(density d))` (less a part in 16,000): the certain entries go as they
    are, the others all as `± 1 / λ` (at most the largest number of the dtype). `E|C(x) - x|² = Σ x_i² (1 / p_i - 1)`,
    the least for k entries on average; equal magnitudes are the worst case, ω = d/k - 1 (with that k), which is what
    `random_k` has for every input.

    Exactly k places are sent, so that shapes are known beforehand, and yet every entry is kept with probability p_i:
    the p_i lie end to end on a line, and one random offset and all whole steps from it choose (systematic sampling).
    The entries of one array then are not independent, on which neither the mean nor the variance depends.

    With `variance=ε` instead, `k = ceil(d / (1 + ε))`, the smallest for which the variance is at most `ε |x|²` whatever
    the input is. The paper sends fewer for inputs that allow it, in messages whose length changes; `expected_bits` says
    what that would take.

    On the wire: k values in the dtype of x, and their positions as in `top_k`.

    Args:
      density: the part that is kept, in (0, 1]. Start at 0.1, without error feedback; inside it, `top_k` loses less.
      variance: ε, above 0; in place of the density.

    Returns:
      An unbiased compressor; payloads are gathered.

    Raises:
      ValueError: an argument is out of range, or both or neither are given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = gspar(0.5), jnp.array([0.0, 9.0, 1.0, 1.0, 0.0, 0.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)  # three places: nothing is lost
      Array([0., 9., 1., 1., 0., 0.], dtype=float32)

    References:
      J. Wangni, J. Wang, J. Liu, T. Zhang, "Gradient sparsification for communication-efficient distributed
      optimization", arXiv:1710.09854, 2017.
      W. G. Madow, "On the theory of systematic sampling, II", 1949.
    """
    if (density is None) == (variance is None):
        raise ValueError(f"give either density or variance, got density={density} and variance={variance}")
    part = 1.0 if density is None else density
    check_density(part)
    if variance is not None and variance <= 0:
        raise ValueError(f"variance must be above 0, got {variance}; identity() has none")

    def capacity(size: int) -> int:
        if variance is not None:
            return math.ceil(size / (1 + variance))
        return kept(part, size)

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        count = capacity(x.size)
        flat = x.reshape(-1)
        if count == x.size:
            return SparsePayload(flat, encode_positions(lax.iota(jnp.int32, count), x.size))
        magnitudes = scaled_magnitudes(flat)
        units, certain = _units(magnitudes, count)
        where, chosen = _draw(units, certain, key_words(key)[0], count)
        wide = working_dtype(x.dtype)
        kept_units = units.at[where].get(mode="promise_in_bounds").astype(wide)
        values = flat.at[where].get(mode="promise_in_bounds").astype(wide)
        finite = jnp.isfinite(values)
        values = jnp.where(kept_units > 0, values / jnp.where(kept_units > 0, kept_units * UNIT, 1.0), values)
        values = jnp.where(chosen, saturated(values, x.dtype, finite), 0)
        # One entry that is not finite leaves no scale for the others.
        values = jnp.where(jnp.isfinite(total(magnitudes)), values, jnp.nan)
        return SparsePayload(values, encode_positions(where, x.size))

    def omega(shape: Shape) -> float:
        size = math.prod(shape)
        count = capacity(size)
        # Twice what is spared, since sums in float32 find λ only so well.
        return 0.0 if size <= count else size / (_budget(count, size) - count * SPARE) - 1.0

    return Compressor(compress, decompress, variance=omega)


def _budget(count: int, size: int) -> float:
    """What the chances may add up to, so that after rounding up they add up to at most `count`."""
    return count * (1 - SPARE) - size * UNIT


def _units(magnitudes: Float[Array, " size"], count: int) -> tuple[Int[Array, " size"], Bool[Array, " size"]]:
    """Chances in units, rounded up, 0 where an entry is certain or zero; and which are certain."""
    budget = _budget(count, magnitudes.shape[0])

    def closer(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rate, _, rounds = carry
        return newton_rate(magnitudes, rate, budget), rate, rounds + 1

    def open(carry: tuple[Array, Array, Array]) -> Array:
        rate, last, rounds = carry
        return (rate > last) & (rounds < ROUNDS)

    start = jnp.sum(magnitudes[:1]) * 0  # of the input, so that its type is the one of the later carries
    first = newton_rate(magnitudes, start, budget)
    rate, last, _ = lax.while_loop(open, closer, (first, start, start.astype(jnp.int32)))
    all_fit = jnp.sum(magnitudes > 0, dtype=jnp.int32) <= count
    chances = probabilities(magnitudes, jnp.where(all_fit, jnp.inf, jnp.maximum(rate, last)))
    certain = chances >= 1
    units = jnp.ceil(jnp.where(certain, 0.0, chances) / UNIT).astype(jnp.int32)
    return units, certain


def _draw(
    units: Int[Array, " size"], certain: Bool[Array, " size"], offset: UInt[Array, ""], count: int
) -> tuple[Int[Array, " count"], Bool[Array, " count"]]:
    """Ascending positions of the chosen entries and, where they are fewer than `count`, of the first others.

    In u32, where a whole step is `2**32`: an entry is chosen when the running sum up to it overflows, which happens for
    exactly as many of all offsets as it has units.
    """
    size = units.shape[0]
    padding = -size % (COLUMN * 8)
    steps = jnp.pad(units.astype(jnp.uint32) << 1, (0, padding)).reshape(COLUMN, -1)
    totals = jnp.sum(steps, axis=0, dtype=jnp.uint32)
    begins = jnp.cumsum(totals) - totals + offset

    def along(begin: Array, step: Array) -> tuple[Array, Array]:
        end = begin + step
        return end, end < step

    _, overflowed = lax.scan(along, begins, steps)
    chosen = overflowed.reshape(-1) | jnp.pad(certain, (0, padding))
    words = to_bitmap(chosen[None])[0]
    others = jnp.pad(full(size), (0, words.shape[0] - -(-size // WORD))) & ~words
    fill = first_ones(others, count - jnp.sum(ones(words), dtype=jnp.int32))
    where = positions(words | fill, count)
    return where, chosen.at[where].get(mode="promise_in_bounds")
