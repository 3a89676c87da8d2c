"""Averages of whole models: with neighbors (D-PSGD), over one-way links (SGP, OSGP), along a tree (RelaySGD)."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.trees import plus, wide
from .._core.types import Array, Float, PyTree, Updates
from ..comm.base import Comm
from ..topology.base import TOLERANCE, Topology, color_edges, matrices, matrix
from ..topology.spectrum import is_doubly_stochastic, reachable
from ..wire.flat import map_groups, permute
from .method import (
    Method,
    StepContext,
    StepResult,
    check_connected,
    check_doubly_stochastic,
    check_interval,
    check_static,
    every_n_steps,
    mix,
    mixing_delta,
)

Order = Literal["adapt_then_combine", "combine_then_adapt"]
ORDERS = ("adapt_then_combine", "combine_then_adapt")


@with_description
def d_psgd(*, order: Order = "adapt_then_combine", interval: int = 1) -> Method:
    """Each worker takes its own step and averages its model with those of its neighbors.

        adapt_then_combine:  x_i <- Σ_j W_ij (x_j + u_j)        combine_then_adapt:  x_i <- u_i + Σ_j W_ij x_j

    with the steps `u` of the inner optimizer at the local gradient. Where workers' data differ both end off the optimum
    by `O(rate)`, the more so the smaller the spectral gap; `d2`, `gradient_tracking` and `relay_sgd` do not.

    *Topologies*: doubly stochastic.

    *On the wire*: one model for each neighbor; with a complete graph one all-reduce, `2(W-1)/W` models. Divided
    by the interval on average; the steps between send nothing.

    *State*: none.

    Args:
      order: `"adapt_then_combine"` is the more accurate and the more stable. `"combine_then_adapt"` is the paper's:
        it sends models that do not depend on the gradient, so they may be sent while that is computed.
      interval: neighbors communicate at the end of every `interval` steps; between, each worker steps alone. A topology
        that changes does so with each communication. More sends less, and workers drift further apart.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(1.0), jd.topology.ring(4), method=jd.decentralized.d_psgd())
      >>> def one_worker(x):  # with a gradient of zero the neighbors' average is all that happens
      ...     return x + tx.update(jnp.zeros(()), tx.init(x), x)[0]
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([3.0, 0.0, 0.0, 0.0])).round(5).tolist()
      [1.0, 1.0, 0.0, 1.0]

    References:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case
      Study for Decentralized Parallel Stochastic Gradient Descent", arXiv:1705.09056, 2017.
    """
    check_order(order)
    check_interval(interval)
    step = _adapt_then_combine if order == "adapt_then_combine" else _combine_then_adapt
    return Method(check_doubly_stochastic, lambda params, topology: (), partial(step, interval))


def check_order(order: str) -> None:
    """Checks that `order` is one of `ORDERS`."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")


def _adapt_then_combine(interval: int, context: StepContext) -> StepResult:
    # x_i <- Σ_j W_ij (x_j + u_j)
    steps, inner = context.adapt(context.gradients)
    return StepResult(_mix_every(interval, context, plus(context.params, steps)), inner, ())


def _combine_then_adapt(interval: int, context: StepContext) -> StepResult:
    # x_i <- u_i + Σ_j W_ij x_j, whose messages do not wait for the gradient.
    combined = _mix_every(interval, context, wide(context.params))
    steps, inner = context.adapt(context.gradients)
    return StepResult(plus(combined, steps), inner, ())


def _mix_every(interval: int, context: StepContext, tree: PyTree) -> PyTree:
    """`Σ_j W_ij x_j` in every `interval`-th step, and `x_i` in the steps between."""
    delta = partial(mixing_delta, like=context.params)
    return plus(tree, every_n_steps(context, interval, delta, _zero_delta, tree))


def _zero_delta(comm: Comm, tree: PyTree) -> PyTree:
    # `lax.cond` needs branches of one type, and the delta differs between workers.
    return comm.varying(jax.tree.map(jnp.zeros_like, tree))


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
      Nedić, Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying Directed Graphs", arXiv
      1406.2075, 2014.
    """
    return Method(check_columns, _init_weight, _push)


class PushSumState(NamedTuple):
    """The state of `sgp` of one worker on a graph whose rows do not sum to 1: its push-sum weight `w`."""

    weight: Float[Array, ""]

    keeps_apart = "push-sum weights, by which the models count in their mean"

    def weigh_drift(self, anchor: Updates, drift: Updates) -> Updates:
        """`w a - x`, with the numerator `x = w z`, is `w (a - z)`; all `w` sum to the number of workers."""
        del anchor
        return _scale(drift, self.weight)


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
    return () if is_doubly_stochastic(topology) else PushSumState(jnp.ones((), jnp.float32))


def _push(context: StepContext) -> StepResult:
    # With w = 1 always this is D-PSGD.
    if not jax.tree.leaves(context.state):
        return _adapt_then_combine(1, context)
    steps, inner = context.adapt(context.gradients)
    # x = w z + u,  x <- P x,  w <- P w,  z = x / w
    weight = context.state.weight
    x = plus(_scale(wide(context.params), weight), steps)
    x, weight = mix(context, (x, weight), like=(context.params, weight))
    return StepResult(jax.tree.map(lambda x: x / weight.astype(x.dtype), x), inner, PushSumState(weight))


def _scale(tree: PyTree, factor: Array) -> PyTree:
    return jax.tree.map(lambda x: factor.astype(x.dtype) * x, tree)


class OverlappedState(NamedTuple):
    """The state of `osgp` of one worker: its push-sum weight, and the model and weight of which a share is under way.

    `share` is `1 - P_ii`, that of `outgoing` and `outgoing_weight` which other workers will receive.
    """

    weight: Float[Array, ""]
    outgoing: Updates
    outgoing_weight: Float[Array, ""]
    share: Float[Array, ""]

    keeps_apart = "push-sum weights, and messages that are under way"

    def weigh_drift(self, anchor: Updates, drift: Updates) -> Updates:
        """`w (a - z) + (1 - P_ii) (w' a - x')`: models and weights that are stored or under way keep their sums."""
        under_way = jax.tree.map(
            lambda a, x: self.outgoing_weight.astype(a.dtype) * a - x.astype(a.dtype), anchor, self.outgoing
        )
        return plus(_scale(drift, self.weight), _scale(under_way, self.share))


@with_description
def osgp() -> Method:
    """Overlapped stochastic gradient push: the messages of a step arrive one step later, so no gradient waits for them.

    With push-sum weights `w_i = 1` at first and the parameters that the user sees, `z = x / w`; a prime marks the
    previous step:

        x_i = w_i z_i + u_i,   x_i <- P_ii x_i + Σ_{j≠i} P'_ij x'_j,   w_i <- P_ii w_i + Σ_{j≠i} P'_ij w'_j

    What a step sends is part of the state, so the compiler may send it while the gradient is computed. The weights
    differ from 1 on every graph, since a part of each model is always under way; models and weights that are stored
    or under way keep their sums.

    *Topologies*: column-stochastic and strongly connected.

    *On the wire*: as `sgp`, one model and 4 bytes for each neighbor, always with the 4 bytes.

    *State*: per-worker, one model in float32 and two numbers.

    Raises:
      ValueError: at trace time, `round=` was passed: the messages belong to the round before.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(1.0), jd.topology.one_peer_exponential(4), method=jd.decentralized.osgp())
      >>> def run(x, steps):
      ...     opt_state = tx.init(x)
      ...     for _ in range(steps):
      ...         updates, opt_state = tx.update(jnp.zeros(()), opt_state, x)
      ...         x = x + updates
      ...     return x
      >>> x = jnp.array([0.0, 4.0, 8.0, 12.0])
      >>> one_step = jax.vmap(lambda x: run(x, 1), axis_name="data")
      >>> jax.jit(one_step)(x).tolist()  # the messages of the first step are under way
      [0.0, 4.0, 8.0, 12.0]
      >>> bool(jnp.allclose(jax.jit(jax.vmap(lambda x: run(x, 30), axis_name="data"))(x), 6, atol=1e-2))
      True

    References:
      Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792, 2019
      (OSGP, with messages one step late).
    """
    return Method(check_columns, _init_osgp, _osgp_step)


def _init_osgp(params: PyTree, topology: Topology) -> OverlappedState:
    del topology
    zero = jnp.zeros((), jnp.float32)
    return OverlappedState(zero + 1, jax.tree.map(jnp.zeros_like, params), zero, zero)


def _osgp_step(context: StepContext) -> StepResult:
    if context.static_round:
        raise ValueError("osgp sends the messages of the previous round, so round= cannot select them; leave round out")
    state: OverlappedState = context.state
    # Σ_{j≠i} P'_ij x'_j: it depends on the state only, not on the gradient.
    before = context._replace(count=jnp.maximum(context.count - 1, 0))
    sent = state.outgoing, state.outgoing_weight
    delta = mixing_delta(before, sent, like=(context.params, state.weight))
    arrived = _add_scaled(delta, sent, 1 - _self_weight(before))

    steps, inner = context.adapt(context.gradients)
    # x = w z + u, of which P_ii stays; the rest is sent in the next step, as the wire rounds it.
    x = plus(_scale(wide(context.params), state.weight), steps)
    outgoing = jax.tree.map(lambda x, p: x.astype(p.dtype).astype(x.dtype), x, context.params)
    leaves = _self_weight(context) - 1
    x = jax.tree.map(jnp.add, _add_scaled(x, outgoing, leaves), arrived[0])
    weight = state.weight + leaves * state.weight + arrived[1]
    params = jax.tree.map(lambda x: x / weight.astype(x.dtype), x)
    return StepResult(params, inner, OverlappedState(weight, outgoing, state.weight, -leaves))


def _self_weight(context: StepContext) -> Array:
    """Returns `P_ii` of this worker in the round of a step."""
    weights = jnp.asarray([round.self_weights for round in context.topology.rounds], jnp.float32)
    order = jnp.asarray(context.topology.order, jnp.int32)
    return weights[order[context.count % len(context.topology.order)], context.comm.index]


def _add_scaled(tree: PyTree, other: PyTree, factor: Array) -> PyTree:
    """Returns `tree + factor · other`."""
    return jax.tree.map(lambda x, y: x + factor.astype(y.dtype) * y, tree, other)


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
      >>> for _ in range(400):
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
        total = _scale(drift, self.shares[0])
        for share, message in zip(self.shares[1:], self.messages, strict=True):
            behind = jax.tree.map(lambda a, m: a - m.astype(a.dtype), anchor, message)
            total = plus(total, _scale(behind, share))
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
