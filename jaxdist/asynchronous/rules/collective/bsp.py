"""Bulk synchronous parallel (BSP): synchronous SGD by an all-reduce of gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from ...protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    Actions,
    Compute,
    GradientRecord,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
)
from ..base import all_workers, other_workers, params_of, replicated_optimizer, step_records, unknown_message


class _BSPState(NamedTuple):
    """A worker's site, model, optimizer state, step count, and whether it has joined the all-reduce of this step."""

    site: Site
    params: Any
    opt_state: Any
    version: int
    waiting: bool


def bsp(optimizer: optax.GradientTransformation) -> Rule:
    """Synchronous data parallelism: `x <- x - γ (1/n) Σ g_i`, by an all-reduce that waits for the slowest worker.

    The method of `jd.distribute`, and the baseline of the other rules. A step takes the longest of n computations and
    one all-reduce.

    On the wire: an all-reduce of the gradient per step.

    State: replicated model and optimizer state.

    Args:
      optimizer: the optimizer of every worker.

    Returns:
      The rule; it has no server.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> run = replay.run(rules.bsp(optax.sgd(0.1)), durations=durations.constant([1, 1, 3]), workers=3, seconds=300)
      >>> len(run.trace.steps)
      100

    References:
      Valiant, "A bridging model for parallel computation", 1990.
    """
    start, step = replicated_optimizer(optimizer)
    return Rule("bsp", Role(partial(_init, start), partial(_receive, step), params_of, _waits_for))


def _init(start: Callable[..., Any], site: Site, params: Any) -> tuple[_BSPState, Actions]:
    return _BSPState(site, params, start(params), 0, False), (Compute(params, 0),)


def _receive(step: Callable[..., Any], state: _BSPState, sender: int, message: Message) -> tuple[_BSPState, Actions]:
    site, version = state.site, state.version
    if message.kind == COMPUTED:
        reduce = Reduce(all_workers(site.workers), version, message.value)
        return state._replace(waiting=True), (GradientRecord(site.index, version, version), reduce)
    if message.kind == REDUCED:
        # x <- x - γ (1/n) Σ g_i
        params, opt_state = step(state.params, state.opt_state, message.value)
        records = step_records(site, version + 1, version)
        return _BSPState(site, params, opt_state, version + 1, False), (*records, Compute(params, version + 1))
    if message.kind == RECOVERED:
        # A gradient that was running when the worker failed is lost; one that is in the all-reduce is not.
        return state, () if state.waiting else (Compute(state.params, version),)
    raise unknown_message("a worker of bsp", message)


def _waits_for(state: _BSPState) -> tuple[int, ...]:
    return other_workers(state.site) if state.waiting else ()
