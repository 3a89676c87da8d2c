"""SGP: averages over one-way links, corrected by push-sum weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.dtypes import factor_dtype
from .._core.trees import plus, wide
from .._core.types import Array, Float, PyTree, Updates
from ..topology.base import TOLERANCE, Topology, matrices
from ..topology.spectrum import is_doubly_stochastic
from .d_psgd import d_psgd
from .method import Method, StepContext, StepResult, check_connected, mix


@with_description
def sgp() -> Method:
    """Stochastic gradient push: push-sum corrects for links in one direction only.

    With weights `w_i = 1` at first, and the parameters that the user sees, `z = x / w`:

        x_i = w_i z_i + u_i,   x_i <- Σ_j P_ij x_j,   w_i <- Σ_j P_ij w_j,   z_i = x_i / w_i

    Each worker divides its model into shares, and need not know which workers send to it. The sum of all `x` changes by
    the steps alone, and `Σ w = W` always.

    *Topologies*: column-stochastic and strongly connected.

    *On the wire*: one model and 4 bytes for each neighbor; the 4 bytes only where rows do not sum to 1, since the
    weights stay 1 otherwise.

    *State*: per-worker, one number.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> graph = jd.topology.digraph(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
      >>> tx = jd.gossip(optax.sgd(1.0), graph, method=jd.decentralized.sgp())
      >>> def one_worker(x):
      ...     opt_state = tx.init(x)
      ...     for _ in range(8):
      ...         updates, opt_state = tx.update(jnp.zeros(()), opt_state, x)
      ...         x = x + updates
      ...     return x
      >>> found = jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([3.0, 0.0, 6.0]))
      >>> float(jnp.abs(found - 3).max()) < 1e-3
      True

    References:
      Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792, 2019.
      Nedić, Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying Directed Graphs",
      arXiv:1406.2075, 2014.
    """
    return Method(check_columns, _init_weight, _push)


class PushSumState(NamedTuple):
    """The state of `sgp` of one worker on a graph whose rows do not sum to 1: its push-sum weight `w`."""

    weight: Float[Array, ""]

    keeps_apart = "push-sum weights, by which the models count in their mean"

    def weigh_drift(self, anchor: Updates, drift: Updates) -> Updates:
        """`w a - x`, with the numerator `x = w z`, is `w (a - z)`; all `w` sum to the number of workers."""
        del anchor
        return scale_models(drift, self.weight)


def check_columns(topology: Topology) -> Topology:
    """Returns the topology, after a check that each worker divides its model into shares that sum to 1."""
    if any(np.max(abs(weights.sum(0) - 1)) > TOLERANCE for weights in matrices(topology)):
        raise ValueError(
            f"push-sum needs columns that sum to 1 (each worker divides its model into shares), and those of "
            f"{topology.name} do not: use topology.digraph, or from_matrix with such a matrix"
        )
    return check_connected(topology)


def _init_weight(params: PyTree, topology: Topology) -> PyTree:
    # Rows that sum to 1 keep all weights at 1, so that there is nothing to store or send.
    return () if is_doubly_stochastic(topology) else PushSumState(jnp.ones((), factor_dtype(params)))


def _push(context: StepContext) -> StepResult:
    # With w = 1 always this is D-PSGD.
    if not jax.tree.leaves(context.state):
        return d_psgd().step(context)
    steps, inner = context.adapt(context.gradients)
    # x = w z + u,  x <- P x,  w <- P w,  z = x / w
    weight = context.state.weight
    x = plus(scale_models(wide(context.params), weight), steps)
    x, weight = mix(context, (x, weight), like=(context.params, weight))
    return StepResult(jax.tree.map(lambda x: x / weight.astype(x.dtype), x), inner, PushSumState(weight))


def scale_models(tree: PyTree, factor: Array) -> PyTree:
    """Multiplies the leaves by a push-sum weight, each in its own dtype."""
    return jax.tree.map(lambda x: factor.astype(x.dtype) * x, tree)
