"""RelaySGD: models are relayed along a tree, so that each worker averages over all workers, with a delay for some."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.trees import plus
from .._core.types import Array, PyTree
from ..comm.base import Comm
from ..topology.base import Topology, color_edges, matrix
from ..wire.flat import fuse, map_groups
from .method import Method, StepContext, StepResult, check_static


class _Color(NamedTuple):
    """One color of the tree's edges: the pairs of workers, and the number of workers behind the partner of each."""

    pairs: tuple[tuple[int, int], ...]
    behind: tuple[int, ...]


@with_description
def relay_sgd() -> Method:
    """Each worker sends along an edge of a tree the mean of all models on its side, and averages over all `W` workers.

    With `n_ji` the number of workers behind the edge from `j` to `i`, and `m_ji` what came over it:

        h_i = x_i + u_i;   m_ij = (h_i + Σ_{k ≠ j} n_ki m_ki) / n_ij, sent;   x_i = (h_i + Σ_j n_ji m_ji) / W

    The model of a worker at distance `d` enters as it was `d - 1` steps ago, and each counts exactly once: different
    data cause no bias, and the spectral gap does not matter. The paper relays sums and counts, with `x_0` for workers
    whose model has not arrived yet; means that start at `x_0` are the same without counts.

    *Topologies*: trees: `topology.path`, `binary_tree`, or another one; weights do not matter.

    *On the wire*: one model for each neighbor.

    *State*: per-worker, the last message of each edge, in float32: as many models as the busiest worker has neighbors
    (two in a path, three in a binary tree; a star has `W-1`, on all workers). All must start from one model, as
    `init_state` and `place` make them.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.05), jd.topology.path(4), method=jd.decentralized.relay_sgd())
      >>> def step(state, data):  # the loss of worker i is i (x - 5 + i)² / 2; the optimum of their sum is 2
      ...     updates, opt_state = tx.update(data[0] * (state["x"] - 5 + data[0]), state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(400):
      ...     state, _ = run(state, jnp.arange(1.0, 5.0))
      >>> state["x"].value.round(4).tolist()
      [2.0, 2.0, 2.0, 2.0]

    References:
      Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for Decentralized Deep Learning on Heterogeneous
      Data", arXiv:2110.04175, 2021.
    """
    return Method(_check_tree, _init_messages, _relay_step)


def _init_messages(params: PyTree, topology: Topology) -> list[PyTree]:
    # The last message of each color: the mean of models that all are x_0.
    return [params] * len(_colors(topology))


def _relay_step(context: StepContext) -> StepResult:
    comm, workers = context.comm, context.topology.workers
    steps, inner = context.adapt(context.gradients)
    own, structure = jax.tree.flatten(plus(context.params, steps))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(context.params)]
    colors = _colors(context.topology)
    last_messages = [jax.tree.leaves(message) for message in context.state]
    # n_ji of each color, on this worker; 0 where it has no edge of that color.
    behind = [jnp.asarray(np.array(color.behind, np.float32))[comm.index] for color in colors]
    messages = []
    for i, color in enumerate(colors):
        # m_ij = (h_i + Σ_{k ≠ j} n_ki m_ki) / n_ij: without the message that came over the same edge.
        total = _sum_weighted(own, behind[:i] + behind[i + 1 :], last_messages[:i] + last_messages[i + 1 :])
        count = workers - behind[i]
        sent = [(x / count.astype(x.dtype)).astype(dtype) for x, dtype in zip(total, dtypes, strict=True)]
        received = jax.tree.leaves(map_groups(partial(_send_color, comm, color), structure.unflatten(sent)))
        messages.append([x.astype(leaf.dtype) for x, leaf in zip(received, own, strict=True)])
    # x_i = (h_i + Σ_j n_ji m_ji) / W
    params = [x / workers for x in _sum_weighted(own, behind, messages)]
    return StepResult(structure.unflatten(params), inner, [structure.unflatten(message) for message in messages])


def _send_color(comm: Comm, color: _Color, tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(fuse(lambda x: comm.ppermute(x, color.pairs), leaves))


def _sum_weighted(own: list[Array], counts: list[Array], messages: list[list[Array]]) -> list[Array]:
    """`own + Σ counts · messages`, leaf by leaf."""
    total = list(own)
    for count, message in zip(counts, messages, strict=True):
        total = [x + count.astype(x.dtype) * m for x, m in zip(total, message, strict=True)]
    return total


def _check_tree(topology: Topology) -> Topology:
    adjacent = matrix(check_static(topology, "relay_sgd")) != 0
    # A tree has W - 1 edges, and all workers can be reached from worker 0.
    is_connected = len(_reachable(adjacent, 0, set())) == topology.workers
    if (adjacent != adjacent.T).any() or np.triu(adjacent, 1).sum() != topology.workers - 1 or not is_connected:
        raise ValueError(
            f"relay_sgd needs a tree (exactly one path between any two workers), and {topology.name} is not: use "
            "topology.binary_tree, topology.path, or from_edges"
        )
    return topology


def _colors(topology: Topology) -> list[_Color]:
    """Returns the edges of a tree by color: no two edges of a color share a worker."""
    adjacent = matrix(topology) != 0
    edges = [(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(adjacent, 1)), strict=True)]
    colors = []
    for group in color_edges(edges):
        behind = [0] * topology.workers
        for i, j in group:
            behind[i], behind[j] = len(_reachable(adjacent, j, {i})), len(_reachable(adjacent, i, {j}))
        colors.append(_Color(tuple(sorted([*group, *((j, i) for i, j in group)])), tuple(behind)))
    return colors


def _reachable(adjacent: np.ndarray, start: int, barred: set[int]) -> set[int]:
    """The workers that can be reached from `start` without passing through the `barred` ones."""
    reached, frontier = {start}, [start]
    while frontier:
        neighbors = np.nonzero(adjacent[frontier.pop()])[0].tolist()
        new = [j for j in neighbors if j not in reached and j not in barred]
        reached |= set(new)
        frontier += new
    return reached
