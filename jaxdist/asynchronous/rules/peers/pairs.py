"""Exchanges between pairs of neighbors: one half of the graph initiates, the other replies, and none is lost."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import numpy as np

from ...protocol import Actions, Message, Send, Site
from .exchange import ACTIVE, PASSIVE, Exchange
from .neighbors import Choice, Halves, choose_neighbor

PARAMS, BACK = "params", "back"


class Edge(NamedTuple):
    """A peer's view of a neighbor: the number of completed exchanges, the shared memory, and its own last reply."""

    count: int
    memory: Any
    reply: Any


class Pairs(NamedTuple):
    """The exchanges of a peer.

    Attributes:
      started: the number of exchanges that it has initiated.
      partner: the neighbor whose reply it waits for, or -1.
      request: the payload that it sent there.
      edges: the state of each neighbor.
    """

    started: int
    partner: int
    request: Any
    edges: dict[int, Edge]


class Peer(NamedTuple):
    """A worker, or a group of `size` workers whose first one exchanges for all."""

    index: int
    size: int
    seed: int


class PairProtocol(NamedTuple):
    """The functions of a peer: initially, at each gradient, at each message, and after a failure."""

    init: Callable[[Peer, Halves, Any], Pairs]
    begin: Callable[[Pairs, Peer, Halves, Any], tuple[Pairs, Actions]]
    receive: Callable[[Pairs, Peer, Halves, Any, int, Message], tuple[Pairs, Any, Actions]]
    recover: Callable[[Pairs, Peer, Halves], Actions]


def peer_of(site: Site, size: int = 1) -> Peer:
    """Returns the peer that a worker belongs to."""
    return Peer(site.index // size, size, site.seed)


def pair_protocol(exchange: Exchange, choice: Choice) -> PairProtocol:
    """Makes the exchanges of a peer.

    The active peer sends its model. The passive one replies with its own and updates it at once, so that no other
    exchange comes between; the active one updates its model when the reply arrives. Updates are differences, so that
    gradients that were applied meanwhile are kept. An active peer has one exchange at a time and passive peers never
    wait, so that no cycle of waiting peers can form.

    A message to a peer that has failed is lost. The active peer repeats its request when either end recovers, and a
    passive peer that had replied already (as the count of exchanges shows) repeats its reply instead of averaging
    twice.
    """
    return PairProtocol(
        partial(_init, exchange), partial(_begin, exchange, choice), partial(_receive, exchange), _recover
    )


def _pair_words(peer: Peer, active: int, passive: int) -> np.ndarray:
    return np.array([peer.seed & 0xFFFFFFFF, active, passive], np.uint32)


def _init(exchange: Exchange, peer: Peer, graph: Halves, params: Any) -> Pairs:
    own, is_active = peer.index, graph.active[peer.index]
    edges = {}
    for other in graph.neighbors[own]:
        ends = (own, other) if is_active else (other, own)
        edges[other] = Edge(0, exchange.start(params, _pair_words(peer, *ends)), None)
    return Pairs(0, -1, None, edges)


@no_type_check
def _begin(
    exchange: Exchange, choice: Choice, pairs: Pairs, peer: Peer, graph: Halves, params: Any
) -> tuple[Pairs, Actions]:
    """Initiates an exchange, if this peer is active and has none in progress."""
    if not graph.active[peer.index] or pairs.partner >= 0:
        return pairs, ()
    other = choose_neighbor(graph, choice, peer.seed, peer.index, pairs.started)
    if other is None:
        return pairs._replace(started=pairs.started + 1), ()
    request = _encode(exchange, peer, other, pairs.edges[other], params, ACTIVE)
    pairs = Pairs(pairs.started + 1, other, request, pairs.edges)
    return pairs, _send_request(pairs, peer)


@no_type_check
def _receive(
    exchange: Exchange, pairs: Pairs, peer: Peer, graph: Halves, params: Any, sender: int, message: Message
) -> tuple[Pairs, Any, Actions]:
    other = sender // peer.size
    edge = pairs.edges[other]
    if message.kind == BACK:
        return pairs, params, _send_request(pairs, peer) if pairs.partner == other else ()
    if graph.active[peer.index]:
        return _on_reply(exchange, pairs, params, other, edge, message)

    # The passive end: average once, and reply as often as it is asked.
    actions = ()
    if message.tag == edge.count:
        reply = _encode(exchange, peer, other, edge, params, PASSIVE)
        params, memory = exchange.settle(params, edge.memory, message.value, reply, PASSIVE, edge.count)
        edge = Edge(edge.count + 1, memory, reply)
        pairs = pairs._replace(edges=pairs.edges | {other: edge})
    if message.tag == edge.count - 1:
        actions = (Send(sender, Message(PARAMS, edge.reply, 0, message.tag)),)
    return pairs, params, actions


@no_type_check
def _on_reply(
    exchange: Exchange, pairs: Pairs, params: Any, other: int, edge: Edge, message: Message
) -> tuple[Pairs, Any, Actions]:
    # A reply that was repeated has been used already.
    if pairs.partner != other or message.tag != edge.count:
        return pairs, params, ()
    params, memory = exchange.settle(params, edge.memory, pairs.request, message.value, ACTIVE, edge.count)
    edges = pairs.edges | {other: Edge(edge.count + 1, memory, None)}
    return Pairs(pairs.started, -1, None, edges), params, ()


def _recover(pairs: Pairs, peer: Peer, graph: Halves) -> Actions:
    if pairs.partner >= 0:
        return _send_request(pairs, peer)
    if graph.active[peer.index]:
        return ()
    return tuple(Send(other * peer.size, Message(BACK)) for other in pairs.edges)


def _send_request(pairs: Pairs, peer: Peer) -> Actions:
    edge = pairs.edges[pairs.partner]
    return (Send(pairs.partner * peer.size, Message(PARAMS, pairs.request, 0, edge.count)),)


def _encode(exchange: Exchange, peer: Peer, other: int, edge: Edge, params: Any, end: int) -> Any:
    ends = (peer.index, other) if end == ACTIVE else (other, peer.index)
    return exchange.encode(params, edge.memory, end, edge.count, _pair_words(peer, *ends))
