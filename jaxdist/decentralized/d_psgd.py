"""D-PSGD: step, then average with the neighbors, or the other way round."""

from typing import Literal

import jax
import jax.numpy as jnp

from .._core.trees import plus, wide
from .._core.types import PyTree
from ..topology.base import Topology
from .method import Method, Turn, Turned, check_interval, empty, in_turns
from .mixing import change, check_doubly_stochastic

Order = Literal["adapt_then_combine", "combine_then_adapt"]
ORDERS = ("adapt_then_combine", "combine_then_adapt")


def d_psgd(*, order: Order = "adapt_then_combine", interval: int = 1) -> Method:
    """Each worker takes its own step and averages its model with those of its neighbors.

        adapt_then_combine:  x_i <- Σ_j W_ij (x_j + u_j)        combine_then_adapt:  x_i <- u_i + Σ_j W_ij x_j

    with the steps `u` of the inner optimizer at the local gradient. Where workers' data differ both end off the optimum
    by `O(rate)`, the more so the smaller the spectral gap: `d2`, `gradient_tracking` and `relay_sgd` do not.

    *On the wire*: one model for each neighbor; with a complete graph one all-reduce, `2(W-1)/W` models. Divided
    by the interval on average; steps between send nothing.

    *State*: nothing.

    Args:
      order: `"adapt_then_combine"` is the more accurate and the more stable. `"combine_then_adapt"` is the paper's:
        what is sent does not depend on the gradient, so it may travel while that is computed.
      interval: neighbors talk at the end of every so many steps; between these workers step by themselves. A topology
        that changes does so with each talk. More sends less, and workers drift further apart.

    Returns:
      The method, for any doubly stochastic topology.

    Raises:
      ValueError: there is no such order, or the interval is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(1.0), jd.topology.ring(4), method=jd.decentralized.d_psgd())
      >>> def one_worker(x):  # with a gradient of zero the neighbors' average is all that happens
      ...     return x + tx.update(jnp.zeros(()), tx.init(x), x)[0]
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([3.0, 0.0, 0.0, 0.0])).round(5).tolist()
      [1.0, 1.0, 0.0, 1.0]

    References:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case
      Study for Decentralized Parallel Stochastic Gradient Descent", arXiv 1705.09056, 2017.
    """
    check_order(order)
    check_interval(interval)

    def moved(turn: Turn, tree: PyTree) -> PyTree:
        def talk(turn, tree):
            return change(turn, tree, like=turn.params)

        def silent(comm, tree):
            return comm.varying(jax.tree.map(jnp.zeros_like, tree))

        return plus(tree, in_turns(turn, interval, talk, silent, tree))

    def step(turn: Turn) -> Turned:
        if order == "adapt_then_combine":
            steps, inner = turn.adapt(turn.gradients)
            return Turned(moved(turn, plus(turn.params, steps)), inner, ())
        combined = moved(turn, wide(turn.params))
        steps, inner = turn.adapt(turn.gradients)
        return Turned(plus(combined, steps), inner, ())

    return Method(doubly_stochastic, empty, step)


def check_order(order: str) -> None:
    """Raises for a wrong spelling."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")


def doubly_stochastic(topology: Topology) -> Topology:
    """Any graph whose mixing keeps the mean."""
    check_doubly_stochastic(topology)
    return topology
