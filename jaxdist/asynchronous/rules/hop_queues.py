"""What a worker of Hop keeps of its neighbours' models, which of them an iteration may use, and with what weight."""

import functools
from typing import Any, NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float

from ...topology import matrix
from ._graph import Graph, graph_of

Queue = tuple[tuple[int, Any], ...]


class Neighbours(NamedTuple):
    """Whose models a worker gets, who gets its own, and the weights of its own model and of those it gets."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    weights: tuple[float, ...]


@functools.lru_cache(maxsize=16)
def neighbours_in(graph: Graph, workers: int) -> tuple[Neighbours, ...]:
    """The neighbours of each worker; refuses graphs that change, or that are not for so many workers."""
    topology = graph_of(graph, workers)
    if len(topology.rounds) > 1:
        raise ValueError(
            f"the {topology.name} changes from step to step, and neighbours must stay: take a static topology"
        )
    weights = matrix(topology)
    if abs(weights.sum(1) - 1).max() > 1e-6:
        raise ValueError(f"the rows of the {topology.name} must sum to 1: push-sum weights do not work here")
    own, others = np.diag(weights), weights - np.diag(np.diag(weights))
    found = []
    for index in range(workers):
        sources = np.flatnonzero(others[index])
        given = (own[index].item(), *others[index, sources].tolist())
        found.append(Neighbours(tuple(sources.tolist()), tuple(np.flatnonzero(others[:, index]).tolist()), given))
    return tuple(found)


@no_type_check
def arrived(queue: Queue, iteration: int, model: Any, *, newest: bool) -> Queue:
    """The queue of a neighbour with one more model; of two the newest alone, where that is all that counts."""
    if queue and queue[-1][0] >= iteration:  # sent again, by one who had been gone
        return queue
    return ((iteration, model),) if newest else (*queue, (iteration, model))


@no_type_check
def usable(queues: tuple[Queue, ...], iteration: int, staleness: int) -> list[tuple[int, int, Any]]:
    """`(which neighbour, iteration, model)` of all that this iteration may use.

    Without staleness the model of this very iteration. Where that was lost, since nobody was there to take it, a later
    one is first in the queue and stands in: links keep their order, so the lost one cannot come any more.
    """
    found = []
    for which, queue in enumerate(queues):
        for sent, model in queue:
            if sent >= iteration - staleness:
                found.append((which, sent, model))
                break
    return found


@no_type_check
def since(queues: tuple[Queue, ...], iteration: int) -> tuple[Queue, ...]:
    """The queues without what came too late for this iteration."""
    return tuple([tuple([one for one in queue if one[0] >= iteration]) for queue in queues])


def shares(
    weights: tuple[float, ...], found: list[tuple[int, int, Any]], iteration: int, staleness: int
) -> Float[np.ndarray, " models"]:
    """The weights of the own model and of those found: they sum to 1, and fall linearly with staleness.

    `w_ij (k_j - (k - s) + 1)`, normalised; the own model is of iteration `k`. With no staleness, `w_ij`.
    """
    fresh = [staleness + 1, *[sent - iteration + staleness + 1 if staleness else 1 for _, sent, _ in found]]
    given = np.array([weights[0], *[weights[which + 1] for which, _, _ in found]]) * fresh
    return (given / given.sum()).astype(np.float32)
