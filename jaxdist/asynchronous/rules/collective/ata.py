"""ATA: shares of a batch by optimistic estimates of the workers' speeds."""

import math
from functools import partial
from typing import no_type_check

import optax

from ...._core.checks import check_range
from ...._core.types import Number
from ...protocol import Rule
from .allocation import allocate, allocation_rule


def ata(batch: int, optimizer: optax.GradientTransformation, *, confidence: Number = 1.0) -> Rule:
    """Adaptive task allocation: `task_allocation` that learns unknown speeds as a bandit and leaves out slow workers.

    In round k worker i has completed `K_i` microbatches of mean duration `m_i`. The B microbatches are divided such
    that the last worker would finish soonest if each took the lower confidence bound of its duration,

        s_i = max(0, m_i (1 - c (sqrt(L / K_i) + L / K_i))),   L = ln(2 k²);   0 while K_i = 0

    so that a worker that might be fast is tried again, ever more rarely, and one that is certainly slow gets nothing.
    Nothing that is computed is thrown away: `rennala` is about as fast per step, and keeps all workers busy.

    *On the wire*: an all-reduce of the sum of gradients and a gather of 8 bytes from each worker, per round, also from
    workers without a microbatch; kind `"reduced"`.

    *State*: replicated model, optimizer state, n durations and n counts; a sum of gradients per worker.

    Args:
      batch: B, the microbatches of a step, at least 1.
      optimizer: the optimizer of every worker.
      confidence: c. In theory `4 e η`, where η bounds the spread of a duration relative to its mean (1 for exponential
        ones), which explores for thousands of rounds; 0.1 to 1 are practical. 0 trusts the means at once, and a worker
        that was slow by chance the first time is never tried again.

    Examples:
      >>> import numpy as np, optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> law = durations.constant([1, 1, 2, 50])
      >>> run = replay.run(rules.ata(5, optax.sgd(0.1), confidence=0.1), durations=law, workers=4, steps=100)
      >>> np.bincount(run.trace.gradients.worker[-50:], minlength=4).tolist()
      [20, 20, 10, 0]

    References:
      Maranjyan, Saad, Richtárik, Orabona, "ATA: Adaptive Task Allocation for Efficient Resource Management in
      Distributed Machine Learning", arXiv:2502.00775, 2025 (the empirical variant, whose bound is relative to the
      mean). Maranjyan, "First Provably Optimal Asynchronous SGD for Homogeneous and Heterogeneous Data",
      arXiv:2601.02523, 2026.
    """
    check_range("batch", batch, 1, ends="[]")
    check_range("confidence", confidence, 0)
    shares = partial(_optimistic_shares, float(confidence))
    return allocation_rule("ata", batch, optimizer, shares, _mean_of_all, measures=True)


@no_type_check
def _optimistic_shares(confidence: float, batch: int, seconds: tuple, tasks: tuple, version: int) -> tuple[int, ...]:
    return allocate(lower_bounds(seconds, tasks, version + 1, confidence), batch, 0)


@no_type_check
def lower_bounds(seconds: tuple, tasks: tuple, number: int, confidence: float) -> tuple[float, ...]:
    """Returns the lower confidence bounds of the durations in round `number`, counted from 1."""
    # s_i = max(0, m_i (1 - c (sqrt(L / K_i) + L / K_i))), L = ln(2 k²)
    log = math.log(2 * number**2)
    return tuple(
        [
            max(0.0, mean * (1 - confidence * (math.sqrt(log / count) + log / count))) if count else 0.0
            for mean, count in zip(seconds, tasks)
        ]
    )


def _mean_of_all(version: int, count: int, total: int) -> float:
    return count / total
