"""Pipe-SGD: the all-reduce of a gradient beside the computation of the next."""

from typing import Any, NamedTuple, no_type_check

import optax

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
from ..server.base import everybody, others, replica


class PipeState(NamedTuple):
    """A worker's model and the iteration that it is at; gradients on their way out and means that came back.

    Attributes:
      site: where it runs.
      params: the model of this iteration, the same at all workers.
      opt_state: the optimizer's state.
      version: the number of steps of the model.
      iteration: the number of gradients computed before.
      computing: whether the gradient of this iteration is in the making.
      travelling: whether an all-reduce is under way.
      outbox: own gradients, oldest first, whose all-reduce has not begun.
      means: what came back and is not applied yet, oldest first.
    """

    site: Site
    params: Any
    opt_state: Any
    version: int
    iteration: int
    computing: bool
    travelling: bool
    outbox: tuple[Any, ...]
    means: tuple[Any, ...]


def pipe_sgd(optimizer: optax.GradientTransformation, *, width: int = 2) -> Rule:
    """Synchronous SGD whose all-reduce is hidden: `x_{t+1} = x_t - γ ḡ_{t-(W-1)}`, with gradients W - 1 steps old.

    The gradient of iteration t is reduced while the next ones are computed, one all-reduce after the other, and applied
    W - 1 iterations later at all workers alike. With W = 2 an iteration takes the longer of computation and
    communication; more only helps where their times vary. Everybody still waits for the slowest worker. The first W - 1
    iterations have nothing to apply.

    On the wire: an all-reduce of the gradient per step, kind `"reduced"`.

    State: each worker has the model and the optimizer's state, all the same, and up to W gradients.

    Args:
      optimizer: what every worker steps with. Momentum adds to the delay; keep it low, or the rate.
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
    start, move = replica(optimizer)

    def init(site: Site, params: Any) -> tuple[PipeState, Actions]:
        return PipeState(site, params, start(params), 0, 0, True, False, (), ()), (Compute(params, 0),)

    def sent(state: PipeState) -> tuple[PipeState, Actions]:
        """One all-reduce at a time: the network carries no two at once any faster."""
        if state.travelling or not state.outbox:
            return state, ()
        (tag, value), *rest = state.outbox
        part = Reduce(everybody(state.site.workers), tag, value)
        return state._replace(travelling=True, outbox=tuple(rest)), (part,)

    def went_on(state: PipeState) -> tuple[PipeState, Actions]:
        """The next iteration, if the step before it can be taken; a mean that came early is held back till then."""
        due = state.iteration + 1 >= width
        if state.computing or (due and not state.means):
            return state, ()
        state, books = state._replace(iteration=state.iteration + 1, computing=True), ()
        if due:
            (read, mean), *rest = state.means
            params, opt_state = move(state.params, state.opt_state, mean)
            state = state._replace(params=params, opt_state=opt_state, version=state.version + 1, means=tuple(rest))
            books = (Stepped(state.version, max(0, read - width + 1)),) if state.site.index == 0 else ()
        return state, (*books, Compute(state.params, state.version))

    @no_type_check
    def receive(state: PipeState, sender: int, message: Message) -> tuple[PipeState, Actions]:
        books = ()
        if message.kind == COMPUTED:
            # The gradient of iteration t makes version t + 1.
            books = (Counted(state.site.index, message.version, state.iteration),)
            state = state._replace(computing=False, outbox=(*state.outbox, (state.iteration, message.value)))
        elif message.kind == REDUCED:
            state = state._replace(travelling=False, means=(*state.means, (message.tag, message.value)))
        elif message.kind == RECOVERED:
            return state, (Compute(state.params, state.version),) if state.computing else ()
        else:
            raise ValueError(f"a worker of pipe_sgd does not know the message {message.kind!r}")
        state, parts = sent(state)
        state, steps = went_on(state)
        return state, (*books, *parts, *steps)

    def waits_for(state: PipeState) -> tuple[int, ...]:
        return () if state.computing else others(state.site)

    return Rule("pipe_sgd", Role(init, receive, lambda state: state.params, waits_for))
