"""BAGUA's algorithms whose workers hold one model: gradients or momenta are averaged over all of them."""

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
    """Gradients are averaged in full precision: `c_fp_s`, then the optimizer.

    *On the wire* for `n` entries of float32: `2(W-1)/W · 4n` bytes. Hierarchically, `2(L-1)/L · 4n` over the fast axis
    of `L`, and between `M` nodes `2(M-1)/M · 4n/L` for each worker.

    *State*: that of the optimizer.

    Args:
      optimizer: gets the mean gradient.
      hierarchical: average within nodes first; with `axis=(slow, fast)`.
      bucket_bytes: one collective for each bucket of so many bytes; `None` is one for all.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients.

    Raises:
      ValueError: the bucket has no bytes, `hierarchical` without two axes; at trace time, what `all_reduce` raises.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.gradient_allreduce(optax.adam(1e-3))

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
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
    """ByteGrad: gradients are averaged in 8 bits, there and back: `c_lp_s`, then the optimizer.

    An entry of the mean is off by at most half a step of the first code, averaged over workers, and half a step of the
    second; a step is the range of a chunk divided by 255.

    *On the wire* for a bucket of `n` entries: `2(W-1) · (8 + 8⌈n / 8W⌉)` bytes, a quarter of an all-reduce of float32.
    Hierarchically, between `M` nodes the same for `n/L` entries and `M`, and `2(L-1)/L · 4n` over the fast axis of `L`.

    *State*: that of the optimizer, and with feedback that of `c_lp_s`.

    Args:
      optimizer: gets the mean gradient.
      compressor: the code of a chunk; by default `min_max_uint8()`.
      feedback: keep what codes lose, as the paper has it; public code does not.
      hierarchical: average within nodes first, in full precision; with `axis=(slow, fast)`. Codes are those of the
        shards of node means, so the numbers differ from those of one level.
      bucket_bytes: each chunk of a bucket has a range of its own; `None` is one bucket.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients.

    Raises:
      ValueError: the bucket has no bytes, `hierarchical` without two axes; at trace time, what `all_reduce` raises.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.bytegrad(optax.sgd(0.1, momentum=0.9))

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
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
    """QAdam: Adam in full precision for `warmup_steps`, then momenta in 8 bits over a variance at rest.

    `jd.optimizers.qadam` with `c_lp_s` for the momentum. Two things differ from public code, as its docstring says: the
    bias correction of the variance stops where the variance does (there it goes on, and steps become up to
    `1/√(1-β₂^warmup_steps)`, 3.2 times, longer), and the gradient of the last step of the warm-up counts.

    *On the wire*: in the warm-up `2(W-1)/W · 4n` bytes for `n` entries, not hierarchical; then what `c_lp_s` sends.

    *State*: agreed, a count, momentum and variance, 8 bytes an entry; with feedback that of `c_lp_s`.

    Args:
      learning_rate: `η`, a number or a schedule.
      warmup_steps: at least 1, since the variance keeps the value that it has after them.
      b1: `β₁`, of the momentum.
      b2: `β₂`, of the variance.
      eps: `ε`.
      weight_decay: `λ`, decoupled.
      compressor: the code of a chunk of momentum; by default `min_max_uint8()`. The tutorial speaks of one bit:
        `jd.compressors.scaled_sign()` with `feedback=True`.
      feedback: keep what codes lose.
      hierarchical: average momenta within nodes first, in full precision; with `axis=(slow, fast)`.
      bucket_bytes: each chunk of a bucket has a range of its own; `None` is one bucket.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients whose updates contain the learning rate.

    Raises:
      ValueError: an argument is out of range, there is no warm-up, `hierarchical` without two axes; at trace time, what
        `all_reduce` raises.

    Example:
      >>> import jaxdist as jd
      >>> tx = jd.recipes.bagua.qadam(1e-3, warmup_steps=100)

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
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
