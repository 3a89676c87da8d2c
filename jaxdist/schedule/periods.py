"""The number of local steps between two synchronizations: schedules of `H`, and `H_i` for workers of unequal speed.

A schedule is a function from the number of steps taken to the period, both `Int[Array, ""]`, for
`local_steps(..., sync_period=)`. A round ends when its length reaches the current value of the schedule.
"""

import operator
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Float, Int

Period = Callable[[Int[Array, ""] | int], Int[Array, ""]]
# From the number of steps taken to the learning rate.
Rate = Callable[[Int[Array, ""] | int], Float[Array, ""] | float]

# More than the steps of any training, and exact in float32 and int32.
MOST = 2**30


def constant(period: int) -> Period:
    """`H` steps in every round.

    Args:
      period: `H`, at least 1. More sends less, and workers drift further apart: 8 to 64 for plain averaging, up to 500
        with DiLoCo.

    Returns:
      The schedule.

    Raises:
      ValueError: `period` is below 1.

    Example:
      >>> from jaxdist.schedule import constant
      >>> int(constant(30)(0))
      30

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, 2019.
    """
    _check("period", period)
    return lambda step: jnp.full_like(jnp.asarray(step, jnp.int32), period)


def post_local(switch_step: int, period: int) -> Period:
    """Synchronous first, local later: 1 up to a step, then `H`.

    Args:
      switch_step: workers synchronize in every step before it; the step of the first decay of the learning rate.
      period: `H` from then on: 8 to 16.

    Returns:
      The schedule.

    Raises:
      ValueError: `switch_step` is negative, or `period` below 1.

    Example:
      >>> from jaxdist.schedule import post_local
      >>> [int(post_local(2, 16)(step)) for step in range(4)]
      [1, 1, 16, 16]

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020.
    """
    if switch_step < 0:
        raise ValueError(f"switch_step must not be negative, got {switch_step}")
    _check("period", period)
    return lambda step: jnp.where(jnp.asarray(step) < switch_step, 1, period).astype(jnp.int32)


def quadratic(learning_rate: Rate, alpha: float | int, base: int, *, most: int = MOST) -> Period:
    """The quadratic synchronization rule: `H_t = max(H_base, floor((α / γ_t)²))`.

    As the rate decays, rounds grow longer, at a pace that keeps the drift within a round in proportion to the noise:
    more is saved late in training, and the model found is flatter.

    Args:
      learning_rate: the schedule `γ_t` of the inner optimizer. During a warm-up of the rate `H` would be large: pass a
        schedule that starts at the peak, or use `post_local` in the warm-up.
      alpha: `α`. Larger sends less; start where the peak rate gives `H_base`, `α = γ_max sqrt(H_base)`: 0.0175 with a
        peak of 0.008 and `base=4`.
      base: `H_base`, the shortest round: 2 to 8.
      most: the longest round, also at a rate of zero.

    Returns:
      The schedule. The quotient is computed in float32, and a millionth below an integer counts as that integer.

    Raises:
      ValueError: `alpha` is not positive, `base` below 1, or `most` below `base`.

    Example:
      >>> from jaxdist.schedule import quadratic
      >>> rule = quadratic(lambda step: 0.008 / 2**step, 0.0175, 4)
      >>> [int(rule(step)) for step in range(4)]
      [4, 19, 76, 306]

    References:
      Gu, Lyu, Arora, Zhang, Huang, "A Quadratic Synchronization Rule for Distributed Deep Learning", arXiv:2310.14423,
      2024.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    _check("base", base)
    if not base <= most <= MOST:
        raise ValueError(f"most must be in [base={base}, {MOST}], got {most}")

    def at(step):
        rate = jnp.asarray(learning_rate(step), jnp.float32)
        ratio = alpha / jnp.where(rate > 0, rate, 1)
        # Clipped before the conversion, since it may not fit an integer.
        steps = jnp.floor(jnp.minimum(jnp.minimum(ratio, 1e9) ** 2 * (1 + 1e-6), float(most))).astype(jnp.int32)
        return jnp.where(rate > 0, jnp.maximum(steps, base), most)

    return at


def doubling(every: int, period: int) -> Period:
    """`H = min(period, 2^(t // every))`: 1 at first, doubled after each `every` steps.

    Args:
      every: steps between doublings; start with a hundredth of the training.
      period: the final `H`.

    Returns:
      The schedule.

    Raises:
      ValueError: an argument is below 1.

    Example:
      >>> from jaxdist.schedule import doubling
      >>> [int(doubling(10, 6)(step)) for step in (0, 9, 10, 20, 30, 10**6)]
      [1, 1, 2, 4, 6, 6]

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020 (warm-ups of `H`).
    """
    _check("every", every)
    _check("period", period)
    return lambda step: jnp.minimum(period, 2 ** jnp.minimum(jnp.asarray(step, jnp.int32) // every, 30))


def linear(warmup_steps: int, period: int) -> Period:
    """From 1 to `H` linearly: `H_t = 1 + floor((H - 1) t / warmup_steps)`, then `H`.

    Args:
      warmup_steps: the number of steps until it is `H`.
      period: `H`.

    Returns:
      The schedule.

    Raises:
      ValueError: an argument is below 1, or their product does not fit 31 bits.

    Example:
      >>> from jaxdist.schedule import linear
      >>> [int(linear(8, 5)(step)) for step in (0, 1, 2, 4, 8, 100)]
      [1, 1, 2, 3, 5, 5]

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020 (warm-ups of `H`).
    """
    _check("warmup_steps", warmup_steps)
    _check("period", period)
    if warmup_steps * (period - 1) >= 2**31:
        raise ValueError(f"warmup_steps * period must be less than 2**31, got {warmup_steps} and {period}")
    return lambda step: 1 + (period - 1) * jnp.minimum(jnp.asarray(step, jnp.int32), warmup_steps) // warmup_steps


def proportional_steps(
    speeds: Sequence[float | int] | np.ndarray, period: int, *, minimum: int = 1, rounding: str = "nearest"
) -> Int[np.ndarray, " workers"]:
    """The steps that workers of unequal speed take in a round to finish together: `H_i = H v_i / max_j v_j`.

    Worker `i` passes `active = (steps of the round so far) < H_i` to the update. All workers then have equal weight,
    whatever their number of steps, which moves the optimum (Biased Local SGD: quadratic losses with curvatures `a_i`
    are averaged with weights `1 - (1 - γ a_i)^H_i`); pass `examples=` to weigh them by their examples.

    Args:
      speeds: `v_i`, steps per second, or numbers in proportion to them.
      period: `H` of the fastest worker.
      minimum: the fewest steps of a worker. DyLU's notebook has 5.
      rounding: "nearest" (Oscars; ties to even), or "down" (DyLU).

    Returns:
      `H_i`, integers.

    Raises:
      ValueError: speeds are empty or not positive, `period` or `minimum` is below 1, or `rounding` is unknown.

    Example:
      >>> from jaxdist.schedule import proportional_steps
      >>> proportional_steps([1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33], 20).tolist()
      [20, 15, 8, 3]
      >>> proportional_steps([1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33], 20, minimum=5, rounding="down").tolist()
      [20, 15, 7, 5]

    References:
      Huang, "Oscars: Adaptive Semi-Synchronous Parallel Model for Distributed Deep Learning with Global View",
      arXiv:2102.08550, 2021. Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135,
      2024 (DyLU). Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems",
      arXiv:2508.08540, 2025.
    """
    rates = np.asarray(speeds, np.float64)
    if rates.ndim != 1 or not rates.size or not (np.isfinite(rates) & (rates > 0)).all():
        raise ValueError(f"speeds must be positive numbers, one for each worker, got {speeds}")
    _check("period", period)
    _check("minimum", minimum)
    if rounding not in ("nearest", "down"):
        raise ValueError(f'rounding must be "nearest" or "down", got {rounding!r}')
    exact = period * rates / rates.max()
    # Integers up to rounding errors are not rounded down.
    steps = np.rint(exact) if rounding == "nearest" else np.floor(exact * (1 + 1e-12))
    return np.maximum(steps.astype(np.int64), minimum)


def check_whole(name: str, value: float | int) -> None:
    """Checks that a number of steps is an integer: 2.5 would be rounded differently in different places."""
    try:
        operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name} must be a whole number of steps, got {value}") from None


def _check(name: str, value: float | int) -> None:
    """Checks that a number of steps is a positive integer."""
    check_whole(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
