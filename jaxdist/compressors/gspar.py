"""GSpar: unbiased sparsification that keeps large entries with certainty and small ones at random (Wangni et al.).

`gspar` draws exactly k entries, by systematic sampling. Of the two algorithms of the paper for the probabilities, a
density uses the greedy one, in rounds until they change nothing, and a variance with a code the closed form
(`closed_form_probabilities`). `expected_bits` is the mean length of the paper's messages.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.dtypes import saturate, working_dtype
from .._core.types import Array, Float, Int, PRNGKeyArray, Shape, UInt
from .._core.xla_quirks import largest_entry, largest_magnitude, sum_vector
from .bitmaps import WORD, first_ones, full, ones, positions, to_bitmap
from .codecs import SparseCode, sparse_codec
from .compressor import Compressor
from .positions import encode_positions
from .random import key_words
from .rounding import to_unit
from .sparse import SparsePayload, add, check_density, decompress, num_kept

# Probabilities are multiples of 2**-31, so that the probability of an entry is exactly the number it is divided by.
UNIT = 2.0**-31
# The share of the budget that is not used, since sums are rounded and all chosen entries must fit.
SPARE = 2.0**-14
# The most steps of Newton's method.
ROUNDS = 40
# The entries of a column of the array in `_draw`. XLA:CPU adds rows as vectors, but the entries of a row one by one.
COLUMN = 32


@with_description
def gspar(
    density: float | None = None, *, variance: float | int | None = None, code: SparseCode | None = None
) -> Compressor:
    """Keeps entry i with probability `p_i = min(λ |x_i|, 1)` and sends `x_i / p_i`: unbiased, with minimal variance.

    λ is such that `Σ p_i` is `k = max(1, round(density d))` (less one part in 16,000): the certain entries are sent as
    they are, the others all as `± 1 / λ` (at most the largest number of the dtype).
    `E|C(x) - x|² = Σ x_i² (1 / p_i - 1)`, the minimum for k entries on average; equal magnitudes are the worst case, ω
    = d/k - 1 (with that k), which `random_k` has for every input. Exactly k positions are sent, drawn by systematic
    sampling, so that shapes are static; the choices in one array are not independent.

    With `variance=ε` instead, `k = ceil(d / (1 + ε))`, the smallest k whose variance is at most `ε |x|²` for any input.
    With a `code` too, only the `Σ p_i` entries of the paper's closed form (`closed_form_probabilities`), up to k, are
    kept, and the payload is padded with zeros, which the code leaves out.

    *On the wire*: k values in the dtype of x, and their positions as in `top_k`.

    Args:
      density: the share that is kept, in (0, 1]. Start at 0.1, without error feedback.
      variance: ε, above 0; in place of the density.
      code: how islands and asynchronous rules send a payload, see `Codec`: "two_part", the code of the paper, with
        values for the certain entries and `1 / λ` once for all others, or "entropy", about half as long. All others are
        then exactly `± 1 / λ`, at most `2**-31 / λ` too much on average. `None`: k values and positions.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = gspar(0.5), jnp.array([0.0, 9.0, 1.0, 1.0, 0.0, 0.0])
      >>> round_trip = jax.jit(lambda x, key: code.decompress(code.compress(x, key), x))
      >>> round_trip(x, jax.random.key(0))  # three nonzero entries: nothing is lost
      Array([0., 9., 1., 1., 0., 0.], dtype=float32)

    References:
      Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", arXiv:1710.09854,
      2017.
      Madow, "On the theory of systematic sampling, II", 1949.
    """
    if (density is None) == (variance is None):
        raise ValueError(f"give either density or variance, got density={density} and variance={variance}")
    share = 1.0 if density is None else density
    check_density(share)
    if variance is not None:
        check_range("variance", variance, 0, ends="()", hint="identity() has none")

    def capacity(size: int) -> int:
        return num_kept(share, size) if variance is None else math.ceil(size / (1 + variance))

    codec = sparse_codec(SparsePayload, capacity, code)

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        count = capacity(x.size)
        flat = x.reshape(-1)
        if count == x.size:
            return SparsePayload(flat, encode_positions(lax.iota(jnp.int32, count), x.size))
        magnitudes = relative_magnitudes(flat)
        keep = _keep_probabilities(magnitudes, count)
        if codec is not None and variance is not None:
            # Both are `min(λ a, 1)`, so the smaller is the one of the smaller λ.
            keep = jnp.minimum(keep, closed_form_probabilities(flat, variance))
        units, certain = _to_units(keep)
        where, chosen = _draw(units, certain, key_words(key)[0], count)
        # x_i / p_i; entries without units are certain, and sent as they are.
        wide = working_dtype(x.dtype)
        kept_units = units.at[where].get(mode="promise_in_bounds").astype(wide)
        values = flat.at[where].get(mode="promise_in_bounds").astype(wide)
        finite = jnp.isfinite(values)
        if codec is None:
            inverse = values / jnp.where(kept_units > 0, kept_units * UNIT, 1.0)
        else:
            inverse = jnp.sign(values) * _inverse_rate(flat, magnitudes, keep).astype(wide)
        values = jnp.where(kept_units > 0, inverse, values)
        values = jnp.where(chosen, saturate(values, x.dtype, finite), 0)
        # With an entry that is not finite, no scale is left for the others.
        values = jnp.where(jnp.isfinite(sum_vector(magnitudes)), values, jnp.nan)
        return SparsePayload(values, encode_positions(where, x.size))

    def omega(shape: Shape) -> float:
        size = math.prod(shape)
        count = capacity(size)
        # Twice the unused share, for the rounding of sums in float32 that determine λ.
        worst = 0.0 if size <= count else size / (_budget(count, size) - count * SPARE) - 1.0
        return worst if codec is None or variance is None else max(worst, variance * (1 + 2 * SPARE))

    return Compressor(compress, decompress, variance=omega, codec=codec, add=add)


def _budget(count: int, size: int) -> float:
    """The largest sum of probabilities that is at most `count` after each is rounded up to a multiple of `UNIT`."""
    return count * (1 - SPARE) - size * UNIT


def _inverse_rate(
    flat: Float[Array, " size"], magnitudes: Float[Array, " size"], keep: Float[Array, " size"]
) -> Float[Array, ""]:
    """`1 / λ`, from the largest entry that is not certain; infinite where it is above the largest number."""
    uncertain = keep < 1
    probability, magnitude = (largest_entry(jnp.where(uncertain, x, 0.0)) for x in (keep, magnitudes))
    largest = largest_magnitude(flat[None].astype(jnp.float32))[0, 0]
    return largest * (magnitude / jnp.where(probability > 0, probability, 1.0))


def _keep_probabilities(magnitudes: Float[Array, " size"], count: int) -> Float[Array, " size"]:
    """The probabilities of the minimal variance for `count` entries: the limit of the paper's greedy algorithm."""
    budget = _budget(count, magnitudes.shape[0])
    rate = _rise(lambda rate: newton_rate(magnitudes, rate, budget), magnitudes)
    all_fit = jnp.sum(magnitudes > 0, dtype=jnp.int32) <= count
    return probabilities(magnitudes, jnp.where(all_fit, jnp.inf, rate))


def _rise(step: Callable[[Float[Array, ""]], Float[Array, ""]], magnitudes: Float[Array, " size"]) -> Float[Array, ""]:
    """Repeats a step of Newton's method, from rate 0, while the rate rises."""

    def still_rises(carry: tuple[Array, Array, Array]) -> Array:
        rate, last, rounds = carry
        return (rate > last) & (rounds < ROUNDS)

    # Zero, computed from the input so that its type (per-worker or not) is that of the later carries.
    start = jnp.sum(magnitudes[:1]) * 0
    first = (step(start), start, start.astype(jnp.int32))
    rate, last, _ = lax.while_loop(still_rises, lambda carry: (step(carry[0]), carry[0], carry[2] + 1), first)
    return jnp.maximum(rate, last)


def _to_units(keep: Float[Array, " size"]) -> tuple[Int[Array, " size"], Bool[Array, " size"]]:
    """Probabilities in units, rounded up, 0 for entries that are certain or zero; and the flags of certain entries."""
    certain = keep >= 1
    units = jnp.ceil(jnp.where(certain, 0.0, keep) / UNIT).astype(jnp.int32)
    return units, certain


def _draw(
    units: Int[Array, " size"], certain: Bool[Array, " size"], offset: UInt[Array, ""], count: int
) -> tuple[Int[Array, " count"], Bool[Array, " count"]]:
    """Ascending positions of the chosen entries, filled up to `count` with the first others, and which are chosen.

    In u32 a whole step is `2**32`: an entry is chosen if the running sum overflows at it, which happens for a number of
    offsets in proportion to its units.
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
    words = to_bitmap(chosen)
    others = jnp.pad(full(size), (0, words.shape[0] - -(-size // WORD))) & ~words
    fill = first_ones(others, count - jnp.sum(ones(words), dtype=jnp.int32))
    where = positions(words | fill, count)
    return where, chosen.at[where].get(mode="promise_in_bounds")


def closed_form_probabilities(x: Float[Array, " size"], variance: float | int) -> Float[Array, " size"]:
    """The fewest entries for a variance of `ε |x|²`: the paper's closed form, without its sort.

    With magnitudes a in falling order, `T1(k)` and `T2(k)` the sums of a and a² after the k largest, and k the first
    with `a_{k+1} T1(k) <= ε |x|² + T2(k)`: the k largest are certain, and `λ = T1(k) / (ε |x|² + T2(k))`. It is found
    from below: entries that are certain with one λ are so with the next, from what they leave of both sums.

    A higher ε > 0 keeps fewer entries. The probabilities are 0 where x is 0.

    Examples:
      >>> import jax.numpy as jnp
      >>> p = closed_form_probabilities(jnp.array([4.0, -3.0, 2.0, 1.0, 0.0]), 0.1)
      >>> [round(x, 3) for x in p.tolist()]
      [1.0, 1.0, 0.75, 0.375, 0.0]
    """
    check_range("variance", variance, 0, ends="(]", hint="with 0 all entries that are not zero are kept")
    magnitudes = relative_magnitudes(x)
    # Each entry that is not certain loses a / λ - a² on average, and ε |x|² is allowed.
    allowed = variance * sum_vector(magnitudes * magnitudes)

    def next_rate(rate: Float[Array, ""]) -> Float[Array, ""]:
        # Newton's method for `Σ max(a μ - a², 0) = ε |x|²` with μ = 1 / λ, a convex function of μ.
        others = jnp.where(rate * magnitudes >= 1, 0.0, magnitudes)
        above, below = sum_vector(others), allowed + sum_vector(others * others)
        return jnp.where((above > 0) & (below > 0), above / jnp.where(below > 0, below, 1.0), jnp.inf)

    return probabilities(magnitudes, _rise(next_rate, magnitudes))


def expected_bits(probabilities: Float[Array, " size"], *, value_bits: int = 32) -> Float[Array, ""]:
    """The mean length of the paper's messages, whose length differs from step to step.

    They contain index and value of the k certain entries. The others all are `± 1 / λ`: 1/λ is sent once, with index
    and sign of each, or a ternary map of all entries: `k (b + log2 d) + min(2 d, (log2 d + 1) Σ_{p < 1} p) + b`.

    b is `value_bits`.

    Examples:
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
    """`min(λ a, 1)`, and 0 for 0 even if λ is infinite."""
    return jnp.where(magnitudes > 0, jnp.minimum(rate * magnitudes, 1.0), 0.0)


def newton_rate(magnitudes: Float[Array, " size"], rate: Float[Array, ""], count: float | Array) -> Float[Array, ""]:
    """One step of Newton's method for `Σ min(λ a, 1) = count`, from below; infinite if all nonzero entries are certain.

    A round of the paper's greedy algorithm, `p = min(c p, 1)` with `c = (count - #{p = 1}) / Σ_{p < 1} p`, is such a
    step: with `p = min(λ a, 1)`, `c λ` is the next rate.
    """
    certain = rate * magnitudes >= 1
    others = sum_vector(jnp.where(certain, 0.0, magnitudes))
    left = count - sum_vector(certain.astype(jnp.float32))
    return jnp.where(others > 0, left / jnp.where(others > 0, others, 1.0), jnp.inf)


def relative_magnitudes(x: Float[Array, " size"]) -> Float[Array, " size"]:
    """`|x| / max|x|` in float32: squares and sums neither vanish nor overflow. Probabilities are the same."""
    if not x.size:
        return x.astype(jnp.float32)
    scaled = to_unit(x.astype(jnp.float32)[None])
    return jnp.abs(scaled.rows[0]) / jnp.where(scaled.largest[0] == 0, 1.0, scaled.largest[0])
