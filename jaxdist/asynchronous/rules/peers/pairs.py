"""Exchanges between pairs of neighbors: one half of the graph asks, the other replies, and nothing is lost."""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import numpy as np

from ...protocol import Actions, Message, Send, Site
from .exchange import ACTIVE, PASSIVE, Exchange
from .neighbors import Choice, Halves, chosen

PARAMS, BACK = "params", "back"


class Edge(NamedTuple):
    """What a node has of a neighbor: how many exchanges are done, the memory of both, and its last reply."""

    count: int
    memory: Any
    reply: Any


class Pairs(NamedTuple):
    """A node's exchanges: how many it began, whom it has asked (-1: nobody) and what it sent, and its neighbors."""

    begun: int
    asked: int
    sent: Any
    edges: dict[int, Edge]


class Node(NamedTuple):
    """A worker, or a group of `size` workers whose first one exchanges for all."""

    index: int
    size: int
    seed: int


class Protocol(NamedTuple):
    """What a node does at the beginning, with each gradient, when a message comes, and when it is back."""

    init: Callable[[Node, Halves, Any], Pairs]
    begin: Callable[[Pairs, Node, Halves, Any], tuple[Pairs, Actions]]
    receive: Callable[[Pairs, Node, Halves, Any, int, Message], tuple[Pairs, Any, Actions]]
    recovered: Callable[[Pairs, Node, Halves], Actions]


def node_of(site: Site, size: int = 1) -> Node:
    """The node that a worker belongs to."""
    return Node(site.index // size, size, site.seed)


def protocol(exchange: Exchange, choice: Choice) -> Protocol:
    """The exchanges of one node.

    The active one sends its model, and the passive one replies with its own and takes its step at once, which no other
    exchange can come between; the active one takes its step when the reply is there. Steps are differences, so that
    what the active one did meanwhile (gradients) stays. It has one exchange at a time, and the passive ones never wait:
    so nobody waits in a circle.

    A message to a node that is gone is lost. Then who asked asks again, when either is back, and who had replied
    already (the count of exchanges tells) repeats its reply instead of averaging twice.
    """

    def words(node: Node, active: int, passive: int) -> np.ndarray:
        return np.array([node.seed & 0xFFFFFFFF, active, passive], np.uint32)

    def init(node: Node, graph: Halves, params: Any) -> Pairs:
        me, active = node.index, graph.active[node.index]
        edges = {
            other: Edge(0, exchange.start(params, words(node, *((me, other) if active else (other, me)))), None)
            for other in graph.neighbors[me]
        }
        return Pairs(0, -1, None, edges)

    def ask(pairs: Pairs, node: Node) -> Actions:
        edge = pairs.edges[pairs.asked]
        return (Send(pairs.asked * node.size, Message(PARAMS, pairs.sent, 0, edge.count)),)

    def encoded(node: Node, other: int, edge: Edge, params: Any, end: int) -> Any:
        ends = (node.index, other) if end == ACTIVE else (other, node.index)
        return exchange.encode(params, edge.memory, end, edge.count, words(node, *ends))

    @no_type_check
    def begin(pairs: Pairs, node: Node, graph: Halves, params: Any) -> tuple[Pairs, Actions]:
        """An exchange, if this node asks and none is under way."""
        if not graph.active[node.index] or pairs.asked >= 0:
            return pairs, ()
        other = chosen(graph, choice, node.seed, node.index, pairs.begun)
        if other is None:
            return pairs._replace(begun=pairs.begun + 1), ()
        sent = encoded(node, other, pairs.edges[other], params, ACTIVE)
        pairs = Pairs(pairs.begun + 1, other, sent, pairs.edges)
        return pairs, ask(pairs, node)

    @no_type_check
    def receive(
        pairs: Pairs, node: Node, graph: Halves, params: Any, sender: int, message: Message
    ) -> tuple[Pairs, Any, Actions]:
        other = sender // node.size
        edge = pairs.edges[other]
        if message.kind == BACK:
            return pairs, params, ask(pairs, node) if pairs.asked == other else ()
        if graph.active[node.index]:
            if pairs.asked != other or message.tag != edge.count:  # a reply that was repeated
                return pairs, params, ()
            params, memory = exchange.settle(params, edge.memory, pairs.sent, message.value, ACTIVE, edge.count)
            edges = pairs.edges | {other: Edge(edge.count + 1, memory, None)}
            return Pairs(pairs.begun, -1, None, edges), params, ()
        actions = ()
        if message.tag == edge.count:
            reply = encoded(node, other, edge, params, PASSIVE)
            params, memory = exchange.settle(params, edge.memory, message.value, reply, PASSIVE, edge.count)
            edge = Edge(edge.count + 1, memory, reply)
            pairs = pairs._replace(edges=pairs.edges | {other: edge})
        if message.tag == edge.count - 1:
            actions = (Send(sender, Message(PARAMS, edge.reply, 0, message.tag)),)
        return pairs, params, actions

    def recovered(pairs: Pairs, node: Node, graph: Halves) -> Actions:
        if pairs.asked >= 0:
            return ask(pairs, node)
        if graph.active[node.index]:
            return ()
        return tuple(Send(other * node.size, Message(BACK)) for other in pairs.edges)

    return Protocol(init, begin, receive, recovered)
