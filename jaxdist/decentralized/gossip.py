"""Gossip: each worker averages with its neighbors in a graph, without an all-reduce."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS
from .._core.dtypes import wider_dtype
from .._core.trees import next_count, wide
from .._core.types import Array, AxisNames, Int, Key, PyTree, State, UInt, Updates
from ..comm.base import Comm, add_bytes
from ..comm.over import over
from ..state.marks import PerWorker, axis_tuple, bind, flatten_marks, with_value
from ..topology.base import Topology, check_topology
from ..transforms.common import check_per_worker, inner_step
from ..transforms.extra_args import with_extra_args
from ..transforms.local_gradients import check_leaves, check_local, check_shards, refuse_model_axes
from ..transforms.weights import as_flag, check_shared, zero_unless
from .d_psgd import d_psgd
from .method import Method, StepContext, check_interval, workers_of


class GossipState(NamedTuple):
    """The state of `gossip`: replicated but for the states of the inner optimizer and of the method.

    `sent` is the bytes that one worker has sent on average, as (high, low) words. With `local_steps` around, the
    `count_fields` stay replicated, and the exact average replaces the `model_fields` by those of `init`.
    """

    count: Int[Array, ""]
    key: Key[Array, ""]
    sent: UInt[Array, "2"]
    inner: PerWorker
    method: PerWorker

    communicates = True
    count_fields = ("count", "key", "sent")
    model_fields = ("method",)


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

    and the other methods improve on it.

    **Parameters differ between workers**: the state is `TrainState(jd.PerWorker(params), tx.init(params))`, and the
    model to evaluate is the mean, `jd.consensus(params)`, or with one-way links and delayed messages `mean_params`. The
    transformation takes local gradients, needs `params` and comes last in a chain. Its `update` also takes

    - `learning_rate=`, the replicated rate of this step, for the methods that need it;
    - `active=`, a boolean of this worker, false where it takes no step of its own, as without examples: its gradient is
      left out, even NaN, and its optimizer's state stays; it still averages;
    - `round=`, the static number of a round as `due_round` gives it;

    and refuses `examples=`, since unequal weights of neighbors would change the global mean: pass
    `active=examples > 0`.

    *On the wire*: see the method; one message for each neighbor and dtype, whatever the number of leaves. With a
    topology that changes, the program contains the messages of all its rounds, and a step sends those of one.

    *State*: replicated, a count and a key; per-worker, the states of `inner` and of the method.

    Args:
      inner: the optimizer of each worker.
      topology: the graph; its number of workers is that of the axis.
      method: how models are combined with those of the neighbors; `d_psgd()` by default.
      seed: of the random draws of compressors.
      carriers: another, faster axis, whose workers act as one: they have one model, each sends a part of it over the
        slow links, and they gather what arrived.

    Examples:
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
      Study for Decentralized Parallel Stochastic Gradient Descent", arXiv:1705.09056, 2017, as `d_psgd`.
    """
    if common := set(axis_tuple(axis)) & set(axis_tuple(carriers)):
        raise ValueError(f"carriers must be another axis than that of the workers, {axis!r}, got {sorted(common)[0]!r}")
    check_topology(topology)
    chosen = d_psgd() if method is None else method
    if not isinstance(chosen, Method):
        raise TypeError(f"expected a method of gossip, such as d_psgd(), got {chosen!r}")
    tx = _Gossip(with_extra_args(inner), topology, chosen.prepare(topology), chosen, seed, axis, carriers)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _Gossip(NamedTuple):
    """The checked arguments of `gossip`; `graph` is the topology as the method prepared it."""

    inner: optax.GradientTransformationExtraArgs
    topology: Topology
    graph: Topology
    method: Method
    seed: int
    axis: AxisNames
    carriers: AxisNames

    def __repr__(self) -> str:
        # Without the inner optimizer, whose `repr` has addresses of functions.
        carriers = "" if self.carriers is None else f", carriers={self.carriers!r}"
        return f"gossip({self.topology!r}, method={self.method!r}, axis={self.axis!r}{carriers})"

    def init(self, params: PyTree) -> State:
        check_leaves(params, sharded=True)
        check_shards(params, self.axis)
        # Copies, since parameters and optimizer state may both be donated.
        method_state = jax.tree.map(jnp.array, self.method.init(wide(params), self.graph))
        self._check_sharded(params, method_state)
        return GossipState(
            count=jnp.zeros((), jnp.int32),
            key=jax.random.key(self.seed),
            sent=jnp.zeros(2, jnp.uint32),
            inner=bind(PerWorker(self.inner.init(params)), self.axis),
            method=bind(PerWorker(method_state), self.axis),
        )

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        learning_rate: Any = None,
        examples: Any = None,
        active: Any = None,
        round: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        self._check_update(updates, params, examples)
        if active is not None:
            # A worker without examples may have a NaN gradient.
            active = as_flag(active)
            check_shared("active", active, params)
            updates = zero_unless(active, updates)
        if self.method.flattens:
            refuse_model_axes("this method", "use d_psgd, gradient_tracking or another method that sends whole models")
        if self.carriers is not None:
            refuse_model_axes("carriers=", "leave carriers= out")
        workers = workers_of(self.topology, self.axis)
        ledger: list[comms.Sent] = []
        comm = comms.count_sent(
            workers if self.carriers is None else _split_messages(workers, over(self.carriers)), ledger
        )
        extras = {"step": state.count, **extra_args}
        if learning_rate is not None:
            extras["learning_rate"] = learning_rate

        def adapt(direction: Updates) -> tuple[Updates, State]:
            return inner_step(self.inner, direction, state.inner.value, params, axis=self.axis, taken=active, **extras)

        with jax.named_scope("gossip"):
            result = self.method.step(
                StepContext(
                    gradients=updates,
                    params=params,
                    state=state.method.value,
                    adapt=adapt,
                    comm=comm,
                    topology=self.graph if round is None else _select_round(self.graph, round),
                    count=state.count,
                    key=jax.random.fold_in(state.key, state.count),
                    learning_rate=None if learning_rate is None else jnp.asarray(learning_rate),
                    active=active,
                    static_round=round is not None,
                )
            )
            # The method returns new parameters; a gradient transformation returns what to add to the old ones.
            steps = jax.tree.map(
                lambda new, p, u: (new - p.astype(new.dtype)).astype(wider_dtype(u.dtype, p.dtype)),
                result.params,
                params,
                updates,
            )
        return steps, GossipState(
            count=next_count(state.count),
            key=state.key,
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
            inner=with_value(state.inner, comm.varying(result.inner)),
            method=with_value(state.method, comm.varying(result.state)),
        )

    def _check_update(self, updates: Updates, params: PyTree | None, examples: Any) -> None:
        if params is None:
            raise ValueError(NO_PARAMS)
        if examples is not None:
            raise ValueError(
                "gossip does not support example weighting (examples=): unequal weights of neighbors would change the "
                "global mean; pass active=examples > 0 for workers without any, or use local_steps"
            )
        check_leaves(updates, sharded=True)
        check_local(updates, self.axis)
        check_per_worker(params, self.axis)

    def _check_sharded(self, params: PyTree, method_state: State) -> None:
        """Checks that workers may mix their shards of a model one by one."""
        found = flatten_marks(params)
        if not any(leaf.marks for leaf in found):
            return
        if self.carriers is not None:
            raise ValueError(
                f"carriers={self.carriers!r} divide messages that all of them have in full, and of Sharded parameters "
                "each has its own shard, which is all that it sends: leave carriers= out"
            )
        if not self.method.entrywise:
            raise ValueError(
                "this method takes a norm of the whole model, and of Sharded parameters a worker has a shard: use "
                "another one, such as quasi_global_momentum, or do not shard the parameters (stages 1 and 2)"
            )
        shapes = {leaf.value.shape for leaf in found}
        for leaf in flatten_marks(method_state):
            if leaf.marks and leaf.value.shape not in shapes:
                raise ValueError(
                    f"this method keeps arrays of shape {leaf.value.shape} for Sharded parameters of shape "
                    f"{leaf.marks[-1].shape}, which cannot be split as these are: use another one, or dcd_psgd without "
                    "replicas="
                )


def _split_messages(outer: Comm, inner: Comm) -> Comm:
    """Returns `outer` with messages that the `inner.size` members of each group send in equal parts and then gather.

    Members have equal values. Over `outer` each sends `1/inner.size` of the bytes.
    """
    return outer._replace(
        mean=partial(_in_parts, outer.mean, inner),
        ppermute=partial(_in_parts, outer.ppermute, inner),
        ledger=None,
        remake=lambda wrap: _split_messages(wrap(outer), wrap(inner)),
    )


def _in_parts(collective: Callable[..., Array], inner: Comm, tree: PyTree, *args: Any) -> PyTree:
    """Runs a collective on this member's part of each leaf, and gathers the parts of the results."""

    def communicate_part(x: Array) -> Array:
        part = jnp.pad(x.ravel(), (0, -x.size % inner.size)).reshape(inner.size, -1)[inner.index]
        return inner.all_gather(collective(part, *args)).ravel()[: x.size].reshape(x.shape)

    return jax.tree.map(communicate_part, tree)


def _select_round(topology: Topology, round: Any) -> Topology:
    """Returns the static topology of one round."""
    if isinstance(round, jax.Array):
        raise ValueError("round selects the program, so it must be static: distribute(..., static_argnames=('round',))")
    if not 0 <= round < len(topology.rounds):
        raise ValueError(
            f"round must be from 0 to {len(topology.rounds) - 1}, the last round of {topology.name}, got {round}"
        )
    return topology._replace(rounds=(topology.rounds[round],), order=(0,))


def due_round(step: int, topology: Topology, *, interval: int = 1) -> int | None:
    """The round of a topology that a step uses, for the static argument `round=` of `gossip`'s update.

    `None` in a step without communication: then leave `round` out.

    Args:
      step: the number of the step, from 0.
      topology: the graph.
      interval: the method's.

    Examples:
      >>> import jaxdist as jd
      >>> graph = jd.topology.shift_one(4)
      >>> [jd.decentralized.due_round(step, graph, interval=2) for step in range(6)]
      [None, 0, None, 1, None, 0]
    """
    check_interval(interval)
    return None if (step + 1) % interval else topology.order[step // interval % len(topology.order)]
