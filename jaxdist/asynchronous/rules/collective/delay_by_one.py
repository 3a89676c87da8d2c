"""Model averaging concurrent with the gradient: synchronous, with the collective hidden by the computation."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from ...._core.types import PyTree
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
from ...values import numeric
from ..base import all_workers, other_workers, params_of, step_records, unknown_message


class _DelayByOneState(NamedTuple):
    """A worker's site, model, optimizer state, iteration, and this iteration's gradient and mean (None until known)."""

    site: Site
    params: Any
    opt_state: Any
    version: int
    gradient: Any
    mean: Any


def delay_by_one(optimizer: optax.GradientTransformation) -> Rule:
    """Averages all models while gradients are computed: `x_i <- x̄ - γ g(x_i)`.

    An iteration takes the maximum of the slowest gradient and the all-reduce. The gradient is computed at the worker's
    own model, without the other workers' last gradients: it is one version old. The fastest rule for workers of equal
    speed; it waits for the slowest worker as `bsp` does. Equivalent to `d_psgd` with `order="combine_then_adapt"` on
    the complete graph, with an all-reduce.

    On the wire: an all-reduce of the model per iteration.

    State: a worker's model and optimizer.

    Args:
      optimizer: the local optimizer of each worker.

    Returns:
      The rule; it has no server.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules, links
      >>> slow = links.alpha_beta(latency=0.125)  # 0.75 s for an all-reduce of 4, beside gradients of 1 s
      >>> run = replay.run(rules.delay_by_one(optax.sgd(0.1)), links=slow, workers=4, seconds=100)
      >>> len(run.trace.steps), replay.step_delays(run.trace)[1:].max().item()
      (100, 1)

    References:
      Cui, Zhang, Kayi, Liu, Finkler, Kingsbury, Saon, Kung, "Asynchronous decentralized distributed training of
      acoustic models", arXiv:2110.11199, 2021.
    """
    start, step = numeric(optimizer.init), numeric(partial(_step_from_mean, optimizer), outputs=2)
    return Rule("delay_by_one", Role(partial(_init, start), partial(_receive, step), params_of, _waits_for))


def _step_from_mean(
    optimizer: optax.GradientTransformation, mean: PyTree, params: PyTree, opt_state: PyTree, gradient: PyTree
) -> tuple[PyTree, PyTree]:
    # x_i <- x̄ - γ g(x_i): the update is computed at the worker's own model and applied to the mean.
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(mean, updates), opt_state


def _init(start: Callable[..., Any], site: Site, params: Any) -> tuple[_DelayByOneState, Actions]:
    state = _DelayByOneState(site, params, start(params), 0, None, None)
    return state, _begin_iteration(state)


def _begin_iteration(state: _DelayByOneState) -> Actions:
    reduce = Reduce(all_workers(state.site.workers), state.version, state.params)
    # The gradient and the all-reduce of the same models run concurrently.
    return Compute(state.params, state.version), reduce


def _receive(
    step: Callable[..., Any], state: _DelayByOneState, sender: int, message: Message
) -> tuple[_DelayByOneState, Actions]:
    if message.kind == COMPUTED:
        return _try_advance(step, state._replace(gradient=message.value))
    if message.kind == REDUCED:
        return _try_advance(step, state._replace(mean=message.value))
    if message.kind == RECOVERED:
        return state, (Compute(state.params, state.version),) if state.gradient is None else ()
    raise unknown_message("a worker of delay_by_one", message)


def _try_advance(step: Callable[..., Any], state: _DelayByOneState) -> tuple[_DelayByOneState, Actions]:
    """Begins the next iteration once both the gradient and the mean of this one are known."""
    if state.gradient is None or state.mean is None:
        return state, ()
    site, version = state.site, state.version
    params, opt_state = step(state.mean, state.params, state.opt_state, state.gradient)
    # The model of iteration 0 is the same everywhere; afterwards the other workers' last gradients are missing in it.
    read = max(version - 1, 0)
    records = GradientRecord(site.index, read, version), *step_records(site, version + 1, read)
    state = _DelayByOneState(site, params, opt_state, version + 1, None, None)
    return state, (*records, *_begin_iteration(state))


def _waits_for(state: _DelayByOneState) -> tuple[int, ...]:
    return other_workers(state.site) if state.mean is None and state.gradient is not None else ()
