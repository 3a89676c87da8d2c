"""Minibatches that the server gathers at one model: Rennala, Malenia, and synchronous SGD with backup workers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from ...._core.checks import check_count
from ...._core.types import Number
from ...protocol import GradientRecord, Message, Reaction, Rule
from ...values import mean_of
from .base import Core, broadcast_params, reply, send_current, server_rule, stepper


class _BatchState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, job, value)`."""

    core: Core
    gathered: tuple[tuple[int, int, Any], ...] = ()


def rennala(batch: int, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """Gathers S gradients at the current model, from any workers, then steps: `x <- x - γ/S Σ g`.

    A worker continues at once: fast workers contribute several of the S gradients, and a gradient at an older model is
    discarded. For workers that draw from the same data its time complexity is optimal; in theory `S = ⌈σ²/ε⌉`.

    On the wire: each gradient up; a model down after each step, and nothing if the worker already has the current one.

    State: the server's model, optimizer, and up to S gradients; a worker's model.

    Args:
      batch: S. A small value steps often, a large one averages noise out.
      optimizer: the optimizer of the server.
      stop: send each new model to all workers at once; they discard the gradient that they are computing.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.rennala(3, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 1, 10]), workers=4, seconds=1000)
      >>> len(run.trace.steps)
      600

    References:
      Tyurin, Richtárik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
      computation model", arXiv:2305.12387, 2023.
    """
    check_count("batch", batch, 1)
    return _minibatch_rule(
        "rennala",
        optimizer,
        lambda gathered, workers: len(gathered) == batch,
        lambda gathered: mean_of([value for _, _, value in gathered]),
        stop,
    )


def malenia(batch: Number, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """Rennala for data that differ: gathers `b_i` gradients of each worker, then steps with the mean of workers' means.

    `x <- x - γ (1/n) Σ_i (1/b_i) Σ g_i` as soon as the harmonic mean of the b_i (0 while one is 0) is at least `S/n`.
    Unbiased for any speeds; gradients at older models are discarded.

    On the wire: as `rennala`.

    State: the server's model, optimizer, and the gradients of the step; a worker's model.

    Args:
      batch: S. Up to n, one gradient of each worker is enough.
      optimizer: the optimizer of the server.
      stop: as for `rennala`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.malenia(1, optax.sgd(0.1), stop=True)
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 5]), workers=3, seconds=1000)
      >>> len(run.trace.steps)
      200

    References:
      Tyurin, Richtárik, arXiv:2305.12387, 2023.
    """
    if not batch > 0:
        raise ValueError(f"batch must be positive, got {batch}")
    return _minibatch_rule("malenia", optimizer, partial(_has_harmonic_mean, batch), _mean_of_means, stop)


def _has_harmonic_mean(batch: Number, gathered: tuple, workers: int) -> bool:
    # n / Σ 1/b_i >= S/n, which no worker without a gradient satisfies.
    counts = [0] * workers
    for worker, _, _ in gathered:
        counts[worker] += 1
    # Where both are equal, as for the same count of all workers, rounding must not ask for one gradient more.
    return all(counts) and workers**2 >= (1 - 1e-9) * batch * sum(1 / count for count in counts)


def _mean_of_means(gathered: list) -> Any:
    # (1/n) Σ_i (1/b_i) Σ g_i: workers have equal weights, however many gradients they contribute.
    by_worker: dict[int, list[Any]] = {}
    for worker, _, value in gathered:
        by_worker.setdefault(worker, []).append(value)
    return mean_of([mean_of(values) for values in by_worker.values()])


def _minibatch_rule(
    name: str,
    optimizer: optax.GradientTransformation,
    is_full: Callable[[tuple, int], bool],
    mean: Callable[[list], Any],
    stop: bool,
) -> Rule:
    """Makes a rule that steps with `mean(gathered)`, sorted gradients, as soon as `is_full(gathered, workers)`."""
    server = stepper(optimizer)
    on_gradient = partial(_on_gradient, server.step, is_full, mean, stop)
    return server_rule(name, server, on_gradient, begin=_BatchState, discard_outdated=True)


def _on_gradient(
    step: Callable[..., Any],
    is_full: Callable[[tuple, int], bool],
    mean: Callable[[list], Any],
    stop: bool,
    state: _BatchState,
    worker: int,
    message: Message,
) -> Reaction:
    core, gathered, read = state.core, state.gathered, message.version
    # A gradient at an older model is logged as discarded, and its worker gets the current one.
    version, accepted = core.version, read == core.version
    actions: list = [GradientRecord(worker, read, version, accepted)]
    if accepted:
        gathered = (*gathered, (worker, message.tag, message.value))
    complete = accepted and is_full(gathered, len(core.reads))
    if complete:
        # Sorted by worker and job, so that the sum does not depend on the order of arrival.
        gradient = mean(sorted(gathered, key=lambda entry: entry[:2]))
        core, step_record = step(core, gradient, 1.0, version)
        actions.append(step_record)
        gathered = ()
    if complete and stop:
        core, sends = broadcast_params(core)
        actions.extend(sends)
    else:
        core, sent = reply(core, worker)
        actions.append(sent)
    return _BatchState(core, gathered), tuple(actions)


class _BackupState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, value)`."""

    core: Core
    gathered: tuple[tuple[int, Any], ...] = ()


def backup_workers(spare: int, optimizer: optax.GradientTransformation) -> Rule:
    """Synchronous SGD that uses the first `n - b` gradients of each step and cancels the other b.

    `x <- x - γ 1/(n - b) Σ g_i`. A step takes the (n - b)-th shortest of n computations; with b = 0 it is synchronous
    SGD with a parameter server.

    On the wire: n models down and n gradients up per step; up to b of them are cancelled before they are sent.

    State: the server's model, optimizer, and up to n - b gradients; a worker's model.

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

    def begin(core: Core) -> _BackupState:
        if spare >= len(core.reads):
            raise ValueError(f"spare must be less than the {len(core.reads)} workers, got {spare}")
        return _BackupState(core)

    return server_rule(
        "backup_workers",
        server,
        partial(_on_backup_gradient, server.step, spare),
        begin=begin,
        on_pull=_on_backup_pull,
        waits_for=_backup_waits_for,
        discard_outdated=True,
    )


def _on_backup_gradient(
    step: Callable[..., Any], spare: int, state: _BackupState, worker: int, message: Message
) -> Reaction:
    core = state.core
    # A worker that recovered got this model twice: with all others, and for its request.
    if any(worker == contributor for contributor, _ in state.gathered):
        return state, (GradientRecord(worker, core.version, core.version, accepted=False),)
    record = GradientRecord(worker, core.version, core.version)
    gathered = (*state.gathered, (worker, message.value))
    if len(gathered) < len(core.reads) - spare:
        return _BackupState(core, gathered), (record,)
    # Sorted by worker, so that the sum does not depend on the order of arrival.
    mean = mean_of([value for _, value in sorted(gathered, key=lambda entry: entry[0])])
    core, step_record = step(core, mean, 1.0, core.version)
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
