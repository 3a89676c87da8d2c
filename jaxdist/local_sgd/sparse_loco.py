"""SparseLoCo: DiLoCo of the largest entries, with error feedback instead of momentum."""

from typing import Any

import optax

from .._core.options import takes_options_of
from ..compressors.block_top_k import block_top_k
from ..compressors.chained import chained
from ..compressors.two_means import two_means
from ..reducers.compressed import compressed
from ..reducers.error_feedback import error_feedback
from ..transforms.common import LearningRate
from .fragments import SyncPeriod
from .local_steps import local_steps


@takes_options_of(local_steps, fixed=["reducer"])
def sparse_loco(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod = 30,
    density: float = 64 / 4096,
    block: int = 4096,
    values_block: int = 256,
    decay: float | int = 0.95,
    learning_rate: LearningRate = 1.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """SparseLoCo: every `H` steps each worker sends the largest 1 to 3 % of entries, with error feedback for the rest.

    With the drift `Δ_w`: `a_w = β e_w + Δ_w`, `s_w = two_means(block_top_k(a_w))`, `e_w = a_w - s_w`, and the global
    parameters move by `-α mean(s_w)`. There is no outer momentum: error feedback takes its place.

    *On the wire*: every `H` steps one all-gather. For each whole block of 4096 entries 64 positions of 8 bits and 64
    values of 2 bits, and 8 bytes of means for each 256 values: 10.25 bits for an entry sent, 200 times less than
    float32, where indices of 12 bits within a block make it 14 (146 times less). Every worker receives `W-1` of these.

    *State*: as `local_steps`; per worker `e_w`, float32, of the size of the model.

    Args:
      inner: the optimizer of each worker; the paper has AdamW.
      sync_period: `H`, 15 to 250.
      density: the fraction that is sent, 64 of 4096. Up to 0.03 the loss is that of DiLoCo or better.
      block: the number of entries, in the order of the leaf, among which the largest are selected. The paper has 64 by
        64 tiles of matrices.
      values_block: the number of values that share two means.
      decay: `β`; a lower one forgets unsent drift sooner.
      learning_rate: `α`; constant, or a schedule that counts rounds. A run of 72 billion parameters ended with 0.65.
      **options: other arguments: those of `local_steps`, but for `reducer`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.sparse_loco(optax.adamw(4e-4), sync_period=30)

    References:
      Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706,
      2025 (with another code of two bits and another unit of positions).
    """
    # The two-bit code is applied to the values that top-k selects.
    code = chained(block_top_k(density, block=block), two_means(block=values_block))
    outer, reducer = optax.sgd(learning_rate), error_feedback(compressed(code), decay=decay)
    return local_steps(inner, outer, sync_period=sync_period, reducer=reducer, **options)
