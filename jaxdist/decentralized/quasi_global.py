"""Quasi-global momentum: from what the models did after mixing, not from what one worker's gradients say."""

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.trees import minus, plus, wide
from .._core.types import Array, Updates
from ..transforms.common import LearningRate, moving_average, rate_at
from .d_psgd import doubly_stochastic
from .method import Method, Turn, Turned
from .mixing import mix


def quasi_global_momentum(
    learning_rate: LearningRate | None = None,
    *,
    momentum: float | int = 0.9,
    decay: float | int | None = None,
    nesterov: bool = False,
) -> Method:
    """Momentum that follows the mean model: a worker's own gradients do not enter it, only where mixing led.

    With the inner rate `γ` and the step `u(m) = -γ m` of the inner optimizer, plain SGD:

        m = β m̂ + g,   x' = W (x + u(m)),   m̂ <- μ m̂ + (1 - μ) (x - x') / γ

    with `u(g + β m)` for Nesterov. Where data differ, the momentum of each worker by itself drives them apart; this
    does not.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per worker one model, `m̂`, in float32.

    Args:
      learning_rate: `γ`, that of `inner`, a number or a schedule; if it is left out, the update needs `learning_rate=`.
        Where it is 0, `m̂` stays.
      momentum: `β`.
      decay: `μ`; `β` by default, as in the paper.
      nesterov: look ahead. The paper's experiments do.

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
      Data", arXiv 2102.04761, 2021.
    """
    check_range("momentum", momentum, 0, 1)
    kept = momentum if decay is None else decay
    check_range("decay", kept, 0, 1)

    def init(params, topology):
        del topology
        return jax.tree.map(jnp.zeros_like, params)

    def step(turn: Turn) -> Turned:
        gradient = wide(turn.gradients)
        velocity = jax.tree.map(lambda m, g: momentum * m + g, turn.state, gradient)
        direction = jax.tree.map(lambda m, g: g + momentum * m, velocity, gradient) if nesterov else velocity
        steps, inner = turn.adapt(_as(direction, turn.gradients))
        params = mix(turn, plus(turn.params, steps), like=turn.params)
        rate = _rate(turn, learning_rate)
        moved = minus(turn.params, params)

        def follow(old: Array, x: Array) -> Array:
            own = rate.astype(x.dtype)
            return jnp.where(own > 0, kept * old + (1 - kept) * x / jnp.where(own > 0, own, 1), old)

        return Turned(params, inner, jax.tree.map(follow, turn.state, moved))

    return Method(doubly_stochastic, init, step)


def quasi_global_adam(*, b1: float | int = 0.9, b2: float | int = 0.99, eps: float | int = 1e-8) -> Method:
    """Adam whose moments follow the mean model: both are averages of the normed difference that a step has made.

    With `d = x - x'` after mixing and `d̂ = d / |d|` over the whole model:

        m = β1 m̂ + (1 - β1) g,   v = β2 v̂ + (1 - β2) g²,   x' = W (x + u(m / (1 - β1^t) / (√(v / (1 - β2^t)) + ε)))
        m̂ <- β1 m̂ + (1 - β1) d̂,   v̂ <- β2 v̂ + (1 - β2) d̂²

    The authors' code adds the whole gradient to `m`, without `1 - β1`; this is the paper's form.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per worker two models, in float32.

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
      Data", arXiv 2102.04761, 2021.
    """
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)

    def init(params, topology):
        del topology
        return {"first": jax.tree.map(jnp.zeros_like, params), "second": jax.tree.map(jnp.zeros_like, params)}

    def step(turn: Turn) -> Turned:
        gradient = wide(turn.gradients)
        first = moving_average(turn.state["first"], gradient, b1)
        second = moving_average(turn.state["second"], jax.tree.map(jnp.square, gradient), b2)
        steps_done = turn.count.astype(jnp.float32) + 1
        corrected = [1 - jnp.asarray(b, jnp.float32) ** steps_done for b in (b1, b2)]

        def one(m: Array, v: Array) -> Array:
            by_first, by_second = (c.astype(m.dtype) for c in corrected)
            return m / by_first / (jnp.sqrt(v / by_second) + eps)

        steps, inner = turn.adapt(_as(jax.tree.map(one, first, second), turn.gradients))
        params = mix(turn, plus(turn.params, steps), like=turn.params)
        moved = minus(turn.params, params)
        norm = optax.tree.norm(moved)
        moved = jax.tree.map(lambda d: d / (norm + 1e-8).astype(d.dtype), moved)
        state = {
            "first": moving_average(turn.state["first"], moved, b1),
            "second": moving_average(turn.state["second"], jax.tree.map(jnp.square, moved), b2),
        }
        return Turned(params, inner, state)

    return Method(doubly_stochastic, init, step)


def _rate(turn: Turn, learning_rate: LearningRate | None) -> Array:
    if turn.learning_rate is not None:
        return turn.learning_rate
    if learning_rate is None:
        raise ValueError(
            "quasi-global momentum divides by the rate of the inner optimizer, and there is none: give "
            "quasi_global_momentum(learning_rate), or learning_rate= to the update"
        )
    return rate_at(learning_rate, turn.count)


def _as(tree: Updates, like: Updates) -> Updates:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
