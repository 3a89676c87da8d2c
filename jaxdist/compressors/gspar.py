"""Keeps large entries for certain and small ones at random, so that the result is right on average."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool

from .._core.dtypes import saturated, working_dtype
from .._core.types import Array, Float, Int, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .indices import WORD, encode_positions, first_ones, full, ones, positions, to_bitmap
from .random import key_words
from .rows import to_unit
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


def closed_form_probabilities(x: Float[Array, " size"], variance: float | int) -> Float[Array, " size"]:
    """The fewest entries for a variance of `ε |x|²`: the paper's closed form, by a sort.

    With magnitudes a in falling order, `T1(k)` and `T2(k)` the sums of a and a² behind the k largest, and k the first
    with `a_{k+1} T1(k) <= ε |x|² + T2(k)`: the k largest are certain, and `λ = T1(k) / (ε |x|² + T2(k))`.

    Args:
      x: one array.
      variance: ε > 0; higher keeps fewer entries.

    Returns:
      float32 probabilities; 0 where x is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> p = closed_form_probabilities(jnp.array([4.0, -3.0, 2.0, 1.0, 0.0]), 0.1)
      >>> [round(x, 3) for x in p.tolist()]
      [1.0, 1.0, 0.75, 0.375, 0.0]
    """
    if variance <= 0:
        raise ValueError(f"variance must be above 0, got {variance}; with 0 all entries that are not zero are kept")
    magnitudes, falling, first, second = _sorted_sums(x)
    budget = variance * second[:1] + second
    enough = falling * first <= budget
    return _at_first(magnitudes, falling, enough, first, budget)


def greedy_probabilities(x: Float[Array, " size"], density: float | int, *, rounds: int = 2) -> Float[Array, " size"]:
    """The paper's rounds, without a sort: what certain entries leave of the budget is spread over the others.

    `p = min(κ d |x| / Σ|x|, 1)`, then `p = min(c p, 1)` with `c = (κ d - #{p = 1}) / Σ_{p < 1} p` above 1.
    Never more than `κ d` in sum; two rounds come within a few parts in a thousand, many give `water_filling`.

    Args:
      x: one array.
      density: κ, in (0, 1].
      rounds: how often.

    Returns:
      float32 probabilities; 0 where x is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> p = greedy_probabilities(jnp.array([4.0, -3.0, 2.0, 1.0, 0.0]), 0.6, rounds=0)
      >>> [round(x, 3) for x in p.tolist()]
      [1.0, 0.9, 0.6, 0.3, 0.0]
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}")
    magnitudes = scaled_magnitudes(x)
    count = density * x.shape[0]
    rate = newton_rate(magnitudes, jnp.zeros(()), count)
    for _ in range(rounds):
        rate = jnp.maximum(rate, newton_rate(magnitudes, rate, count))
    return probabilities(magnitudes, rate)


def water_filling_probabilities(x: Float[Array, " size"], count: float | int) -> Float[Array, " size"]:
    """The least variance for `count` entries on average: the fixed point of `greedy`, by a sort.

    With k the first for which `(count - k) a_{k+1} <= T1(k)`: the k largest are certain, and `λ = (count - k) / T1(k)`.

    Args:
      x: one array.
      count: how many entries are kept on average, at most its size.

    Returns:
      float32 probabilities; 0 where x is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> p = water_filling_probabilities(jnp.array([4.0, -3.0, 2.0, 1.0, 0.0]), 3)
      >>> [round(x, 3) for x in p.tolist()]
      [1.0, 1.0, 0.667, 0.333, 0.0]
    """
    if not 0 < count <= x.shape[0]:
        raise ValueError(f"count must be in (0, {x.shape[0]}], got {count}")
    magnitudes, falling, first, _ = _sorted_sums(x)
    left = count - lax.iota(jnp.int32, x.shape[0]).astype(jnp.float32)
    # Where no budget is left for what is behind, and at the last entry, all before is certain.
    enough = left * falling <= first
    return _at_first(magnitudes, falling, enough, left, first)


def expected_bits(probabilities: Float[Array, " size"], *, value_bits: int = 32) -> Float[Array, ""]:
    """What the paper's coding in two parts would take on average, a length that differs from step to step.

    The k certain entries as index and value; the others all are `± 1 / λ`, so that 1/λ is sent once, and index and sign
    of each, or a map of all entries in three values: `k (b + log2 d) + min(2 d, (log2 d + 1) Σ_{p < 1} p) + b`.

    Args:
      probabilities: of keeping each entry.
      value_bits: b, of a value.

    Returns:
      The number of bits, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> float(expected_bits(jnp.array([1.0, 1.0, 0.5, 0.5])))
      103.0
    """
    size = probabilities.shape[0]
    index = math.log2(max(size, 1))
    certain = probabilities >= 1
    count = jnp.sum(certain, dtype=jnp.int32).astype(jnp.float32)
    others = jnp.sum(jnp.where(certain, 0.0, probabilities))
    return count * (value_bits + index) + jnp.minimum(2.0 * size, (index + 1) * others) + value_bits


def probabilities(magnitudes: Float[Array, "..."], rate: Float[Array, ""]) -> Float[Array, "..."]:
    """`min(λ a, 1)`, and 0 for 0 whatever λ is."""
    return jnp.where(magnitudes > 0, jnp.minimum(rate * magnitudes, 1.0), 0.0)


def newton_rate(magnitudes: Float[Array, " size"], rate: Float[Array, ""], count: float | Array) -> Float[Array, ""]:
    """One step of Newton's method for `Σ min(λ a, 1) = count`, from below: a round of `greedy`.

    Infinite when every entry that is not zero is certain.
    """
    certain = rate * magnitudes >= 1
    others = total(jnp.where(certain, 0.0, magnitudes))
    left = count - total(certain.astype(jnp.float32))
    return jnp.where(others > 0, left / jnp.where(others > 0, others, 1.0), jnp.inf)


def total(x: Float[Array, " size"]) -> Float[Array, ""]:
    """The sum as a tree of eights: exact to a few units in the last place, and XLA:CPU adds vectors."""
    while x.shape[0] > 8:
        x = jnp.sum(jnp.pad(x, (0, -x.shape[0] % 8)).reshape(-1, 8), axis=1)
    return jnp.sum(x)


def scaled_magnitudes(x: Float[Array, " size"]) -> Float[Array, " size"]:
    """`|x| / max|x|` in float32: squares and sums neither vanish nor overflow, and the scale does not matter."""
    if not x.size:
        return x.astype(jnp.float32)
    scaled = to_unit(x.astype(jnp.float32)[None])
    return jnp.abs(scaled.rows[0]) / jnp.where(scaled.largest[0] == 0, 1.0, scaled.largest[0])


def _sorted_sums(x: Array) -> tuple[Array, Array, Array, Array]:
    """Magnitudes; in falling order; and the sums of them and of their squares from each one on, small ones first."""
    magnitudes = scaled_magnitudes(x)
    rising = jnp.sort(magnitudes)
    first, second = jnp.cumsum(rising), jnp.cumsum(rising * rising)
    return magnitudes, rising[::-1], first[::-1], second[::-1]


def _at_first(magnitudes: Array, falling: Array, enough: Array, above: Array, below: Array) -> Array:
    """`min(λ a, 1)` with λ = above / below at the first entry where it is enough; all certain where it never is."""
    first = jnp.argmax(enough)
    positive = enough[first] & (below[first] > 0)
    rate = jnp.where(positive, above[first] / jnp.where(positive, below[first], 1.0), jnp.inf)
    # The entries before are certain by the choice of the first one; this also holds where rounding says 0.9999999.
    certain = (falling[first] < magnitudes) | ~enough[first]
    return jnp.where(certain & (magnitudes > 0), 1.0, probabilities(magnitudes, rate))
