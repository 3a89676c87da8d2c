"""The interface of decentralized methods, and the averages and checks that they share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import comm as comms
from .._core.checks import check_count
from .._core.trees import plus
from .._core.types import Array, AxisNames, Int, Key, PyTree, State, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..topology.base import Topology
from ..topology.spectrum import is_doubly_stochastic, is_symmetric, separate_workers
from ..wire.mixing import mixing_change
from ..wire.shards import map_groups


class StepContext(NamedTuple):
    """One step on one worker: the argument of a method's `step`. Arrays are of this worker unless replicated.

    Attributes:
      gradients: the local gradients.
      params: the parameters, as the user has them.
      state: the method's state.
      adapt: `adapt(direction) -> (steps, inner state)`, one step of the inner optimizer.
      comm: the workers.
      topology: the graph, as `prepare` returned it.
      count: the number of this step (replicated).
      key: of this step (replicated).
      learning_rate: of this step (replicated), if it was passed.
      active: whether this worker takes a step, if that was passed.
      static_round: whether the host passed `round=`: neighbors communicate in this step, and `topology` has only that
        round.
    """

    gradients: Updates
    params: PyTree
    state: State
    adapt: Callable[[Updates], tuple[Updates, State]]
    comm: Comm
    topology: Topology
    count: Int[Array, ""]
    key: Key[Array, ""]
    learning_rate: Array | None
    active: Array | None
    static_round: bool = False


class StepResult(NamedTuple):
    """The new parameters, in float32 or better, and the new states of the inner optimizer and of the method."""

    params: PyTree
    inner: State
    state: State


class Method(NamedTuple):
    """A method of decentralized training, for `gossip(method=)`.

    A round of `local_steps` around `gossip` replaces the state by that of `init`. A state that is a NamedTuple may say
    more: a class attribute `model_fields` names those of its fields that the round replaces instead of all, and
    `buffer_fields` those that `buffers=` treats as momentum. Its method `weigh_drift(anchor, drift)` returns what the
    worker contributes to the mean drift `a - mean(x)`, where its model `x = anchor - drift` is not all that it has of
    the sum which mixing keeps.

    Attributes:
      prepare: `prepare(topology) -> topology`: the graph to communicate over. Raises `ValueError` for a graph on which
        the method cannot work.
      init: `init(params, topology) -> state` of one worker, made without communication from parameters in float32.
      step: `step(context) -> StepResult`.
      entrywise: treats each entry of a model by itself, so that parameters may be `Sharded` over another axis. `False`:
        it takes norms of whole models.
      flattens: stacks or flattens leaves, which would gather those that the compiler shards over another axis.
      description: the call that made it, such as `d_psgd()`, for `repr`.
    """

    prepare: Callable[[Topology], Topology]
    init: Callable[[PyTree, Topology], State]
    step: Callable[[StepContext], StepResult]
    entrywise: bool = True
    flattens: bool = False
    description: str = ""

    def __repr__(self) -> str:
        return self.description or f"Method{tuple(self)}"


def mix(context: StepContext, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """`x_i <- Σ_j W_ij x_j` with the matrix of this step, in float32 or better.

    One message for each dtype and neighbor, whatever the number of leaves. Leaves are sent in the dtypes of `like`, by
    default in those of `tree`; rounding them does not change the mean over workers.

    Args:
      context: the argument of a method's `step`.
      tree: of this worker; a tuple of trees is sent as one message.
      like: the dtypes on the wire.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> from jaxdist.decentralized import Method, StepResult, mix
      >>> def step(context):  # mixing only
      ...     return StepResult(mix(context, context.params), context.adapt(context.gradients)[1], ())
      >>> method = Method(lambda topology: topology, lambda params, topology: (), step)
      >>> tx = jd.gossip(optax.identity(), jd.topology.ring(3), method=method)
      >>> def one_worker(x):
      ...     return tx.update(x, tx.init(x), x)[0]
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([0.0, 3.0, 6.0])).tolist()
      [3.0, 0.0, -3.0]

    References:
      Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004.
    """
    return plus(tree, mixing_delta(context, tree, like=like))


def mixing_delta(context: StepContext, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """`Σ_j W_ij (x_j - x_i)`, the difference that `mix` adds to this worker's tree."""

    # A sum of differences, since weights like 1/3 are rounded, and a sum of models would drift where they are equal.
    # A worker rounds its own model as it sends it, so that low precision on the wire keeps the mean.
    def change(part: PyTree, dtypes: PyTree) -> PyTree:
        return mixing_change(context.comm, context.topology, context.count, part, like=dtypes)

    return map_groups(change, tree, tree if like is None else like)


def every_n_steps(
    context: StepContext, interval: int, communicate: Callable[..., Any], skip: Callable[..., Any], *operands: PyTree
) -> Any:
    """Runs `communicate(context, *operands)` in every `interval`-th step, and `skip(comm, *operands)` between.

    Both return the same types. The `context.count` of `communicate` counts communications instead of steps, so that a
    topology that changes goes on by one round with each.
    """
    if interval == 1 or context.static_round:
        return communicate(context, *operands)
    numbered = context._replace(count=context.count // interval)
    return comms.cond(
        context.count % interval == interval - 1,
        lambda comm, *xs: communicate(numbered._replace(comm=comm), *xs),
        skip,
        context.comm,
        *operands,
    )


def workers_of(topology: Topology, axis: AxisNames) -> Comm:
    """Returns the workers of an axis, after a check that the topology is for their number."""
    comm = over(axis)
    if comm.size != topology.workers:
        raise ValueError(
            f"the topology {topology.name} has {topology.workers} workers, but axis {axis!r} has {comm.size}: make the "
            f"topology for {comm.size}"
        )
    return comm


def check_interval(interval: int) -> None:
    """Checks that `interval` is a positive number of steps."""
    check_count("interval", interval, 1)


def check_doubly_stochastic(topology: Topology) -> Topology:
    """Returns the topology, after a check that its mixing keeps the mean and converges to it."""
    if not is_doubly_stochastic(topology):
        raise ValueError(
            f"the weights of {topology.name} do not sum to 1 in both directions, so workers would not converge to "
            "their mean: use method=sgp() for graphs that are directed and irregular"
        )
    return check_connected(topology)


def check_connected(topology: Topology) -> Topology:
    """Returns the topology, after a check that models of all workers reach all others, through others or later."""
    separate = separate_workers(topology)
    if separate:
        raise ValueError(
            f"in {topology.name}, worker {separate[0]} never receives what worker 0 has, or worker 0 never what that "
            "one has, not even through others, so workers would not converge to one model: add edges, or rounds"
        )
    return topology


def check_static(topology: Topology, method: str) -> Topology:
    """Returns the topology, after a check that it is the same in every step."""
    if len(topology.rounds) > 1:
        raise ValueError(
            f"{method} needs the same neighbors in every step, got {topology.name}, which has {len(topology.rounds)} "
            "different rounds: use a static topology, such as ring, torus or hypercube"
        )
    return topology


def check_undirected(topology: Topology, method: str) -> Topology:
    """Returns the topology, after a check that it is static and that both ends of a link have the same weight."""
    check_doubly_stochastic(check_static(topology, method))
    if not is_symmetric(topology):
        raise ValueError(
            f"{method} needs symmetric weights, and those of {topology.name} are not: use ring, torus, hypercube, or "
            "another undirected graph"
        )
    return topology
