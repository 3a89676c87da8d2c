"""D-PSGD: each worker averages its model with those of its neighbors.

`examples/from_scratch/gossip.py` is the method, and CHOCO-SGD, in 100 lines of plain JAX.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import plus, wide
from .._core.types import PyTree
from ..comm.base import Comm
from .method import (
    Method,
    StepContext,
    StepResult,
    check_doubly_stochastic,
    check_interval,
    every_n_steps,
    mixing_delta,
)

Order = Literal["adapt_then_combine", "combine_then_adapt"]
ORDERS = ("adapt_then_combine", "combine_then_adapt")


@with_description
def d_psgd(*, order: Order = "adapt_then_combine", interval: int = 1) -> Method:
    """Each worker takes its own step and averages its model with those of its neighbors.

        adapt_then_combine:  x_i <- Σ_j W_ij (x_j + u_j)        combine_then_adapt:  x_i <- u_i + Σ_j W_ij x_j

    with the steps `u` of the inner optimizer at the local gradient. Where workers' data differ both end off the optimum
    by `O(rate)`, the more so the smaller the spectral gap; `d2`, `gradient_tracking` and `relay_sgd` do not.

    *Topologies*: doubly stochastic.

    *On the wire*: one model for each neighbor; with a complete graph one all-reduce, `2(W-1)/W` models. Divided
    by the interval on average; the steps between send nothing.

    *State*: none.

    Args:
      order: `"adapt_then_combine"` is the more accurate and the more stable. `"combine_then_adapt"` is the paper's:
        it sends models that do not depend on the gradient, so they may be sent while that is computed.
      interval: neighbors communicate at the end of every `interval` steps; between, each worker steps alone. A topology
        that changes does so with each communication. More sends less, and workers drift further apart.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(1.0), jd.topology.ring(4), method=jd.decentralized.d_psgd())
      >>> def one_worker(x):  # with a gradient of zero the neighbors' average is all that happens
      ...     return x + tx.update(jnp.zeros(()), tx.init(x), x)[0]
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([3.0, 0.0, 0.0, 0.0])).round(5).tolist()
      [1.0, 1.0, 0.0, 1.0]

    References:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case
      Study for Decentralized Parallel Stochastic Gradient Descent", arXiv:1705.09056, 2017.
    """
    check_order(order)
    check_interval(interval)
    gossip = _DPSGD(interval)
    step = gossip.adapt_then_combine if order == "adapt_then_combine" else gossip.combine_then_adapt
    return Method(check_doubly_stochastic, lambda params, topology: (), step)


def check_order(order: str) -> None:
    """Checks that `order` is one of `ORDERS`."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")


class _DPSGD(NamedTuple):
    interval: int

    def adapt_then_combine(self, context: StepContext) -> StepResult:
        """A step, then the average with the neighbors."""
        # x_i <- Σ_j W_ij (x_j + u_j)
        steps, inner = context.adapt(context.gradients)
        return StepResult(self._mix(context, plus(context.params, steps)), inner, ())

    def combine_then_adapt(self, context: StepContext) -> StepResult:
        # x_i <- u_i + Σ_j W_ij x_j, whose messages do not wait for the gradient.
        combined = self._mix(context, wide(context.params))
        steps, inner = context.adapt(context.gradients)
        return StepResult(plus(combined, steps), inner, ())

    def _mix(self, context: StepContext, tree: PyTree) -> PyTree:
        """`Σ_j W_ij x_j` in every `interval`-th step, and `x_i` in the steps between."""

        def delta(context: StepContext, tree: PyTree) -> PyTree:
            return mixing_delta(context, tree, like=context.params)

        return plus(tree, every_n_steps(context, self.interval, delta, _zero_delta, tree))


def _zero_delta(comm: Comm, tree: PyTree) -> PyTree:
    # `lax.cond` needs branches of one type, and the delta differs between workers.
    return comm.varying(jax.tree.map(jnp.zeros_like, tree))
