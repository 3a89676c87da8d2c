"""BAGUA's algorithms with replicated parameters: gradients or momenta are averaged over all workers."""

import optax

from ... import optimizers
from ..._core.types import AxisNames
from ...compressors.base import Compressor
from ...transforms.all_reduce import all_reduce
from ...transforms.common import LearningRate
from .primitives import BUCKET_BYTES, c_fp_s, c_lp_s, levels


def gradient_allreduce(
    optimizer: optax.GradientTransformation,
    *,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients in full precision: `c_fp_s`, then the optimizer.

    *On the wire* for `n` entries of float32: `2(W-1)/W · 4n` bytes. Hierarchically, `2(L-1)/L · 4n` over the fast axis
    of `L`, and between `M` nodes `2(M-1)/M · 4n/L` for each worker.

    *State*: that of the optimizer.

    Args:
      optimizer: gets the mean gradient.
      hierarchical: average within nodes first; with `axis=(slow, fast)`.
      bucket_bytes: the size of a bucket; each has its collective. `None`: one for all.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients.

    Raises:
      ValueError: `bucket_bytes` is not positive, or `hierarchical` without two axes; at trace time, as `all_reduce`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.gradient_allreduce(optax.adam(1e-3))

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    _check_levels(hierarchical, axis)
    reducer = c_fp_s(hierarchical=hierarchical, bucket_bytes=bucket_bytes)
    return optax.with_extra_args_support(optax.chain(all_reduce(reducer, axis=axis), optimizer))


def bytegrad(
    optimizer: optax.GradientTransformation,
    *,
    compressor: Compressor | None = None,
    feedback: bool = False,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """ByteGrad: averages gradients in 8 bits in both directions: `c_lp_s`, then the optimizer.

    The error of an entry of the mean is at most half a step of the first code, averaged over workers, and half a step
    of the second; a step is the range of a chunk divided by 255.

    *On the wire* for a bucket of `n` entries: `2(W-1) · (8 + 8⌈n / 8W⌉)` bytes, a quarter of an all-reduce of float32.
    Hierarchically, between `M` nodes the same for `n/L` entries and `M`, and `2(L-1)/L · 4n` over the fast axis of `L`.

    *State*: that of the optimizer, and with feedback that of `c_lp_s`.

    Args:
      optimizer: gets the mean gradient.
      compressor: of a chunk; by default `min_max_uint8()`.
      feedback: use error feedback, as the paper does; the public implementation does not.
      hierarchical: average within nodes first, in full precision; with `axis=(slow, fast)`. The shards
        of node means are encoded, so the numbers differ from those of one level.
      bucket_bytes: each chunk of a bucket has its own range; `None`: one bucket.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients.

    Raises:
      ValueError: `bucket_bytes` is not positive, or `hierarchical` without two axes; at trace time, as `all_reduce`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.bytegrad(optax.sgd(0.1, momentum=0.9))

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    _check_levels(hierarchical, axis)
    reducer = c_lp_s(compressor, feedback=feedback, hierarchical=hierarchical, bucket_bytes=bucket_bytes)
    return optax.with_extra_args_support(optax.chain(all_reduce(reducer, axis=axis), optimizer))


def qadam(
    learning_rate: LearningRate,
    *,
    warmup_steps: int = 100,
    b1: float | int = 0.9,
    b2: float | int = 0.999,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.0,
    compressor: Compressor | None = None,
    feedback: bool = False,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """QAdam: Adam in full precision for `warmup_steps`, then momenta in 8 bits with a frozen variance.

    `jd.optimizers.qadam` with `c_lp_s` for the momentum. It differs from the public implementation in two ways, as its
    docstring says: the bias correction of the variance is frozen with the variance (there it continues, and steps
    become up to `1/√(1-β₂^warmup_steps)`, 3.2 times, longer), and the gradient of the last warm-up step counts.

    *On the wire*: in the warm-up `2(W-1)/W · 4n` bytes for `n` entries, not hierarchical; then the bytes of `c_lp_s`.

    *State*: replicated, a count, momentum and variance, 8 bytes an entry; with feedback that of `c_lp_s`.

    Args:
      learning_rate: `η`, a number or a schedule.
      warmup_steps: at least 1; the variance is frozen after them.
      b1: `β₁`, of the momentum.
      b2: `β₂`, of the variance.
      eps: `ε`.
      weight_decay: `λ`, decoupled.
      compressor: of a chunk of momentum; by default `min_max_uint8()`. For one bit, as in BAGUA's tutorial:
        `jd.compressors.scaled_sign()` with `feedback=True`.
      feedback: use error feedback.
      hierarchical: average momenta within nodes first, in full precision; with `axis=(slow, fast)`.
      bucket_bytes: each chunk of a bucket has its own range; `None`: one bucket.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients whose updates contain the learning rate.

    Raises:
      ValueError: an argument is out of range, there is no warm-up, or `hierarchical` without two axes; at trace time,
        as `all_reduce`.

    Example:
      >>> import jaxdist as jd
      >>> tx = jd.recipes.bagua.qadam(1e-3, warmup_steps=100)

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    _check_levels(hierarchical, axis)
    return optimizers.qadam(
        learning_rate,
        warmup_steps=warmup_steps,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        reducer=c_lp_s(compressor, feedback=feedback, hierarchical=hierarchical, bucket_bytes=bucket_bytes),
        axis=axis,
    )


def _check_levels(hierarchical: bool, axis: AxisNames) -> None:
    if hierarchical:
        levels(axis)
