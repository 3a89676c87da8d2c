"""Methods for data that differ between workers: D², gradient tracking, quasi-global momentum and Adam."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.trees import minus, next_count, plus, tree_where, wide
from .._core.types import Array, Float, Int, PyTree, State, Updates
from ..topology.base import Topology
from ..topology.spectrum import lazy, smallest_eigenvalue
from ..transforms.common import LearningRate, moving_average, rate_at, zeros_like
from .method import (
    Method,
    StepContext,
    StepResult,
    check_doubly_stochastic,
    check_undirected,
    mix,
    mixing_delta,
)
from .plain import Order, check_order, d_psgd

# The smallest eigenvalue must be above -1/3. An even ring has exactly -1/3, and there noise accumulates.
SMALLEST_EIGENVALUE = -1 / 3 + 1e-6


@with_description
def d2(*, exact_diffusion: bool | None = None) -> Method:
    """Each worker subtracts the disagreement that it has had with its neighbors so far, so that bias cancels.

    With the steps `u` of the inner optimizer, the correction `c`, 0 at first, and `W̃` that is `W` or `(I + W) / 2`:

        y = x + u - c,   x <- W̃ y,   c <- c + (y - W̃ y)

    which is the paper's `x_{t+1} = W̃ (2 x_t - x_{t-1} + u_t - u_{t-1})`, `x_1 = W̃ (x_0 + u_0)` for a constant rate.
    The paper's form sums up the rounding errors of the models; those of `c` are far smaller.

    Its fixed point at a constant rate is the optimum of the mean loss, however much the workers' data differ. If the
    rate changes, pass `learning_rate=` to the update: `c` is proportional to it, and with an outdated scale would throw
    the model off where the rate drops.

    *Topologies*: static, with symmetric weights.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per-worker, one model, `c`, in float32.

    Args:
      exact_diffusion: mix with `(I + W) / 2`, which is Exact Diffusion. `None`: where `λ_min <= -1/3`, since D²
        diverges below that and accumulates noise at `-1/3`, the value of every ring with an even number of workers.
        `False` refuses such graphs.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> def last(method):
      ...     tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=method)
      ...     def step(state, data):  # the loss of worker i is i (x - i)² / 2; the optimum of their sum is 5
      ...         updates, opt_state = tx.update(data[0] * (state["x"] - data[0]), state["opt"], state["x"])
      ...         return {"x": state["x"] + updates, "opt": opt_state}, {}
      ...     state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 8)
      ...     run = jd.simulate(step, workers=8)
      ...     for _ in range(500):
      ...         state, _ = run(state, jnp.arange(8.0))
      ...     return round(float(jd.consensus(state["x"])), 2)
      >>> last(jd.decentralized.d2()), last(jd.decentralized.d_psgd()) == 5
      (5.0, False)

    References:
      Tang, Lian, Yan, Zhang, Liu, "D²: Decentralized Training over Decentralized Data", arXiv:1803.07068, 2018. Yuan,
      Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning", arXiv:1702.05122, 2019.
    """
    return Method(partial(_prepare_d2, exact_diffusion), _init_d2, _d2_step)


def _prepare_d2(exact_diffusion: bool | None, topology: Topology) -> Topology:
    smallest = smallest_eigenvalue(check_undirected(topology, "d2"))
    if exact_diffusion is False and smallest <= SMALLEST_EIGENVALUE:
        raise ValueError(
            f"d2 diverges on {topology.name}: its smallest eigenvalue is {smallest:.3f}, and must be above -1/3; leave "
            "out exact_diffusion=False"
        )
    use_lazy = smallest <= SMALLEST_EIGENVALUE if exact_diffusion is None else exact_diffusion
    return lazy(topology) if use_lazy else topology


class CorrectionState(NamedTuple):
    """The state of `d2` of one worker: its correction `c`, and the learning rate that this is proportional to.

    The corrections of all workers sum to zero and belong to the steps of the inner optimizer, not to the models. So a
    round of local steps treats them as that optimizer's momentum.
    """

    correction: Updates
    rate: Float[Array, ""]

    model_fields = ()
    buffer_fields = ("correction", "rate")


def _init_d2(params: PyTree, topology: Topology) -> CorrectionState:
    return CorrectionState(zeros_like(params), jnp.zeros((), jnp.float32))


def _d2_step(context: StepContext) -> StepResult:
    steps, inner = context.adapt(context.gradients)
    old_correction, old_rate = context.state
    # The correction is a sum of differences of steps, so it scales with the rate: not in the paper, whose rate is
    # constant.
    rate = old_rate if context.learning_rate is None else context.learning_rate.astype(old_rate.dtype)
    ratio = jnp.where(old_rate > 0, rate / jnp.where(old_rate > 0, old_rate, 1), 1)
    correction = jax.tree.map(lambda c: ratio.astype(c.dtype) * c, old_correction)
    # y = x + u - c,  x <- W̃ y,  c <- c + (y - W̃ y)
    before_mixing = plus(context.params, minus(steps, correction))
    delta = mixing_delta(context, before_mixing, like=context.params)
    new_correction = minus(correction, delta)
    if context.learning_rate is not None:
        # A step at rate zero says nothing about the disagreement of gradients.
        new_correction, rate = tree_where(rate > 0, (new_correction, rate), (old_correction, old_rate))
    return StepResult(plus(before_mixing, delta), inner, CorrectionState(new_correction, rate))


@with_description
def gradient_tracking(*, order: Order = "adapt_then_combine") -> Method:
    """A tracker `y` follows the mean gradient of all workers, and the inner optimizer steps along it.

        adapt_then_combine:  y <- W (y + g - g'),   x <- W (x + u(y))
        combine_then_adapt:  y <- W y + g - g',     x <- W x + u(y)

    with the steps `u` of the inner optimizer and the gradient `g'` of the previous step (`y` and `g'` are 0 at first).
    The mean of all `y` is that of all `g` in every step, so different data cause no bias at a constant rate.

    *Topologies*: doubly stochastic, including those that change.

    *On the wire*: two models for each neighbor; in `"combine_then_adapt"` as one message, before the gradient is
    known.

    *State*: per-worker, two models, the tracker and the last gradient, in float32.

    Args:
      order: `"adapt_then_combine"` works at larger rates. The other is DIGing, which diverges sooner: at a rate of .1
        on a torus of 8 workers and losses of curvature 1 to 4, where .02 works.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.gradient_tracking()
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.one_peer_exponential(4), method=method)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target[0], state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(200):
      ...     state, _ = run(state, jnp.arange(4.0))
      >>> state["x"].value.round(4).tolist()
      [1.5, 1.5, 1.5, 1.5]

    References:
      Nedić, Olshevsky, Shi, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs"
      (DIGing), arXiv:1607.03218, 2017. Di Lorenzo, Scutari, "NEXT: In-Network Nonconvex Optimization", arXiv
      1602.00591, 2016 (the adapt-then-combine form).
    """
    check_order(order)
    step = _adapt_then_combine if order == "adapt_then_combine" else _combine_then_adapt
    return Method(check_doubly_stochastic, _init_tracker, step)


class TrackerState(NamedTuple):
    """The state of `gradient_tracking` of one worker: its tracker `y` and its last gradient.

    Their means over workers are equal whatever the models are, so a round of local steps leaves them as they are.
    """

    tracker: Updates
    gradient: Updates

    model_fields = ()


def _init_tracker(params: PyTree, topology: Topology) -> TrackerState:
    return TrackerState(zeros_like(params), zeros_like(params))


def _adapt_then_combine(context: StepContext) -> StepResult:
    gradient = _current_gradient(context)
    # y <- W (y + g - g'),   x <- W (x + u(y))
    tracker = mix(context, plus(context.state.tracker, minus(gradient, context.state.gradient)))
    steps, inner = context.adapt(optax.tree.cast_like(tracker, context.gradients))
    params = mix(context, plus(context.params, steps), like=context.params)
    return StepResult(params, inner, TrackerState(tracker, gradient))


def _combine_then_adapt(context: StepContext) -> StepResult:
    gradient, tracker = _current_gradient(context), context.state.tracker
    # y <- W y + g - g',   x <- W x + u(y): both averages in one message.
    params, tracker = mix(context, (wide(context.params), tracker), like=(context.params, tracker))
    tracker = plus(tracker, minus(gradient, context.state.gradient))
    steps, inner = context.adapt(optax.tree.cast_like(tracker, context.gradients))
    return StepResult(plus(params, steps), inner, TrackerState(tracker, gradient))


def _current_gradient(context: StepContext) -> Updates:
    """The local gradient; an inactive worker repeats its last one, so that the tracker does not change."""
    last = context.state.gradient
    gradient = optax.tree.cast_like(context.gradients, last)
    return gradient if context.active is None else tree_where(context.active, gradient, last)


@with_description
def quasi_global_momentum(
    learning_rate: LearningRate | None = None,
    *,
    momentum: float | int = 0.9,
    decay: float | int | None = None,
    nesterov: bool = False,
    method: Method | None = None,
) -> Method:
    """Momentum that follows the mean model: it is computed from the change after mixing, not from local gradients.

    With the inner rate `γ` and the step `u(m) = -γ m` of the inner optimizer, plain SGD:

        m = β m̂ + g,   x' = W (x + u(m)),   m̂ <- μ m̂ + (1 - μ) (x - x') / γ

    with `u(g + β m)` for Nesterov. Where data differ, the momentum of local gradients drives workers apart; this does
    not. The inner optimizer is `optax.sgd(learning_rate)`.

    *Topologies*: doubly stochastic, and what `method` needs.

    *On the wire*: what `method` sends; by default one model for each neighbor, as `d_psgd`.

    *State*: per-worker, one model, `m̂`, in float32, and the state of `method`.

    Args:
      learning_rate: `γ`, the rate of `inner`, a number or a schedule; if it is left out, the update needs
        `learning_rate=`. Where it is 0, `m̂` does not change.
      momentum: `β` in [0, 1).
      decay: `μ` in [0, 1); `β` by default, as in the paper.
      nesterov: use Nesterov momentum, as the paper's experiments do.
      method: takes the step and mixes, in place of `W (x + u(m))`: `choco(compressor, step_size=)` sends few bytes.
        By default `d_psgd()`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.quasi_global_momentum(0.1))
      >>> def one_worker(x):
      ...     updates, opt_state = tx.update(jnp.ones(()), tx.init(x), x)
      ...     return opt_state.method.value.momentum  # (1 - μ) (x - x') / γ
      >>> round(float(jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.zeros(4))[0]), 4)
      0.1

    References:
      Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous
      Data", arXiv:2102.04761, 2021.
    """
    check_range("momentum", momentum, 0, 1)
    decay = momentum if decay is None else decay
    check_range("decay", decay, 0, 1)
    method = d_psgd() if method is None else method

    def init(params: PyTree, topology: Topology) -> MomentumState:
        return MomentumState(zeros_like(params), method.init(params, topology))

    step = partial(_momentum_step, learning_rate, momentum, decay, nesterov, method)
    return Method(
        lambda topology: method.prepare(check_doubly_stochastic(topology)),
        init,
        step,
        method.entrywise,
        method.flattens,
    )


class MomentumState(NamedTuple):
    """Per worker: the quasi-global momentum `m̂`, and the state of the method that mixes."""

    momentum: Updates
    method: State

    model_fields = ("method",)
    buffer_fields = ("momentum",)


def _momentum_step(
    learning_rate: LearningRate | None,
    beta: float | int,
    mu: float | int,
    nesterov: bool,
    method: Method,
    context: StepContext,
) -> StepResult:
    # m = β m̂ + g. Each step starts from the quasi-global m̂, so `m` itself is not kept.
    kept, gradient = context.state.momentum, wide(context.gradients)
    velocity = jax.tree.map(lambda m, g: beta * m + g, kept, gradient)
    direction = jax.tree.map(lambda m, g: g + beta * m, velocity, gradient) if nesterov else velocity
    # x' = W (x + u(m)), or what the method makes of it
    direction = optax.tree.cast_like(direction, context.gradients)
    params, inner, state = method.step(context._replace(gradients=direction, state=context.state.method))
    # m̂ <- μ m̂ + (1 - μ) (x - x') / γ, and m̂ where γ is 0.
    rate = _learning_rate(learning_rate, context)
    change = minus(context.params, params)

    def follow_change(old: Array, x: Array) -> Array:
        gamma = rate.astype(x.dtype)
        return jnp.where(gamma > 0, mu * old + (1 - mu) * x / jnp.where(gamma > 0, gamma, 1), old)

    return StepResult(params, inner, MomentumState(jax.tree.map(follow_change, kept, change), state))


def _learning_rate(learning_rate: LearningRate | None, context: StepContext) -> Array:
    if context.learning_rate is not None:
        return context.learning_rate
    if learning_rate is None:
        raise ValueError(
            "quasi-global momentum divides by the rate of the inner optimizer, and there is none: give "
            "quasi_global_momentum(learning_rate), or learning_rate= to the update"
        )
    return rate_at(learning_rate, context.count)


@with_description
def quasi_global_adam(*, b1: float | int = 0.9, b2: float | int = 0.99, eps: float | int = 1e-8) -> Method:
    """Adam whose moments follow the mean model: both are averages of the normalized change of the model in a step.

    With `d = x - x'` after mixing and `d̂ = d / |d|` over the whole model:

        m = β1 m̂ + (1 - β1) g,   v = β2 v̂ + (1 - β2) g²,   x' = W (x + u(m / (1 - β1^t) / (√(v / (1 - β2^t)) + ε)))
        m̂ <- β1 m̂ + (1 - β1) d̂,   v̂ <- β2 v̂ + (1 - β2) d̂²

    with `b1` and `b2` in [0, 1) for `β1` and `β2`, and `eps` for `ε`. The authors' code adds the whole gradient to `m`,
    without `1 - β1`; this is the paper's form. The inner optimizer is `optax.sgd(learning_rate)`.

    *Topologies*: doubly stochastic.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per-worker, two models, in float32.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.quasi_global_adam())
      >>> def one_worker(x):
      ...     return tx.update(2 * jnp.ones(()), tx.init(x), x)[0]
      >>> round(float(jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.zeros(4))[0]), 4)
      -0.1

    References:
      Lin, Karimireddy, Stich, Jaggi, arXiv:2102.04761, 2021, as `quasi_global_momentum`.
    """
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    step = partial(_adam_step, b1, b2, eps)
    return Method(check_doubly_stochastic, _init_adam, step, entrywise=False)


class MomentsState(NamedTuple):
    """The state of `quasi_global_adam` of one worker: the moments `m̂` and `v̂`, and their count of steps."""

    first: Updates
    second: Updates
    # A count of its own: where the moments are reset, so is their bias correction.
    count: Int[Array, ""]

    model_fields = ()
    buffer_fields = ("first", "second", "count")


def _init_adam(params: PyTree, topology: Topology) -> MomentsState:
    return MomentsState(zeros_like(params), zeros_like(params), jnp.zeros((), jnp.int32))


def _adam_step(b1: float | int, b2: float | int, eps: float | int, context: StepContext) -> StepResult:
    # m = β1 m̂ + (1 - β1) g,   v = β2 v̂ + (1 - β2) g²
    first, second = _update_moments(b1, b2, context.state, wide(context.gradients))
    # Bias corrections 1 - β^t.
    count = next_count(context.state.count)
    t = count.astype(jnp.float32)
    corrections = [1 - jnp.asarray(beta, jnp.float32) ** t for beta in (b1, b2)]

    # m / (1 - β1^t) / (√(v / (1 - β2^t)) + ε)
    def adam_direction(m: Array, v: Array) -> Array:
        of_first, of_second = (c.astype(m.dtype) for c in corrections)
        return m / of_first / (jnp.sqrt(v / of_second) + eps)

    steps, inner = context.adapt(optax.tree.cast_like(jax.tree.map(adam_direction, first, second), context.gradients))
    params = mix(context, plus(context.params, steps), like=context.params)
    # d̂ = d / |d|; the small number keeps a step of zero finite.
    change = minus(context.params, params)
    norm = optax.tree.norm(change)
    change = jax.tree.map(lambda d: d / (norm + 1e-8).astype(d.dtype), change)
    first, second = _update_moments(b1, b2, context.state, change)
    return StepResult(params, inner, MomentsState(first, second, count))


def _update_moments(b1: float | int, b2: float | int, old: MomentsState, x: Updates) -> tuple[Updates, Updates]:
    """`β1 m̂ + (1 - β1) x` and `β2 v̂ + (1 - β2) x²`."""
    return moving_average(old.first, x, b1), moving_average(old.second, jax.tree.map(jnp.square, x), b2)
