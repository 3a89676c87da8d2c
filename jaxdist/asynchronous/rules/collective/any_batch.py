"""Any-batch rounds: each worker computes as many gradients as fit into a fixed time, and all are averaged."""

from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.checks import check_range
from ...._core.types import Number, PyTree
from ... import protocol
from ...protocol import After, Cancel, Compute, GradientRecord, Message, Reaction, Role, Rule, Site, StepRecord
from ...values import add, numeric, zeros_of_sum
from ..base import (
    apply_gradient,
    optimizer_on_values,
    other_workers,
    params_of,
    reduce_all,
    step_records,
    unknown_message,
)


class _AnyBatchState(NamedTuple):
    """A worker's replicated model, the sum and number of its gradients in this round, and whether it has joined."""

    site: Site
    params: Any
    opt_state: Any
    version: int
    total: Any
    count: int = 0
    waiting: bool = False


def any_batch(window: Number, optimizer: optax.GradientTransformation) -> Rule:
    """Each worker computes at one model for T seconds: `x <- x - γ Σ_i S_i / Σ_i b_i`, with `S_i` its sum of `b_i`.

    No worker waits for a slow one, which contributes fewer gradients: `b_i = floor(T / τ_i)`, and a round takes T and
    one all-reduce. A `Compute` is one sample, or one microbatch; a gradient that is unfinished at the end of the window
    is discarded, and its data count as used. A round without any gradients changes nothing. All samples have the same
    weight: on data that differ between workers fast ones count more. A worker that failed contributes what it has as
    soon as it recovers.

    *On the wire*: an all-reduce of the sum of gradients, in float32 or wider, and of their number, 4 bytes, per round,
    kind `"reduced"`.

    *State*: replicated model and optimizer state, and a sum of gradients per worker.

    Args:
      window: T. Several times the duration of a gradient, or much work is discarded; `schedule.anytime_window` returns
        the window in which workers complete a given batch on average.
      optimizer: the optimizer of every worker.

    Examples:
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
    check_range("window", window, 0, ends="()")
    start, step = optimizer_on_values(optimizer, _step_with_mean, shared=True)
    zeros = numeric(zeros_of_sum, shared=True)

    def begin_round(site: Site, params: Any, opt_state: Any, version: int, *records: StepRecord) -> Reaction:
        state = _AnyBatchState(site, params, opt_state, version, zeros(params))
        # The timer has the tag of its round, so that one of an earlier round is ignored.
        return state, (*records, After(window, version), Compute(params, version))

    @no_type_check
    def receive(state: _AnyBatchState, sender: int, message: Message) -> Reaction:
        site, kind, version = state.site, message.kind, state.version
        if kind == protocol.COMPUTED:
            state = state._replace(total=add(state.total, message.value), count=state.count + 1)
            return state, (GradientRecord(site.index, version, version), Compute(state.params, version))
        if kind == protocol.TIMER:
            return (state, ()) if state.waiting or message.tag != version else _end_round(state)
        if kind == protocol.RECOVERED:
            # The timer may have expired during the outage.
            return (state, ()) if state.waiting else _end_round(state)
        if kind == protocol.REDUCED:
            params, opt_state = step(state.params, state.opt_state, message.value)
            return begin_round(site, params, opt_state, version + 1, *step_records(site, version + 1, version))
        raise unknown_message("a worker of any_batch", message)

    def init(site: Site, params: Any) -> Reaction:
        return begin_round(site, params, start(params), 0)

    return Rule(
        "any_batch", Role(init, receive, params_of, lambda state: other_workers(state.site) if state.waiting else ())
    )


# An integer, which no code rounds.
_contribution = numeric(lambda total, count: (total, jnp.asarray(count, jnp.int32)))


def _step_with_mean(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, mean: PyTree
) -> tuple[PyTree, PyTree]:
    total, count = mean
    # Both are divided by n, which cancels: Σ S_i / Σ b_i.
    gradient = jax.tree.map(lambda s, x: (s / jnp.where(count > 0, count, 1)).astype(x.dtype), total, params)
    stepped = apply_gradient(optimizer, params, opt_state, gradient)
    # A round without gradients leaves everything as it was, the optimizer's counts included.
    return jax.tree.map(lambda old, new: jnp.where(count > 0, new, old), (params, opt_state), stepped)


def _end_round(state: _AnyBatchState) -> Reaction:
    # S_i and b_i, of which the all-reduce computes the means.
    contribution = _contribution(state.total, state.count)
    return state._replace(waiting=True), (Cancel(), reduce_all(state.site, state.version, contribution))
