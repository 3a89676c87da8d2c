"""Adam whose variance is frozen after a warm-up, so that momentum can be compressed: 1-bit Adam and QAdam."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm
from ..reducers.base import Extras, Reducer
from ..reducers.exact import exact
from ..reducers.with_stats import add_bytes
from ..state.marks import bind
from ..transforms.common import LearningRate, moving_average, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, local_gradients
from .base import check_adam, descend, divide, mask_unseen, multiply, preconditioner


class FrozenAdamState(NamedTuple):
    """Replicated: a count, the bytes `sent` by one worker, as (high, low) words, and two trees in float32 or better.

    `reducer` as the reducer defines it.
    """

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    momentum: Updates
    variance: Updates
    reducer: State

    communicates = True


class _Config(NamedTuple):
    learning_rate: LearningRate
    freeze_step: int
    b1: float | int
    b2: float | int
    eps: float | int
    weight_decay: float | int
    corrected: bool
    reducer: Reducer
    axis: AxisNames


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

    The variance `v` is frozen by then, so `d` is replicated and constant, and residuals of the reducer keep their unit.
    `corrected`: divide by `1 - βᵗ` as Adam does, for the variance with the `t` at which it was frozen.
    """
    check_adam(b1, b2, eps, weight_decay)
    if freeze_step < 1:
        raise ValueError(f"the variance needs a warm-up of at least one step, got {freeze_step}")
    cfg = _Config(learning_rate, freeze_step, b1, b2, eps, weight_decay, corrected, reducer, axis)
    return optax.GradientTransformationExtraArgs(partial(_init, cfg), partial(_update, cfg))


def _init(cfg: _Config, params: PyTree) -> State:
    check_leaves(params)
    return FrozenAdamState(
        count=jnp.zeros((), jnp.int32),
        sent=jnp.zeros(2, jnp.uint32),
        momentum=zeros_like(params),
        variance=zeros_like(params),
        reducer=bind(cfg.reducer.init(zeros_like(params)), cfg.axis),
    )


def _update(
    cfg: _Config,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    examples: Array | int | None = None,
    **extra_args: Any,
) -> tuple[Updates, State]:
    del extra_args
    with jax.named_scope("frozen_adam"):
        gradients, comm = local_gradients(updates, cfg.axis, examples)
        ledger: list[comms.Sent] = []
        comm = comms.counted(comm, ledger)
        rate = rate_at(cfg.learning_rate, state.count)
        extras = Extras(state.count, rate)
        momentum, variance, reducer_state = comms.cond(
            state.count >= cfg.freeze_step,
            partial(_compressed_step, cfg, extras),
            partial(_warm_up_step, cfg),
            comm,
            gradients,
            state,
        )
        count = next_count(state.count)

        direction = divide(momentum, _preconditioner(cfg, variance, count))
        if cfg.corrected:
            # m̂ = m / (1 - β₁ᵗ)
            direction = jax.tree.map(lambda m: m / (1 - cfg.b1 ** count.astype(m.dtype)), direction)
        out = descend(direction, rate, cfg.weight_decay, params, updates)
        sent = add_bytes(state.sent, comms.total_bytes(ledger))
        return out, FrozenAdamState(count, sent, momentum, variance, reducer_state)


def _warm_up_step(
    cfg: _Config, comm: Comm, gradients: Updates, state: FrozenAdamState
) -> tuple[Updates, Updates, State]:
    """Returns Adam's moments of the exact mean gradient."""
    reduced, _ = exact().reduce(gradients, (), comm)
    momentum = moving_average(state.momentum, reduced.mean, cfg.b1)
    variance = moving_average(state.variance, jax.tree.map(jnp.square, reduced.mean), cfg.b2)
    return momentum, variance, state.reducer


def _compressed_step(
    cfg: _Config, extras: Extras, comm: Comm, gradients: Updates, state: FrozenAdamState
) -> tuple[Updates, Updates, State]:
    """Returns the reduced momentum and the frozen variance."""
    reducer = cfg.reducer
    # Unlike the paper, which sends m itself: one scale would then serve entries whose d differ by decades.
    by = _preconditioner(cfg, state.variance, cfg.freeze_step)
    local = mask_unseen(divide(moving_average(state.momentum, gradients, cfg.b1), by), state.variance)
    reduced, reducer_state = reducer.reduce(local, state.reducer, comm, extras)
    return multiply(mask_unseen(reduced.mean, state.variance), by), state.variance, reducer_state


def _preconditioner(cfg: _Config, variance: Updates, count: Array | int) -> Updates:
    """Returns `d = √v̂ + ε`, where the bias correction of `v̂` stops at `freeze_step`, as the variance does."""
    if cfg.corrected:
        variance = jax.tree.map(
            lambda v: v / (1 - cfg.b2 ** jnp.minimum(count, cfg.freeze_step).astype(v.dtype)), variance
        )
    return preconditioner(variance, cfg.eps)
