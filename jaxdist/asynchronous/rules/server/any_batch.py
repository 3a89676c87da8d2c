"""Rounds of fixed time: everybody gives the mean of as many gradients as it got done."""

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
    Counted,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
    Stepped,
)
from ...values import add, numeric
from .base import everybody, others


class AnyBatchState(NamedTuple):
    """A worker's model and the gradients of this round.

    Attributes:
      site: where it runs.
      params: the model, the same at all workers.
      opt_state: the optimizer's state.
      version: the number of rounds.
      total: the sum of this worker's gradients at this model.
      done: their number.
      waiting: whether they are in the reduction already.
    """

    site: Site
    params: Any
    opt_state: Any
    version: int
    total: Any
    done: int
    waiting: bool


def any_batch(window: Number, optimizer: optax.GradientTransformation) -> Rule:
    """Each worker computes at one model for T seconds: `x <- x - γ Σ_i S_i / Σ_i b_i`, with `S_i` its sum of `b_i`.

    Nobody waits for a slow worker, which is just behind fewer of the gradients: `b_i = floor(T / τ_i)`, and a round
    takes T and one all-reduce. A `Compute` is one sample, or one microbatch; what is in the making when the time is
    over is thrown away, and its data are used up. A round in which nobody got anything done changes nothing. Each
    sample weighs the same: on data that differ between workers fast ones count more. A worker that was gone gives what
    it has as soon as it is back.

    On the wire: an all-reduce of the sum of gradients and of their number, 4 bytes, per round, kind `"reduced"`.

    State: each worker has the model and the optimizer's state, all the same, and a sum of gradients.

    Args:
      window: T. Several times what a gradient takes, or much is thrown away; `schedule.anytime_window` has the one in
        which workers get through a given batch on average.
      optimizer: what every worker steps with.

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

    def moved(params: PyTree, opt_state: PyTree, mean: PyTree) -> tuple[PyTree, PyTree]:
        total, count = mean
        gradient = jax.tree.map(lambda leaf: (leaf / jnp.where(count > 0, count, 1)).astype(leaf.dtype), total)
        updates, new = optimizer.update(gradient, opt_state, params)
        after = optax.apply_updates(params, updates), new
        return jax.tree.map(lambda old, now: jnp.where(count > 0, now, old), (params, opt_state), after)

    start, move = numeric(optimizer.init, shared=True), numeric(moved, outputs=2, shared=True)
    zeros = numeric(lambda params: jax.tree.map(jnp.zeros_like, params), shared=True)
    part_of = numeric(lambda total, count: (total, jnp.asarray(count, jnp.float32)))

    def begun(state: AnyBatchState) -> Actions:
        return After(window, state.version), Compute(state.params, state.version)

    def init(site: Site, params: Any) -> tuple[AnyBatchState, Actions]:
        state = AnyBatchState(site, params, start(params), 0, zeros(params), 0, False)
        return state, begun(state)

    def given(state: AnyBatchState) -> tuple[AnyBatchState, Actions]:
        part = Reduce(everybody(state.site.workers), state.version, part_of(state.total, float(state.done)))
        return state._replace(waiting=True), (Cancel(), part)

    @no_type_check
    def receive(state: AnyBatchState, sender: int, message: Message) -> tuple[AnyBatchState, Actions]:
        site, kind, version = state.site, message.kind, state.version
        if kind == COMPUTED:
            total = add(state.total, message.value)
            state = state._replace(total=total, done=state.done + 1)
            return state, (Counted(site.index, version, version), Compute(state.params, version))
        if kind == TIMER:
            return (state, ()) if state.waiting or message.tag != version else given(state)
        if kind == RECOVERED:  # the timer may have gone unheard: it gives what it has
            return (state, ()) if state.waiting else given(state)
        if kind == REDUCED:
            params, opt_state = move(state.params, state.opt_state, message.value)
            state = AnyBatchState(site, params, opt_state, version + 1, zeros(state.params), 0, False)
            return state, (*((Stepped(version + 1, version),) if site.index == 0 else ()), *begun(state))
        raise ValueError(f"a worker of any_batch does not know the message {kind!r}")

    def waits_for(state: AnyBatchState) -> tuple[int, ...]:
        return others(state.site) if state.waiting else ()

    return Rule("any_batch", Role(init, receive, lambda state: state.params, waits_for))
