"""Synchronous SGD that drops the gradients of the slowest workers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from ...._core.checks import check_count
from ...protocol import GradientRecord, Message, Reaction, Rule
from ...values import mean_of
from .base import Core, broadcast_params, send_current, server_rule, stepper


class _BackupState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, value)`."""

    core: Core
    gathered: tuple[tuple[int, Any], ...] = ()


def backup_workers(spare: int, optimizer: optax.GradientTransformation) -> Rule:
    """Synchronous SGD that uses the first `n - b` gradients of each step and cancels the other b.

    `x <- x - γ 1/(n - b) Σ g_i`. A step takes the (n - b)-th shortest of n computations; with b = 0 it is synchronous
    SGD with a parameter server.

    *On the wire*: n models down and n gradients up per step; up to b of them are cancelled before they are sent.

    *State*: the server's model, optimizer, and up to n - b gradients; a worker's model.

    Args:
      spare: b. A few percent of the workers absorb rare slowdowns; more wastes work and, if data differ between
        workers, excludes the slow ones.
      optimizer: the optimizer of the server.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.backup_workers(1, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 3]), workers=3, seconds=300)
      >>> len(run.trace.steps)
      300

    References:
      Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting distributed synchronous SGD", arXiv:1604.00981, 2016.
    """
    check_count("spare", spare, 0)
    server = stepper(optimizer)
    method = _BackupWorkers(server.step, spare)
    return server_rule(
        "backup_workers",
        server,
        method.on_gradient,
        begin=method.begin,
        on_pull=_on_backup_pull,
        waits_for=_backup_waits_for,
        discard_outdated=True,
    )


class _BackupWorkers(NamedTuple):
    """The step of the server, and how many gradients of a step it does not wait for."""

    step: Callable[..., Any]
    spare: int

    def begin(self, core: Core) -> _BackupState:
        if self.spare >= len(core.reads):
            raise ValueError(f"spare must be less than the {len(core.reads)} workers, got {self.spare}")
        return _BackupState(core)

    def on_gradient(self, state: _BackupState, worker: int, message: Message) -> Reaction:
        core = state.core
        # A worker that recovered got this model twice: with all others, and for its request.
        if any(worker == contributor for contributor, _ in state.gathered):
            return state, (GradientRecord(worker, core.version, core.version, accepted=False),)
        record = GradientRecord(worker, core.version, core.version)
        gathered = (*state.gathered, (worker, message.value))
        if len(gathered) < len(core.reads) - self.spare:
            return _BackupState(core, gathered), (record,)
        # Sorted by worker, so that the sum does not depend on the order of arrival.
        mean = mean_of([value for _, value in sorted(gathered, key=lambda entry: entry[0])])
        core, step_record = self.step(core, mean, 1.0, core.version)
        core, sends = broadcast_params(core)
        return _BackupState(core, ()), (record, step_record, *sends)


def _on_backup_pull(state: _BackupState, worker: int, message: Message) -> Reaction:
    # Its gradient of this step has arrived: it receives the next model with all others.
    if any(worker == contributor for contributor, _ in state.gathered):
        return state, ()
    return send_current(state, worker, message)


def _backup_waits_for(state: _BackupState) -> tuple[int, ...]:
    contributors = {worker for worker, _ in state.gathered}
    return tuple(i for i in range(len(state.core.reads)) if i not in contributors)
