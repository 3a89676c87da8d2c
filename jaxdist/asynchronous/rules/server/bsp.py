"""Bulk synchronous: all-reduce of gradients, and the parameter server that does not wait for the last."""

from typing import Any, NamedTuple

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
from ...values import mean_of
from .base import Core, everybody, fresh, others, outdated, replica, server_rule, stepper, to_all


class BSPState(NamedTuple):
    """A worker's place, model, optimizer state, count of steps, and whether its gradient is in the mean already."""

    site: Site
    params: Any
    opt_state: Any
    version: int
    waiting: bool


def bsp(optimizer: optax.GradientTransformation) -> Rule:
    """Synchronous data parallelism: `x <- x - γ (1/n) Σ g_i`, by an all-reduce that waits for the slowest worker.

    It is what `jd.distribute` runs, and what the other rules are compared with. A step takes the longest of n
    computations and one all-reduce.

    On the wire: an all-reduce of the gradient per step.

    State: each worker has the model and the optimizer's state, all the same.

    Args:
      optimizer: what every worker steps with.

    Returns:
      The rule; it has no server.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> run = replay.run(rules.bsp(optax.sgd(0.1)), durations=durations.constant([1, 1, 3]), workers=3, seconds=300)
      >>> len(run.trace.steps)
      100

    References:
      Valiant, "A bridging model for parallel computation", 1990.
    """
    start, move = replica(optimizer)

    def init(site: Site, params: Any) -> tuple[BSPState, Actions]:
        return BSPState(site, params, start(params), 0, False), (Compute(params, 0),)

    def receive(state: BSPState, sender: int, message: Message) -> tuple[BSPState, Actions]:
        site, version = state.site, state.version
        if message.kind == COMPUTED:
            part = Reduce(everybody(site.workers), version, message.value)
            return state._replace(waiting=True), (Counted(site.index, version, version), part)
        if message.kind == REDUCED:
            params, opt_state = move(state.params, state.opt_state, message.value)
            books = (Stepped(version + 1, version),) if site.index == 0 else ()
            return BSPState(site, params, opt_state, version + 1, False), (*books, Compute(params, version + 1))
        if message.kind == RECOVERED:
            return state, () if state.waiting else (Compute(state.params, version),)
        raise ValueError(f"a worker of bsp does not know the message {message.kind!r}")

    def waits_for(state: BSPState) -> tuple[int, ...]:
        return others(state.site) if state.waiting else ()

    return Rule("bsp", Role(init, receive, lambda state: state.params, waits_for))


class BackupState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, value)`."""

    core: Core
    gathered: tuple[tuple[int, Any], ...]


def backup_workers(spare: int, optimizer: optax.GradientTransformation) -> Rule:
    """Synchronous SGD that takes the first `n - b` gradients of each step and gives up the other b.

    `x <- x - γ 1/(n - b) Σ g_i`. A step takes the (n - b)-th shortest of n computations; with b = 0 it is synchronous
    SGD with a parameter server.

    On the wire: n models down and n gradients up per step, of which up to b never leave the slow workers.

    State: the server's model, optimizer, and up to n - b gradients; a worker's model.

    Args:
      spare: b. A few per cent of the workers absorb rare slowdowns; more wastes work, and on data that differ between
        workers leaves the slow ones out.
      optimizer: what the server steps with.

    Returns:
      The rule.

    Raises:
      ValueError: `spare` is negative, or not less than the number of workers.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.backup_workers(1, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 3]), workers=3, seconds=300)
      >>> len(run.trace.steps)
      300

    References:
      Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting distributed synchronous SGD", arXiv:1604.00981, 2016.
    """
    if spare < 0:
        raise ValueError(f"spare must be at least 0, got {spare}")
    begin, step = stepper(optimizer)

    def init(site: Site, params: Any) -> BackupState:
        if spare >= site.workers:
            raise ValueError(f"spare must be less than the {site.workers} workers, got {spare}")
        return BackupState(begin(site, params), ())

    def on_gradient(state: BackupState, worker: int, message: Message) -> tuple[BackupState, Actions]:
        core = state.core
        late, ignored = outdated(core, worker, message)
        if ignored:
            return state, late
        counted = Counted(worker, core.version, core.version)
        gathered = (*state.gathered, (worker, message.value))
        if len(gathered) < len(core.reads) - spare:
            return BackupState(core, gathered), (counted,)
        # By worker, not by arrival.
        mean = mean_of([value for _, value in sorted(gathered, key=lambda pair: pair[0])])
        core, stepped = step(core, mean, 1.0, core.version)
        core, sends = to_all(core)
        return BackupState(core, ()), (counted, stepped, *sends)

    def on_pull(state: BackupState, worker: int, message: Message) -> tuple[BackupState, Actions]:
        if any(worker == one for one, _ in state.gathered):
            return state, ()
        core, sent = fresh(state.core, worker)
        return state._replace(core=core), (sent,)

    def waits_for(state: BackupState) -> tuple[int, ...]:
        there = {worker for worker, _ in state.gathered}
        return tuple(i for i in range(len(state.core.reads)) if i not in there)

    return server_rule("backup_workers", init, on_gradient, on_pull=on_pull, waits_for=waits_for)
