"""NGC: the mean of a worker's gradient and the cross-gradients of its neighbors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.dtypes import widen
from .._core.types import Array, AxisNames, PyTree, Updates
from ..topology.base import Topology
from ..wire.mixing import multiply_in_dtype, weight_of
from .cross_gradients import cross_gradients, weights_of_destinations
from .method import check_undirected


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
      Distributions", arXiv:2209.14390, 2022. N-SADDLe: Choudhary, Aketi, Roy, "SADDLe: Sharpness-Aware Decentralized
      Deep Learning with Heterogeneous Data", arXiv:2405.13961, 2024.
    """
    check_range("data_share", data_share, 0, 1, ends="[]")
    check_range("radius", radius, 0, ends="[]")
    check_undirected(topology, "neighborhood_value_and_grad")

    def value_and_grad(params: PyTree, *data: Any) -> tuple[Any, Updates]:
        cross = partial(cross_gradients, radius=radius, exchange_back=data_share > 0)
        comm, value, own, neighbors = cross(loss, topology, axis, params, data)
        # W_ii ∇F_i(x_i) belongs to both sums, with shares that add up to 1.
        own_weight = weight_of(comm, topology.rounds[0].self_weights)
        total = jax.tree.map(lambda g: multiply_in_dtype(widen(g), own_weight), own)
        for message, on_own_data, on_their_data in neighbors:
            # (1 - α) W_ij ∇F_i(x_j) + α W_ij ∇F_j(x_i)
            total = _add_weighted(total, 1 - data_share, weight_of(comm, message.weights), on_own_data)
            total = _add_weighted(total, data_share, weight_of(comm, weights_of_destinations(message)), on_their_data)
        return value, optax.tree.cast_like(total, own)

    return value_and_grad


def _add_weighted(total: Updates, share: float | int, weight: Array | float, gradient: Updates | None) -> Updates:
    if not share:
        return total
    # Where no parameters arrived, the gradient is one at zeros, which may be NaN.
    return jax.tree.map(
        lambda t, g: t + jnp.where(weight == 0, 0, share * multiply_in_dtype(widen(g), weight)), total, gradient
    )
