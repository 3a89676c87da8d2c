"""Decentralized training: each worker averages with its neighbors in a graph, without an all-reduce."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS
from .._core.trees import next_count, wide
from .._core.types import Array, AxisNames, Float, Int, Key, PyTree, State, UInt, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..reducers.with_stats import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..topology.base import Topology
from ..transforms.common import check_per_worker, inner_step
from ..transforms.local_gradients import check_leaves, check_local
from .d_psgd import d_psgd
from .method import Method, StepContext
from .mixing import select_round, split_messages


class GossipState(NamedTuple):
    """The state of `gossip`.

    Attributes:
      count: the number of steps (replicated).
      key: of all draws (replicated).
      sent: the bytes that one worker has sent on average, as (high, low) words (replicated).
      inner: the state of the inner optimizer (per-worker).
      method: the state of the method (per-worker).
    """

    count: Int[Array, ""]
    key: Key[Array, ""]
    sent: UInt[Array, "2"]
    inner: PerWorker
    method: PerWorker

    communicates = True


def gossip(
    inner: optax.GradientTransformation,
    topology: Topology,
    *,
    method: Method | None = None,
    seed: int = 0,
    axis: AxisNames = "data",
    carriers: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Each worker takes its own step and averages with its neighbors in a graph; no step waits for all workers.

    With the mixing matrix `W` of the topology and the steps `u` of the inner optimizer, `d_psgd` is

        x_i <- Σ_j W_ij (x_j + u_j)

    and the other methods improve on it: for data that differ between workers (`d2`, `gradient_tracking`, `relay_sgd`),
    momentum (`quasi_global_momentum`, `quasi_global_adam`), links in one direction (`sgp`) and fewer bytes (`choco`,
    `dcd_psgd`, `ecd_psgd`).

    **Parameters differ between workers**: the state is `TrainState(jd.PerWorker(params), tx.init(params))`, and the
    model to evaluate is the mean, `jd.consensus(params)`.

    *On the wire*: see the method; one message for each neighbor and dtype, whatever the number of leaves. With a
    topology that changes, the program contains the messages of all its rounds, and a step sends those of one.

    *State*: replicated, a count and a key; per-worker, the states of `inner` and of the method.

    Args:
      inner: the optimizer of each worker.
      topology: the graph; its number of workers is that of the axis.
      method: how models are combined with those of the neighbors; `d_psgd()` by default.
      seed: of the random draws of compressors.
      axis: the mesh axis of the workers.
      carriers: another, faster axis, whose workers act as one: `optax.chain(jd.all_reduce(jd.exact(), axis="chip"),
        jd.gossip(inner, topology, axis="pod", carriers="chip"))`. They have one model; each sends a part of it over
        the slow links, and they gather what arrived. Without `carriers` each would send the whole model.

    Returns:
      A gradient transformation for local gradients; it needs `params` and comes last in a chain. Its `update` takes
      `learning_rate=`, the replicated rate of this step, for the methods that need it; `active=`, a boolean of this
      worker, false where it takes no step of its own (it still averages with its neighbors); and `round=`, the static
      number of a round as `due_round` gives it.

    Raises:
      ValueError: the method does not work on the topology; at trace time, the axis has another number of workers,
        `params` are missing or not marked `PerWorker`, or `examples=` is passed: unequal weights of neighbors would
        change the global mean.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.5), jd.topology.one_peer_exponential(4))
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target[0], state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 4)
      >>> state, _ = jd.simulate(step, workers=4)(state, jnp.array([0.0, 4.0, 8.0, 12.0]))
      >>> state["x"].value.tolist(), float(jd.consensus(state["x"]))  # each with the one before it
      ([3.0, 1.0, 3.0, 5.0], 3.0)

    References:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case
      Study for Decentralized Parallel Stochastic Gradient Descent", arXiv:1705.09056, 2017.
    """
    chosen = d_psgd() if method is None else method
    cfg = _Config(
        optax.with_extra_args_support(inner), topology, chosen.prepare(topology), chosen, seed, axis, carriers
    )
    return optax.GradientTransformationExtraArgs(partial(_init, cfg), partial(_update, cfg))


class _Config(NamedTuple):
    """The checked arguments of `gossip`; `graph` is the topology as the method prepared it."""

    inner: optax.GradientTransformationExtraArgs
    topology: Topology
    graph: Topology
    method: Method
    seed: int
    axis: AxisNames
    carriers: AxisNames


def _init(cfg: _Config, params: PyTree) -> State:
    check_leaves(params)
    # Copies, since parameters and optimizer state may both be donated.
    method_state = jax.tree.map(jnp.array, cfg.method.init(wide(params), cfg.graph))
    return GossipState(
        count=jnp.zeros((), jnp.int32),
        key=jax.random.key(cfg.seed),
        sent=jnp.zeros(2, jnp.uint32),
        inner=bind(PerWorker(cfg.inner.init(params)), cfg.axis),
        method=bind(PerWorker(method_state), cfg.axis),
    )


def _update(
    cfg: _Config,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    learning_rate: Any = None,
    examples: Any = None,
    active: Array | None = None,
    round: Any = None,
    **extra_args: Any,
) -> tuple[Updates, State]:
    _check_update(cfg, updates, params, examples)
    ledger: list[comms.Sent] = []
    comm = comms.counted(_comm(cfg), ledger)
    with jax.named_scope("gossip"):
        result = cfg.method.step(
            StepContext(
                gradients=updates,
                params=params,
                state=state.method.value,
                adapt=partial(_adapt, cfg, state, params, active, learning_rate, extra_args),
                comm=comm,
                topology=cfg.graph if round is None else select_round(cfg.graph, round),
                count=state.count,
                key=jax.random.fold_in(state.key, state.count),
                learning_rate=None if learning_rate is None else jnp.asarray(learning_rate),
                active=active,
                static_round=round is not None,
            )
        )
        # The method returns new parameters; a gradient transformation returns what to add to the old ones.
        steps = jax.tree.map(
            lambda new, p, u: (new - p.astype(new.dtype)).astype(u.dtype), result.params, params, updates
        )
    return steps, GossipState(
        count=next_count(state.count),
        key=state.key,
        sent=add_bytes(state.sent, comms.total_bytes(ledger)),
        inner=with_value(state.inner, comm.varying(result.inner)),
        method=with_value(state.method, comm.varying(result.state)),
    )


def _check_update(cfg: _Config, updates: Updates, params: PyTree | None, examples: Any) -> None:
    if params is None:
        raise ValueError(NO_PARAMS)
    if examples is not None:
        raise ValueError(
            "gossip does not support example weighting: unequal weights of neighbors would change the global mean; "
            "pass active= for workers without examples, or use local_steps"
        )
    check_leaves(updates)
    check_local(updates, cfg.axis)
    check_per_worker(params, cfg.axis)


def _comm(cfg: _Config) -> Comm:
    comm = over(cfg.axis)
    if comm.size != cfg.topology.workers:
        raise ValueError(
            f"the topology {cfg.topology.name} has {cfg.topology.workers} workers, but axis {cfg.axis!r} has "
            f"{comm.size}: make the topology for {comm.size}"
        )
    return comm if cfg.carriers is None else split_messages(comm, over(cfg.carriers))


def _adapt(
    cfg: _Config,
    state: GossipState,
    params: PyTree,
    active: Array | None,
    learning_rate: Any,
    extra_args: dict[str, Any],
    direction: Updates,
) -> tuple[Updates, State]:
    """One step of the inner optimizer along `direction`."""
    extras = {"step": state.count, **extra_args}
    if learning_rate is not None:
        extras["learning_rate"] = learning_rate
    return inner_step(cfg.inner, direction, state.inner.value, params, active=active, **extras)[:2]


def consensus_distance(params: PerWorker) -> Float[Array, ""]:
    """The distance between workers: `√(mean_i |x_i - mean x|²)` over all parameters.

    Args:
      params: placed parameters, `[W, ...]` each, as a distributed or simulated step returned them.

    Returns:
      One number, in float32.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> float(jd.decentralized.consensus_distance(jd.PerWorker(jnp.array([[1.0, 0.0], [3.0, 0.0]]))))
      1.0

    References:
      Kong, Lin, Koloskova, Jaggi, Stich, "Consensus Control for Decentralized Deep Learning", arXiv:2102.04828, 2021.
    """

    def mean_square(x: Array) -> Array:
        x = x.astype(jnp.float32)
        return jnp.sum(jnp.square(x - x.mean(0, keepdims=True))) / x.shape[0]

    return jnp.sqrt(sum(map(mean_square, jax.tree.leaves(params.value)), jnp.zeros(())))
