"""Stale synchronous parallel: nobody runs more than s iterations ahead."""

from typing import Any, NamedTuple

import optax

from ...protocol import Actions, Counted, Message, Rule, Site
from .base import Core, fresh, put, reply, server_rule, stepper


class SSPState(NamedTuple):
    """The server's core, each worker's completed iterations, their least and how many have it, and who waits."""

    core: Core
    completed: tuple[int, ...]
    least: int
    last: int
    waiting: tuple[int, ...]


def ssp(staleness: int, optimizer: optax.GradientTransformation) -> Rule:
    """Asynchronous SGD in which a worker starts its next iteration only if `c - min_j c_j <= s`.

    `c` counts completed iterations. It absorbs random slowdowns of up to s iterations; with one worker that is always
    slow all others end up waiting for it, and each makes one iteration in its time. Iterations that run already are
    finished, so completed counts differ by up to `s + 1`.

    On the wire: a gradient up and a model down per step.

    State: the server's model and optimizer; a worker's model.

    Args:
      staleness: s. 0 is lockstep (each gradient still a step of its own); large is `asgd`.
      optimizer: what the server steps with.

    Returns:
      The rule.

    Raises:
      ValueError: `staleness` is negative.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.ssp(3, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 1, 6]), workers=4, seconds=600)
      >>> len(run.trace.steps)
      409

    References:
      Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
    """
    if staleness < 0:
        raise ValueError(f"staleness must be at least 0, got {staleness}")
    begin, step = stepper(optimizer)

    def init(site: Site, params: Any) -> SSPState:
        return SSPState(begin(site, params), (0,) * site.workers, 0, site.workers, ())

    def on_gradient(state: SSPState, worker: int, message: Message) -> tuple[SSPState, Actions]:
        version = state.core.version
        core, stepped = step(state.core, message.value, 1.0, message.version)
        done, least = state.completed[worker], state.least
        completed = put(state.completed, worker, done + 1)
        last, asking, waiting = state.last - (done == least), [worker], list(state.waiting)
        if not last:  # the slowest moved: all are looked at once more
            least = min(completed)
            last, asking, waiting = completed.count(least), sorted([*waiting, worker]), []
        actions: list = [Counted(worker, message.version, version), stepped]
        for other in asking:
            if completed[other] <= least + staleness:
                core, sent = reply(core, other)
                actions.append(sent)
            else:
                waiting.append(other)
        return SSPState(core, completed, least, last, tuple(waiting)), tuple(actions)

    def on_pull(state: SSPState, worker: int, message: Message) -> tuple[SSPState, Actions]:
        if worker in state.waiting:  # its gradient has arrived, and it must wait as before
            return state, ()
        core, sent = fresh(state.core, worker)
        return state._replace(core=core), (sent,)

    def waits_for(state: SSPState) -> tuple[int, ...]:
        return tuple(i for i, c in enumerate(state.completed) if c == state.least) if state.waiting else ()

    return server_rule("ssp", init, on_gradient, on_pull=on_pull, waits_for=waits_for)
