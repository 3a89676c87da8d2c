"""Schedules of the number of local steps between two synchronizations."""

from collections.abc import Callable

import jax.numpy as jnp

from .._core.checks import check_count, check_range
from .._core.types import Array, Float, Int

Period = Callable[[Int[Array, ""] | int], Int[Array, ""]]
# From the number of steps taken to the learning rate.
Rate = Callable[[Int[Array, ""] | int], Float[Array, ""] | float]
# More than the steps of any training, and exact in float32 and int32.
MOST = 2**30


def constant(period: int) -> Period:
    """`H` steps in every round: 8 to 64 for plain averaging, up to 500 with DiLoCo.

    More steps mean less traffic, and workers that drift further apart.

    Examples:
      >>> from jaxdist.schedule import constant
      >>> int(constant(30)(0))
      30

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, 2019.
    """
    check_periods("period", period)
    return lambda step: jnp.full_like(jnp.asarray(step, jnp.int32), period)


def post_local(switch_step: int, period: int) -> Period:
    """Synchronous first, local later: 1 up to a step, then `H`.

    Workers synchronize in every step before `switch_step`, best that of the first decay of the learning rate; from then
    on `H = period`, 8 to 16.

    Examples:
      >>> from jaxdist.schedule import post_local
      >>> [int(post_local(2, 16)(step)) for step in range(4)]
      [1, 1, 16, 16]

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020.
    """
    check_count("switch_step", switch_step, 0)
    check_periods("period", period)
    return lambda step: jnp.where(jnp.asarray(step) < switch_step, 1, period).astype(jnp.int32)


def quadratic(learning_rate: Rate, alpha: float | int, base: int, *, most: int = MOST) -> Period:
    """The quadratic synchronization rule: `H_t = max(H_base, floor((α / γ_t)²))`.

    As the rate decays, rounds grow longer, at a pace that keeps the drift within a round in proportion to the noise:
    more is saved late in training, and the model found is flatter. The quotient is computed in float32, and a millionth
    below an integer counts as that integer.

    Args:
      learning_rate: the schedule `γ_t` of the inner optimizer. During a warm-up of the rate `H` would be large: pass a
        schedule that starts at the peak, or use `post_local` in the warm-up.
      alpha: `α`. Larger sends less; start where the peak rate gives `H_base`, `α = γ_max sqrt(H_base)`: 0.0175 with a
        peak of 0.008 and `base=4`.
      base: `H_base`, the shortest round: 2 to 8.
      most: the longest round, also at a rate of zero.

    Examples:
      >>> from jaxdist.schedule import quadratic
      >>> rule = quadratic(lambda step: 0.008 / 2**step, 0.0175, 4)
      >>> [int(rule(step)) for step in range(4)]
      [4, 19, 76, 306]

    References:
      Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", arXiv:2310.14423, 2024.
    """
    check_range("alpha", alpha, 0, ends="(]")
    check_periods("base", base)
    check_periods("most", most)
    if most < base:
        raise ValueError(f"most must be in [base={base}, {MOST}], got {most}")

    def period_at(step):
        rate = jnp.asarray(learning_rate(step), jnp.float32)
        ratio = alpha / jnp.where(rate > 0, rate, 1)
        # Clipped before the conversion, since it may not fit an integer.
        steps = jnp.floor(jnp.minimum(jnp.minimum(ratio, 1e9) ** 2 * (1 + 1e-6), float(most))).astype(jnp.int32)
        return jnp.where(rate > 0, jnp.maximum(steps, base), most)

    return period_at


def doubling(every: int, period: int) -> Period:
    """`H = min(period, 2^(t // every))`: 1 at first, doubled after each `every` steps.

    Rounds are full after `every · log2(period)` steps.

    Examples:
      >>> from jaxdist.schedule import doubling
      >>> [int(doubling(10, 6)(step)) for step in (0, 9, 10, 20, 30, 10**6)]
      [1, 1, 2, 4, 6, 6]

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020 (warm-ups of `H`).
    """
    check_periods("every", every)
    check_periods("period", period)
    return lambda step: jnp.minimum(period, 2 ** jnp.minimum(jnp.asarray(step, jnp.int32) // every, 30))


def linear(warmup_steps: int, period: int) -> Period:
    """From 1 to `H` linearly: `H_t = 1 + floor((H - 1) t / warmup_steps)`, then `H`.

    Examples:
      >>> from jaxdist.schedule import linear
      >>> [int(linear(8, 5)(step)) for step in (0, 1, 2, 4, 8, 100)]
      [1, 1, 2, 3, 5, 5]

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020 (warm-ups of `H`).
    """
    check_periods("warmup_steps", warmup_steps)
    check_periods("period", period)
    if warmup_steps * (period - 1) >= 2**31:
        raise ValueError(f"warmup_steps * period must be less than 2**31, got {warmup_steps} and {period}")
    return lambda step: 1 + (period - 1) * jnp.minimum(jnp.asarray(step, jnp.int32), warmup_steps) // warmup_steps


def check_periods(name: str, value: float | int) -> None:
    """Checks that a number of steps is a positive integer, and no more than 32 bits hold."""
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}")
    check_count(name, value, 1)
