"""Rennala and Malenia: minibatches at one model, gathered from whoever is fast."""

from typing import Any, NamedTuple

import optax

from ...._core.types import Number
from ...protocol import Actions, Counted, Message, Rule, Site
from ...values import mean_of
from .base import Core, outdated, reply, server_rule, stepper, to_all


class BatchState(NamedTuple):
    """The server's core, and the gradients at its model so far, as `(worker, job, value)`."""

    core: Core
    gathered: tuple[tuple[int, int, Any], ...]


def rennala(batch: int, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """Gathers S gradients at the current model from whoever sends them, then steps: `x <- x - γ/S Σ g`.

    A worker gets to work again at once: fast ones give several of the S, and a gradient at an older model is thrown
    away. On workers that draw from the same data it is as fast as any method can be; in theory `S = ⌈σ²/ε⌉`.

    On the wire: a gradient up per gradient; a model down to a worker after each step, and no bytes where it has that.

    State: the server's model, optimizer, and up to S gradients; a worker's model.

    Args:
      batch: S. Small steps often, large averages noise away.
      optimizer: what the server steps with.
      stop: send each new model to all workers at once, and let them give up what they compute.

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

    def full(gathered: tuple, workers: int) -> bool:
        return len(gathered) == batch

    def mean(gathered: list) -> Any:
        return mean_of([value for _, _, value in gathered])

    return _batched("rennala", optimizer, full, mean, stop=stop)


def malenia(batch: Number, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """Rennala for data that differ: gathers until every worker gave `b_i`, then steps with the mean of workers' means.

    `x <- x - γ (1/n) Σ_i (1/b_i) Σ g_i` as soon as the harmonic mean of the b_i, 0 while one is 0, is `S/n` or more. It
    is unbiased for any speeds; work at older models is thrown away.

    On the wire: a gradient up per gradient; a model down to a worker after each step, and no bytes where it has that.

    State: the server's model, optimizer, and the gradients of the step; a worker's model.

    Args:
      batch: S. Up to n, one gradient of each worker is enough.
      optimizer: what the server steps with.
      stop: send each new model to all workers at once, and let them give up what they compute.

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

    def full(gathered: tuple, workers: int) -> bool:
        counts = [0] * workers
        for worker, _, _ in gathered:
            counts[worker] += 1
        return all(counts) and workers / sum(1 / count for count in counts) >= batch / workers

    def mean(gathered: list) -> Any:
        own: dict[int, list[Any]] = {}
        for worker, _, value in gathered:
            own.setdefault(worker, []).append(value)
        return mean_of([mean_of(values) for values in own.values()])

    return _batched("malenia", optimizer, full, mean, stop=stop)


def _batched(name: str, optimizer: optax.GradientTransformation, full: Any, mean: Any, *, stop: bool) -> Rule:
    begin, step = stepper(optimizer)

    def init(site: Site, params: Any) -> BatchState:
        return BatchState(begin(site, params), ())

    def on_gradient(state: BatchState, worker: int, message: Message) -> tuple[BatchState, Actions]:
        core, read = state.core, message.version
        late, ignored = outdated(core, worker, message)
        if ignored:
            return state, late
        version, accepted, stepped = core.version, read == core.version, ()
        gathered = (*state.gathered, (worker, message.tag, message.value)) if accepted else state.gathered
        if accepted and full(gathered, len(core.reads)):
            # By worker and job, not by arrival.
            core, done = step(core, mean(sorted(gathered, key=lambda one: one[:2])), 1.0, version)
            gathered, stepped = (), (done,)
        counted = Counted(worker, read, version, accepted)
        if stepped and stop:
            core, sends = to_all(core)
        else:
            core, sent = reply(core, worker)
            sends = (sent,)
        return BatchState(core, gathered), (counted, *stepped, *sends)

    return server_rule(name, init, on_gradient)
