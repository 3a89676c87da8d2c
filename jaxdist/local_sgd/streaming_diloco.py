"""Streaming DiLoCo: fragments of the model that are synchronized in turn, while training goes on.

Rounds, their delay and the merge are those of `local_steps`. `examples/from_scratch/streaming_diloco.py` is the method
in 100 lines of plain JAX.
"""

from typing import Any

import optax

from .._core.options import takes_options_of
from ..transforms.common import LearningRate
from .fragments import Fragments
from .local_steps import local_steps


@takes_options_of(local_steps)
def streaming_diloco(
    inner: optax.GradientTransformation,
    *,
    sync_period: int,
    fragments: Fragments | int,
    delay: int = 1,
    merge_alpha: float | int = 0.5,
    learning_rate: LearningRate = 0.4,
    momentum: float | int = 0.9,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Streaming DiLoCo: fragments are synchronized in turn, and their result is merged into the local model later.

    *On the wire*: over `H` steps as much as `diloco`, but never more than the largest fragment in one step. The paper
    sends 4 bits an entry: `reducer=jd.compressed(jd.compressors.e3m0())`.

    *State*: as `local_steps`, with one outer state and one state of the reducer for each fragment.

    Args:
      sync_period: `H` of each fragment; the paper has 100.
      fragments: `strided(P)` where layers are numbered, else a number of groups of about equal bytes.
      delay: `τ`, the number of steps until the result is merged: 1 to 5.
      merge_alpha: `α`, the weight of a worker's own parameters.
      learning_rate: the outer `η`; the paper has 0.4.
      momentum: the outer `μ`; 0.9 needs a synchronous start, `warmup_steps=` of a fifth of the run, as in `diloco`.
      **options: other arguments: those of `local_steps`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.streaming_diloco(optax.adamw(4e-4), sync_period=100, fragments=3)

    References:
      Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
      arXiv:2501.18512, 2025.
    """
    outer = optax.sgd(learning_rate, momentum=momentum, nesterov=True)
    return local_steps(
        inner,
        outer,
        sync_period=sync_period,
        fragments=fragments,
        delay=delay,
        merge_alpha=merge_alpha,
        **options,
    )
