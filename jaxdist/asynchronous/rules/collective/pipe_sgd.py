"""Pipe-SGD: the all-reduce of a gradient overlaps the computation of the next ones."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

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


class _PipeState(NamedTuple):
    """A worker's model and iteration, gradients that wait for an all-reduce, and means that wait to be applied.

    Attributes:
      site: where it runs.
      params: the model of this iteration, replicated.
      opt_state: the optimizer's state, replicated.
      version: the number of steps of the model.
      iteration: the number of gradients computed before.
      computing: whether the gradient of this iteration is running.
      reducing: whether an all-reduce is running.
      outbox: own gradients, oldest first, as `(iteration, gradient)`, whose all-reduce has not begun.
      means: mean gradients that are not applied yet, oldest first, as `(iteration, mean)`.
    """

    site: Site
    params: Any
    opt_state: Any
    version: int
    iteration: int
    computing: bool
    reducing: bool
    outbox: tuple[Any, ...]
    means: tuple[Any, ...]


def pipe_sgd(optimizer: optax.GradientTransformation, *, width: int = 2) -> Rule:
    """Synchronous SGD whose all-reduce is hidden: `x_{t+1} = x_t - γ ḡ_{t-(W-1)}`, with gradients W - 1 steps old.

    The gradient of iteration t is reduced while the next ones are computed, one all-reduce after the other, and all
    workers apply it W - 1 iterations later. With W = 2 an iteration takes the maximum of computation and communication;
    a larger W helps only if these times vary. All workers still wait for the slowest. The first W - 1 iterations apply
    no gradient.

    On the wire: an all-reduce of the gradient per step, kind `"reduced"`.

    State: replicated model and optimizer state, and up to W gradients per worker.

    Args:
      optimizer: the optimizer of every worker. Momentum compounds the delay: lower it, or the rate.
      width: W. 1 is `bsp`.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: `width` is below 1.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import links, replay, rules
      >>> slow = links.alpha_beta(0.4)  # an all-reduce of 2 workers: 0.8 s
      >>> for rule in (rules.bsp(optax.sgd(0.1)), rules.pipe_sgd(optax.sgd(0.1))):
      ...     print(len(replay.run(rule, workers=2, seconds=180, links=slow).trace.steps))
      100
      179

    References:
      Li, Yu, Li, Avestimehr, Kim, Schwing, "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
      Training", arXiv:1811.03619, 2018.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}: 1 waits for each all-reduce, 2 hides it")
    cfg = _Config(*replicated_optimizer(optimizer), width)
    return Rule("pipe_sgd", Role(partial(_init, cfg), partial(_receive, cfg), params_of, _waits_for))


class _Config(NamedTuple):
    """The replicated optimizer on values, and W."""

    start: Callable[..., Any]
    step: Callable[..., Any]
    width: int


def _init(cfg: _Config, site: Site, params: Any) -> tuple[_PipeState, Actions]:
    return _PipeState(site, params, cfg.start(params), 0, 0, True, False, (), ()), (Compute(params, 0),)


@no_type_check
def _receive(cfg: _Config, state: _PipeState, sender: int, message: Message) -> tuple[_PipeState, Actions]:
    records = ()
    if message.kind == COMPUTED:
        # The gradient of iteration t makes version t + 1.
        records = (GradientRecord(state.site.index, message.version, state.iteration),)
        state = state._replace(computing=False, outbox=(*state.outbox, (state.iteration, message.value)))
    elif message.kind == REDUCED:
        state = state._replace(reducing=False, means=(*state.means, (message.tag, message.value)))
    elif message.kind == RECOVERED:
        return state, (Compute(state.params, state.version),) if state.computing else ()
    else:
        raise unknown_message("a worker of pipe_sgd", message)
    state, reduces = _try_reduce(state)
    state, steps = _try_advance(cfg, state)
    return state, (*records, *reduces, *steps)


def _try_reduce(state: _PipeState) -> tuple[_PipeState, Actions]:
    """Starts the next all-reduce. One runs at a time: two at once would share the same bandwidth."""
    if state.reducing or not state.outbox:
        return state, ()
    (iteration, gradient), *rest = state.outbox
    reduce = Reduce(all_workers(state.site.workers), iteration, gradient)
    return state._replace(reducing=True, outbox=tuple(rest)), (reduce,)


def _try_advance(cfg: _Config, state: _PipeState) -> tuple[_PipeState, Actions]:
    """Begins the next iteration if its step can be taken; a mean that arrived early waits until then."""
    # The first W - 1 iterations have no mean to apply.
    due = state.iteration + 1 >= cfg.width
    if state.computing or (due and not state.means):
        return state, ()
    state, records = state._replace(iteration=state.iteration + 1, computing=True), ()
    if due:
        # x_{t+1} = x_t - γ ḡ_{t-(W-1)}
        (iteration, mean), *rest = state.means
        params, opt_state = cfg.step(state.params, state.opt_state, mean)
        state = state._replace(params=params, opt_state=opt_state, version=state.version + 1, means=tuple(rest))
        records = step_records(state.site, state.version, max(0, iteration - cfg.width + 1))
    return state, (*records, Compute(state.params, state.version))


def _waits_for(state: _PipeState) -> tuple[int, ...]:
    return () if state.computing else other_workers(state.site)
