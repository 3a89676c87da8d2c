"""Pipe-SGD: the all-reduce of gradients overlaps the computation of the next ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from ...._core.checks import check_range
from ...protocol import Compute, GradientRecord, Message, Reaction, Rule, Site
from ..base import collective_rule, optimizer_on_values, reduce_all, step_records


class _PipeState(NamedTuple):
    """A worker's model and iteration, gradients that wait for an all-reduce, and means that wait to be applied."""

    site: Site
    params: Any
    opt_state: Any
    # Steps of the model, and gradients computed: W - 1 more.
    version: int = 0
    iteration: int = 0
    computing: bool = True
    reducing: bool = False
    # As `(iteration, gradient)` and `(iteration, mean)`, oldest first.
    outbox: tuple[Any, ...] = ()
    means: tuple[Any, ...] = ()


def pipe_sgd(optimizer: optax.GradientTransformation, *, width: int = 2) -> Rule:
    """Synchronous SGD whose all-reduce is hidden: `x_{t+1} = x_t - γ ḡ_{t-(W-1)}`, with gradients W - 1 steps old.

    The gradient of iteration t is reduced while the next ones are computed, one all-reduce after the other, and all
    workers apply it W - 1 iterations later. With W = 2 an iteration takes the maximum of computation and communication;
    a larger W helps only if these times vary. All workers still wait for the slowest. The first W - 1 iterations apply
    no gradient.

    *On the wire*: an all-reduce of the gradient per step, kind `"reduced"`.

    *State*: replicated model and optimizer state, and up to W gradients per worker.

    Args:
      optimizer: the optimizer of every worker. Momentum compounds the delay: lower it, or the rate.
      width: W. 1 is `bsp`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import links, replay, rules
      >>> slow = links.alpha_beta(0.4)  # an all-reduce of 2 workers: 0.8 s
      >>> for rule in (rules.bsp(optax.sgd(0.1)), rules.pipe_sgd(optax.sgd(0.1))):
      ...     print(len(replay.run(rule, workers=2, seconds=180, links=slow).trace.steps))
      100
      179

    References:
      Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training",
      arXiv:1811.03619, 2018.
    """
    check_range("width", width, 1, ends="[]", hint="1 waits for each all-reduce, 2 hides it")
    start, step = optimizer_on_values(optimizer, shared=True)

    def init(site: Site, params: Any) -> Reaction:
        return _PipeState(site, params, start(params)), (Compute(params, 0),)

    def on_gradient(state: _PipeState, message: Message) -> Reaction:
        # The gradient of iteration t makes version t + 1.
        record = GradientRecord(state.site.index, message.version, state.iteration)
        state = state._replace(computing=False, outbox=(*state.outbox, (state.iteration, message.value)))
        state, actions = _advance_pipe(step, width, state)
        return state, (record, *actions)

    def on_mean(state: _PipeState, message: Message) -> Reaction:
        state = state._replace(reducing=False, means=(*state.means, (message.tag, message.value)))
        return _advance_pipe(step, width, state)

    return collective_rule("pipe_sgd", init, on_gradient, on_mean, is_computing=lambda state: state.computing)


def _advance_pipe(step: Callable[..., Any], width: int, state: _PipeState) -> Reaction:
    """Begins the next all-reduce, and the next iteration if its mean is known."""
    actions = ()
    # One all-reduce runs at a time: two at once would share the same bandwidth.
    if state.outbox and not state.reducing:
        (iteration, gradient), *rest = state.outbox
        state = state._replace(reducing=True, outbox=tuple(rest))
        actions = (reduce_all(state.site, iteration, gradient),)
    # The first W - 1 iterations have no mean to apply; a mean that arrives early waits for its iteration.
    due = state.iteration + 1 >= width
    if state.computing or (due and not state.means):
        return state, actions
    state = state._replace(iteration=state.iteration + 1, computing=True)
    if due:
        # x_{t+1} = x_t - γ ḡ_{t-(W-1)}
        (iteration, mean), *rest = state.means
        params, opt_state = step(state.params, state.opt_state, mean)
        state = state._replace(params=params, opt_state=opt_state, version=state.version + 1, means=tuple(rest))
        actions += step_records(state.site, state.version, max(0, iteration - width + 1))
    return state, (*actions, Compute(state.params, state.version))
