"""The mean of all models beside the gradient: synchronous, with the time of the collective hidden."""

from typing import Any, NamedTuple

import optax

from ...._core.types import PyTree
from ...protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    Actions,
    Compute,
    Counted,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
    Stepped,
)
from ...values import numeric
from ..server.base import everybody, others


class DelayByOneState(NamedTuple):
    """A worker's site, model, optimizer state, iteration, and of this one the gradient and the mean, None before."""

    site: Site
    params: Any
    opt_state: Any
    version: int
    gradient: Any
    mean: Any


def delay_by_one(optimizer: optax.GradientTransformation) -> Rule:
    """The mean of all models is made while gradients are computed: `x_i <- x̄ - γ g(x_i)`.

    An iteration takes the longer of the slowest gradient and the all-reduce. The gradient is at the worker's own model,
    in which the others' last gradients are not yet: one version old. The fastest where workers are equally fast, but it
    waits for the slowest as `bsp` does. It is `d_psgd` on the complete graph, combining first, with an all-reduce.

    On the wire: an all-reduce of the model per iteration.

    State: a worker's model and optimizer.

    Args:
      optimizer: what each worker steps with, on its own.

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

    def moved(mean: PyTree, params: PyTree, opt_state: PyTree, gradient: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(mean, updates), opt_state

    start, move = numeric(optimizer.init), numeric(moved, outputs=2)

    def begun(state: DelayByOneState) -> tuple[DelayByOneState, Actions]:
        part = Reduce(everybody(state.site.workers), state.version, state.params)
        return state, (Compute(state.params, state.version), part)

    def init(site: Site, params: Any) -> tuple[DelayByOneState, Actions]:
        return begun(DelayByOneState(site, params, start(params), 0, None, None))

    def settled(state: DelayByOneState) -> tuple[DelayByOneState, Actions]:
        site, params, opt_state, version, gradient, mean = state
        if gradient is None or mean is None:
            return state, ()
        params, opt_state = move(mean, params, opt_state, gradient)
        read = max(version - 1, 0)
        books = (Counted(site.index, read, version), *((Stepped(version + 1, read),) if site.index == 0 else ()))
        state, actions = begun(DelayByOneState(site, params, opt_state, version + 1, None, None))
        return state, (*books, *actions)

    def receive(state: DelayByOneState, sender: int, message: Message) -> tuple[DelayByOneState, Actions]:
        if message.kind == COMPUTED:
            return settled(state._replace(gradient=message.value))
        if message.kind == REDUCED:
            return settled(state._replace(mean=message.value))
        if message.kind == RECOVERED:
            return state, (Compute(state.params, state.version),) if state.gradient is None else ()
        raise ValueError(f"a worker of delay_by_one does not know the message {message.kind!r}")

    def waits_for(state: DelayByOneState) -> tuple[int, ...]:
        return others(state.site) if state.mean is None and state.gradient is not None else ()

    return Rule("delay_by_one", Role(init, receive, lambda state: state.params, waits_for))
