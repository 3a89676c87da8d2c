"""D-PSGD: decentralized SGD in which each worker waits for its neighbors only."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.dtypes import widen
from ...._core.types import PyTree
from ....topology.base import Topology
from ....topology.spectrum import is_doubly_stochastic
from ... import protocol
from ...protocol import Actions, Compute, GradientRecord, Message, Reaction, Role, Rule, Send, Site, StepRecord
from ...values import numeric
from ..base import Graph, combine_and_adapt, graph_of, optimizer_on_values, params_of, unknown_message

Order = Literal["adapt_then_combine", "combine_then_adapt"]
ORDERS = ("adapt_then_combine", "combine_then_adapt")
# A model; an acknowledgment that a model was used; a request to repeat models after a failure.
PARAMS, USED, AGAIN = "params", "used", "again"


class Rounds(NamedTuple):
    """For each round of a worker its sources, their weights, and its destinations; `order` as in a topology."""

    sources: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    destinations: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    def at(self, iteration: int) -> int:
        """Returns the index of the round of an iteration."""
        return self.order[iteration % len(self.order)]


class NeighborState(NamedTuple):
    """A worker's neighbors, model and iteration, and the models that it has received and sent."""

    site: Site
    rounds: Rounds
    params: Any
    opt_state: Any
    version: int
    computing: bool
    # Of this iteration's computation: the adapted model, or the gradient if it combines first; None while computing.
    result: Any
    # Models that have arrived, by `(iteration, sender)`.
    inbox: dict[tuple[int, int], Any]
    # Models that it has sent and may have to repeat, by `(receiver, iteration)`.
    outbox: dict[tuple[int, int], Any]


def d_psgd(graph: Graph, optimizer: optax.GradientTransformation, *, order: Order = "adapt_then_combine") -> Rule:
    """Each worker steps and averages with its neighbors' models of the same iteration, for which it waits.

        adapt_then_combine:  x_i <- Σ_j W_ij (x_j + u_j)        combine_then_adapt:  x_i <- u_i + Σ_j W_ij x_j

    The same computation as `jd.gossip` with `method="d_psgd"`. The barrier is local: with random durations an iteration
    takes less than the longest of all workers, whatever their number; but a worker that is always slow delays its
    neighbors, and through them all workers.

    Steps in the trace are those of single workers, n per iteration, and versions are their own counts.

    *On the wire*: a model to each neighbor per iteration; in directed or changing graphs an acknowledgment without
    bytes back. Models that a worker missed during an outage are repeated.

    *State*: a worker's model and optimizer; models of neighbors that are ahead; its own last models, until they are
    used.

    Args:
      graph: a topology with doubly stochastic weights, or a function that makes one for a number of workers, such as
        `jd.topology.ring`.
      optimizer: the local optimizer of each worker.
      order: `"adapt_then_combine"` sends after the gradient and is more accurate; `"combine_then_adapt"`, the paper's,
        sends before it, which hides the time of the messages and lets neighbors be one iteration apart.

    Raises:
      ValueError: the graph has another number of workers, or its weights are not doubly stochastic.

    Examples:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule, law = rules.d_psgd(jd.topology.ring, optax.sgd(0.1)), durations.exponential(1.0)
      >>> for rule in (rule, rules.bsp(optax.sgd(0.1))):  # seconds per iteration of 16 workers
      ...     run = replay.run(rule, durations=law, workers=16, seconds=1500)
      ...     print(round(1500 * 16 / len(run.trace.gradients), 1))
      2.3
      3.4

    References:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case
      Study for Decentralized Parallel Stochastic Gradient Descent", arXiv:1705.09056, 2017.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    on_values = optimizer_on_values(optimizer, partial(combine_and_adapt, combine))
    rule = _DPSGD(graph, order == "adapt_then_combine", numeric(combine), *on_values)
    return Rule("d_psgd", Role(rule.init, rule.receive, params_of, waits_for))


def combine(params: PyTree, weights: Any, *others: PyTree) -> PyTree:
    """`Σ_j W_ij x_j`, for one's own tree and those of the sources with their weights."""

    def combine_leaves(own: Any, *theirs: Any) -> Any:
        # x_i + Σ_j W_ij (x_j - x_i): weights such as 1/3 are rounded, and a plain sum would let equal models drift.
        base = widen(own)
        change = sum(((widen(x) - base) * weight for x, weight in zip(theirs, weights, strict=True)), start=0.0)
        return (base + jnp.asarray(change, base.dtype)).astype(own.dtype)

    return jax.tree.map(combine_leaves, params, *others)


class _DPSGD(NamedTuple):
    """The graph, the order, and functions of values: `Σ_j W_ij x_j`, the optimizer's first state, and both's step."""

    graph: Graph
    adapt_first: bool
    combine: Callable[..., Any]
    start: Callable[..., Any]
    step: Callable[..., Any]

    def init(self, site: Site, params: Any) -> Reaction:
        rounds = rounds_of_workers(graph_of(self.graph, site.workers))[site.index]
        return self._begin_iteration(NeighborState(site, rounds, params, self.start(params), 0, True, None, {}, {}))

    @no_type_check
    def _begin_iteration(self, state: NeighborState) -> Reaction:
        state, sends = (state, ()) if self.adapt_first else send_model(state, state.params)
        return state, (*sends, Compute(state.params, state.version))

    @no_type_check
    def receive(self, state: NeighborState, sender: int, message: Message) -> Reaction:
        if message.kind == protocol.COMPUTED:
            return self._on_gradient(state, message.value)
        if message.kind == protocol.RECOVERED:
            state, actions = receive_from_peer(state, sender, message)
            return state, ((Compute(state.params, state.version),) if state.computing else ()) + actions
        state, replies = receive_from_peer(state, sender, message)
        state, actions = self._try_advance(state)
        return state, replies + actions

    @no_type_check
    def _on_gradient(self, state: NeighborState, gradient: Any) -> Reaction:
        if not self.adapt_first:
            return self._try_advance(state._replace(computing=False, result=gradient))
        # x_i + u_i, without neighbors
        adapted, opt_state = self.step(state.params, state.opt_state, gradient, ())
        state = state._replace(computing=False, result=adapted, opt_state=opt_state)
        state, sends = send_model(state, adapted)
        state, actions = self._try_advance(state)
        return state, (*sends, *actions)

    @no_type_check
    def _try_advance(self, state: NeighborState) -> Reaction:
        """Begins the next iteration if the gradient and all models of this one are known."""
        k, found = state.version, models_of_iteration(state)
        if found is None:
            return state, ()
        weights, others = found
        if self.adapt_first:
            params, opt_state = self.combine(state.result, weights, *others), state.opt_state
        else:
            params, opt_state = self.step(state.params, state.opt_state, state.result, weights, *others)
        state, used = end_iteration(state, params, opt_state)
        state, actions = self._begin_iteration(state)
        return state, (GradientRecord(state.site.index, k, k), StepRecord(k + 1, k), *actions, *used)


@no_type_check
def send_model(state: NeighborState, model: Any) -> Reaction:
    """Sends the model of this iteration to all destinations."""
    k, rounds = state.version, state.rounds
    destinations = rounds.destinations[rounds.at(k)]
    outbox = state.outbox | {(to, k): model for to in destinations}
    return state._replace(outbox=outbox), tuple([Send(to, Message(PARAMS, model, 0, k)) for to in destinations])


@no_type_check
def receive_from_peer(state: NeighborState, sender: int, message: Message) -> Reaction:
    """Takes a model, an acknowledgment or a request for models, or asks for what was missed during a failure."""
    kind = message.kind
    if kind == PARAMS:
        # To reach this iteration the sender has used all earlier models of this worker.
        state = state._replace(outbox=_drop_used(state.outbox, sender, message.tag - 1))
        if message.tag < state.version:
            # It was repeated, so the sender may have missed the acknowledgment.
            return state, (Send(sender, Message(USED, None, 0, state.version - 1)),)
        return state._replace(inbox=state.inbox | {(message.tag, sender): message.value}), ()
    if kind == USED:
        return state._replace(outbox=_drop_used(state.outbox, sender, message.tag)), ()
    if kind == AGAIN:
        return state, tuple([s for s in repeat_models(state) if s.to == sender and s.message.tag >= message.tag])
    if kind == protocol.RECOVERED:
        sources = sorted({j for sources in state.rounds.sources for j in sources})
        requests = tuple(Send(j, Message(AGAIN, None, 0, state.version)) for j in sources)
        return state, (*repeat_models(state), *requests)
    raise unknown_message("a worker that gossips", message)


@no_type_check
def models_of_iteration(state: NeighborState) -> tuple[tuple[float, ...], list[Any]] | None:
    """Returns the weights and models of this iteration's sources; `None` while it computes or one is missing."""
    k, rounds = state.version, state.rounds
    sources = rounds.sources[rounds.at(k)]
    if state.computing or any((k, j) not in state.inbox for j in sources):
        return None
    return rounds.weights[rounds.at(k)], [state.inbox[k, j] for j in sources]


@no_type_check
def end_iteration(state: NeighborState, params: Any, opt_state: Any) -> Reaction:
    """Goes to the next iteration with this model, and acknowledges the models that were used."""
    k, rounds = state.version, state.rounds
    state = state._replace(
        params=params,
        opt_state=opt_state,
        version=k + 1,
        computing=True,
        result=None,
        inbox={key: model for key, model in state.inbox.items() if key[0] > k},
    )
    # The next model acknowledges this one; sources that do not receive it get an explicit acknowledgment.
    next_destinations = rounds.destinations[rounds.at(k + 1)]
    sources = rounds.sources[rounds.at(k)]
    return state, tuple(Send(j, Message(USED, None, 0, k)) for j in sources if j not in next_destinations)


def repeat_models(state: NeighborState) -> Actions:
    """Sends everything once more that its receivers may not have used."""
    models = sorted(state.outbox.items(), key=lambda entry: entry[0])
    return tuple(Send(to, Message(PARAMS, model, 0, k)) for (to, k), model in models)


@no_type_check
def _drop_used(outbox: dict, receiver: int, last: int) -> dict:
    """Drops the models that a receiver has used, up to an iteration."""
    return {key: model for key, model in outbox.items() if key[0] != receiver or key[1] > last}


def waits_for(state: NeighborState) -> tuple[int, ...]:
    """The sources whose models of this iteration are missing."""
    sources = state.rounds.sources[state.rounds.at(state.version)]
    return () if state.computing else tuple(j for j in sources if (state.version, j) not in state.inbox)


@functools.lru_cache(maxsize=16)
def rounds_of_workers(topology: Topology) -> tuple[Rounds, ...]:
    """Returns the rounds of each worker."""
    if not is_doubly_stochastic(topology):
        raise ValueError(
            f"the weights of {topology.name} do not sum to 1 in both directions, so averaging would not keep the mean: "
            "use an undirected graph, or one in which all workers have equally many neighbors"
        )
    found = []
    for worker in range(topology.workers):
        sources, weights, destinations = [], [], []
        for step in topology.rounds:
            pairs = [(source, to, m.weights[to]) for m in step.messages for source, to in m.pairs if source != to]
            sources.append(tuple(source for source, to, _ in pairs if to == worker))
            weights.append(tuple(weight for _, to, weight in pairs if to == worker))
            destinations.append(tuple(to for source, to, _ in pairs if source == worker))
        found.append(Rounds(tuple(sources), tuple(weights), tuple(destinations), topology.order))
    return tuple(found)
