"""Malenia: a step once every worker's mean gradient at the current model is precise enough."""

from functools import partial
from typing import Any

import optax

from ...._core.checks import check_range
from ...._core.types import Number
from ...protocol import Rule
from ...values import mean_of
from .minibatch import minibatch_rule


def malenia(batch: Number, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """Rennala for data that differ: gathers `b_i` gradients of each worker, then steps with the mean of workers' means.

    `x <- x - γ (1/n) Σ_i (1/b_i) Σ g_i` as soon as the harmonic mean of the b_i (0 while one is 0) is at least `S/n`.
    Unbiased for any speeds; gradients at older models are discarded.

    *On the wire*: as `rennala`.

    *State*: the server's model, optimizer, and the gradients of the step; a worker's model.

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
      Tyurin, Richtárik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
      computation model", arXiv:2305.12387, 2023.
    """
    check_range("batch", batch, 0, ends="(]")
    return minibatch_rule("malenia", optimizer, partial(_has_harmonic_mean, batch), _mean_of_means, stop)


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
