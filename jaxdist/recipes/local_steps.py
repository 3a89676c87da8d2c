"""Local SGD, SlowMo and DiLoCo."""

import optax

from .._typing import AxisNames
from ..reducers import Reducer
from ..transforms import local_steps, slow_momentum
from ..transforms.local_steps.buffers import Buffers
from ..transforms.local_steps.fragments import Fragments
from ..transforms.local_steps.rounds import SyncPeriod
from ..transforms.optimizers.base import LearningRate, rate_at


def local_sgd(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    buffers: Buffers = "maintain",
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Local SGD: `H` steps of each worker by itself, then the mean of the models.

    *On the wire*: every `H` steps what the reducer sends for the model, `exact()` `2(W-1)/W · 4n` bytes; else nothing.

    *State*: that of `local_steps`.

    Args:
      inner: the optimizer of each worker.
      sync_period: `H`. Start at 8; plain averaging degrades above 16 or so.
      buffers: `"maintain"`, `"reset"` or `"average"`, as in `local_steps`.
      reducer: what carries the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.local_sgd(optax.sgd(0.1, momentum=0.9), sync_period=8)

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
    """Post-local SGD: data parallel until `switch_step`, Local SGD from there on.

    *On the wire*: until the switch one exact all-reduce of the gradients a step, `2(W-1)/W · 4n` bytes, and the model
    once; then a round every `H` steps.

    *State*: that of `local_steps`.

    Args:
      inner: the optimizer of each worker.
      switch_step: how many steps average gradients; the first drop of the learning rate is a good one.
      sync_period: `H` after the switch; the paper has 16.
      offset: the first round ends after so many steps instead of `H`. 1 is PyTorch's `PeriodicModelAverager`, which
        averages when `(step - warmup_steps) mod period == 0` and so first after a single step.
      reducer: what carries the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.post_local_sgd(optax.sgd(0.1, momentum=0.9), switch_step=1000, sync_period=16)

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
    """SlowMo: Local SGD whose drifts, divided by the learning rate, build up a slow momentum.

    BMUF is `slow_learning_rate=1`; Lookahead one worker with `momentum=0` and `slow_learning_rate < 1`.

    *On the wire*: as `local_sgd`: the momentum costs nothing.

    *State*: that of `local_steps`, with a momentum in float32.

    Args:
      inner: the optimizer of each worker, with the learning rate in it.
      sync_period: `τ`, the steps of a round; the paper has 12.
      learning_rate: that of `inner`, a number or a schedule. `update(..., learning_rate=)` overrides it.
      slow_learning_rate: `α`; leave it at 1.
      momentum: `β`, 0.4 to 0.8; more for more workers.
      buffers: the paper resets those of SGD and maintains those of Adam.
      reducer: what carries the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.slowmo(optax.sgd(0.1, momentum=0.9), sync_period=12, learning_rate=0.1, momentum=0.6)

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

    def update(updates, state, params=None, **extra_args):
        given = {"learning_rate": rate_at(learning_rate, state.count), **extra_args}
        return tx.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(tx.init, update)


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
    """DiLoCo: workers run AdamW by themselves; every `H` steps their mean drift is a step of Nesterov momentum.

    *On the wire*: as `local_sgd`.

    *State*: that of `local_steps`: per worker the state of `inner`; agreed, anchor and momentum in float32.

    Args:
      inner: the optimizer of each worker; the papers have AdamW with clipping at 1.
      sync_period: `H`, 30 to 500.
      learning_rate: the outer `η`, 0.4 to 0.8, more for more workers and longer rounds; constant. A schedule counts
        rounds.
      momentum: the outer `μ`.
      warmup_steps: so many first steps average gradients.
      reducer: what carries the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.diloco(optax.adamw(4e-4), sync_period=100)

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
    """Streaming DiLoCo: fragments of the model meet in turn, what they send arrives later, and workers mix it in.

    *On the wire*: over `H` steps as much as `diloco`, but never more than the largest fragment in one step. The paper
    sends 4 bits an entry: `reducer=jd.compressed(jd.compressors.e3m0())`.

    *State*: that of `local_steps`, with one outer state and one state of the reducer for each fragment.

    Args:
      inner: the optimizer of each worker.
      sync_period: `H` of each fragment; the paper has 100.
      fragments: `strided(P)` where layers are numbered, else a number of groups of about equal bytes.
      delay: `τ`, after how many steps what was sent is merged: 1 to 5.
      merge_alpha: `α`, the share that workers keep of their own.
      learning_rate: the outer `η`; the paper has 0.4.
      momentum: the outer `μ`.
      warmup_steps: so many first steps average gradients.
      reducer: what carries the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation; parameters are `PerWorker`, as for `local_steps`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.streaming_diloco(optax.adamw(4e-4), sync_period=100, fragments=3)

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
