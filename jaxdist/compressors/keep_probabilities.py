"""How probable it should be that an entry is kept, for the least variance: three solutions of one convex problem.

`min Σ p_i` under `Σ x_i² / p_i <= (1 + ε) Σ x_i²`, or `min Σ x_i² / p_i` under `Σ p_i <= k`; both are solved by
`p_i = min(λ |x_i|, 1)` and differ in λ.

References:
  J. Wangni, J. Wang, J. Liu, T. Zhang, "Gradient sparsification for communication-efficient distributed optimization",
  arXiv:1710.09854, 2017.
"""

import math

import jax.numpy as jnp
from jax import lax

from .._typing import Array, Float
from .rows import to_unit


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
