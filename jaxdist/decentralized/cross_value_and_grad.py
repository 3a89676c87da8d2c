"""CGA: a gradient projected until it agrees with the cross-gradients of all neighbors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.dtypes import widen
from .._core.types import Array, AxisNames, PyTree, Updates
from .._core.xla_quirks import largest_entry
from ..topology.base import Topology
from ..wire.mixing import weight_of
from .cross_gradients import cross_gradients, weights_of_destinations
from .method import check_undirected


def cross_value_and_grad(
    loss: Callable[..., Any], topology: Topology, *, axis: AxisNames = "data"
) -> Callable[..., tuple[Any, Updates]]:
    """Cross-gradient aggregation: the direction nearest to the local gradient that raises no neighbor's loss.

    With the gradients `G` of all neighbors' losses at the local parameters, the local `g` among them:

        min |g̃ - g|²  with  <g̃, G_j> >= 0 for all j;   by duality  g̃ = g + Σ_j v_j G_j,  v >= 0

    solved for each leaf separately, in its Gram matrix of `degree + 1` rows. Arguments and results are those of
    `neighborhood_value_and_grad`.

    *On the wire*: one model for each neighbor, and a gradient back.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> f = jd.decentralized.cross_value_and_grad(lambda x, a: jnp.vdot(a, x), jd.topology.ring(2))
      >>> data = jnp.array([[1.0, 0.0], [-1.0, 1.0]])  # each gradient raises the other's loss
      >>> jax.jit(jax.vmap(f, axis_name="data"))(jnp.zeros((2, 2)), data)[1].round(4).tolist()
      [[0.5, 0.5], [0.0, 1.0]]

    References:
      Esfandiari, Tan, Jiang, Balu, Herron, Hegde, Sarkar, "Cross-Gradient Aggregation for Decentralized Learning from
      Non-IID data", arXiv:2103.02051, 2021. Lopez-Paz, Ranzato, "Gradient Episodic Memory for Continual Learning",
      arXiv:1706.08840, 2017 (the dual problem).
    """
    check_undirected(topology, "cross_value_and_grad")

    def value_and_grad(params: PyTree, *data: Any) -> tuple[Any, Updates]:
        comm, value, own, neighbors = cross_gradients(loss, topology, axis, params, data, exchange_back=True)
        has_edge = [weight_of(comm, weights_of_destinations(message)) != 0 for message, _, _ in neighbors]
        on_their_data = [gradient for _, _, gradient in neighbors]
        return value, jax.tree.map(partial(_project_on_neighbors, has_edge), own, *on_their_data)

    return value_and_grad


def _project_on_neighbors(has_edge: Sequence[Any], g: Array, *others: Array, sweeps: int = 50) -> Array:
    """The vector nearest to `g` with no negative product with a gradient, by coordinate descent in the dual."""
    if not g.size:
        return g
    # Zeros are no constraint: the gradients of workers without this edge.
    constraints = [jnp.where(edge, other, jnp.zeros_like(other)) for edge, other in zip(has_edge, others, strict=True)]
    rows = jnp.stack([widen(c).ravel() for c in (g, *constraints)])
    # Scaled, since products of tiny gradients would underflow.
    size = jnp.maximum(largest_entry(jnp.abs(rows)), jnp.finfo(rows.dtype).tiny)
    rows, own = rows / size, widen(g).ravel() / size
    gram, linear = rows @ rows.T, rows @ own

    # The dual is min |g + Σ v_j G_j|² over v >= 0; its slope in v_j is <G_j, g + Σ v_k G_k>.
    def sweep(_, v):
        for j in range(len(rows)):
            slope = gram[j] @ v + linear[j]
            v = v.at[j].set(jnp.maximum(v[j] - slope / jnp.where(gram[j, j] > 0, gram[j, j], 1), 0))
        return v

    v = lax.fori_loop(0, sweeps, sweep, jnp.zeros_like(linear))
    return ((own + v @ rows) * size).reshape(g.shape).astype(g.dtype)
