"""PALSGD: DiLoCo whose workers are pulled to the last agreed model now and then."""

import optax

from .._typing import AxisNames
from ..reducers import Reducer
from ..transforms import local_steps, pulled
from ..transforms.local_steps.rounds import SyncPeriod
from ..transforms.optimizers.base import LearningRate, rate_at


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
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """PALSGD: with probability `p` a worker is pulled to the anchor in place of a step, which costs no communication.

    Workers stay closer together than in `diloco`, so that rounds can be longer.

    *On the wire*: as `diloco`; the warm-up averages gradients.

    *State*: that of `local_steps`, and per worker a key and a count.

    Args:
      inner: the optimizer of each worker, with its learning rate inside.
      sync_period: `H`; the paper's code has 100.
      learning_rate: the inner `γ` once more, a number or a schedule of steps: the pull is `γ η / p (x - a)`. `update`
        takes `learning_rate=` too.
      probability: `p`; at 0 this is `diloco`.
      pull: `η`.
      slow_learning_rate: the outer rate, constant, or a schedule that counts rounds.
      momentum: the outer `μ`.
      warmup_steps: so many first steps average gradients and pull nobody.
      seed: of the coins.
      reducer: what carries the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.palsgd(optax.adamw(4e-4), learning_rate=4e-4)

    References:
      Naganuma, Zhang, Yue, Mitliagkas, Witte, Hewett, Lee, "Pseudo-Asynchronous Local SGD: Robust and Efficient
      Data-Parallel Training", arXiv 2504.18454, 2025.
    """
    tx = local_steps(
        pulled(inner, probability=probability, pull=pull, start_step=warmup_steps, seed=seed, axis=axis),
        optax.sgd(slow_learning_rate, momentum=momentum, nesterov=True),
        sync_period=sync_period,
        warmup_steps=warmup_steps,
        reducer=reducer,
        axis=axis,
    )

    def update(updates, state, params=None, **extra_args):
        given = {"learning_rate": rate_at(learning_rate, state.count), **extra_args}
        return tx.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(tx.init, update)
