"""Stochastic gradient push: for links in one direction."""

import jax
import jax.numpy as jnp

from .._core.trees import plus, wide
from .._core.types import PyTree
from ..topology.base import TOLERANCE, Topology, matrices
from ..topology.spectrum import is_doubly_stochastic
from .method import Method, StepContext, StepResult
from .mixing import mix


def sgp() -> Method:
    """Stochastic gradient push: push-sum corrects for links in one direction only.

    With weights `w_i = 1` at first, and the parameters that the user sees, `z = x / w`:

        x_i = w_i z_i + u_i,   x_i <- Σ_j P_ij x_j,   w_i <- Σ_j P_ij w_j,   z_i = x_i / w_i

    `P` need only be column-stochastic: each worker divides its model into shares, and need not know which workers send
    to it. The sum of all `x` changes by the steps alone, and `Σ w = W` always.

    *On the wire*: one model and 4 bytes for each neighbor; the 4 bytes only where rows do not sum to 1, since the
    weights stay 1 otherwise.

    *State*: per-worker, one number.

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
      Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792, 2019.
      Nedić, Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying Directed Graphs", arXiv
      1406.2075, 2014.
    """
    return Method(_prepare, _init, _step)


def _prepare(topology: Topology) -> Topology:
    if any(abs(weights.sum(0) - 1).max() > TOLERANCE for weights in matrices(topology)):
        raise ValueError(
            f"push-sum needs columns that sum to 1 (each worker divides its model into shares), and those of "
            f"{topology.name} do not: use topology.digraph, or from_matrix with such a matrix"
        )
    return topology


def _init(params: PyTree, topology: Topology) -> PyTree:
    del params
    # Rows that sum to 1 keep all weights at 1, so that there is nothing to store or send.
    return () if is_doubly_stochastic(topology) else jnp.ones((), jnp.float32)


def _step(context: StepContext) -> StepResult:
    steps, inner = context.adapt(context.gradients)
    if is_doubly_stochastic(context.topology):
        return StepResult(mix(context, plus(context.params, steps), like=context.params), inner, ())
    # x = w z + u,  x <- P x,  w <- P w,  z = x / w
    weight = context.state
    x = plus(jax.tree.map(lambda z: z * weight.astype(z.dtype), wide(context.params)), steps)
    x, weight = mix(context, (x, weight), like=(context.params, weight))
    return StepResult(jax.tree.map(lambda x: x / weight.astype(x.dtype), x), inner, weight)
