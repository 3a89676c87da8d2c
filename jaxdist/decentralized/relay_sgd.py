"""RelaySGD: sums of models that are relayed along a tree."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.trees import plus
from .._core.types import Array, Float, PyTree, Updates
from ..topology.base import Topology, color_edges, matrix
from ..topology.spectrum import reachable
from ..wire.buffers import permute
from ..wire.shards import map_groups
from .method import Method, StepContext, StepResult, check_static
from .sgp import scale_models


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
    (two in a path, three in a binary tree; a star has `W-1`, on all workers), and one number for each. All must start
    from one model, as `init_state` and `place` make them.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.05), jd.topology.path(4), method=jd.decentralized.relay_sgd())
      >>> def step(state, data):  # the loss of worker i is i (x - 5 + i)² / 2; the optimum of their sum is 2
      ...     updates, opt_state = tx.update(data[0] * (state["x"] - 5 + data[0]), state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(150):
      ...     state, _ = run(state, jnp.arange(1.0, 5.0))
      >>> state["x"].value.round(4).tolist()
      [2.0, 2.0, 2.0, 2.0]

    References:
      Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for Decentralized Deep Learning on Heterogeneous
      Data", arXiv:2110.04175, 2021.
    """
    return Method(_check_tree, _init_relay, _relay_step)


class RelayState(NamedTuple):
    """The state of `relay_sgd` of one worker.

    The last message of each color, and the `shares` of the own model and of these messages in the model that all
    workers would agree on if they took no more steps. They sum to the number of workers, over all of them.
    """

    messages: list[PyTree]
    shares: Float[Array, " messages"]

    keeps_apart = "messages that are under way to distant workers"

    def weigh_drift(self, anchor: Updates, drift: Updates) -> Updates:
        """`s_i (a - x_i) + Σ_j s_ji (a - m_ji)`: relaying keeps the sum over all workers."""
        total = scale_models(drift, self.shares[0])
        for share, message in zip(self.shares[1:], self.messages, strict=True):
            behind = jax.tree.map(lambda a, m: a - m.astype(a.dtype), anchor, message)
            total = plus(total, scale_models(behind, share))
        return total


def _init_relay(params: PyTree, topology: Topology) -> RelayState:
    # The last message of each color: the mean of models that all are x_0. They have no share before the first step.
    colors = len(_colors(topology))
    return RelayState([params] * colors, jnp.zeros(1 + colors, jnp.float32).at[0].set(1))


def _shares(colors: list["_Color"], workers: int) -> np.ndarray:
    """Returns the shares `[W, 1 + colors]` of models and messages, the left eigenvector of relaying without steps.

    With the `n_ji` workers behind a message, `s_i = 1` and `s_ji = n_ji (W - n_ji - 1) / W` up to a common factor.
    """
    behind = np.array([color.behind for color in colors], float).reshape(len(colors), workers).T
    shares = np.concatenate([np.ones((workers, 1)), behind * (workers - behind - 1) / workers], axis=1)
    return shares * workers / shares.sum()


def _relay_step(context: StepContext) -> StepResult:
    comm, workers = context.comm, context.topology.workers
    steps, inner = context.adapt(context.gradients)
    own, structure = jax.tree.flatten(plus(context.params, steps))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(context.params)]
    colors = _colors(context.topology)
    last_messages = [jax.tree.leaves(message) for message in context.state.messages]
    # n_ji of each color, on this worker; 0 where it has no edge of that color.
    behind = [jnp.asarray(np.array(color.behind, np.float32))[comm.index] for color in colors]
    messages = []
    for i, color in enumerate(colors):
        # m_ij = (h_i + Σ_{k ≠ j} n_ki m_ki) / n_ij: without the message that came over the same edge.
        total = _sum_weighted(own, behind[:i] + behind[i + 1 :], last_messages[:i] + last_messages[i + 1 :])
        count = workers - behind[i]
        sent = [(x / count.astype(x.dtype)).astype(dtype) for x, dtype in zip(total, dtypes, strict=True)]
        received = jax.tree.leaves(map_groups(partial(permute, comm, pairs=color.pairs), structure.unflatten(sent)))
        # Without an edge of this color the own model, so that a mean over other numbers of workers is one of models.
        messages.append([jnp.where(behind[i] > 0, x.astype(leaf.dtype), leaf) for x, leaf in zip(received, own)])
    # x_i = (h_i + Σ_j n_ji m_ji) / W
    params = [x / workers for x in _sum_weighted(own, behind, messages)]
    shares = jnp.asarray(_shares(colors, workers), jnp.float32)[comm.index]
    state = RelayState([structure.unflatten(message) for message in messages], shares)
    return StepResult(structure.unflatten(params), inner, state)


def _sum_weighted(own: list[Array], counts: list[Array], messages: list[list[Array]]) -> list[Array]:
    """`own + Σ counts · messages`, leaf by leaf."""
    total = list(own)
    for count, message in zip(counts, messages, strict=True):
        total = [x + count.astype(x.dtype) * m for x, m in zip(total, message, strict=True)]
    return total


def _check_tree(topology: Topology) -> Topology:
    adjacent = matrix(check_static(topology, "relay_sgd")) != 0
    # A tree has W - 1 edges, and all workers can be reached from worker 0.
    is_connected = len(reachable(adjacent, 0)) == topology.workers
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
            behind[i], behind[j] = len(reachable(adjacent, j, {i})), len(reachable(adjacent, i, {j}))
        colors.append(_Color(tuple(sorted([*group, *((j, i) for i, j in group)])), tuple(behind)))
    return colors
