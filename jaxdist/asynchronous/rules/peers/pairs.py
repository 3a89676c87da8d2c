"""Exchanges between pairs of neighbors: one half of the graph initiates, the other replies, and none is lost."""

import functools
from typing import Any, Literal, NamedTuple, no_type_check

import numpy as np

from ....topology.base import Topology
from ...protocol import Actions, Message, Send, Site
from ..base import hash_words
from .exchange import ACTIVE, PASSIVE, Exchange
from .whole_models import whole_models

Choice = Literal["uniform", "in_turn"]
CHOICES = ("uniform", "in_turn")
# Separates these choices from those of other rules.
_NEIGHBOR_STREAM = 3


class Halves(NamedTuple):
    """For each node whether it initiates exchanges, its sorted neighbors in each round, and those of all rounds."""

    active: tuple[bool, ...]
    rounds: tuple[tuple[tuple[int, ...], ...], ...]
    order: tuple[int, ...]
    neighbors: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=16)
def halves(topology: Topology) -> Halves:
    """Splits a bipartite graph into the half that initiates exchanges and the half that replies.

    The lowest node of each connected component belongs to the half that initiates.
    """
    nodes = topology.workers
    rounds = tuple(
        tuple(tuple(sorted(_neighbors_in_round(step.messages, node))) for node in range(nodes))
        for step in topology.rounds
    )
    neighbors = tuple(tuple(sorted({j for step in rounds for j in step[node]})) for node in range(nodes))
    # Breadth-first search; an edge between nodes of the same parity closes an odd cycle.
    depth: dict[int, int] = {}
    parents: dict[int, int] = {}
    for root in range(nodes):
        if root in depth:
            continue
        depth[root], queue = 0, [root]
        for node in queue:
            for other in neighbors[node]:
                if other not in depth:
                    depth[other], parents[other] = depth[node] + 1, node
                    queue.append(other)
                elif (depth[other] - depth[node]) % 2 == 0:
                    cycle = " - ".join(map(str, _cycle(node, other, parents)))
                    raise ValueError(
                        "pairwise exchanges need a bipartite graph, or workers could wait for each other in a cycle; "
                        f"the {topology.name} has the odd cycle {cycle}: use a ring of an even number of workers, a "
                        "hypercube, or another bipartite graph"
                    )
    return Halves(tuple(depth[node] % 2 == 0 for node in range(nodes)), rounds, topology.order, neighbors)


def _neighbors_in_round(messages: tuple, node: int) -> set[int]:
    pairs = [pair for message in messages for pair in message.pairs if node in pair and pair[0] != pair[1]]
    return {end for pair in pairs for end in pair} - {node}


def _cycle(left: int, right: int, parents: dict[int, int]) -> list[int]:
    """Returns the cycle that an edge closes: from one end up to the common ancestor and down to the other end."""
    up, down = [left], [right]
    while up[-1] != down[-1]:
        up.append(parents[up[-1]])
        down.append(parents[down[-1]])
    return [*up, *down[-2::-1], left]


@no_type_check
def choose_neighbor(graph: Halves, choice: Choice, seed: int, node: int, count: int) -> int | None:
    """Returns the partner of a node in its exchange number `count`, or None if it has no neighbor in that round."""
    options = graph.rounds[graph.order[count % len(graph.order)]][node]
    if not options:
        return None
    which = count // len(graph.order) if choice == "in_turn" else hash_words(seed, _NEIGHBOR_STREAM, node, count)
    return options[which % len(options)]


PARAMS, BACK = "params", "back"


class Edge(NamedTuple):
    """A peer's view of a neighbor: the number of completed exchanges, the shared memory, and its own last reply."""

    count: int
    memory: Any
    reply: Any


class Pairs(NamedTuple):
    """The exchanges of a peer: the number that it has initiated, and the state of each neighbor."""

    started: int
    # The neighbor whose reply it waits for, or -1, and the payload that it sent there.
    partner: int
    request: Any
    edges: dict[int, Edge]


class Peer(NamedTuple):
    """A worker, or a group of `size` workers whose first one exchanges for all."""

    index: int
    size: int
    seed: int


class PairProtocol(NamedTuple):
    """The exchanges of a peer: initially, at each gradient, at each message, and after a failure."""

    exchange: Exchange
    choice: Choice

    def init(self, peer: Peer, graph: Halves, params: Any) -> Pairs:
        """Starts with what the exchange remembers of each neighbor."""
        own, is_active = peer.index, graph.active[peer.index]
        edges = {}
        for other in graph.neighbors[own]:
            ends = (own, other) if is_active else (other, own)
            edges[other] = Edge(0, self.exchange.start(params, _pair_words(peer, *ends)), None)
        return Pairs(0, -1, None, edges)

    @no_type_check
    def begin(self, pairs: Pairs, peer: Peer, graph: Halves, params: Any) -> tuple[Pairs, Actions]:
        """Initiates an exchange, if this peer is active and has none in progress."""
        if not graph.active[peer.index] or pairs.partner >= 0:
            return pairs, ()
        other = choose_neighbor(graph, self.choice, peer.seed, peer.index, pairs.started)
        if other is None:
            return pairs._replace(started=pairs.started + 1), ()
        request = self._encode(peer, other, pairs.edges[other], params, ACTIVE)
        pairs = Pairs(pairs.started + 1, other, request, pairs.edges)
        return pairs, _send_request(pairs, peer)

    @no_type_check
    def receive(
        self, pairs: Pairs, peer: Peer, graph: Halves, params: Any, sender: int, message: Message
    ) -> tuple[Pairs, Any, Actions]:
        """Answers a request, or completes the exchange that a reply belongs to; returns the new parameters too."""
        other = sender // peer.size
        edge = pairs.edges[other]
        if message.kind == BACK:
            return pairs, params, _send_request(pairs, peer) if pairs.partner == other else ()
        if graph.active[peer.index]:
            # A reply that was repeated has been used already.
            if pairs.partner != other or message.tag != edge.count:
                return pairs, params, ()
            params, memory = self.exchange.settle(params, edge.memory, pairs.request, message.value, ACTIVE, edge.count)
            edges = pairs.edges | {other: Edge(edge.count + 1, memory, None)}
            return Pairs(pairs.started, -1, None, edges), params, ()

        # The passive end: average once, and reply as often as it is asked.
        if message.tag == edge.count:
            reply = self._encode(peer, other, edge, params, PASSIVE)
            params, memory = self.exchange.settle(params, edge.memory, message.value, reply, PASSIVE, edge.count)
            edge = Edge(edge.count + 1, memory, reply)
            pairs = pairs._replace(edges=pairs.edges | {other: edge})
        repeats = message.tag == edge.count - 1
        return pairs, params, (Send(sender, Message(PARAMS, edge.reply, 0, message.tag)),) if repeats else ()

    def recover(self, pairs: Pairs, peer: Peer, graph: Halves) -> Actions:
        """Repeats what may have been lost, after a failure of this peer."""
        if pairs.partner >= 0:
            return _send_request(pairs, peer)
        if graph.active[peer.index]:
            return ()
        return tuple(Send(other * peer.size, Message(BACK)) for other in pairs.edges)

    def _encode(self, peer: Peer, other: int, edge: Edge, params: Any, end: int) -> Any:
        ends = (peer.index, other) if end == ACTIVE else (other, peer.index)
        return self.exchange.encode(params, edge.memory, end, edge.count, _pair_words(peer, *ends))


def peer_of(site: Site, size: int = 1) -> Peer:
    """Returns the peer that a worker belongs to."""
    return Peer(site.index // size, size, site.seed)


def pair_protocol(exchange: Exchange | None, choice: Choice) -> PairProtocol:
    """Makes the exchanges of a peer, of whole models by default.

    The active peer sends its model. The passive one replies with its own and updates it at once, so that no other
    exchange comes between; the active one updates its model when the reply arrives. Updates are differences, so that
    gradients that were applied meanwhile are kept. An active peer has one exchange at a time and passive peers never
    wait, so that no cycle of waiting peers can form.

    A message to a peer that has failed is lost. The active peer repeats its request when either end recovers, and a
    passive peer that had replied already (as the count of exchanges shows) repeats its reply instead of averaging
    twice.
    """
    if choice not in CHOICES:
        raise ValueError(f"choice must be one of {', '.join(CHOICES)}, got {choice!r}")
    return PairProtocol(exchange or whole_models(), choice)


def _pair_words(peer: Peer, active: int, passive: int) -> np.ndarray:
    return np.array([peer.seed & 0xFFFFFFFF, active, passive], np.uint32)


def _send_request(pairs: Pairs, peer: Peer) -> Actions:
    edge = pairs.edges[pairs.partner]
    return (Send(pairs.partner * peer.size, Message(PARAMS, pairs.request, 0, edge.count)),)
