"""Gradients for workers whose data differ: those of neighbors' models on one's own data, and the other way round."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._core.dtypes import working_dtype
from .._core.types import Array, AxisNames, PyTree, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..topology.base import Message, Topology
from ..transforms.local_value_and_grad import local_value_and_grad, to_varying
from ..wire.flat import fused
from ..wire.mixing import weight_of
from .mixing import check_static, check_symmetric


def neighborhood_value_and_grad(
    loss: Callable[..., Any], topology: Topology, *, data_share: float | int = 0.0, axis: AxisNames = "data"
) -> Callable[..., tuple[Any, Updates]]:
    """Neighborhood gradient clustering: each worker also differentiates its neighbors' models on its own data.

    With the gradient `∇F_i(x_j)` of worker `i`'s loss at the parameters of `j`, and the weights of the topology:

        g_i = (1 - α) Σ_j W_ij ∇F_i(x_j) + α Σ_j W_ij ∇F_j(x_i)

    The first sum evens out that models differ, the second that data do. Pass `g` to `gossip`.

    *On the wire*: one model for each neighbor, and with `α > 0` another one back. Beside
    `d_psgd(order="combine_then_adapt")`, which sends the same models, the compiler merges both: `α = 0` is free.

    Args:
      loss: `loss(params, batch, *rest) -> scalar`.
      topology: static, with symmetric weights.
      data_share: `α`, 0 or 1 in the paper: 1 for data that differ strongly.
      axis: the mesh axis of the workers.

    Returns:
      A function with the arguments of `loss` that returns `(value, gradient)`, the value being that of this worker's
      own parameters. It takes `degree + 1` gradients.

    Raises:
      ValueError: `data_share` is outside [0, 1], or the topology is directed or changes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> f = jd.decentralized.neighborhood_value_and_grad(lambda x, a: a * x, jd.topology.ring(3), data_share=1.0)
      >>> jax.vmap(f, axis_name="data")(jnp.ones(3), jnp.array([0.0, 3.0, 6.0]))[1].tolist()  # the mean of all data
      [3.0, 3.0, 3.0]

    References:
      Aketi, Kodge, Roy, "Neighborhood Gradient Clustering: An Efficient Decentralized Learning Method for Non-IID Data
      Distributions", arXiv 2209.14390, 2022.
    """
    if not 0 <= data_share <= 1:
        raise ValueError(f"data_share must be in [0, 1], got {data_share}")
    _check(topology, "neighborhood_value_and_grad")

    def value_and_grad(params, *data):
        comm, value, own, crossed = _cross(loss, topology, axis, params, data, back=data_share > 0)
        mine = weight_of(comm, topology.rounds[0].self_weights)
        total = jax.tree.map(lambda g: _wide(g) * mine, own)
        for message, there, back in crossed:
            total = _add(total, (1 - data_share), weight_of(comm, message.weights), there)
            total = _add(total, data_share, weight_of(comm, _of_destinations(message)), back)
        return value, jax.tree.map(lambda t, g: t.astype(g.dtype), total, own)

    return value_and_grad


def cross_value_and_grad(
    loss: Callable[..., Any], topology: Topology, *, axis: AxisNames = "data"
) -> Callable[..., tuple[Any, Updates]]:
    """Cross-gradient aggregation: the step nearest to one's own gradient that raises no neighbor's loss.

    With the gradients `G` of all neighbors' losses at one's own parameters, and one's own `g` among them:

        min |g̃ - g|²  with  <g̃, G_j> >= 0 for all j;   by duality  g̃ = g + Σ_j v_j G_j,  v >= 0

    solved for each leaf by itself, in its Gram matrix of `degree + 1` rows.

    *On the wire*: one model for each neighbor, and a gradient back.

    Args:
      loss: `loss(params, batch, *rest) -> scalar`.
      topology: static, with symmetric weights.
      axis: the mesh axis of the workers.

    Returns:
      A function with the arguments of `loss` that returns `(value, gradient)`, the value being that of this worker's
      own parameters. It takes `degree + 1` gradients.

    Raises:
      ValueError: the topology is directed or changes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> f = jd.decentralized.cross_value_and_grad(lambda x, a: jnp.vdot(a, x), jd.topology.ring(2))
      >>> data = jnp.array([[1.0, 0.0], [-1.0, 1.0]])  # what helps one hurts the other
      >>> jax.vmap(f, axis_name="data")(jnp.zeros((2, 2)), data)[1].round(4).tolist()
      [[0.5, 0.5], [0.0, 1.0]]

    References:
      Esfandiari, Tan, Jiang, Balu, Herron, Hegde, Sarkar, "Cross-Gradient Aggregation for Decentralized Learning from
      Non-IID data", arXiv 2103.02051, 2021. Lopez-Paz, Ranzato, "Gradient Episodic Memory for Continual Learning",
      arXiv 1706.08840, 2017 (the dual problem).
    """
    _check(topology, "cross_value_and_grad")

    def value_and_grad(params, *data):
        comm, value, own, crossed = _cross(loss, topology, axis, params, data, back=True)
        known = [weight_of(comm, _of_destinations(message)) != 0 for message, _, _ in crossed]

        def project(g, *others):
            others = [jnp.where(here, other, jnp.zeros_like(other)) for here, other in zip(known, others, strict=True)]
            return _project(g, [g, *others])

        return value, jax.tree.map(project, own, *(back for _, _, back in crossed))

    return value_and_grad


def sharpness_aware(
    value_and_grad: Callable[..., tuple[Any, Updates]], *, radius: float | int = 0.05
) -> Callable[..., tuple[Any, Updates]]:
    """The gradient where the loss is highest nearby: `∇F(x + ρ g / |g|)` with `g = ∇F(x)`, each worker by itself.

    Flat minima suffer less from what gossip and codes do to a model. With `gossip(method=quasi_global_momentum(...))`
    this is Q-SADDLe, and around `neighborhood_value_and_grad` N-SADDLe.

    *On the wire*: what `value_and_grad` sends, twice.

    Args:
      value_and_grad: of the first argument, as `local_value_and_grad(loss)` returns it.
      radius: `ρ`. Too large blurs the loss; start at 0.05.

    Returns:
      A function of the same arguments and results, the value being that of the parameters as they are; it takes two
      gradients.

    Raises:
      ValueError: `radius` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> plain = jd.local_value_and_grad(lambda x: x**2, axis=None)
      >>> value, gradient = jd.decentralized.sharpness_aware(plain, radius=0.5)(jnp.array(1.0))
      >>> float(value), float(gradient)
      (1.0, 3.0)

    References:
      Choudhary, Aketi, Roy, "SADDLe: Sharpness-Aware Decentralized Deep Learning with Heterogeneous Data", arXiv
      2405.13961, 2024. Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving
      Generalization", arXiv 2010.01412, 2021.
    """
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}")

    def ascended(params, *data):
        value, first = value_and_grad(params, *data)
        norm = optax.tree.norm(jax.tree.map(_wide, first))
        length = jnp.where(norm > 0, radius / jnp.where(norm > 0, norm, 1), 0)
        there = jax.tree.map(lambda p, g: p + (length.astype(norm.dtype) * _wide(g)).astype(p.dtype), params, first)
        return value, value_and_grad(there, *data)[1]

    return ascended


def _check(topology: Topology, what: str) -> None:
    check_static(topology, what)
    check_symmetric(topology, what)


def _of_destinations(message: Message) -> tuple[float, ...]:
    """What each worker gives to the one that it sends to: weights are symmetric."""
    destination = dict(message.pairs)
    return tuple(message.weights[destination[i]] if i in destination else 0.0 for i in range(len(message.weights)))


def _add(total: Updates, share: float | int, weight: Array | float, gradient: Updates | None) -> Updates:
    if not share:
        return total
    return jax.tree.map(lambda t, g: t + share * weight * _wide(g), total, gradient)


def _wide(x: Array) -> Array:
    return x.astype(working_dtype(x.dtype))


def _cross(
    loss: Callable[..., Any], topology: Topology, axis: AxisNames, params: PyTree, data: Sequence[Any], *, back: bool
) -> tuple[Comm, Any, Updates, list[tuple[Message, Updates, Updates]]]:
    """Own value and gradient, and for each message the gradient of what came, and that of what was sent, come back."""
    comm = over(axis)
    if comm.size != topology.workers:
        raise ValueError(
            f"the topology {topology.name} is one of {topology.workers} workers, and axis {axis!r} has {comm.size}"
        )
    params = to_varying(params, axis)
    differentiate = local_value_and_grad(loss, axis=axis)
    value, own = differentiate(params, *data)
    crossed = []
    for message in topology.rounds[0].messages:
        theirs = _send(comm, message.pairs, params)
        there = differentiate(theirs, *data)[1]
        returned = _send(comm, tuple((j, i) for i, j in message.pairs), there) if back else None
        crossed.append((message, there, returned))
    return comm, value, own, crossed


def _send(comm: Comm, pairs: tuple[tuple[int, int], ...], tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(fused(lambda x: comm.ppermute(x, pairs), leaves))


def _project(g: Array, constraints: Sequence[Array], sweeps: int = 50) -> Array:
    """The nearest vector to `g` with no negative product with a constraint: coordinate descent in the dual."""
    rows = jnp.stack([_wide(c).ravel() for c in constraints])
    size = jnp.maximum(jnp.max(jnp.abs(rows)), jnp.finfo(rows.dtype).tiny)
    rows = rows / size  # products of tiny gradients would vanish
    mine = _wide(g).ravel() / size
    gram, linear = rows @ rows.T, rows @ mine

    def sweep(_, v):
        for j in range(len(constraints)):
            slope = gram[j] @ v + linear[j]
            v = v.at[j].set(jnp.maximum(v[j] - slope / jnp.where(gram[j, j] > 0, gram[j, j], 1), 0))
        return v

    v = lax.fori_loop(0, sweeps, sweep, jnp.zeros_like(linear))
    return ((mine + v @ rows) * size).reshape(g.shape).astype(g.dtype)
