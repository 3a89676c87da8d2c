"""Rennala: a step with the mean of the first gradients at the current model."""

import optax

from ...._core.checks import check_count
from ...protocol import Rule
from ...values import mean_of
from .minibatch import minibatch_rule


def rennala(batch: int, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """Gathers S gradients at the current model, from any workers, then steps: `x <- x - γ/S Σ g`.

    A worker continues at once: fast workers contribute several of the S gradients, and a gradient at an older model is
    discarded. For workers that draw from the same data its time complexity is optimal; in theory `S = ⌈σ²/ε⌉`.

    *On the wire*: each gradient up; a model down after each step, and nothing if the worker already has the current
    one.

    *State*: the server's model, optimizer, and up to S gradients; a worker's model.

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
    return minibatch_rule(
        "rennala",
        optimizer,
        lambda gathered, workers: len(gathered) == batch,
        lambda gathered: mean_of([value for _, _, value in gathered]),
        stop,
    )
