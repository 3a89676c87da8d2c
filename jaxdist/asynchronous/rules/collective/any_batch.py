"""Anytime minibatch: rounds of fixed duration, in which each worker contributes the gradients that it finished."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.types import Number, PyTree
from ...protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    TIMER,
    Actions,
    After,
    Cancel,
    Compute,
    GradientRecord,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
)
from ...values import add, numeric
from ..base import all_workers, other_workers, params_of, step_records, unknown_message


class _AnyBatchState(NamedTuple):
    """A worker's model and the gradients of this round.

    Attributes:
      site: where it runs.
      params: the model, replicated.
      opt_state: the optimizer's state, replicated.
      version: the number of rounds.
      total: the sum of this worker's gradients at this model.
      count: their number.
      waiting: whether it has joined the all-reduce of this round.
    """

    site: Site
    params: Any
    opt_state: Any
    version: int
    total: Any
    count: int
    waiting: bool


def any_batch(window: Number, optimizer: optax.GradientTransformation) -> Rule:
    """Each worker computes at one model for T seconds: `x <- x - γ Σ_i S_i / Σ_i b_i`, with `S_i` its sum of `b_i`.

    No worker waits for a slow one, which contributes fewer gradients: `b_i = floor(T / τ_i)`, and a round takes T and
    one all-reduce. A `Compute` is one sample, or one microbatch; a gradient that is unfinished at the end of the window
    is discarded, and its data count as used. A round without any gradients changes nothing. All samples have the same
    weight: on data that differ between workers fast ones count more. A worker that failed contributes what it has as
    soon as it recovers.

    On the wire: an all-reduce of the sum of gradients and of their number, 4 bytes, per round, kind `"reduced"`.

    State: replicated model and optimizer state, and a sum of gradients per worker.

    Args:
      window: T. Several times the duration of a gradient, or much work is discarded; `schedule.anytime_window` returns
        the window in which workers complete a given batch on average.
      optimizer: the optimizer of every worker.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: `window` is not positive.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.any_batch(3.5, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 3]), workers=3, seconds=35)
      >>> len(run.trace.steps), len(run.trace.gradients)  # 3 + 3 + 1 in each
      (10, 70)

    References:
      Ferdinand, Al-Lawati, Draper, Nokleby, "Anytime Minibatch: Exploiting Stragglers in Online Distributed
      Optimization", arXiv:2006.05752, 2019.
    """
    if not 0 < window < float("inf"):
        raise ValueError(f"window must be positive and finite, got {window}")
    cfg = _Config(
        window,
        numeric(optimizer.init, shared=True),
        numeric(partial(_step_with_mean, optimizer), outputs=2, shared=True),
        numeric(lambda params: jax.tree.map(jnp.zeros_like, params), shared=True),
        numeric(lambda total, count: (total, jnp.asarray(count, jnp.float32))),
    )
    return Rule("any_batch", Role(partial(_init, cfg), partial(_receive, cfg), params_of, _waits_for))


class _Config(NamedTuple):
    """T, and functions of values: the optimizer's, zeros, and a worker's part of the all-reduce."""

    window: Number
    start: Callable[..., Any]
    step: Callable[..., Any]
    zeros: Callable[..., Any]
    contribution: Callable[..., Any]


def _step_with_mean(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, mean: PyTree
) -> tuple[PyTree, PyTree]:
    total, count = mean
    # Both are divided by n, which cancels: Σ S_i / Σ b_i.
    gradient = jax.tree.map(lambda leaf: (leaf / jnp.where(count > 0, count, 1)).astype(leaf.dtype), total)
    updates, new_opt_state = optimizer.update(gradient, opt_state, params)
    stepped = optax.apply_updates(params, updates), new_opt_state
    # A round without gradients leaves everything as it was, the optimizer's counts included.
    return jax.tree.map(lambda old, new: jnp.where(count > 0, new, old), (params, opt_state), stepped)


def _init(cfg: _Config, site: Site, params: Any) -> tuple[_AnyBatchState, Actions]:
    state = _AnyBatchState(site, params, cfg.start(params), 0, cfg.zeros(params), 0, False)
    return state, _begin_round(cfg, state)


def _begin_round(cfg: _Config, state: _AnyBatchState) -> Actions:
    # The timer has the tag of its round, so that one of an earlier round is ignored.
    return After(cfg.window, state.version), Compute(state.params, state.version)


def _end_window(cfg: _Config, state: _AnyBatchState) -> tuple[_AnyBatchState, Actions]:
    # S_i and b_i, of which the all-reduce computes the means.
    contribution = cfg.contribution(state.total, float(state.count))
    reduce = Reduce(all_workers(state.site.workers), state.version, contribution)
    return state._replace(waiting=True), (Cancel(), reduce)


@no_type_check
def _receive(cfg: _Config, state: _AnyBatchState, sender: int, message: Message) -> tuple[_AnyBatchState, Actions]:
    site, kind, version = state.site, message.kind, state.version
    if kind == COMPUTED:
        state = state._replace(total=add(state.total, message.value), count=state.count + 1)
        return state, (GradientRecord(site.index, version, version), Compute(state.params, version))
    if kind == TIMER:
        return (state, ()) if state.waiting or message.tag != version else _end_window(cfg, state)
    if kind == RECOVERED:
        # The timer may have expired during the outage.
        return (state, ()) if state.waiting else _end_window(cfg, state)
    if kind == REDUCED:
        params, opt_state = cfg.step(state.params, state.opt_state, message.value)
        state = _AnyBatchState(site, params, opt_state, version + 1, cfg.zeros(state.params), 0, False)
        return state, (*step_records(site, version + 1, version), *_begin_round(cfg, state))
    raise unknown_message("a worker of any_batch", message)


def _waits_for(state: _AnyBatchState) -> tuple[int, ...]:
    return other_workers(state.site) if state.waiting else ()
