"""Bulk synchronous SGD: every step waits for the mean of all gradients."""

from typing import Any, NamedTuple

import optax

from ...protocol import Compute, GradientRecord, Message, Reaction, Rule, Site
from ..base import collective_rule, optimizer_on_values, reduce_all, step_records


class _BSPState(NamedTuple):
    """A worker's site, model, optimizer state, step count, and whether it has joined the all-reduce of this step."""

    site: Site
    params: Any
    opt_state: Any
    version: int = 0
    waiting: bool = False


def bsp(optimizer: optax.GradientTransformation) -> Rule:
    """Bulk synchronous: `x <- x - γ (1/n) Σ g_i`, by an all-reduce that waits for the slowest worker.

    The method of `jd.distribute`, and the baseline of the other rules. A step takes the longest of n computations and
    one all-reduce.

    *On the wire*: an all-reduce of the gradient per step.

    *State*: replicated model and optimizer state.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> run = replay.run(rules.bsp(optax.sgd(0.1)), durations=durations.constant([1, 1, 3]), workers=3, seconds=300)
      >>> len(run.trace.steps)
      100

    References:
      Valiant, "A bridging model for parallel computation", 1990.
    """
    start, step = optimizer_on_values(optimizer, shared=True)

    def init(site: Site, params: Any) -> Reaction:
        return _BSPState(site, params, start(params)), (Compute(params, 0),)

    def on_gradient(state: _BSPState, message: Message) -> Reaction:
        site, version = state.site, state.version
        actions = GradientRecord(site.index, version, version), reduce_all(site, version, message.value)
        return state._replace(waiting=True), actions

    def on_mean(state: _BSPState, message: Message) -> Reaction:
        site, version = state.site, state.version
        # x <- x - γ (1/n) Σ g_i
        params, opt_state = step(state.params, state.opt_state, message.value)
        records = step_records(site, version + 1, version)
        return _BSPState(site, params, opt_state, version + 1), (*records, Compute(params, version + 1))

    return collective_rule("bsp", init, on_gradient, on_mean, is_computing=lambda state: not state.waiting)
