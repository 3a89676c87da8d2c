"""Adam whose variance rests after a warm-up, so that momentum can be compressed: what two optimizers share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, State, UInt, Updates
from ..reducers.base import Extras, Reducer
from ..reducers.exact import exact
from ..reducers.with_stats import add_bytes
from ..state.marks import bind
from ..transforms.common import LearningRate, moving_average, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, local_gradients
from .base import check_adam, descend, divide, multiply, seen, units


class FrozenAdamState(NamedTuple):
    """Agreed: a count, the bytes `sent` by one worker, as (high, low) words, and two trees in float32 or better.

    `reducer` as the reducer defines it.
    """

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    momentum: Updates
    variance: Updates
    reducer: State

    communicates = True


def frozen_adam(
    learning_rate: LearningRate,
    *,
    freeze_step: int,
    b1: float | int,
    b2: float | int,
    eps: float | int,
    weight_decay: float | int,
    corrected: bool,
    reducer: Reducer,
    axis: AxisNames,
) -> optax.GradientTransformationExtraArgs:
    """Adam of mean gradients for `freeze_step` steps; then `m = d · reduce((β₁ m + (1-β₁) g_w) / d)`, `d = √v + ε`.

    The variance `v` rests by then, so `d` is agreed and does not change, and residuals of the reducer keep their unit.
    `corrected`: divide by `1 - βᵗ` as Adam does, for the variance with the `t` at which it stopped.
    """
    check_adam(b1, b2, eps, weight_decay)
    if freeze_step < 1:
        raise ValueError(f"the variance needs a warm-up of at least one step, got {freeze_step}")

    def init(params) -> State:
        check_leaves(params)
        return FrozenAdamState(
            count=jnp.zeros((), jnp.int32),
            sent=jnp.zeros(2, jnp.uint32),
            momentum=zeros_like(params),
            variance=zeros_like(params),
            reducer=bind(reducer.init(zeros_like(params)), axis),
        )

    def unit(variance, count):
        if corrected:
            variance = jax.tree.map(lambda v: v / (1 - b2 ** jnp.minimum(count, freeze_step).astype(v.dtype)), variance)
        return units(variance, eps)

    def warm_up(comm, gradients, state, extras):
        del extras
        reduced, _ = exact().reduce(gradients, (), comm)
        momentum = moving_average(state.momentum, reduced.mean, b1)
        variance = moving_average(state.variance, jax.tree.map(jnp.square, reduced.mean), b2)
        return momentum, variance, state.reducer

    def compress(comm, gradients, state, extras):
        # The paper sends m itself: one scale for all entries, which those of small variance are then divided out of.
        by = unit(state.variance, freeze_step)
        local = seen(divide(moving_average(state.momentum, gradients, b1), by), state.variance)
        reduced, reducer_state = reducer.reduce(local, state.reducer, comm, extras)
        return multiply(seen(reduced.mean, state.variance), by), state.variance, reducer_state

    def update(updates, state, params=None, *, examples=None, **extra_args) -> tuple[Updates, State]:
        del extra_args
        with jax.named_scope("frozen_adam"):
            gradients, comm = local_gradients(updates, axis, examples)
            ledger: list[comms.Sent] = []
            comm = comms.counted(comm, ledger)
            rate = rate_at(learning_rate, state.count)
            extras = Extras(state.count, rate)
            momentum, variance, reducer_state = comms.cond(
                state.count >= freeze_step, compress, warm_up, comm, gradients, state, extras
            )
            count = next_count(state.count)

            direction = divide(momentum, unit(variance, count))
            if corrected:
                direction = jax.tree.map(lambda m: m / (1 - b1 ** count.astype(m.dtype)), direction)
            out = descend(direction, rate, weight_decay, params, updates)
            sent = add_bytes(state.sent, comms.total_bytes(ledger))
            return out, FrozenAdamState(count, sent, momentum, variance, reducer_state)

    return optax.GradientTransformationExtraArgs(init, update)
