"""RelaySGD: models are passed on along a tree, so that everybody averages over all workers, some of them a bit late."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.trees import plus
from ..topology.base import Topology, matrix
from ..topology.coloring import color_edges
from ..wire.flat import fused
from .method import Method, Turn, Turned
from .mixing import check_static


class _Link(NamedTuple):
    """One color of the tree's edges: who talks to whom, and how many workers stand behind the partner of each."""

    pairs: tuple[tuple[int, int], ...]
    behind: tuple[int, ...]


def relay_sgd() -> Method:
    """Along each edge of a tree goes the mean of all models on this side of it; each worker averages over all `W`.

    With `n_ji` the number of workers behind the edge from `j` to `i`, and `m_ji` what came over it:

        h_i = x_i + u_i;   m_ij = (h_i + Σ_{k ≠ j} n_ki m_ki) / n_ij, sent;   x_i = (h_i + Σ_j n_ji m_ji) / W

    The model of a worker at distance `d` enters as it was `d - 1` steps ago, and each counts exactly once: there is no
    bias of data that differ, and no spectral gap. The paper passes sums and counts on, with `x_0` for those who have
    not been heard of yet; means that start at `x_0` are the same without counts.

    *On the wire*: one model for each neighbor.

    *State*: per worker what came over each edge, in float32: as many models as the busiest worker has neighbors (two
    in a path, three in a binary tree; a star has `W-1`, on all workers). All must start from one model, as
    `init_state` and `place` make them.

    Returns:
      The method, for trees: `topology.path`, `binary_tree`, or one of your own; weights do not matter.

    Raises:
      ValueError: by `gossip`, the topology is no tree, or changes.

    Example:
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
      Data", arXiv 2110.04175, 2021.
    """

    def prepare(topology: Topology) -> Topology:
        _links(topology)
        return topology

    def init(params, topology):
        return [params] * len(_links(topology))

    def step(turn: Turn) -> Turned:
        comm, workers = turn.comm, turn.topology.workers
        steps, inner = turn.adapt(turn.gradients)
        half = plus(turn.params, steps)
        leaves, structure = jax.tree.flatten(half)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(turn.params)]
        links = _links(turn.topology)
        heard = [jax.tree.leaves(one) for one in turn.state]
        behind = [jnp.asarray(np.array(link.behind, np.float32))[comm.index] for link in links]

        def sum_of(*, but: int | None, messages) -> list:
            out = list(leaves)
            for color, (number, message) in enumerate(zip(behind, messages, strict=True)):
                if color != but:
                    out = [x + number.astype(x.dtype) * m for x, m in zip(out, message, strict=True)]
            return out

        arrived = []
        for color, link in enumerate(links):
            number = workers - behind[color]
            mean = [x / number.astype(x.dtype) for x in sum_of(but=color, messages=heard)]
            sent = [x.astype(dtype) for x, dtype in zip(mean, dtypes, strict=True)]
            got = fused(lambda x, pairs=link.pairs: comm.ppermute(x, pairs), sent)
            arrived.append([x.astype(leaf.dtype) for x, leaf in zip(got, leaves, strict=True)])
        params = [x / workers for x in sum_of(but=None, messages=arrived)]
        return Turned(structure.unflatten(params), inner, [structure.unflatten(one) for one in arrived])

    return Method(prepare, init, step)


def _links(topology: Topology) -> list[_Link]:
    """The edges of a tree by colors, or a `ValueError` if it is none."""
    check_static(topology, "relay_sgd")
    joined = matrix(topology) != 0
    workers = topology.workers
    edges = [(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(joined, 1)), strict=True)]
    reached, new = {0}, [0]
    while new:
        new = [j for i in new for j in np.nonzero(joined[i])[0].tolist() if j not in reached]
        reached |= set(new)
    if (joined != joined.T).any() or len(edges) != workers - 1 or len(reached) != workers:
        raise ValueError(
            f"relay_sgd needs a tree, on which there is one way from each worker to each, and {topology.name} is none: "
            "use topology.binary_tree, topology.path, or from_edges"
        )
    links = []
    for group in color_edges(edges):
        behind = [0] * workers
        for i, j in group:
            behind[i], behind[j] = _side(joined, j, i), _side(joined, i, j)
        links.append(_Link(tuple(sorted([*group, *((j, i) for i, j in group)])), tuple(behind)))
    return links


def _side(joined: np.ndarray, first: int, other: int) -> int:
    """How many workers are on the side of `first` of its edge to `other`."""
    seen, left = {first, other}, [first]
    while left:
        left_here = [j for j in np.nonzero(joined[left.pop()])[0].tolist() if j not in seen]
        seen |= set(left_here)
        left += left_here
    return len(seen) - 1
