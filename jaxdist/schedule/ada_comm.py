"""AdaComm: rounds of local steps become shorter as the loss falls."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from .._core.types import Array, Float, Int
from .periods import check_whole


class AdaCommState(NamedTuple):
    """The state of `ada_comm`, replicated; losses and rates are NaN before the first update.

    Attributes:
      period: the number of steps of a round.
      first_loss: of the first interval.
      first_rate: of the first interval.
      last_rate: of the last interval.
    """

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

    Args:
      period: `H_0`. Start where communication takes a tenth of the time.
      most: the longest round.

    Returns:
      The rule. The user chooses the intervals, each epoch or a time that is the same on all workers; `loss` must be the
      mean over workers. The first update, with the loss at the start, sets the reference for the others.

    Raises:
      ValueError: `period` is below 1, or `most` below `period`.

    Example:
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
    check_whole("period", period)
    if not 1 <= period <= most:
        raise ValueError(f"period must be in [1, most={most}], got {period}")

    def init() -> AdaCommState:
        # Four separate arrays, since a step may donate them.
        return AdaCommState(jnp.asarray(period, jnp.int32), *(jnp.full((), jnp.nan, jnp.float32) for _ in range(3)))

    def update(state, *, loss, learning_rate) -> AdaCommState:
        loss, rate = jnp.asarray(loss, jnp.float32), jnp.asarray(learning_rate, jnp.float32)
        is_first = jnp.isnan(state.first_loss)
        first_loss = jnp.where(is_first, loss, state.first_loss)
        first_rate = jnp.where(is_first, rate, state.first_rate)
        ratio = (first_rate / rate) * (loss / first_loss)
        wanted = jnp.ceil(jnp.clip(period * jnp.sqrt(ratio) * (1 - 1e-6), 1.0, float(most)))
        # A loss or a rate that is zero or not finite leaves the period as it is.
        wanted = jnp.where(jnp.isfinite(ratio), wanted, state.period).astype(jnp.int32)
        halved = jnp.maximum(state.period // 2, 1)
        stuck = (wanted >= state.period) & (rate == state.last_rate)
        new = jnp.where(is_first, period, jnp.where(stuck, halved, wanted)).astype(jnp.int32)
        return AdaCommState(new, first_loss, first_rate, rate)

    return AdaComm(init, update)
