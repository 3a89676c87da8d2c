"""Quasi-global Adam: moments from the change of the averaged model instead of local gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.dtypes import widest_float
from .._core.trees import minus, next_count, plus, wide
from .._core.types import Array, Int, PyTree, Updates
from ..topology.base import Topology
from ..transforms.common import moving_average, zeros_like
from .method import Method, StepContext, StepResult, check_doubly_stochastic, mix


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
      Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous
      Data", arXiv:2102.04761, 2021, as `quasi_global_momentum`.
    """
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    adam = _QuasiGlobalAdam(b1, b2, eps)
    return Method(check_doubly_stochastic, adam.init, adam.step, entrywise=False)


class MomentsState(NamedTuple):
    """The state of `quasi_global_adam` of one worker: the moments `m̂` and `v̂`, and their count of steps."""

    first: Updates
    second: Updates
    # A count of its own: where the moments are reset, so is their bias correction.
    count: Int[Array, ""]

    model_fields = ()
    buffer_fields = ("first", "second", "count")


class _QuasiGlobalAdam(NamedTuple):
    b1: float | int
    b2: float | int
    eps: float | int

    def init(self, params: PyTree, topology: Topology) -> MomentsState:
        return MomentsState(zeros_like(params), zeros_like(params), jnp.zeros((), jnp.int32))

    def step(self, context: StepContext) -> StepResult:
        # m = β1 m̂ + (1 - β1) g,   v = β2 v̂ + (1 - β2) g²
        first, second = self._update_moments(context.state, wide(context.gradients))
        # Bias corrections 1 - β^t.
        count = next_count(context.state.count)
        t = count.astype(widest_float())
        corrections = [1 - jnp.asarray(beta, t.dtype) ** t for beta in (self.b1, self.b2)]

        # m / (1 - β1^t) / (√(v / (1 - β2^t)) + ε)
        def adam_direction(m: Array, v: Array) -> Array:
            of_first, of_second = (c.astype(m.dtype) for c in corrections)
            return m / of_first / (jnp.sqrt(v / of_second) + self.eps)

        steps, inner = context.adapt(
            optax.tree.cast_like(jax.tree.map(adam_direction, first, second), context.gradients)
        )
        params = mix(context, plus(context.params, steps), like=context.params)
        # d̂ = d / |d|; the small number keeps a step of zero finite.
        change = minus(context.params, params)
        norm = optax.tree.norm(change)
        change = jax.tree.map(lambda d: d / (norm + 1e-8).astype(d.dtype), change)
        first, second = self._update_moments(context.state, change)
        return StepResult(params, inner, MomentsState(first, second, count))

    def _update_moments(self, old: MomentsState, x: Updates) -> tuple[Updates, Updates]:
        """`β1 m̂ + (1 - β1) x` and `β2 v̂ + (1 - β2) x²`."""
        return moving_average(old.first, x, self.b1), moving_average(old.second, jax.tree.map(jnp.square, x), self.b2)
