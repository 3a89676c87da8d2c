"""AD-PSGD: workers step at their own pace and average with one neighbor at a time."""

from typing import Any, NamedTuple, no_type_check

import optax

from ... import protocol
from ...protocol import Compute, GradientRecord, Message, Reaction, Role, Rule, Site, StepRecord
from ..base import Graph, graph_of, optimizer_on_values, params_of, unknown_message
from .exchange import Exchange
from .pairs import BACK, PARAMS, Choice, Halves, Pairs, Peer, halves, pair_protocol, peer_of


class _ADPSGDState(NamedTuple):
    """A worker's peer, the halves of the graph, its model, optimizer state and step count, and its exchanges."""

    peer: Peer
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
    """Steps each worker at its own pace, `x_i <- x_i - γ g(x̂_i)`, and averages with one neighbor meanwhile.

    `x̂_i` is the model when the gradient begins; while the gradient is computed, x_i and the model of a neighbor become
    their mean, and the gradient is applied to the averaged x_i. No worker waits: the exchange overlaps the gradient.
    With data that differ between workers the limit is weighted by the workers' speeds, as for `asgd`.

    One half of a bipartite graph initiates an exchange with each gradient that it begins (if its last exchange is
    complete), and the other half only replies. If a worker fails, the others continue; exchanges that it interrupted
    are repeated when it recovers.

    Versions in the trace are a worker's own step count; `replay.peer_delays` counts the gradients that all workers
    applied between reading and using one: the number of workers minus one, on average.

    *On the wire*: a model each way per gradient of the half that initiates; other exchanges send less.

    *State*: a worker's model and optimizer; in the half that replies the last reply to each neighbor, in case it was
    lost.

    Args:
      graph: a bipartite topology, or a function that makes one for a number of workers, such as `jd.topology.ring`
        (which needs an even number). A topology that changes advances with each exchange of a worker; of the random
        ones, `lambda n: jd.topology.relabeled_ring(n, halves=True)` is bipartite.
      optimizer: the local optimizer of each worker.
      choice: of the neighbors, `"uniform"` or `"in_turn"` (a fixed ring).
      exchange: how pairs average: `whole_models()`, `power_gossip(rank)`, or `choco_exchange(...)`.

    Raises:
      ValueError: the graph has another number of workers or an odd cycle.

    Examples:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule, law = rules.ad_psgd(jd.topology.ring, optax.sgd(0.1)), durations.constant([1, 1, 1, 6])
      >>> run = replay.run(rule, durations=law, workers=4, seconds=600)
      >>> len(run.trace.steps) / 600, float(replay.peer_delays(run.trace).mean().round(1))
      (3.1666666666666665, 3.0)

    References:
      Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv:1710.06952,
      2018; Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training", ICASSP,
      arXiv:2002.01119, 2020 (the randomized ring); Cui et al., "Asynchronous Decentralized Distributed Training of
      Acoustic Models", arXiv:2110.11199, 2021.
    """
    pairing, (start, step) = pair_protocol(exchange, choice), optimizer_on_values(optimizer)

    @no_type_check
    def begin_gradient(state: _ADPSGDState) -> Reaction:
        # The exchange sends the model at which the gradient is computed, and overlaps it.
        pairs, sends = pairing.begin(state.pairs, state.peer, state.graph, state.params)
        return state._replace(pairs=pairs), (Compute(state.params, state.version), *sends)

    def init(site: Site, params: Any) -> Reaction:
        peer, split = peer_of(site), halves(graph_of(graph, site.workers))
        return begin_gradient(_ADPSGDState(peer, split, params, start(params), 0, pairing.init(peer, split, params)))

    @no_type_check
    def receive(state: _ADPSGDState, sender: int, message: Message) -> Reaction:
        peer, split, params, opt_state, version, pairs = state
        if message.kind == protocol.COMPUTED:
            # The gradient of x̂_i is applied to x_i, which exchanges have changed meanwhile.
            params, opt_state = step(params, opt_state, message.value)
            records = GradientRecord(peer.index, message.version, version), StepRecord(version + 1, message.version)
            state, actions = begin_gradient(_ADPSGDState(peer, split, params, opt_state, version + 1, pairs))
            return state, (*records, *actions)
        if message.kind in (PARAMS, BACK):
            pairs, params, actions = pairing.receive(pairs, peer, split, params, sender, message)
            return state._replace(params=params, pairs=pairs), actions
        if message.kind == protocol.RECOVERED:
            return state, (Compute(params, version), *pairing.recover(pairs, peer, split))
        raise unknown_message("a worker of ad_psgd", message)

    return Rule("ad_psgd", Role(init, receive, params_of))
