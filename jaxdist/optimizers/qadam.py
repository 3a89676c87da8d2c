"""QAdam: momentum in 8 bits an entry after a warm-up."""

import optax

from .._core.checks import check_count
from .._core.types import AxisNames
from ..compressors.qsgd import qsgd
from ..reducers.reducer import Reducer
from ..reducers.two_shot import two_shot
from ..transforms.common import LearningRate
from .frozen_adam import FrozenAdam


def qadam(
    learning_rate: LearningRate,
    *,
    warmup_steps: int = 100,
    b1: float | int = 0.9,
    b2: float | int = 0.999,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Adam of mean gradients for `warmup_steps`, then with 8-bit momenta: `m = d · reduce((β₁ m + (1-β₁) g_w) / d)`.

    `x -= η (m̂ / d + λ x)` with `d = √v̂ + ε`, `m̂ = m / (1-β₁ᵗ)` and `v̂ = v / (1-β₂ˢ)`, `s = min(t, warmup_steps)`:
    in the warm-up it is Adam of the mean gradient to the last bit of rounding. Public code lets `s` grow with `t`
    although `v` is frozen, which makes steps up to `1/√(1-β₂^warmup_steps)` = 3.2 times longer over time; and it drops
    the gradient of the last step of the warm-up. Here neither happens. Entries without any gradient in the warm-up do
    not change.

    **Not as in the paper**, which sends `m` and divides by `d` afterwards: momenta are sent in units of `d`, so that
    one scale fits all entries of a block, whatever their variance. Where gradients span three decades, the largest
    distance from the optimum is that of the uncompressed momentum, 0.16; with the momentum itself it was 0.56.

    *On the wire*: in the warm-up one all-reduce, `2(W-1)/W · 4n` bytes sent for `n` entries; afterwards the reducer's
    collectives: by default one all-to-all and one all-gather, about `2(W-1)/W · n` bytes together.

    *State*: replicated, momentum and variance in float32 or better; by default a key and a count of the reducer.

    Args:
      learning_rate: `η`; this and the arguments not listed are those of `one_bit_adam`.
      warmup_steps: steps with the full gradient, at least 1. More gives a better variance and compresses later.
      reducer: averages the momentum; by default `two_shot(qsgd(8))`. With two levels of links, `hierarchical(...)`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx, adam = jd.optimizers.qadam(0.1, warmup_steps=10, axis=None), optax.adam(0.1)
      >>> params, gradient = jnp.zeros(2), jnp.array([1.0, -3.0])
      >>> updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
      >>> bool(jnp.allclose(updates, adam.update(gradient, adam.init(params))[0]))
      True

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    check_count("warmup_steps", warmup_steps, 1)
    chosen = two_shot(qsgd(8)) if reducer is None else reducer
    return FrozenAdam(learning_rate, warmup_steps, b1, b2, eps, weight_decay, True, chosen, axis).as_transformation()
