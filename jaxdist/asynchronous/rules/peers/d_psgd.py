"""Decentralized SGD that waits for its neighbors, and for nobody else."""

import functools
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.types import PyTree
from ....topology.base import Topology
from ....topology.spectrum import is_doubly_stochastic
from ...protocol import COMPUTED, RECOVERED, Actions, Compute, Counted, Message, Role, Rule, Send, Site, Stepped
from ...values import numeric
from .neighbors import Graph, graph_of

Order = Literal["adapt_then_combine", "combine_then_adapt"]
ORDERS = ("adapt_then_combine", "combine_then_adapt")
PARAMS, USED, AGAIN = "params", "used", "again"


class Neighbors(NamedTuple):
    """A worker's rounds: whom it hears, with what weights, and whom it tells; `order` as in a topology."""

    heard: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    told: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]


class DPSGDState(NamedTuple):
    """A worker's site, neighbors, model, optimizer state, iteration, whether it computes, and what waits.

    `made` is what came of the computation: the model that it steps to, or the gradient where it combines first.
    `inbox` has models by `(iteration, sender)`, and `kept` those that it sent and may have to repeat, by `(receiver,
    iteration)`.
    """

    site: Site
    neighbors: Neighbors
    params: Any
    opt_state: Any
    version: int
    computing: bool
    made: Any
    inbox: dict[tuple[int, int], Any]
    kept: dict[tuple[int, int], Any]


def d_psgd(graph: Graph, optimizer: optax.GradientTransformation, *, order: Order = "adapt_then_combine") -> Rule:
    """Each worker steps and averages with its neighbors' models of the same iteration, for which it waits.

        adapt_then_combine:  x_i <- Σ_j W_ij (x_j + u_j)        combine_then_adapt:  x_i <- u_i + Σ_j W_ij x_j

    It computes what `jd.gossip` with `method="d_psgd"` does. A local barrier: with random durations an iteration takes
    less than the longest of all workers, however many there are; a worker that is always slow holds up its neighbors,
    and through them everybody.

    Steps in the trace are those of single workers, n an iteration, and versions their own counts.

    On the wire: a model to each neighbor per iteration; in graphs whose messages go one way, or that change, a word
    without bytes back. What a worker missed while it was gone is repeated.

    State: a worker's model and optimizer; models of neighbors that are ahead; its own last ones, until they are used.

    Args:
      graph: a topology with doubly stochastic weights, or what makes one for any number of workers, such as
        `jd.topology.ring`.
      optimizer: what each worker steps with, on its own.
      order: `"adapt_then_combine"` sends after the gradient, and is the more accurate; `"combine_then_adapt"`, the
        paper's, sends before it, which hides the time of the messages and lets neighbors be an iteration apart.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: there is no such order; the graph is of another number of workers, or its weights do not keep the
        mean.

    Example:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule, law = rules.d_psgd(jd.topology.ring, optax.sgd(0.1)), durations.exponential(1.0)
      >>> for rule in (rule, rules.bsp(optax.sgd(0.1))):  # seconds per iteration of 16 workers
      ...     run = replay.run(rule, durations=law, workers=16, seconds=1500)
      ...     print(round(1500 * 16 / len(run.trace.gradients), 1))
      2.3
      3.4

    References:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform centralized algorithms? A case
      study for decentralized parallel stochastic gradient descent", arXiv:1705.09056, 2017.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    adapt_first = order == "adapt_then_combine"

    def mixed(params: PyTree, weights: Any, *others: PyTree) -> PyTree:
        # Of differences, since weights such as 1/3 are rounded and would let models drift where they agree.
        def one(own, *theirs):
            change = sum(((x - own) * weight for x, weight in zip(theirs, weights, strict=True)), start=0.0)
            return own + jnp.asarray(change, own.dtype)

        return jax.tree.map(one, params, *others)

    def moved(params: PyTree, opt_state: PyTree, gradient: PyTree, weights: Any, *others: PyTree) -> tuple:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(mixed(params, weights, *others), updates), opt_state

    start, mix, move = numeric(optimizer.init), numeric(mixed), numeric(moved, outputs=2)

    @no_type_check
    def told(state: DPSGDState, model: Any) -> tuple[DPSGDState, Actions]:
        """The model of this iteration for all that hear it."""
        k, around = state.version, state.neighbors
        receivers = around.told[around.order[k % len(around.order)]]
        kept = state.kept | {(to, k): model for to in receivers}
        return state._replace(kept=kept), tuple([Send(to, Message(PARAMS, model, 0, k)) for to in receivers])

    @no_type_check
    def begun(state: DPSGDState) -> tuple[DPSGDState, Actions]:
        state, sends = (state, ()) if adapt_first else told(state, state.params)
        return state, (*sends, Compute(state.params, state.version))

    @no_type_check
    def settled(state: DPSGDState) -> tuple[DPSGDState, Actions]:
        """The next iteration, if all of this one is there."""
        site, around, params, opt_state, k, computing, made, inbox, kept = state
        which = around.order[k % len(around.order)]
        heard = around.heard[which]
        if computing or any((k, j) not in inbox for j in heard):
            return state, ()
        others, weights = [inbox[k, j] for j in heard], around.weights[which]
        if adapt_first:
            params = mix(made, weights, *others)
        else:
            params, opt_state = move(params, opt_state, made, weights, *others)
        inbox = {key: model for key, model in inbox.items() if key[0] > k}
        state, actions = begun(DPSGDState(site, around, params, opt_state, k + 1, True, None, inbox, kept))
        following = around.told[around.order[(k + 1) % len(around.order)]]
        # To whom the next model goes, that one says it.
        used = [Send(j, Message(USED, None, 0, k)) for j in heard if j not in following]
        return state, (Counted(site.index, k, k), Stepped(k + 1, k), *actions, *used)

    def init(site: Site, params: Any) -> tuple[DPSGDState, Actions]:
        around = _neighbors(graph_of(graph, site.workers))[site.index]
        return begun(DPSGDState(site, around, params, start(params), 0, True, None, {}, {}))

    @no_type_check
    def receive(state: DPSGDState, sender: int, message: Message) -> tuple[DPSGDState, Actions]:
        kind, k = message.kind, state.version
        if kind == COMPUTED:
            if not adapt_first:
                return settled(state._replace(computing=False, made=message.value))
            made, opt_state = move(state.params, state.opt_state, message.value, ())
            state = state._replace(computing=False, made=made, opt_state=opt_state)
            state, sends = told(state, made)
            state, actions = settled(state)
            return state, (*sends, *actions)
        if kind == PARAMS:
            state = state._replace(kept=_without(state.kept, sender, message.tag - 1))
            if message.tag < k:  # repeated, so it may not have heard that it was used
                return state, (Send(sender, Message(USED, None, 0, k - 1)),)
            return settled(state._replace(inbox=state.inbox | {(message.tag, sender): message.value}))
        if kind == USED:
            return state._replace(kept=_without(state.kept, sender, message.tag)), ()
        if kind == AGAIN:
            return state, tuple([one for one in repeated(state) if one.to == sender and one.message.tag >= message.tag])
        if kind == RECOVERED:
            everybody = sorted({j for heard in state.neighbors.heard for j in heard})
            asks = tuple(Send(j, Message(AGAIN, None, 0, k)) for j in everybody)
            restart = (Compute(state.params, k),) if state.computing else ()
            return state, (*restart, *repeated(state), *asks)
        raise ValueError(f"a worker of d_psgd does not know the message {kind!r}")

    def repeated(state: DPSGDState) -> Actions:
        return tuple(
            Send(to, Message(PARAMS, model, 0, k)) for (to, k), model in sorted(state.kept.items(), key=_first)
        )

    def waits_for(state: DPSGDState) -> tuple[int, ...]:
        around, k = state.neighbors, state.version
        heard = around.heard[around.order[k % len(around.order)]]
        return () if state.computing else tuple(j for j in heard if (k, j) not in state.inbox)

    return Rule("d_psgd", Role(init, receive, lambda state: state.params, waits_for))


def _first(entry: tuple) -> Any:
    return entry[0]


@no_type_check
def _without(kept: dict, receiver: int, last: int) -> dict:
    """Without what a receiver has used, up to an iteration."""
    return {key: model for key, model in kept.items() if key[0] != receiver or key[1] > last}


@functools.lru_cache(maxsize=16)
def _neighbors(topology: Topology) -> tuple[Neighbors, ...]:
    """Those of each worker."""
    if not is_doubly_stochastic(topology):
        raise ValueError(
            f"the weights of {topology.name} do not sum to 1 in both directions, so workers would not agree on their "
            "mean: use an undirected graph, or one in which all have as many neighbors"
        )
    found = []
    for worker in range(topology.workers):
        heard, told = [], []
        for one in topology.rounds:
            pairs = [(source, to, m.weights[to]) for m in one.messages for source, to in m.pairs if source != to]
            heard.append([(source, weight) for source, to, weight in pairs if to == worker])
            told.append(tuple(to for source, to, _ in pairs if source == worker))
        sources = tuple(tuple(source for source, _ in one) for one in heard)
        weights = tuple(tuple(weight for _, weight in one) for one in heard)
        found.append(Neighbors(sources, weights, tuple(told), topology.order))
    return tuple(found)
