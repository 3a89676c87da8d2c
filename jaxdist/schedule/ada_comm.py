"""AdaComm: the number of local steps falls as the loss falls."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from .._core.checks import check_count
from .._core.types import Array, Float, Int
from .periods import MOST


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
