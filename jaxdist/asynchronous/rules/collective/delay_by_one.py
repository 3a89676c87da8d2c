"""Delay-by-one averaging: all models are averaged while each worker computes its next gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from ...protocol import Actions, Compute, GradientRecord, Reaction, Rule, Site
from ..base import collective_rule, combine_and_adapt, optimizer_on_values, reduce_all, step_records


class _DelayByOneState(NamedTuple):
    """A worker's site, model, optimizer state, iteration, and this iteration's gradient and mean (None until known)."""

    site: Site
    params: Any
    opt_state: Any
    version: int = 0
    gradient: Any = None
    mean: Any = None


def delay_by_one(optimizer: optax.GradientTransformation) -> Rule:
    """Averages all models while gradients are computed: `x_i <- x̄ - γ g(x_i)`.

    An iteration takes the maximum of the slowest gradient and the all-reduce. The gradient is computed at the worker's
    own model, without the other workers' last gradients: it is one version old. The fastest rule for workers of equal
    speed; it waits for the slowest worker as `bsp` does. Equivalent to `d_psgd` with `order="combine_then_adapt"` on
    the complete graph, with an all-reduce.

    *On the wire*: an all-reduce of the model per iteration.

    *State*: a worker's model and optimizer.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules, links
      >>> slow = links.alpha_beta(latency=0.125)  # 0.75 s for an all-reduce of 4, beside gradients of 1 s
      >>> run = replay.run(rules.delay_by_one(optax.sgd(0.1)), links=slow, workers=4, seconds=100)
      >>> len(run.trace.steps), replay.step_delays(run.trace)[1:].max().item()
      (100, 1)

    References:
      Cui et al., "Asynchronous Decentralized Distributed Training of Acoustic Models", arXiv:2110.11199, 2021.
    """
    # x_i <- x̄ - γ g(x_i): the update is computed at the worker's own model and applied to the mean.
    start, step = optimizer_on_values(optimizer, partial(combine_and_adapt, lambda params, mean: mean))

    def init(site: Site, params: Any) -> Reaction:
        state = _DelayByOneState(site, params, start(params))
        return state, _begin_iteration(state)

    return collective_rule(
        "delay_by_one",
        init,
        lambda state, message: _try_advance(step, state._replace(gradient=message.value)),
        lambda state, message: _try_advance(step, state._replace(mean=message.value)),
        is_computing=lambda state: state.gradient is None,
    )


def _begin_iteration(state: _DelayByOneState) -> Actions:
    # The gradient and the all-reduce of the same models run concurrently.
    return Compute(state.params, state.version), reduce_all(state.site, state.version, state.params)


def _try_advance(step: Callable[..., Any], state: _DelayByOneState) -> Reaction:
    """Begins the next iteration once both the gradient and the mean of this one are known."""
    if state.gradient is None or state.mean is None:
        return state, ()
    site, version = state.site, state.version
    params, opt_state = step(state.params, state.opt_state, state.gradient, state.mean)
    # The model of iteration 0 is the same everywhere; afterwards the other workers' last gradients are missing in it.
    read = max(version - 1, 0)
    records = GradientRecord(site.index, read, version), *step_records(site, version + 1, read)
    state = _DelayByOneState(site, params, opt_state, version + 1)
    return state, (*records, *_begin_iteration(state))
