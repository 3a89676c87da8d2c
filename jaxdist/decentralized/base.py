"""Decentralized training: no all-reduce at all, each worker talks to its neighbors in a graph."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS
from .._core.trees import next_count, wide
from .._core.types import Array, AxisNames, Float, Int, Key, State, UInt, Updates
from ..comm.over import over
from ..reducers.with_stats import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..topology.base import Topology
from ..transforms.common import check_per_worker, inner_step
from ..transforms.local_gradients import check_leaves, check_local
from .d_psgd import d_psgd
from .method import Method, Turn
from .mixing import carried, only


class GossipState(NamedTuple):
    """What has been agreed on, and what this worker keeps.

    Agreed: `count` of steps, the `key` of all draws, the bytes `sent` by one worker on average, as (high, low) words.
    Per worker: the `inner` state, and that of the `method`.
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
    """Each worker takes its own step and talks to its neighbors in a graph: nobody waits for all.

    With the mixing matrix `W` of the topology and the steps `u` of the inner optimizer, `d_psgd` is

        x_i <- Σ_j W_ij (x_j + u_j)

    and the other methods correct what goes wrong there: data that differ between workers (`d2`, `gradient_tracking`,
    `relay_sgd`), momentum (`quasi_global_momentum`, `quasi_global_adam`), links in one direction (`sgp`), bytes
    (`choco`, `dcd_psgd`, `ecd_psgd`).

    **Parameters differ between workers**: the state is `TrainState(jd.PerWorker(params), tx.init(params))`, and the
    model to evaluate is the mean, `jd.consensus(params)`.

    *On the wire*: what the method says; one message for each neighbor and dtype, however many leaves there are. With a
    topology that changes, the program holds the messages of all its rounds, and a step sends those of one.

    *State*: agreed, a count and a key; per worker that of `inner` and that of the method.

    Args:
      inner: the optimizer of each worker.
      topology: the graph, of as many workers as the axis has.
      method: what is done with the neighbors' models; `d_psgd()` by default.
      seed: of the draws of codes.
      axis: the mesh axis of the workers.
      carriers: another, faster axis, whose workers act as one: `optax.chain(jd.all_reduce(jd.exact(), axis="chip"),
        jd.gossip(inner, topology, axis="pod", carriers="chip"))`. They hold one model, each sends its part of it over
        the slow links, and they gather what has come; without `carriers` each would send the whole.

    Returns:
      A gradient transformation for local gradients; it needs `params` and comes last in a chain. Its `update` takes
      `learning_rate=`, the agreed rate of this step, for the methods that need it, and `active=`, a boolean of this
      worker: false for a step that it does not take (its neighbors' models it averages all the same).

    Raises:
      ValueError: the method does not work on the topology; at trace time, the axis has another number of workers,
        `params` are missing or not marked `PerWorker`, or `examples=` is passed: neighbors of unequal weight would
        move the mean of all.

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
      Study for Decentralized Parallel Stochastic Gradient Descent", arXiv 1705.09056, 2017; and those of the methods.
    """
    chosen = d_psgd() if method is None else method
    graph = chosen.prepare(topology)
    inner = optax.with_extra_args_support(inner)

    def init(params) -> State:
        check_leaves(params)
        # Copies, since parameters and optimizer state may both be donated.
        kept = jax.tree.map(jnp.array, chosen.init(wide(params), graph))
        return GossipState(
            count=jnp.zeros((), jnp.int32),
            key=jax.random.key(seed),
            sent=jnp.zeros(2, jnp.uint32),
            inner=bind(PerWorker(inner.init(params)), axis),
            method=bind(PerWorker(kept), axis),
        )

    def update(
        updates, state, params=None, *, learning_rate=None, examples=None, active=None, round=None, **extra_args
    ) -> tuple[Updates, State]:
        if params is None:
            raise ValueError(NO_PARAMS)
        if examples is not None:
            raise ValueError(
                "gossip cannot weigh workers by examples: neighbors of unequal weight would move the mean of all; "
                "pass active= for workers without any, or use local_steps"
            )
        check_leaves(updates)
        check_local(updates, axis)
        check_per_worker(params, axis)
        ledger: list[comms.Sent] = []
        comm = comms.counted(over(axis) if carriers is None else carried(over(axis), over(carriers)), ledger)
        if comm.size != topology.workers:
            raise ValueError(
                f"the topology {topology.name} is one of {topology.workers} workers, and axis {axis!r} has {comm.size}"
            )
        given = extra_args if learning_rate is None else {**extra_args, "learning_rate": learning_rate}

        def adapt(direction: Updates) -> tuple[Updates, State]:
            told = {"step": state.count, **given}
            return inner_step(inner, direction, state.inner.value, params, active=active, **told)[:2]

        with jax.named_scope("gossip"):
            turned = chosen.step(
                Turn(
                    gradients=updates,
                    params=params,
                    state=state.method.value,
                    adapt=adapt,
                    comm=comm,
                    topology=graph if round is None else only(graph, round),
                    count=state.count,
                    key=jax.random.fold_in(state.key, state.count),
                    learning_rate=None if learning_rate is None else jnp.asarray(learning_rate),
                    active=active,
                    told=round is not None,
                )
            )
            steps = jax.tree.map(
                lambda new, p, u: (new - p.astype(new.dtype)).astype(u.dtype), turned.params, params, updates
            )
        return steps, GossipState(
            count=next_count(state.count),
            key=state.key,
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
            inner=with_value(state.inner, comm.varying(turned.inner)),
            method=with_value(state.method, comm.varying(turned.state)),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def consensus_distance(params: PerWorker) -> Float[Array, ""]:
    """How far workers are apart: `√(mean_i |x_i - mean x|²)` over all parameters.

    Args:
      params: placed parameters, `[W, ...]` each, as a distributed or simulated step returned them.

    Returns:
      One number, in float32.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> float(jd.decentralized.consensus_distance(jd.PerWorker(jnp.array([[1.0, 0.0], [3.0, 0.0]]))))
      1.0

    References:
      Kong, Lin, Koloskova, Jaggi, Stich, "Consensus Control for Decentralized Deep Learning", arXiv 2102.04828, 2021.
    """

    def apart(x: Array) -> Array:
        x = x.astype(jnp.float32)
        return jnp.sum(jnp.square(x - x.mean(0, keepdims=True))) / x.shape[0]

    return jnp.sqrt(sum(map(apart, jax.tree.leaves(params.value)), jnp.zeros(())))
