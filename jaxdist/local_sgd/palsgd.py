"""PALSGD: local SGD with random pulls toward the last global parameters."""

from typing import Any

import optax

from .._core.options import takes_options_of
from .._core.types import AxisNames
from ..transforms.common import LearningRate
from .diloco import diloco
from .fragments import SyncPeriod
from .local_steps import with_rate
from .random_pull import random_pull


@takes_options_of(diloco)
def palsgd(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod = 100,
    learning_rate: LearningRate,
    probability: float | int = 0.2,
    pull: float | int = 0.5,
    slow_learning_rate: LearningRate = 0.7,
    momentum: float | int = 0.9,
    warmup_steps: int = 100,
    seed: int = 0,
    axis: AxisNames = "data",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """PALSGD: DiLoCo whose inner steps are, with probability `p`, a pull toward the anchor, as in `random_pull`.

    Workers stay closer together than in `diloco`, so that rounds can be longer.

    *On the wire* and *State*: as `diloco`, with a key and a count per worker.

    Args:
      inner: the optimizer of each worker, with its learning rate inside.
      sync_period: `H`; the paper's code has 100.
      learning_rate: `γ`, the same as that of `inner`, a number or a schedule of steps. `update(..., learning_rate=)`
        overrides it.
      probability: `p`; at 0 this is `diloco`.
      pull: `η`.
      slow_learning_rate: the outer rate, constant, or a schedule that counts rounds.
      warmup_steps: the number of first steps that average gradients and never pull.
      seed: draws the pulls.
      **options: other arguments: those of `diloco`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.palsgd(optax.adamw(4e-4), learning_rate=4e-4)

    References:
      Naganuma et al., "Pseudo-Asynchronous Local SGD: Robust and Efficient Data-Parallel Training", arXiv:2504.18454,
      2025.
    """
    pulls = random_pull(inner, probability=probability, pull=pull, start_step=warmup_steps, seed=seed, axis=axis)
    tx = diloco(
        pulls,
        sync_period=sync_period,
        learning_rate=slow_learning_rate,
        momentum=momentum,
        warmup_steps=warmup_steps,
        axis=axis,
        **options,
    )
    return with_rate(tx, learning_rate)
