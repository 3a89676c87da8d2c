"""Adam on each worker before a compressed mean."""

from typing import Any

import jax
import optax

from .._core.dtypes import widen
from .._core.options import takes_options_of
from .._core.types import AxisNames
from ..optimizers.frozen_adam import check_adam
from ..reducers.reducer import Reducer
from ..transforms.all_reduce import all_reduce
from ..transforms.common import LearningRate, zeros_like
from ..transforms.per_worker import per_worker


@takes_options_of(all_reduce)
def compressed_adam(
    learning_rate: LearningRate,
    reducer: Reducer,
    *,
    b1: float | int = 0.9,
    b2: float | int = 0.999,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.0,
    axis: AxisNames = "data",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Adam of each worker's own gradients, whose updates are then averaged by a compressing reducer.

        m_w = β₁ m_w + (1-β₁) g_w,  v_w = β₂ v_w + (1-β₂) g_w²;   u = reduce(m̂_w / (√v̂_w + ε));   x -= η (u + λ x)

    With sparse or one-bit codes, Adam *after* the mean sees a gradient of rare spikes: the variance of an entry that
    arrives once in a hundred steps is that of the spike, and its steps are far too short. Here the moments see every
    local gradient, and the code selects among updates of one scale. In float32 it equals
    `chain(per_worker(scale_by_adam()), all_reduce(reducer), add_decayed_weights(λ), scale_by_learning_rate(η))`; for
    parameters in half precision the moments are float32, since `v` would not fall in bfloat16. Low-rank, dense and
    unbiased codes do not need it: use Adam after the mean, which averages the noise of the workers before it divides. A
    worker that passes `examples=0` keeps its moments.

    *On the wire*: what the reducer sends for the gradients. *State*: per worker, `m` and `v` of the size of the
    model, in float32 or better, and two counts; the state of the reducer.

    Args:
      learning_rate: `η`, a number or a schedule. Start at twice the rate of `exact()` or at the same; in our runs 2e-3.
      reducer: `error_feedback(compressed(top_k(0.01)))`, `error_feedback(two_shot(scaled_sign()))`, or another with
        feedback: what is left out of an update is sent later. The residual has no learning rate in it yet.
      b1: `β₁`.
      b2: `β₂`.
      eps: `ε`.
      weight_decay: `λ`, decoupled and not compressed, as in AdamW.
      **options: other arguments: those of `all_reduce`.

    Raises:
      ValueError: a moment's decay or a weight decay outside of its range, and whatever `all_reduce` refuses.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.recipes.compressed_adam(0.1, jd.error_feedback(jd.compressed(jd.top_k(0.5))), axis=None)
      >>> gradient, state = jnp.array([4.0, -1.0, 0.0, 0.0]), tx.init(jnp.zeros(4))
      >>> updates, _ = jax.jit(tx.update)(gradient, state, jnp.zeros(4))
      >>> [round(float(x), 4) for x in updates]
      [-0.1, 0.1, -0.0, -0.0]

    References:
      Chen, Shen, Huang, Liu, "Quantized Adam with Error Feedback", arXiv:2004.14180, 2020 (with one scale for all
      entries of a quantizer, and a server).
    """
    check_adam(b1, b2, eps, weight_decay)
    return optax.chain(
        per_worker(_in_working_dtype(optax.scale_by_adam(b1=b1, b2=b2, eps=eps)), axis=axis),
        all_reduce(reducer, axis=axis, **options),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def _in_working_dtype(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation in float32 or better; its updates have the dtypes of the gradients."""

    def update_fn(updates, state, params=None):
        wide, state = tx.update(jax.tree.map(widen, updates), state, params)
        return jax.tree.map(lambda u, g: u.astype(g.dtype), wide, updates), state

    return optax.GradientTransformation(lambda params: tx.init(zeros_like(params)), update_fn)
