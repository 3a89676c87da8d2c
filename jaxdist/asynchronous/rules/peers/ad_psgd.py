"""Asynchronous decentralized SGD: every worker at its own pace, averaging with one neighbor at a time."""

from typing import Any, NamedTuple, no_type_check

import optax

from ...protocol import COMPUTED, RECOVERED, Actions, Compute, Counted, Message, Role, Rule, Site, Stepped
from ...values import numeric
from ..server.base import step_of
from .exchange import Exchange, whole_models
from .neighbors import Choice, Graph, Halves, check_choice, graph_of, halves
from .pairs import BACK, PARAMS, Node, Pairs, node_of, protocol


class ADPSGDState(NamedTuple):
    """A worker's node, the halves of the graph, its model, optimizer state, count of steps, and its exchanges."""

    node: Node
    graph: Halves
    params: Any
    opt_state: Any
    version: int
    pairs: Pairs


def ad_psgd(
    graph: Graph,
    optimizer: optax.GradientTransformation,
    *,
    choice: Choice = "uniform",
    exchange: Exchange | None = None,
) -> Rule:
    """Each worker steps at its own pace, `x_i <- x_i - γ g(x̂_i)`, and averages with one neighbor meanwhile.

    `x̂_i` is a copy of the model, taken when the gradient begins; while it is computed x_i and the model of a neighbor
    become their mean, and the gradient is applied to what x_i is then. Nobody waits: the time of an exchange is hidden
    behind the gradient. With data that differ between workers the limit is weighted by the workers' speeds, as that of
    `asgd` is.

    One half of the graph asks, with each gradient it begins (if its last exchange is over), and the other half only
    replies: so nobody waits in a circle, and the graph must be bipartite. If a worker is gone, the others step on; who
    has asked it averages again when it is back.

    Versions in the trace are a worker's own count of steps; `replay.peer_delays` counts the gradients that all workers
    applied between reading and using one: the number of workers less one, on average.

    On the wire: a model each way per gradient of the half that asks; other exchanges send less. `compressed` with a
    code for `"params"` works too, but its errors are in proportion to the models rather than to their difference, do
    not vanish as workers agree, and move the sum of all models by half of each: 16 bits are safe; for less take an
    exchange.

    State: a worker's model and optimizer; of the half that replies the last reply to each neighbor, in case it was
    lost.

    Args:
      graph: a bipartite topology, or what makes one for any number of workers, such as `jd.topology.ring` (which needs
        an even number). One that changes goes on to its next round with each exchange of a worker; of those that are
        drawn, such as the randomized ring, `lambda n: jd.topology.relabelled_ring(n, halves=True)` keeps halves.
      optimizer: what each worker steps with, on its own.
      choice: of the neighbors, `"uniform"` or `"in_turn"` (a fixed ring).
      exchange: how a pair averages: `whole_models()`, `power_gossip(rank)`, or `choco_exchange(...)` for any code.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: the graph is of another number of workers, or has an odd cycle; no such choice.

    Example:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule, law = rules.ad_psgd(jd.topology.ring, optax.sgd(0.1)), durations.constant([1, 1, 1, 6])
      >>> run = replay.run(rule, durations=law, workers=4, seconds=600)
      >>> len(run.trace.steps) / 600, float(replay.peer_delays(run.trace).mean().round(1))
      (3.1666666666666665, 3.0)

    References:
      Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent", arXiv:1710.06952,
      2018; Zhang, Cui, Kayi et al., "Improving efficiency in large-scale decentralized distributed training", 2020 (the
      randomized ring); Cui, Zhang, Kayi et al., "Asynchronous decentralized distributed training of acoustic models",
      arXiv:2110.11199, 2021.
    """
    check_choice(choice)
    talk = protocol(exchange or whole_models(), choice)
    start, move = numeric(optimizer.init), numeric(step_of(optimizer), outputs=2)

    def begun(state: ADPSGDState) -> tuple[ADPSGDState, Actions]:
        """A gradient at the model as it is now, and an exchange beside it."""
        pairs, sent = talk.begin(state.pairs, state.node, state.graph, state.params)
        return state._replace(pairs=pairs), (Compute(state.params, state.version), *sent)

    def init(site: Site, params: Any) -> tuple[ADPSGDState, Actions]:
        node, split = node_of(site), halves(graph_of(graph, site.workers))
        return begun(ADPSGDState(node, split, params, start(params), 0, talk.init(node, split, params)))

    @no_type_check
    def receive(state: ADPSGDState, sender: int, message: Message) -> tuple[ADPSGDState, Actions]:
        node, split, params, opt_state, version, pairs = state
        if message.kind == COMPUTED:
            params, opt_state = move(params, opt_state, message.value)
            state, actions = begun(ADPSGDState(node, split, params, opt_state, version + 1, pairs))
            return state, (
                Counted(node.index, message.version, version),
                Stepped(version + 1, message.version),
                *actions,
            )
        if message.kind in (PARAMS, BACK):
            pairs, params, actions = talk.receive(pairs, node, split, params, sender, message)
            return state._replace(params=params, pairs=pairs), actions
        if message.kind == RECOVERED:
            return state, (Compute(params, version), *talk.recovered(pairs, node, split))
        raise ValueError(f"a worker of ad_psgd does not know the message {message.kind!r}")

    return Rule("ad_psgd", Role(init, receive, lambda state: state.params))
