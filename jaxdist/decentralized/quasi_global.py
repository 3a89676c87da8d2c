"""Quasi-global momentum and Adam: moments that follow the change of the mixed model, not one worker's gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.trees import minus, plus, wide
from .._core.types import Array, PyTree, Updates
from ..topology.base import Topology
from ..transforms.common import LearningRate, moving_average, rate_at
from .d_psgd import doubly_stochastic
from .method import Method, StepContext, StepResult, cast_like
from .mixing import mix


def quasi_global_momentum(
    learning_rate: LearningRate | None = None,
    *,
    momentum: float | int = 0.9,
    decay: float | int | None = None,
    nesterov: bool = False,
) -> Method:
    """Momentum that follows the mean model: it is computed from the change after mixing, not from local gradients.

    With the inner rate `γ` and the step `u(m) = -γ m` of the inner optimizer, plain SGD:

        m = β m̂ + g,   x' = W (x + u(m)),   m̂ <- μ m̂ + (1 - μ) (x - x') / γ

    with `u(g + β m)` for Nesterov. Where data differ, the momentum of local gradients drives workers apart; this does
    not.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per-worker, one model, `m̂`, in float32.

    Args:
      learning_rate: `γ`, the rate of `inner`, a number or a schedule; if it is left out, the update needs
        `learning_rate=`. Where it is 0, `m̂` does not change.
      momentum: `β`.
      decay: `μ`; `β` by default, as in the paper.
      nesterov: use Nesterov momentum, as the paper's experiments do.

    Returns:
      The method, for any doubly stochastic topology, with `optax.sgd(learning_rate)` inside.

    Raises:
      ValueError: `momentum` or `decay` is outside [0, 1); at trace time, there is no rate.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.quasi_global_momentum(0.1))
      >>> def one_worker(x):
      ...     updates, opt_state = tx.update(jnp.ones(()), tx.init(x), x)
      ...     return opt_state.method.value  # (1 - μ) (x - x') / γ
      >>> round(float(jax.vmap(one_worker, axis_name="data")(jnp.zeros(4))[0]), 4)
      0.1

    References:
      Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous
      Data", arXiv:2102.04761, 2021.
    """
    check_range("momentum", momentum, 0, 1)
    decay = momentum if decay is None else decay
    check_range("decay", decay, 0, 1)
    cfg = _Momentum(learning_rate, momentum, decay, nesterov)
    return Method(doubly_stochastic, _init_momentum, partial(_momentum_step, cfg))


class _Momentum(NamedTuple):
    learning_rate: LearningRate | None
    momentum: float | int
    decay: float | int
    nesterov: bool


def _init_momentum(params: PyTree, topology: Topology) -> PyTree:
    del topology
    return jax.tree.map(jnp.zeros_like, params)


def _momentum_step(cfg: _Momentum, context: StepContext) -> StepResult:
    beta, mu = cfg.momentum, cfg.decay
    # m = β m̂ + g. Each step starts from the quasi-global m̂, so `m` itself is not kept.
    gradient = wide(context.gradients)
    velocity = jax.tree.map(lambda m, g: beta * m + g, context.state, gradient)
    direction = jax.tree.map(lambda m, g: g + beta * m, velocity, gradient) if cfg.nesterov else velocity
    # x' = W (x + u(m))
    steps, inner = context.adapt(cast_like(direction, context.gradients))
    params = mix(context, plus(context.params, steps), like=context.params)
    # m̂ <- μ m̂ + (1 - μ) (x - x') / γ, and m̂ where γ is 0.
    rate = _learning_rate(cfg, context)
    change = minus(context.params, params)

    def follow_change(old: Array, x: Array) -> Array:
        gamma = rate.astype(x.dtype)
        return jnp.where(gamma > 0, mu * old + (1 - mu) * x / jnp.where(gamma > 0, gamma, 1), old)

    return StepResult(params, inner, jax.tree.map(follow_change, context.state, change))


def _learning_rate(cfg: _Momentum, context: StepContext) -> Array:
    if context.learning_rate is not None:
        return context.learning_rate
    if cfg.learning_rate is None:
        raise ValueError(
            "quasi-global momentum divides by the rate of the inner optimizer, and there is none: give "
            "quasi_global_momentum(learning_rate), or learning_rate= to the update"
        )
    return rate_at(cfg.learning_rate, context.count)


def quasi_global_adam(*, b1: float | int = 0.9, b2: float | int = 0.99, eps: float | int = 1e-8) -> Method:
    """Adam whose moments follow the mean model: both are averages of the normalized change of the model in a step.

    With `d = x - x'` after mixing and `d̂ = d / |d|` over the whole model:

        m = β1 m̂ + (1 - β1) g,   v = β2 v̂ + (1 - β2) g²,   x' = W (x + u(m / (1 - β1^t) / (√(v / (1 - β2^t)) + ε)))
        m̂ <- β1 m̂ + (1 - β1) d̂,   v̂ <- β2 v̂ + (1 - β2) d̂²

    The authors' code adds the whole gradient to `m`, without `1 - β1`; this is the paper's form.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per-worker, two models, in float32.

    Args:
      b1: `β1`.
      b2: `β2`.
      eps: `ε`.

    Returns:
      The method, for any doubly stochastic topology, with `optax.sgd(learning_rate)` inside.

    Raises:
      ValueError: `b1` or `b2` is outside [0, 1), or `eps` is negative.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.quasi_global_adam())
      >>> def one_worker(x):
      ...     return tx.update(2 * jnp.ones(()), tx.init(x), x)[0]
      >>> round(float(jax.vmap(one_worker, axis_name="data")(jnp.zeros(4))[0]), 4)
      -0.1

    References:
      Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous
      Data", arXiv:2102.04761, 2021.
    """
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    return Method(doubly_stochastic, _init_adam, partial(_adam_step, _Adam(b1, b2, eps)))


class _Adam(NamedTuple):
    b1: float | int
    b2: float | int
    eps: float | int


def _init_adam(params: PyTree, topology: Topology) -> dict[str, PyTree]:
    del topology
    return {"first": jax.tree.map(jnp.zeros_like, params), "second": jax.tree.map(jnp.zeros_like, params)}


def _adam_step(cfg: _Adam, context: StepContext) -> StepResult:
    first, second = _update_moments(cfg, context, wide(context.gradients))
    # Bias corrections 1 - β^t.
    t = context.count.astype(jnp.float32) + 1
    corrections = [1 - jnp.asarray(beta, jnp.float32) ** t for beta in (cfg.b1, cfg.b2)]

    def adam_direction(m: Array, v: Array) -> Array:
        of_first, of_second = (c.astype(m.dtype) for c in corrections)
        return m / of_first / (jnp.sqrt(v / of_second) + cfg.eps)

    steps, inner = context.adapt(cast_like(jax.tree.map(adam_direction, first, second), context.gradients))
    params = mix(context, plus(context.params, steps), like=context.params)
    # d̂ = d / |d|; the small number keeps a step of zero finite.
    change = minus(context.params, params)
    norm = optax.tree.norm(change)
    change = jax.tree.map(lambda d: d / (norm + 1e-8).astype(d.dtype), change)
    first, second = _update_moments(cfg, context, change)
    return StepResult(params, inner, {"first": first, "second": second})


def _update_moments(cfg: _Adam, context: StepContext, x: Updates) -> tuple[Updates, Updates]:
    """`β1 m̂ + (1 - β1) x` and `β2 v̂ + (1 - β2) x²`."""
    first = moving_average(context.state["first"], x, cfg.b1)
    return first, moving_average(context.state["second"], jax.tree.map(jnp.square, x), cfg.b2)
