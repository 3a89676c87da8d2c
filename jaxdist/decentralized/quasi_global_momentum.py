"""Quasi-global momentum: momentum from the change of the averaged model instead of local gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.trees import minus, wide
from .._core.types import Array, PyTree, State, Updates
from ..topology.base import Topology
from ..transforms.common import LearningRate, rate_at, zeros_like
from .d_psgd import d_psgd
from .method import Method, StepContext, StepResult, check_doubly_stochastic


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

    quasi_global = _QuasiGlobalMomentum(learning_rate, momentum, decay, nesterov, method)
    return Method(quasi_global.prepare, quasi_global.init, quasi_global.step, method.entrywise, method.flattens)


class MomentumState(NamedTuple):
    """Per worker: the quasi-global momentum `m̂`, and the state of the method that mixes."""

    momentum: Updates
    method: State

    model_fields = ("method",)
    buffer_fields = ("momentum",)


class _QuasiGlobalMomentum(NamedTuple):
    """In the formulas `momentum` is `β`, and `decay` is `μ`."""

    learning_rate: LearningRate | None
    momentum: float | int
    decay: float | int
    nesterov: bool
    method: Method

    def prepare(self, topology: Topology) -> Topology:
        return self.method.prepare(check_doubly_stochastic(topology))

    def init(self, params: PyTree, topology: Topology) -> MomentumState:
        return MomentumState(zeros_like(params), self.method.init(params, topology))

    def step(self, context: StepContext) -> StepResult:
        # m = β m̂ + g. Each step starts from the quasi-global m̂, so `m` itself is not kept.
        kept, gradient = context.state.momentum, wide(context.gradients)
        velocity = jax.tree.map(lambda m, g: self.momentum * m + g, kept, gradient)
        direction = jax.tree.map(lambda m, g: g + self.momentum * m, velocity, gradient) if self.nesterov else velocity
        # x' = W (x + u(m)), or what the method makes of it
        direction = optax.tree.cast_like(direction, context.gradients)
        params, inner, state = self.method.step(context._replace(gradients=direction, state=context.state.method))
        # m̂ <- μ m̂ + (1 - μ) (x - x') / γ, and m̂ where γ is 0.
        rate = self._learning_rate(context)
        change = minus(context.params, params)

        def follow_change(old: Array, x: Array) -> Array:
            gamma = rate.astype(x.dtype)
            return jnp.where(gamma > 0, self.decay * old + (1 - self.decay) * x / jnp.where(gamma > 0, gamma, 1), old)

        return StepResult(params, inner, MomentumState(jax.tree.map(follow_change, kept, change), state))

    def _learning_rate(self, context: StepContext) -> Array:
        if context.learning_rate is not None:
            return context.learning_rate
        if self.learning_rate is None:
            raise ValueError(
                "quasi-global momentum divides by the rate of the inner optimizer, and there is none: give "
                "quasi_global_momentum(learning_rate), or learning_rate= to the update"
            )
        return rate_at(self.learning_rate, context.count)
