"""Minibatches that the server gathers at one model: Rennala, Malenia, and synchronous SGD with backup workers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from ...._core.types import Number
from ...protocol import Actions, GradientRecord, Message, Rule, Site
from ...values import mean_of
from .base import (
    Core,
    Stepper,
    broadcast_params,
    discard,
    is_outdated,
    reply,
    send_params,
    server_rule,
    stepper,
)


class _BatchState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, job, value)`."""

    core: Core
    gathered: tuple[tuple[int, int, Any], ...]


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

    Returns:
      The rule.

    Raises:
      ValueError: `batch` is below 1.

    Example:
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
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")

    return _minibatch_rule("rennala", optimizer, partial(_has_total, batch), _mean, stop=stop)


def malenia(batch: Number, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """Rennala for data that differ: gathers `b_i` gradients of each worker, then steps with the mean of workers' means.

    `x <- x - γ (1/n) Σ_i (1/b_i) Σ g_i` as soon as the harmonic mean of the b_i (0 while one is 0) is at least `S/n`.
    Unbiased for any speeds; gradients at older models are discarded.

    On the wire: each gradient up; a model down after each step, and nothing if the worker already has the current one.

    State: the server's model, optimizer, and the gradients of the step; a worker's model.

    Args:
      batch: S. Up to n, one gradient of each worker is enough.
      optimizer: the optimizer of the server.
      stop: send each new model to all workers at once; they discard the gradient that they are computing.

    Returns:
      The rule.

    Raises:
      ValueError: `batch` is not positive.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.malenia(1, optax.sgd(0.1), stop=True)
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 5]), workers=3, seconds=1000)
      >>> len(run.trace.steps)
      200

    References:
      Tyurin, Richtárik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
      computation model", arXiv:2305.12387, 2023.
    """
    if not batch > 0:
        raise ValueError(f"batch must be positive, got {batch}")

    return _minibatch_rule("malenia", optimizer, partial(_has_harmonic_mean, batch), _mean_of_means, stop=stop)


def _has_total(batch: int, gathered: tuple, workers: int) -> bool:
    return len(gathered) == batch


def _has_harmonic_mean(batch: Number, gathered: tuple, workers: int) -> bool:
    # n / Σ 1/b_i >= S/n, which no worker without a gradient satisfies.
    counts = [0] * workers
    for worker, _, _ in gathered:
        counts[worker] += 1
    return all(counts) and workers / sum(1 / count for count in counts) >= batch / workers


def _mean(gathered: list) -> Any:
    return mean_of([value for _, _, value in gathered])


def _mean_of_means(gathered: list) -> Any:
    # (1/n) Σ_i (1/b_i) Σ g_i: workers have equal weights, however many gradients they contribute.
    by_worker: dict[int, list[Any]] = {}
    for worker, _, value in gathered:
        by_worker.setdefault(worker, []).append(value)
    return mean_of([mean_of(values) for values in by_worker.values()])


class _Config(NamedTuple):
    """The server's step; `is_full(gathered, workers)`; `mean(gathered)` of sorted gradients; whether to broadcast."""

    stepper: Stepper
    is_full: Callable[[tuple, int], bool]
    mean: Callable[[list], Any]
    stop: bool


def _minibatch_rule(
    name: str,
    optimizer: optax.GradientTransformation,
    is_full: Callable[[tuple, int], bool],
    mean: Callable[[list], Any],
    *,
    stop: bool,
) -> Rule:
    cfg = _Config(stepper(optimizer), is_full, mean, stop)
    return server_rule(name, partial(_init, cfg.stepper), partial(_on_gradient, cfg))


def _init(step: Stepper, site: Site, params: Any) -> _BatchState:
    return _BatchState(step.init(site, params), ())


def _on_gradient(cfg: _Config, state: _BatchState, worker: int, message: Message) -> tuple[_BatchState, Actions]:
    core, gathered, read = state.core, state.gathered, message.version
    if is_outdated(core, worker, message):
        return state, discard(core, worker, message)
    # A gradient at an older model is logged as discarded, and its worker gets the current one.
    version, accepted = core.version, read == core.version
    actions: list = [GradientRecord(worker, read, version, accepted)]
    if accepted:
        gathered = (*gathered, (worker, message.tag, message.value))
    complete = accepted and cfg.is_full(gathered, len(core.reads))
    if complete:
        # Sorted by worker and job, so that the sum does not depend on the order of arrival.
        mean = cfg.mean(sorted(gathered, key=lambda entry: entry[:2]))
        core, step_record = cfg.stepper.step(core, mean, 1.0, version)
        actions.append(step_record)
        gathered = ()
    if complete and cfg.stop:
        core, sends = broadcast_params(core)
        actions.extend(sends)
    else:
        core, sent = reply(core, worker)
        actions.append(sent)
    return _BatchState(core, gathered), tuple(actions)


class _BackupState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, value)`."""

    core: Core
    gathered: tuple[tuple[int, Any], ...]


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
    step = stepper(optimizer)
    return server_rule(
        "backup_workers",
        partial(_init_backup, step, spare),
        partial(_on_backup_gradient, step, spare),
        on_pull=_on_backup_pull,
        waits_for=_backup_waits_for,
    )


def _init_backup(step: Stepper, spare: int, site: Site, params: Any) -> _BackupState:
    if spare >= site.workers:
        raise ValueError(f"spare must be less than the {site.workers} workers, got {spare}")
    return _BackupState(step.init(site, params), ())


def _on_backup_gradient(
    step: Stepper, spare: int, state: _BackupState, worker: int, message: Message
) -> tuple[_BackupState, Actions]:
    core = state.core
    if is_outdated(core, worker, message):
        return state, discard(core, worker, message)
    record = GradientRecord(worker, core.version, core.version)
    gathered = (*state.gathered, (worker, message.value))
    if len(gathered) < len(core.reads) - spare:
        return _BackupState(core, gathered), (record,)
    # Sorted by worker, so that the sum does not depend on the order of arrival.
    mean = mean_of([value for _, value in sorted(gathered, key=lambda entry: entry[0])])
    core, step_record = step.step(core, mean, 1.0, core.version)
    core, sends = broadcast_params(core)
    return _BackupState(core, ()), (record, step_record, *sends)


def _on_backup_pull(state: _BackupState, worker: int, message: Message) -> tuple[_BackupState, Actions]:
    # Its gradient of this step has arrived: it receives the next model with all others.
    if any(worker == contributor for contributor, _ in state.gathered):
        return state, ()
    core, sent = send_params(state.core, worker)
    return state._replace(core=core), (sent,)


def _backup_waits_for(state: _BackupState) -> tuple[int, ...]:
    contributors = {worker for worker, _ in state.gathered}
    return tuple(i for i in range(len(state.core.reads)) if i not in contributors)
