"""Stale synchronous parallel (SSP): no worker is more than s iterations ahead of the slowest."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from ...protocol import Actions, GradientRecord, Message, Rule, Site
from ..base import replace_at
from .base import Core, Stepper, reply, send_params, server_rule, stepper


class _SSPState(NamedTuple):
    """The state of the server.

    Attributes:
      core: parameters and optimizer state.
      completed: the number of completed iterations of each worker.
      least: their minimum.
      slowest: the number of workers that have it.
      waiting: the workers that wait for the slowest.
    """

    core: Core
    completed: tuple[int, ...]
    least: int
    slowest: int
    waiting: tuple[int, ...]


def ssp(staleness: int, optimizer: optax.GradientTransformation) -> Rule:
    """Asynchronous SGD in which a worker starts its next iteration only if `c - min_j c_j <= s`.

    `c` counts completed iterations. The rule absorbs random slowdowns of up to s iterations; if one worker is always
    slow, all others end up waiting for it, at one iteration each per iteration of that worker. Running iterations are
    finished, so completed counts differ by up to `s + 1`.

    On the wire: a gradient up and a model down per step.

    State: the server's model and optimizer; a worker's model.

    Args:
      staleness: s. 0 is lockstep (but each gradient is a separate step); a large value is `asgd`.
      optimizer: the optimizer of the server.

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
    step = stepper(optimizer)
    on_gradient = partial(_on_gradient, step.step, staleness)
    return server_rule("ssp", partial(_init, step), on_gradient, on_pull=_on_pull, waits_for=_waits_for)


def _init(step: Stepper, site: Site, params: Any) -> _SSPState:
    return _SSPState(step.init(site, params), (0,) * site.workers, 0, site.workers, ())


def _on_gradient(
    step: Callable[..., Any], staleness: int, state: _SSPState, worker: int, message: Message
) -> tuple[_SSPState, Actions]:
    version = state.core.version
    # Every gradient is a step, x <- x - γ g; only the reply may have to wait.
    core, step_record = step(state.core, message.value, 1.0, message.version)
    done, least = state.completed[worker], state.least
    completed = replace_at(state.completed, worker, done + 1)
    slowest, ready, waiting = state.slowest - (done == least), [worker], list(state.waiting)
    # When the last of the slowest has moved, the minimum rises, and waiting workers may continue. Only then is it
    # recomputed, which makes an event cheap with a thousand workers.
    if not slowest:
        least = min(completed)
        slowest, ready, waiting = completed.count(least), sorted([*waiting, worker]), []
    actions: list = [GradientRecord(worker, message.version, version), step_record]
    for candidate in ready:
        # c - min_j c_j <= s
        if completed[candidate] <= least + staleness:
            core, sent = reply(core, candidate)
            actions.append(sent)
        else:
            waiting.append(candidate)
    return _SSPState(core, completed, least, slowest, tuple(waiting)), tuple(actions)


def _on_pull(state: _SSPState, worker: int, message: Message) -> tuple[_SSPState, Actions]:
    # The worker failed after its gradient had arrived: it must wait as before.
    if worker in state.waiting:
        return state, ()
    core, sent = send_params(state.core, worker)
    return state._replace(core=core), (sent,)


def _waits_for(state: _SSPState) -> tuple[int, ...]:
    return tuple(i for i, c in enumerate(state.completed) if c == state.least) if state.waiting else ()
