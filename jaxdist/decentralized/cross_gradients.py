"""Gradients for workers whose data differ: of the neighbors' models on local data, and of the local model on theirs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._core.dtypes import widen
from .._core.trees import wide
from .._core.types import Array, AxisNames, PyTree, Updates
from .._core.xla_quirks import largest_entry
from ..comm.base import Comm
from ..topology.base import Permutation, Topology
from ..transforms.local_value_and_grad import local_value_and_grad, to_varying
from ..wire.flat import permute
from ..wire.mixing import weight_of
from .method import check_undirected, workers_of


def neighborhood_value_and_grad(
    loss: Callable[..., Any],
    topology: Topology,
    *,
    data_share: float | int = 0.0,
    radius: float | int = 0.0,
    axis: AxisNames = "data",
) -> Callable[..., tuple[Any, Updates]]:
    """Neighborhood gradient clustering: each worker also differentiates its neighbors' models on its own data.

    With the gradient `∇F_i(x_j)` of worker `i`'s loss at the parameters of `j`, and the weights of the topology:

        g_i = (1 - α) Σ_j W_ij ∇F_i(x_j) + α Σ_j W_ij ∇F_j(x_i)

    The first sum corrects for models that differ, the second for data that differ. The function has the arguments of
    `loss` and returns `(value, g)`, with the value of the local parameters; pass `g` to `gossip`. It takes `degree + 1`
    gradients. With a radius each `∇F_i(x_j)` is taken where `F_i` is highest nearby, as `sharpness_aware` does, and
    this is N-SADDLe: twice the gradients, and no more bytes.

    *On the wire*: one model for each neighbor, and with `α > 0` a gradient back. Beside
    `d_psgd(order="combine_then_adapt")`, which sends the same models, the compiler merges both: `α = 0` is free.

    Args:
      loss: `loss(params, batch, *rest) -> scalar`.
      topology: static, with symmetric weights.
      data_share: `α` in [0, 1], 0 or 1 in the paper: 1 for data that differ strongly.
      radius: `ρ` at least 0; 0 is the gradient itself, and SADDLe's is 0.05 or 0.1.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> f = jd.decentralized.neighborhood_value_and_grad(lambda x, a: a * x, jd.topology.ring(3), data_share=1.0)
      >>> _, gradients = jax.jit(jax.vmap(f, axis_name="data"))(jnp.ones(3), jnp.array([0.0, 3.0, 6.0]))
      >>> gradients.tolist()  # the mean of all data
      [3.0, 3.0, 3.0]

    References:
      Aketi, Kodge, Roy, "Neighborhood Gradient Clustering: An Efficient Decentralized Learning Method for Non-IID Data
      Distributions", arXiv:2209.14390, 2022. N-SADDLe: Choudhary, Aketi, Roy, arXiv:2405.13961, 2024.
    """
    if not 0 <= data_share <= 1:
        raise ValueError(f"data_share must be in [0, 1], got {data_share}")
    if not radius >= 0:
        raise ValueError(f"radius must be at least 0, got {radius}")
    check_undirected(topology, "neighborhood_value_and_grad")

    def value_and_grad(params: PyTree, *data: Any) -> tuple[Any, Updates]:
        cross = partial(_cross_gradients, radius=radius, exchange_back=data_share > 0)
        comm, value, own, neighbors = cross(loss, topology, axis, params, data)
        # W_ii ∇F_i(x_i) belongs to both sums, with shares that add up to 1.
        own_weight = weight_of(comm, topology.rounds[0].self_weights)
        total = jax.tree.map(lambda g: widen(g) * own_weight, own)
        for message, on_own_data, on_their_data in neighbors:
            # (1 - α) W_ij ∇F_i(x_j) + α W_ij ∇F_j(x_i)
            total = _add_weighted(total, 1 - data_share, weight_of(comm, message.weights), on_own_data)
            total = _add_weighted(total, data_share, weight_of(comm, _weights_of_destinations(message)), on_their_data)
        return value, optax.tree.cast_like(total, own)

    return value_and_grad


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
        comm, value, own, neighbors = _cross_gradients(loss, topology, axis, params, data, exchange_back=True)
        has_edge = [weight_of(comm, _weights_of_destinations(message)) != 0 for message, _, _ in neighbors]
        on_their_data = [gradient for _, _, gradient in neighbors]
        return value, jax.tree.map(partial(_project_on_neighbors, has_edge), own, *on_their_data)

    return value_and_grad


def sharpness_aware(
    value_and_grad: Callable[..., tuple[Any, Updates]], *, radius: float | int = 0.05
) -> Callable[..., tuple[Any, Updates]]:
    """The gradient where the loss is highest nearby: `∇F(x + ρ g / |g|)` with `g = ∇F(x)`, on each worker separately.

    Flat minima suffer less from the perturbations of gossip and compression. With
    `gossip(method=quasi_global_momentum(...))` this is Q-SADDLe; N-SADDLe is `neighborhood_value_and_grad(radius=)`,
    since around that one models would travel twice.

    The arguments and results are those of `value_and_grad`, with the value of the parameters themselves.

    *On the wire*: what `value_and_grad` sends, twice; it also takes two gradients.

    Args:
      value_and_grad: of the first argument, as `local_value_and_grad(loss)` returns it.
      radius: `ρ` > 0. Too large smooths the loss too much. 0.05 is that of Foret et al., and of our comparison on
        digits that differ between workers (`benchmarks/reports/2026-11-claims`).

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> plain = jd.local_value_and_grad(lambda x: x**2, axis=None)
      >>> value, gradient = jd.decentralized.sharpness_aware(plain, radius=0.5)(jnp.array(1.0))
      >>> float(value), float(gradient)
      (1.0, 3.0)

    References:
      Choudhary, Aketi, Roy, "SADDLe: Sharpness-Aware Decentralized Deep Learning with Heterogeneous Data", arXiv
      2405.13961, 2024. Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving
      Generalization", arXiv:2010.01412, 2021.
    """
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}")

    def value_and_grad_nearby(params: PyTree, *data: Any) -> tuple[Any, Updates]:
        value, gradient = value_and_grad(params, *data)
        # x + ρ g / |g|, and x where g is zero.
        norm = optax.tree.norm(wide(gradient))
        scale = jnp.where(norm > 0, radius / jnp.where(norm > 0, norm, 1), 0).astype(norm.dtype)
        nearby = jax.tree.map(lambda p, g: p + (scale * widen(g)).astype(p.dtype), params, gradient)
        return value, value_and_grad(nearby, *data)[1]

    return value_and_grad_nearby


def _weights_of_destinations(message: Permutation) -> tuple[float, ...]:
    """The weight `W_ij` of the worker `j` that each worker `i` sends to, since weights are symmetric; else 0."""
    destination = dict(message.pairs)
    return tuple(message.weights[destination[i]] if i in destination else 0.0 for i in range(len(message.weights)))


def _add_weighted(total: Updates, share: float | int, weight: Array | float, gradient: Updates | None) -> Updates:
    if not share:
        return total
    # Where no parameters arrived, the gradient is one at zeros, which may be NaN.
    return jax.tree.map(lambda t, g: t + jnp.where(weight == 0, 0, share * weight * widen(g)), total, gradient)


def _cross_gradients(
    loss: Callable[..., Any],
    topology: Topology,
    axis: AxisNames,
    params: PyTree,
    data: Sequence[Any],
    *,
    radius: float | int = 0.0,
    exchange_back: bool,
) -> tuple[Comm, Any, Updates, list[tuple[Permutation, Updates, Updates | None]]]:
    """Returns the workers, the local value and gradient, and two cross-gradients for each message of the topology.

    These are the gradient of the local loss at the parameters that arrived, and the gradient of the destination's loss
    at the local parameters (`None` without `exchange_back`).
    """
    comm = workers_of(topology, axis)
    params = to_varying(params, axis)
    differentiate = local_value_and_grad(loss, axis=axis)
    differentiate = sharpness_aware(differentiate, radius=radius) if radius else differentiate
    value, own = differentiate(params, *data)
    neighbors = []
    for message in topology.rounds[0].messages:
        # ∇F_i(x_j), and back along the same edge: its source j gets the gradient of its own parameters.
        on_own_data = differentiate(permute(comm, params, message.pairs), *data)[1]
        reverse = tuple((j, i) for i, j in message.pairs)
        neighbors.append((message, on_own_data, permute(comm, on_own_data, reverse) if exchange_back else None))
    return comm, value, own, neighbors


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
