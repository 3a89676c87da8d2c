"""Adam on each worker before a compressed mean, for top-k and one-bit codes."""

import optax

from .._core.types import AxisNames
from ..optimizers.frozen_adam import check_adam
from ..reducers.base import Reducer
from ..transforms.all_reduce import all_reduce
from ..transforms.common import LearningRate
from ..transforms.local_gradients import per_worker


def compressed_adam(
    learning_rate: LearningRate,
    reducer: Reducer,
    *,
    b1: float | int = 0.9,
    b2: float | int = 0.999,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Adam of each worker's own gradients, whose updates are then averaged by a compressing reducer.

        m_w = β₁ m_w + (1-β₁) g_w,  v_w = β₂ v_w + (1-β₂) g_w²;   u = reduce(m̂_w / (√v̂_w + ε));   x -= η (u + λ x)

    With sparse or one-bit codes, Adam *after* the mean sees a gradient of rare spikes: the variance of an entry that
    arrives once in a hundred steps is that of the spike, and its steps are far too short. Here the moments see every
    local gradient, and the code selects among updates of one scale. It equals `chain(per_worker(scale_by_adam()),
    all_reduce(reducer), add_decayed_weights(λ), scale_by_learning_rate(η))`. Low-rank, dense and unbiased codes
    do not need it: use Adam after the mean, which averages the noise of the workers before it divides.

    *On the wire*: what the reducer sends for the gradients. *State*: per worker, `m` and `v` of the size of the
    model, in the dtype of the parameters, and two counts; the state of the reducer.

    Args:
      learning_rate: `η`, a number or a schedule. Start at twice the rate of `exact()` or at the same; in our runs 2e-3.
      reducer: `error_feedback(compressed(top_k(0.01)))`, `error_feedback(two_shot(scaled_sign()))`, or another with
        feedback: what is left out of an update is sent later. The residual has no learning rate in it yet.
      b1: `β₁`.
      b2: `β₂`.
      eps: `ε`.
      weight_decay: `λ`, decoupled and not compressed, as in AdamW.

    Raises:
      ValueError: a moment's decay or a weight decay outside of its range, and whatever `all_reduce` refuses.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.recipes.compressed_adam(0.1, jd.error_feedback(jd.compressed(jd.top_k(0.5))), axis=None)
      >>> gradient, state = jnp.array([4.0, -1.0, 0.0, 0.0]), tx.init(jnp.zeros(4))
      >>> updates, _ = tx.update(gradient, state, jnp.zeros(4))
      >>> [round(float(x), 4) for x in updates]
      [-0.1, 0.1, -0.0, -0.0]

    References:
      Chen, Shen, Huang, Liu, "Quantized Adam with Error Feedback", arXiv:2004.14180, 2020 (with one scale for all
      entries of a quantizer, and a server).
    """
    check_adam(b1, b2, eps, weight_decay)
    return optax.chain(
        per_worker(optax.scale_by_adam(b1=b1, b2=b2, eps=eps)),
        all_reduce(reducer, axis=axis),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
