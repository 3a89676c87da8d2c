"""The number of local steps between two synchronizations: schedules of `H`, AdaComm, and `H_i` for unequal workers.

A schedule is a function from the number of steps taken to the period, both `Int[Array, ""]`, for
`local_steps(..., sync_period=)`. A round ends when its length reaches the current value of the schedule.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.checks import check_count
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
    _check("period", period)
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
      Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020.
    """
    check_count("switch_step", switch_step, 0)
    _check("period", period)
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
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    _check("base", base)
    _check("most", most)
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
      Lin et al., arXiv:1808.07217 (warm-ups of `H`).
    """
    _check("every", every)
    _check("period", period)
    return lambda step: jnp.minimum(period, 2 ** jnp.minimum(jnp.asarray(step, jnp.int32) // every, 30))


def linear(warmup_steps: int, period: int) -> Period:
    """From 1 to `H` linearly: `H_t = 1 + floor((H - 1) t / warmup_steps)`, then `H`.

    Examples:
      >>> from jaxdist.schedule import linear
      >>> [int(linear(8, 5)(step)) for step in (0, 1, 2, 4, 8, 100)]
      [1, 1, 2, 3, 5, 5]

    References:
      Lin et al., arXiv:1808.07217 (warm-ups of `H`).
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

    Examples:
      >>> from jaxdist.schedule import proportional_steps
      >>> proportional_steps([1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33], 20).tolist()
      [20, 15, 8, 3]
      >>> proportional_steps([1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33], 20, minimum=5, rounding="down").tolist()
      [20, 15, 7, 5]

    References:
      Huang, "Oscars: Adaptive Semi-Synchronous Parallel Model for Distributed Deep Learning with Global View",
      arXiv:2102.08550, 2021.
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135, 2024 (DyLU).
      Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems", arXiv:2508.08540, 2025.
    """
    rates = np.asarray(speeds, np.float64)
    if rates.ndim != 1 or not rates.size or not (np.isfinite(rates) & (rates > 0)).all():
        raise ValueError(f"speeds must be positive numbers, one for each worker, got {speeds}")
    _check("period", period)
    _check("minimum", minimum)
    if minimum > period:
        raise ValueError(f"minimum must be at most period={period}, got {minimum}")
    if rounding not in ("nearest", "down"):
        raise ValueError(f'rounding must be "nearest" or "down", got {rounding!r}')
    exact = period * rates / np.max(rates)
    # Integers up to rounding errors are not rounded down.
    steps = np.rint(exact) if rounding == "nearest" else np.floor(exact * (1 + 1e-12))
    return np.maximum(steps.astype(np.int64), minimum)


def _check(name: str, value: float | int) -> None:
    """Checks that a number of steps is a positive integer, and no more than 32 bits hold."""
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}")
    check_count(name, value, 1)


class AdaCommState(NamedTuple):
    """The steps of a round, the loss and rate of the first interval, and the last rate: NaN before the first update."""

    period: Int[Array, ""]
    first_loss: Float[Array, ""]
    first_rate: Float[Array, ""]
    last_rate: Float[Array, ""]


class AdaComm(NamedTuple):
    """`init() -> state`; `update(state, *, loss, learning_rate) -> state` at the end of each interval."""

    init: Callable[..., AdaCommState]
    update: Callable[..., AdaCommState]


def ada_comm(period: int, *, most: int = 2**20) -> AdaComm:
    """Updates `H` after each interval: `H_l = ceil(H_0 sqrt(γ_0 / γ_l · F_l / F_0))`, or half of it if it did not fall.

    Early, when the loss is high, long rounds save most time; late, short ones leave less noise. If the learning rate is
    unchanged and the formula gives no fewer steps than now, `H` is halved. If the rate has dropped, the formula holds
    even if it gives more.

    *State*: four replicated numbers. Pass `state.period` to the update of `local_steps` as `sync_period=`.

    Try a few `H_0` (`period`) in the first interval. Too long a start is not made good later: where an average took as
    long as four steps, 32 ended above a constant 4 (`benchmarks/reports/2026-11-claims`). No round exceeds `most`.
    The user chooses the intervals, each epoch or a time that is the same on all workers; `loss` must be the mean over
    workers, and positive: others leave the period as it is. The first update, with the loss at the start, sets the
    reference for the others.

    Examples:
      >>> from jaxdist.schedule import ada_comm
      >>> rule = ada_comm(20)
      >>> state, periods = rule.init(), []
      >>> for loss in (2.0, 0.5, 0.6, 0.1):
      ...     state = rule.update(state, loss=loss, learning_rate=0.1)
      ...     periods.append(int(state.period))
      >>> periods
      [20, 10, 5, 2]

    References:
      Wang, Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD",
      arXiv:1810.08313, 2019.
    """
    check_count("period", period, 1)
    if period > most:
        raise ValueError(f"period must be at most {most}, got {period}")
    if most > MOST:
        raise ValueError(f"most must be at most {MOST}, got {most}")

    def init() -> AdaCommState:
        # Four separate arrays, since a step may donate them.
        return AdaCommState(jnp.asarray(period, jnp.int32), *(jnp.full((), jnp.nan, jnp.float32) for _ in range(3)))

    def update(state, *, loss, learning_rate) -> AdaCommState:
        loss, rate = jnp.asarray(loss, jnp.float32), jnp.asarray(learning_rate, jnp.float32)
        usable = jnp.isfinite(loss) & (loss > 0) & jnp.isfinite(rate) & (rate > 0)
        is_first = jnp.isnan(state.first_loss)
        first_loss = jnp.where(is_first & usable, loss, state.first_loss)
        first_rate = jnp.where(is_first & usable, rate, state.first_rate)
        # H_0 sqrt(γ_0 / γ · F / F_0), of which a millionth above an integer counts as that integer.
        ratio = (first_rate / rate) * (loss / first_loss)
        wanted = jnp.ceil(jnp.clip(period * jnp.sqrt(ratio) * (1 - 1e-6), 1.0, float(most)))
        # A loss or a rate that is not positive and finite leaves the period as it is.
        wanted = jnp.where(usable, wanted, state.period).astype(jnp.int32)
        halved = jnp.maximum(state.period // 2, 1)
        # The paper's γ: no progress at an unchanged rate halves the round.
        stuck = usable & (wanted >= state.period) & (rate == state.last_rate)
        new = jnp.where(is_first, period, jnp.where(stuck, halved, wanted)).astype(jnp.int32)
        return AdaCommState(new, first_loss, first_rate, rate)

    return AdaComm(init, update)
