"""Stochastic gradient push: for links in one direction."""

import jax
import jax.numpy as jnp

from .._core.trees import plus, wide
from ..topology.base import TOLERANCE, Topology, matrices
from ..topology.spectrum import is_doubly_stochastic
from .method import Method, Turn, Turned
from .mixing import mix


def sgp() -> Method:
    """Stochastic gradient push: push-sum corrects for links in one direction only.

    With weights `w_i = 1` at first, and the parameters that the user sees, `z = x / w`:

        x_i = w_i z_i + u_i,   x_i <- Σ_j P_ij x_j,   w_i <- Σ_j P_ij w_j,   z_i = x_i / w_i

    `P` need only be column-stochastic: each worker cuts what it has into shares, and nobody needs to know who sends to
    it. The sum of all `x` changes by the steps alone, and `Σ w = W` always.

    *On the wire*: one model and 4 bytes for each neighbor; the 4 bytes only where rows do not sum to 1, since the
    weights stay 1 otherwise.

    *State*: per worker one number.

    Returns:
      The method, for any column-stochastic topology.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> graph = jd.topology.digraph(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
      >>> tx = jd.gossip(optax.sgd(1.0), graph, method=jd.decentralized.sgp())
      >>> def one_worker(x):
      ...     opt_state = tx.init(x)
      ...     for _ in range(8):
      ...         updates, opt_state = tx.update(jnp.zeros(()), opt_state, x)
      ...         x = x + updates
      ...     return x
      >>> found = jax.vmap(one_worker, axis_name="data")(jnp.array([3.0, 0.0, 6.0]))
      >>> float(jnp.abs(found - 3).max()) < 1e-3
      True

    References:
      Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv 1811.10792, 2019.
      Nedić, Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying Directed Graphs", arXiv
      1406.2075, 2014.
    """

    def init(params, topology):
        del params
        return () if is_doubly_stochastic(topology) else jnp.ones((), jnp.float32)

    def step(turn: Turn) -> Turned:
        steps, inner = turn.adapt(turn.gradients)
        if is_doubly_stochastic(turn.topology):
            return Turned(mix(turn, plus(turn.params, steps), like=turn.params), inner, ())
        weight = turn.state
        x = plus(jax.tree.map(lambda z: z * weight.astype(z.dtype), wide(turn.params)), steps)
        x, weight = mix(turn, (x, weight), like=(turn.params, weight))
        return Turned(jax.tree.map(lambda x: x / weight.astype(x.dtype), x), inner, weight)

    return Method(_column_stochastic, init, step)


def _column_stochastic(topology: Topology) -> Topology:
    if any(abs(one.sum(0) - 1).max() > TOLERANCE for one in matrices(topology)):
        raise ValueError(
            f"push-sum needs columns that sum to 1, each worker cutting its model into shares, and those of "
            f"{topology.name} do not: use topology.digraph, or from_matrix with such a matrix"
        )
    return topology
