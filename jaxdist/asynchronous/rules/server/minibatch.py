"""Minibatches of gradients that the server gathers at one model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from ...protocol import GradientRecord, Message, Reaction, Rule
from .base import Core, broadcast_params, reply, server_rule, stepper


class _BatchState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, job, value)`."""

    core: Core
    gathered: tuple[tuple[int, int, Any], ...] = ()


def minibatch_rule(
    name: str,
    optimizer: optax.GradientTransformation,
    is_full: Callable[[tuple, int], bool],
    mean: Callable[[list], Any],
    stop: bool,
) -> Rule:
    """Makes a rule that steps with `mean(gathered)`, sorted gradients, as soon as `is_full(gathered, workers)`."""
    server = stepper(optimizer)
    method = _Minibatch(server.step, is_full, mean, stop)
    return server_rule(name, server, method.on_gradient, begin=_BatchState, discard_outdated=True)


class _Minibatch(NamedTuple):
    """The arguments of `minibatch_rule`, with the step of the server."""

    step: Callable[..., Any]
    is_full: Callable[[tuple, int], bool]
    mean: Callable[[list], Any]
    stop: bool

    def on_gradient(self, state: _BatchState, worker: int, message: Message) -> Reaction:
        core, gathered, read = state.core, state.gathered, message.version
        # A gradient at an older model is logged as discarded, and its worker gets the current one.
        version, accepted = core.version, read == core.version
        actions: list = [GradientRecord(worker, read, version, accepted)]
        if accepted:
            gathered = (*gathered, (worker, message.tag, message.value))
        complete = accepted and self.is_full(gathered, len(core.reads))
        if complete:
            # Sorted by worker and job, so that the sum does not depend on the order of arrival.
            gradient = self.mean(sorted(gathered, key=lambda entry: entry[:2]))
            core, step_record = self.step(core, gradient, 1.0, version)
            actions.append(step_record)
            gathered = ()
        if complete and self.stop:
            core, sends = broadcast_params(core)
            actions.extend(sends)
        else:
            core, sent = reply(core, worker)
            actions.append(sent)
        return _BatchState(core, gathered), tuple(actions)
