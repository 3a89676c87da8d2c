"""SSP (stale synchronous parallel): the fastest worker is at most a fixed number of steps ahead of the slowest."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from ...._core.checks import check_range
from ...protocol import GradientRecord, Message, Reaction, Rule
from ..base import replace_at
from .base import Core, reply, send_current, server_rule, stepper


class _SSPState(NamedTuple):
    """The server's core, and the progress of the workers."""

    core: Core
    # The number of completed iterations of each worker, their minimum, and the number of workers that have it.
    completed: tuple[int, ...]
    least: int
    slowest: int
    # The workers that wait for the slowest.
    waiting: tuple[int, ...]


def ssp(staleness: int, optimizer: optax.GradientTransformation) -> Rule:
    """Asynchronous SGD in which a worker starts its next iteration only if `c - min_j c_j <= s`.

    `c` counts completed iterations. The rule absorbs random slowdowns of up to s iterations; if one worker is always
    slow, all others end up waiting for it, at one iteration each per iteration of that worker. Running iterations are
    finished, so completed counts differ by up to `s + 1`.

    *On the wire* and *State*: as `asgd`.

    Args:
      staleness: s. 0 is lockstep (but each gradient is a separate step); a large value is `asgd`.
      optimizer: the optimizer of the server.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.ssp(3, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 1, 6]), workers=4, seconds=600)
      >>> len(run.trace.steps)
      409

    References:
      Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS, 2013.
    """
    check_range("staleness", staleness, 0, ends="[]")
    server = stepper(optimizer)
    method = _SSP(server.step, staleness)
    return server_rule(
        "ssp", server, method.on_gradient, begin=_begin_ssp, on_pull=_on_ssp_pull, waits_for=_ssp_waits_for
    )


def _begin_ssp(core: Core) -> _SSPState:
    workers = len(core.reads)
    return _SSPState(core, (0,) * workers, 0, workers, ())


class _SSP(NamedTuple):
    """The step of the server, and by how many steps a worker may be ahead."""

    step: Callable[..., Any]
    staleness: int

    def on_gradient(self, state: _SSPState, worker: int, message: Message) -> Reaction:
        version = state.core.version
        # Every gradient is a step, x <- x - γ g; only the reply may have to wait.
        core, step_record = self.step(state.core, message.value, 1.0, message.version)
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
            if completed[candidate] <= least + self.staleness:
                core, sent = reply(core, candidate)
                actions.append(sent)
            else:
                waiting.append(candidate)
        return _SSPState(core, completed, least, slowest, tuple(waiting)), tuple(actions)


def _on_ssp_pull(state: _SSPState, worker: int, message: Message) -> Reaction:
    # The worker failed after its gradient had arrived: it must wait as before.
    return (state, ()) if worker in state.waiting else send_current(state, worker, message)


def _ssp_waits_for(state: _SSPState) -> tuple[int, ...]:
    return tuple(i for i, c in enumerate(state.completed) if c == state.least) if state.waiting else ()
