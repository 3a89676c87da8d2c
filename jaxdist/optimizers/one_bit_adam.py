"""1-bit Adam: momentum in one bit an entry after a warm-up."""

import optax

from .._core.checks import check_count
from .._core.types import AxisNames
from ..compressors.scaled_sign import scaled_sign
from ..reducers.error_feedback import error_feedback
from ..reducers.reducer import Reducer
from ..reducers.two_shot import two_shot
from ..transforms.common import LearningRate
from .frozen_adam import FrozenAdam


def one_bit_adam(
    learning_rate: LearningRate,
    *,
    freeze_step: int,
    b1: float | int = 0.9,
    b2: float | int = 0.999,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Adam for `freeze_step` steps, then momentum SGD with Adam's last variance, whose momentum is sent as signs.

    With the gradient `g_w` of worker `w` and the mean `ḡ`, while `t <= freeze_step`: `m = β₁ m + (1-β₁) ḡ` and
    `v = β₂ v + (1-β₂) ḡ²`. Afterwards `m = d · reduce((β₁ m + (1-β₁) g_w) / d)` with `d = √v + ε`, and `v` is constant.
    Always `x -= η (m / d + λ x)`, without bias correction (`qadam` corrects). **Not as in the paper**, which sends `m`
    itself. Entries whose gradient was zero in all of the warm-up do not change afterwards.

    The updates contain the learning rate, and `update` takes `examples=` and `active=`, which weight gradients as in
    `all_reduce`; where no worker has examples the gradient is zero, and the step goes on with it.

    *On the wire*: in the warm-up one all-reduce, `2(W-1)/W · 4n` bytes sent for `n` entries; afterwards the reducer's
    collectives: by default one all-to-all and one all-gather of about `2(W-1)/W · n/8` bytes together, 32 times less.

    *State*: replicated, momentum and variance in float32 or better; by default a residual per worker and a sharded one.

    Args:
      learning_rate: `η`, a number or a schedule. Warm it up: the first steps are longer than Adam's.
      freeze_step: steps of the warm-up, at least 1. The variance must have settled: take as many as the learning rate
        warms up, 15 to 20 % of training.
      b1: `β₁`, of the momentum.
      b2: `β₂`, of the variance. It must have forgotten its start: `1 / (1-β₂)` well below `freeze_step`.
      eps: `ε`.
      weight_decay: `λ`, decoupled.
      reducer: averages the momentum; by default `error_feedback(two_shot(scaled_sign()))`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.optimizers.one_bit_adam(0.1, freeze_step=1, axis=None)
      >>> params = jnp.zeros(3)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for gradient in (jnp.array([1.0, -1.0, 0.0]), jnp.array([2.0, -2.0, 5.0])):
      ...     updates, state = update(gradient, state, params)
      >>> (updates == 0).tolist()  # the third entry has no variance
      [False, False, True]

    References:
      Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
      arXiv:2102.02888, 2021.
    """
    check_count("freeze_step", freeze_step, 1)
    chosen = error_feedback(two_shot(scaled_sign())) if reducer is None else reducer
    return FrozenAdam(learning_rate, freeze_step, b1, b2, eps, weight_decay, False, chosen, axis).as_transformation()
