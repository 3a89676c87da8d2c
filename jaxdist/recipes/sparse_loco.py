"""SparseLoCo: the strongest entries of the drift in two bits each, with feedback in place of outer momentum."""

import optax

from .._typing import AxisNames
from ..compressors import block_top_k, chained, two_means
from ..reducers import compressed, error_feedback
from ..transforms import local_steps
from ..transforms.local_steps.rounds import SyncPeriod
from ..transforms.optimizers.base import LearningRate


def sparse_loco(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod = 30,
    density: float = 64 / 4096,
    block: int = 4096,
    values_block: int = 256,
    decay: float | int = 0.95,
    learning_rate: LearningRate = 1.0,
    warmup_steps: int = 0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """SparseLoCo: every `H` steps each worker sends its strongest 1 to 3 % of entries, and keeps the rest for later.

    With the drift `Δ_w`: `a_w = β e_w + Δ_w`, `s_w = two_means(block_top_k(a_w))`, `e_w = a_w - s_w`, and the agreed
    model moves by `-α mean(s_w)`. There is no outer momentum: what was not sent is sent later, which does its part.

    *On the wire*: every `H` steps one all-gather. For each whole block of 4096 entries 64 positions of 8 bits and 64
    values of 2 bits, and 8 bytes of means for each 256 values: 10.25 bits for an entry sent, 200 times less than
    float32, where indices of 12 bits within a block take 14 (146 times). Every worker receives `W-1` of these.

    *State*: that of `local_steps`; per worker `e_w`, float32, of the size of the model.

    Args:
      inner: the optimizer of each worker; the paper has AdamW.
      sync_period: `H`, 15 to 250.
      density: the part that is sent, 64 of 4096. Up to 0.03 the loss is that of DiLoCo or better.
      block: entries that compete with each other, in the order of the leaf. The paper's are 64 by 64 tiles of matrices.
      values_block: values that share two means.
      decay: `β`; lower forgets what was not sent sooner.
      learning_rate: `α`; constant, or a schedule that counts rounds. A run of 72 billion parameters ended with 0.65.
      warmup_steps: so many first steps average gradients.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.sparse_loco(optax.adamw(4e-4), sync_period=30)

    References:
      Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706,
      2025 (with another code of two bits and another unit of positions).
    """
    code = chained(block_top_k(density, block=block), two_means(block=values_block))
    return local_steps(
        inner,
        optax.sgd(learning_rate),
        sync_period=sync_period,
        warmup_steps=warmup_steps,
        reducer=error_feedback(compressed(code), decay=decay),
        axis=axis,
    )
