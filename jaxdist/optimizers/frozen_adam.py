"""1-bit Adam and QAdam: Adam whose variance is frozen after a warm-up, so that its momentum can be compressed."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import check_count, check_range
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm, add_bytes
from ..compressors.qsgd import qsgd
from ..compressors.scaled_sign import scaled_sign
from ..reducers.error_feedback import error_feedback
from ..reducers.exact import exact
from ..reducers.reducer import Extras, Reducer, check_reducer
from ..reducers.two_shot import two_shot
from ..state.marks import bind
from ..transforms.common import LearningRate, descend, moving_average, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, local_gradients


class FrozenAdamState(NamedTuple):
    """Replicated: the bytes `sent` by one worker, as (high, low) words, and two trees in float32 or better."""

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    momentum: Updates
    variance: Updates
    reducer: State

    communicates = True


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
    Always `x -= η (m / d + λ x)`, without bias correction, as the original: the first steps are up to
    `(1-β₁) / √(1-β₂)` = 3.2 times as long as Adam's, so warm the learning rate up, or use `qadam`, which corrects.
    The updates contain the learning rate, and `update` takes `examples=` and `active=`, which weight gradients as in
    `all_reduce`; where no worker has examples the gradient is zero, and the step goes on with it.

    **Not as in the paper**: there `m` itself is sent, with one scale for many entries, and divided by `d` afterwards.
    Inside one matrix `v` may span six decades, so entries of small variance move up to a thousand times too far, unless
    `ε` is raised until it hides `v`. Here payloads and residuals are in units of the replicated `d`. Of 64 entries
    whose gradients span three decades, after an early freeze with `ε = 1e-8`, the largest distance from the optimum is
    0.17 (uncompressed 0.16); with the momentum itself it was 11.6.

    Entries whose gradient was zero in all of the warm-up have no variance, and do not change afterwards: a sign code
    has no zero, and divided by `ε` alone they would move far away.

    *On the wire*: in the warm-up one all-reduce, `2(W-1)/W · 4n` bytes sent for `n` entries; afterwards the reducer's
    collectives: by default one all-to-all and one all-gather of about `2(W-1)/W · n/8` bytes together, 32 times less.

    *State*: replicated, momentum and variance in float32 or better; by default a residual per worker and a sharded one.

    Args:
      learning_rate: `η`, a number or a schedule.
      freeze_step: steps of the warm-up, at least 1. The variance must have settled: take as many as the learning rate
        warms up, 15 to 20 % of training.
      b1: `β₁`, of the momentum.
      b2: `β₂`, of the variance. It must have forgotten its start: `1 / (1-β₂)` well below `freeze_step`.
      eps: `ε`.
      weight_decay: `λ`, decoupled.
      reducer: averages the momentum; by default `error_feedback(two_shot(scaled_sign()))`. Its scale is `|x|₁/d`;
        that of the original, `|x|₂/√d`, expands errors of sparse gradients.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.optimizers.one_bit_adam(0.1, freeze_step=1, axis=None)
      >>> params = jnp.zeros(3)
      >>> state = tx.init(params)
      >>> for gradient in (jnp.array([1.0, -1.0, 0.0]), jnp.array([2.0, -2.0, 5.0])):
      ...     updates, state = tx.update(gradient, state, params)
      >>> (updates == 0).tolist()  # the third entry has no variance
      [False, False, True]

    References:
      Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
      arXiv:2102.02888, 2021.
    """
    check_count("freeze_step", freeze_step, 1)
    chosen = error_feedback(two_shot(scaled_sign())) if reducer is None else reducer
    return _frozen_adam(_Config(learning_rate, freeze_step, b1, b2, eps, weight_decay, False, chosen, axis))


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
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx, adam = jd.optimizers.qadam(0.1, warmup_steps=10, axis=None), optax.adam(0.1)
      >>> params, gradient = jnp.zeros(2), jnp.array([1.0, -3.0])
      >>> updates, _ = tx.update(gradient, tx.init(params), params)
      >>> bool(jnp.allclose(updates, adam.update(gradient, adam.init(params))[0]))
      True

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    check_count("warmup_steps", warmup_steps, 1)
    chosen = two_shot(qsgd(8)) if reducer is None else reducer
    return _frozen_adam(_Config(learning_rate, warmup_steps, b1, b2, eps, weight_decay, True, chosen, axis))


class _Config(NamedTuple):
    """`corrected`: divide by `1 - βᵗ` as Adam does, for the variance with the `t` at which it was frozen."""

    learning_rate: LearningRate
    freeze_step: int
    b1: float | int
    b2: float | int
    eps: float | int
    weight_decay: float | int
    corrected: bool
    reducer: Reducer
    axis: AxisNames


def _frozen_adam(cfg: _Config) -> optax.GradientTransformationExtraArgs:
    check_adam(cfg.b1, cfg.b2, cfg.eps, cfg.weight_decay)
    check_reducer(cfg.reducer)
    return optax.GradientTransformationExtraArgs(partial(_init, cfg), partial(_update, cfg))


def _init(cfg: _Config, params: PyTree) -> State:
    check_leaves(params)
    return FrozenAdamState(
        count=jnp.zeros((), jnp.int32),
        sent=jnp.zeros(2, jnp.uint32),
        momentum=zeros_like(params),
        variance=zeros_like(params),
        reducer=bind(cfg.reducer.init(zeros_like(params)), cfg.axis),
    )


def _update(
    cfg: _Config,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    examples: Any = None,
    active: Any = None,
    **extra_args: Any,
) -> tuple[Updates, State]:
    del extra_args
    with jax.named_scope("frozen_adam"):
        gradients, comm, ledger, rate = start_step(cfg, updates, examples, active, state.count, name="frozen_adam")
        compress, warm_up = partial(_compress_step, cfg, Extras(state.count, rate)), partial(_warm_up_step, cfg)
        # The branches differ in their collectives; the count is replicated, so all workers take the same one.
        frozen = state.count >= cfg.freeze_step
        momentum, variance, reducer_state = comms.cond(frozen, compress, warm_up, comm, gradients, state)
        count = next_count(state.count)
        # x -= η (m / d + λ x)
        direction = divide(momentum, _preconditioner(cfg, variance, count))
        if cfg.corrected:
            # m̂ = m / (1 - β₁ᵗ)
            direction = jax.tree.map(lambda m: m / (1 - cfg.b1 ** count.astype(m.dtype)), direction)
        out = descend(direction, rate, cfg.weight_decay, params, updates)
        sent = add_bytes(state.sent, comms.total_bytes(ledger))
        return out, FrozenAdamState(count, sent, momentum, variance, reducer_state)


def _warm_up_step(
    cfg: _Config, comm: Comm, gradients: Updates, state: FrozenAdamState
) -> tuple[Updates, Updates, State]:
    """Returns Adam's moments of the exact mean gradient."""
    mean = exact().reduce(gradients, (), comm)[0].mean
    # m = β₁ m + (1-β₁) ḡ and v = β₂ v + (1-β₂) ḡ²
    momentum = moving_average(state.momentum, mean, cfg.b1)
    return momentum, moving_average(state.variance, jax.tree.map(jnp.square, mean), cfg.b2), state.reducer


def _compress_step(
    cfg: _Config, extras: Extras, comm: Comm, gradients: Updates, state: FrozenAdamState
) -> tuple[Updates, Updates, State]:
    """Returns the reduced momentum and the frozen variance."""
    # Unlike the paper, which sends m itself: one scale would then serve entries whose d differ by decades.
    # The variance is frozen, so `by` is replicated and constant, and residuals of the reducer keep their unit.
    by = _preconditioner(cfg, state.variance, cfg.freeze_step)
    local = mask_unseen(divide(moving_average(state.momentum, gradients, cfg.b1), by), state.variance)
    # reduce((β₁ m + (1-β₁) g_w) / d)
    reduced, reducer_state = cfg.reducer.reduce(local, state.reducer, comm, extras)
    return multiply(mask_unseen(reduced.mean, state.variance), by), state.variance, reducer_state


def _preconditioner(cfg: _Config, variance: Updates, count: Array | int) -> Updates:
    """Returns `d = √v̂ + ε`, where the bias correction of `v̂` stops at `freeze_step`, as the variance does."""
    if cfg.corrected:
        # v̂ = v / (1 - β₂ˢ)
        s = jnp.minimum(count, cfg.freeze_step)
        variance = jax.tree.map(lambda v: v / (1 - cfg.b2 ** s.astype(v.dtype)), variance)
    return preconditioner(variance, cfg.eps)


def check_adam(b1: float | int, b2: float | int, eps: float | int, weight_decay: float | int) -> None:
    """Checks the range of Adam's arguments."""
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    check_range("weight_decay", weight_decay, 0)


def start_step(
    cfg: Any, updates: Updates, examples: Any, active: Any, count: Array, *, name: str
) -> tuple[Updates, Comm, list[comms.Sent], Array]:
    """Returns gradients in float32 or better, the group of workers, the ledger of the bytes it sends, and the rate.

    `cfg` has the `axis` and the `learning_rate` of the optimizer with this name.
    """
    gradients, comm = local_gradients(updates, cfg.axis, examples, active, name=name)
    ledger: list[comms.Sent] = []
    return gradients, comms.count_sent(comm, ledger), ledger, rate_at(cfg.learning_rate, count)


def mask_unseen(tree: Updates, variance: Updates) -> Updates:
    """Sets entries without any gradient so far to zero: sign codes have no zero, and `eps` alone would divide them."""
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros_like(x)), tree, variance)


def preconditioner(variance: Updates, eps: float | int) -> Updates:
    """Returns `√v + ε`, at least the smallest normal number, so that an `eps` of 0 never divides by zero.

    It is replicated. Divided by it, all entries have about the same size and can share one scale.
    """
    return jax.tree.map(lambda v: jnp.maximum(jnp.sqrt(v) + eps, jnp.finfo(v.dtype).tiny), variance)


def divide(tree: Updates, by: Updates) -> Updates:
    """Returns `tree / by`, entry by entry."""
    return jax.tree.map(jnp.divide, tree, by)


def multiply(tree: Updates, by: Updates) -> Updates:
    """Returns `tree · by`, entry by entry."""
    return jax.tree.map(jnp.multiply, tree, by)
