"""Gradients of the neighbors' models on local data, and of the local model on theirs."""

from collections.abc import Callable, Sequence
from typing import Any

from .._core.types import AxisNames, PyTree, Updates
from ..comm.base import Comm
from ..topology.base import Permutation, Topology
from ..transforms.local_value_and_grad import local_value_and_grad, to_varying
from ..wire.buffers import permute
from .method import workers_of
from .sharpness_aware import sharpness_aware


def weights_of_destinations(message: Permutation) -> tuple[float, ...]:
    """The weight `W_ij` of the worker `j` that each worker `i` sends to, since weights are symmetric; else 0."""
    destination = dict(message.pairs)
    return tuple(message.weights[destination[i]] if i in destination else 0.0 for i in range(len(message.weights)))


def cross_gradients(
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
