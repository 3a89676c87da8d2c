"""Local SGD as a rule: local steps, then an average of all models."""

from collections.abc import Sequence

import numpy as np
import optax
from jaxtyping import Int

from ...protocol import Rule
from .local_rule import local_rule


def local_sgd(
    optimizer: optax.GradientTransformation,
    *,
    sync_period: int | Sequence[int] | Int[np.ndarray, " workers"],
    outer: optax.GradientTransformation | None = None,
) -> Rule:
    """Averages after every H local steps, `a <- a - mean(a - x_i)`, `x_i <- a`, and waits for the slowest only then.

    The counterpart of `jd.local_steps`. A round takes the longest of n sums of H computations, which for times that
    vary is less than H times the longest, and one all-reduce. With a number `H_i` for each worker this is Biased Local
    SGD: workers whose `H_i` are in proportion to their speeds finish together, and have equal weight in the average,
    however few steps they took.

    *On the wire*: an all-reduce of the drift `a - x_i`, in float32, per round, kind `"reduced"`.

    *State*: each worker's model and optimizer; the global parameters a and the outer optimizer, replicated. The final
    model is a; a step in the trace is an average.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H, or H_i of each worker, as `schedule.proportional_steps` makes them. A larger value sends and waits
        less, but lets workers drift further apart; start at 8.
      outer: the optimizer of the global parameters, whose gradient is the mean drift. Default: `optax.sgd(1.0)`, which
        averages; `optax.sgd(0.7, momentum=0.9, nesterov=True)` is DiLoCo.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.local_sgd(optax.sgd(0.1), sync_period=4)
      >>> run = replay.run(rule, durations=durations.exponential(1.0), workers=8, seconds=1000)
      >>> len(run.trace.steps) * 4 > 1.3 * 1000 / 2.717857  # bsp: the longest of 8, each time
      True

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, 2019. Lim, Jo, Ko, Go, Hwa, Lee,
      "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems", arXiv:2508.08540, 2025 (H_i).
    """
    # a <- a - mean(a - x_i) is the mean of the models.
    return local_rule("local_sgd", optimizer, outer or optax.sgd(1.0), sync_period=sync_period, delay=0)
