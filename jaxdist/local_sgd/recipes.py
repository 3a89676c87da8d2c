"""`local_steps` as in the papers: Local SGD, post-local SGD, SlowMo, DiLoCo, streaming DiLoCo and SparseLoCo.

The state of each is that of `local_steps`, and so are the arguments `inner`, `reducer`, `warmup_steps` and `axis`.
"""

import optax

from .._core.types import AxisNames
from ..compressors.combinators import chained
from ..compressors.sign import two_means
from ..compressors.sparse import block_top_k
from ..reducers.base import Reducer
from ..reducers.compressed import compressed
from ..reducers.feedback import error_feedback
from ..transforms.common import LearningRate
from .base import local_steps, with_rate
from .fragments import Fragments, SyncPeriod
from .outer import slow_momentum
from .state import Buffers


def local_sgd(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    buffers: Buffers = "maintain",
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Local SGD: `H` local steps, then the mean of the models.

    *On the wire*: every `H` steps the reducer's collectives for the model, with `exact()` `2(W-1)/W · 4n` bytes; on all
    other steps nothing.

    Args:
      inner: the optimizer of each worker.
      sync_period: `H`. Start at 8; plain averaging degrades above 16 or so.
      buffers: `"maintain"`, `"reset"` or `"average"`, as in `local_steps`.
      reducer: averages the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.local_sgd(optax.sgd(0.1, momentum=0.9), sync_period=8)

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767, 2019.
    """
    return local_steps(inner, optax.sgd(1.0), sync_period=sync_period, buffers=buffers, reducer=reducer, axis=axis)


def post_local_sgd(
    inner: optax.GradientTransformation,
    *,
    switch_step: int,
    sync_period: SyncPeriod,
    offset: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Post-local SGD: data parallel until `switch_step`, Local SGD afterwards.

    *On the wire*: until the switch one exact all-reduce of the gradients a step, `2(W-1)/W · 4n` bytes, and the model
    once; then a round every `H` steps.

    Args:
      inner: the optimizer of each worker.
      switch_step: the number of steps that average gradients; the first drop of the learning rate is a good choice.
      sync_period: `H` after the switch; the paper has 16.
      offset: the length of the first round, if not `H`. 1 is PyTorch's `PeriodicModelAverager`, which
        averages when `(step - warmup_steps) mod period == 0` and so first after a single step.
      reducer: averages the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.post_local_sgd(optax.sgd(0.1, momentum=0.9), switch_step=1000, sync_period=16)

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217, 2020.
    """
    return local_steps(
        inner,
        optax.sgd(1.0),
        sync_period=sync_period,
        offset=offset,
        warmup_steps=switch_step,
        reducer=reducer,
        axis=axis,
    )


def slowmo(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    learning_rate: LearningRate,
    slow_learning_rate: float | int = 1.0,
    momentum: float | int = 0.5,
    buffers: Buffers = "reset",
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """SlowMo: Local SGD whose drifts, divided by the learning rate, accumulate in a slow momentum.

    BMUF is `slow_learning_rate=1`; Lookahead is one worker with `momentum=0` and `slow_learning_rate < 1`.

    *On the wire*: as `local_sgd`; the momentum costs nothing.

    *State*: as `local_steps`, with a momentum in float32.

    Args:
      inner: the optimizer of each worker, with its learning rate.
      sync_period: `τ`, the steps of a round; the paper has 12.
      learning_rate: that of `inner`, a number or a schedule. `update(..., learning_rate=)` overrides it.
      slow_learning_rate: `α`; leave it at 1.
      momentum: `β`, 0.4 to 0.8; more for more workers.
      buffers: as in `local_steps`; the paper resets those of SGD and maintains those of Adam.
      reducer: averages the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.slowmo(optax.sgd(0.1, momentum=0.9), sync_period=12, learning_rate=0.1, momentum=0.6)

    References:
      Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
      arXiv 1910.00643, 2020.
    """
    tx = local_steps(
        inner,
        slow_momentum(learning_rate=slow_learning_rate, momentum=momentum),
        sync_period=sync_period,
        buffers=buffers,
        reducer=reducer,
        axis=axis,
    )
    return with_rate(tx, learning_rate)


def diloco(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    learning_rate: LearningRate = 0.7,
    momentum: float | int = 0.9,
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: `H` local steps of AdamW, then one step of Nesterov momentum along the mean drift.

    *On the wire*: as `local_sgd`.

    *State*: as `local_steps`: per worker the state of `inner`; replicated, anchor and momentum in float32.

    Args:
      inner: the optimizer of each worker; the papers have AdamW with clipping at 1.
      sync_period: `H`, 30 to 500.
      learning_rate: the outer `η`, 0.4 to 0.8, more for more workers and longer rounds; constant. A schedule counts
        rounds.
      momentum: the outer `μ`.
      warmup_steps: the number of first steps that average gradients.
      reducer: averages the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.diloco(optax.adamw(4e-4), sync_period=100)

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, 2023.
      Charles et al., "Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling Laws for
      DiLoCo", arXiv 2503.09799, 2025 (which rates).
    """
    return local_steps(
        inner,
        optax.sgd(learning_rate, momentum=momentum, nesterov=True),
        sync_period=sync_period,
        warmup_steps=warmup_steps,
        reducer=reducer,
        axis=axis,
    )


def streaming_diloco(
    inner: optax.GradientTransformation,
    *,
    sync_period: int,
    fragments: Fragments | int,
    delay: int = 1,
    merge_alpha: float | int = 0.5,
    learning_rate: LearningRate = 0.4,
    momentum: float | int = 0.9,
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Streaming DiLoCo: fragments are synchronized in turn, and their result is merged into the local model later.

    *On the wire*: over `H` steps as much as `diloco`, but never more than the largest fragment in one step. The paper
    sends 4 bits an entry: `reducer=jd.compressed(jd.compressors.e3m0())`.

    *State*: as `local_steps`, with one outer state and one state of the reducer for each fragment.

    Args:
      inner: the optimizer of each worker.
      sync_period: `H` of each fragment; the paper has 100.
      fragments: `strided(P)` where layers are numbered, else a number of groups of about equal bytes.
      delay: `τ`, the number of steps until the result is merged: 1 to 5.
      merge_alpha: `α`, the weight of a worker's own parameters.
      learning_rate: the outer `η`; the paper has 0.4.
      momentum: the outer `μ`.
      warmup_steps: the number of first steps that average gradients.
      reducer: averages the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.streaming_diloco(optax.adamw(4e-4), sync_period=100, fragments=3)

    References:
      Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", arXiv
      2501.18512, 2025.
    """
    return local_steps(
        inner,
        optax.sgd(learning_rate, momentum=momentum, nesterov=True),
        sync_period=sync_period,
        fragments=fragments,
        delay=delay,
        merge_alpha=merge_alpha,
        warmup_steps=warmup_steps,
        reducer=reducer,
        axis=axis,
    )


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
      warmup_steps: the number of first steps that average gradients.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.sparse_loco(optax.adamw(4e-4), sync_period=30)

    References:
      Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706,
      2025 (with another code of two bits and another unit of positions).
    """
    # The two-bit code is applied to the values that top-k selects.
    code = chained(block_top_k(density, block=block), two_means(block=values_block))
    return local_steps(
        inner,
        optax.sgd(learning_rate),
        sync_period=sync_period,
        warmup_steps=warmup_steps,
        reducer=error_feedback(compressed(code), decay=decay),
        axis=axis,
    )
