"""What a worker of Hop keeps of its neighbors' models, which of them an iteration may use, and with what weight."""

import functools
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from ...._core.types import PyTree
from ....topology.base import matrix
from ...protocol import COMPUTED, RECOVERED, Actions, Compute, Counted, Message, Role, Rule, Send, Site, Stepped
from ...values import numeric
from ..server.base import PARAMS, PULL, put
from .neighbors import Graph, graph_of

Queue = tuple[tuple[int, Any], ...]


class Neighbors(NamedTuple):
    """Whose models a worker gets, who gets its own, and the weights of its own model and of those it gets."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    weights: tuple[float, ...]


@functools.lru_cache(maxsize=16)
def neighbors_in(graph: Graph, workers: int) -> tuple[Neighbors, ...]:
    """The neighbors of each worker; refuses graphs that change, or that are not for so many workers."""
    topology = graph_of(graph, workers)
    if len(topology.rounds) > 1:
        raise ValueError(
            f"the {topology.name} changes from step to step, and neighbors must stay: take a static topology"
        )
    weights = matrix(topology)
    if abs(weights.sum(1) - 1).max() > 1e-6:
        raise ValueError(f"the rows of the {topology.name} must sum to 1: push-sum weights do not work here")
    own, others = np.diag(weights), weights - np.diag(np.diag(weights))
    found = []
    for index in range(workers):
        sources = np.flatnonzero(others[index])
        given = (own[index].item(), *others[index, sources].tolist())
        found.append(Neighbors(tuple(sources.tolist()), tuple(np.flatnonzero(others[:, index]).tolist()), given))
    return tuple(found)


@no_type_check
def arrived(queue: Queue, iteration: int, model: Any, *, newest: bool) -> Queue:
    """The queue of a neighbor with one more model; of two the newest alone, where that is all that counts."""
    if queue and queue[-1][0] >= iteration:  # sent again, by one who had been gone
        return queue
    return ((iteration, model),) if newest else (*queue, (iteration, model))


@no_type_check
def usable(queues: tuple[Queue, ...], iteration: int, staleness: int) -> list[tuple[int, int, Any]]:
    """`(which neighbor, iteration, model)` of all that this iteration may use.

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

    `w_ij (k_j - (k - s) + 1)`, normalized; the own model is of iteration `k`. With no staleness, `w_ij`.
    """
    fresh = [staleness + 1, *[sent - iteration + staleness + 1 if staleness else 1 for _, sent, _ in found]]
    given = np.array([weights[0], *[weights[which + 1] for which, _, _ in found]]) * fresh
    return (given / given.sum()).astype(np.float32)


TOKEN = "token"


class HopState(NamedTuple):
    """One worker of Hop.

    Attributes:
      site: where it runs.
      params, opt_state: its model, as its iteration began, and its optimizer's state.
      iteration: how many iterations it has behind it.
      gradient: that of this iteration, or None while it is in the making.
      queues: for each neighbor that sends to it, models not used yet as `(iteration, model)`, the oldest first.
      leads: for each neighbor that it sends to, the iteration that its tokens tell.
    """

    site: Site
    params: Any
    opt_state: Any
    iteration: int
    gradient: Any
    queues: tuple[Queue, ...]
    leads: tuple[int, ...]


def hop(
    graph: Graph,
    optimizer: optax.GradientTransformation,
    *,
    tokens: int | None = None,
    backup: int = 0,
    staleness: int = 0,
    skip: int = 0,
) -> Rule:
    """Decentralized training with queues: each worker waits for its neighbors' models of its own iteration k.

    Entering iteration k a worker sends `x_i^k` to its neighbors and computes its gradient there, at the same time;
    then `x_i^(k+1) = Σ_j w_ij x_j^k + u_i`, with the optimizer's update `u_i` (`-γ g_i` for SGD): D-PSGD without a
    global barrier. A worker leads another by the hops between them at most, and all go as fast as the slowest. Against
    that there are

    - *token queues*: each neighbor that a worker sends to keeps a queue of tokens for it, `tokens` of them at first.
      Entering an iteration takes one token from each and puts one into each own queue, so that nobody leads a
      neighbor by more than `tokens`;
    - *backup workers*: an iteration waits for all but `backup` of the neighbors, uses what else has come and drops
      what comes late. Weights are divided by their sum;
    - *bounded staleness*: the newest model of each neighbor serves, from iteration `k - s` on, with a weight that
      falls linearly with its age: `w_ij (k_j - (k - s) + 1)` over the sum of these. A worker leads another by `s + 1`
      for each hop;
    - *skipping*: a worker that is two iterations or more behind all whom it sends to, as their tokens tell, enters that
      of the nearest of them at once, at most `skip` further on. Its gradient is added to the mean of its neighbors'
      models of the iteration before the one that it enters; its own old model has no part in that.

    The paper leaves open what becomes of the gradient where iterations are skipped, and takes equal weights; here the
    weights are the graph's. A worker that was gone takes its neighbors' newest models for those that it missed.

    On the wire: a model to each neighbor per iteration, and with tokens a message without a value from each.

    State: each worker's model and optimizer, and of each neighbor the models that came early: one without tokens in an
    undirected graph, up to `tokens + 1` with them, one with staleness.

    Args:
      graph: a topology, which says who sends to whom and with what weight, or what makes one for any number of
        workers, such as `jd.topology.ring`. It must stay the same.
      optimizer: what every worker steps with.
      tokens: how far a worker may lead a neighbor (`max_ig` in the paper), or None for no token queues. With many,
        models that came early fill the memory.
      backup: how many neighbors an iteration does not wait for (`N_b`). 1 is enough for one slow neighbor.
      staleness: s. It absorbs random slowdowns of so many iterations.
      skip: most iterations to go on at once (`max_jump`), or 0. With a worker that is slow for good, backup workers and
        staleness help only until tokens or age run out; with `skip`, tokens and any staleness at least the factor by
        which it is slower, the others go at full speed.

    Returns:
      The rule; it has no server. Versions in the books are iterations.

    Raises:
      ValueError: an argument cannot work, or backup workers without tokens, or skipping without tokens or where nobody
        may be ahead (neither backup workers nor staleness).

    Example:
      >>> import optax
      >>> from jaxdist import topology
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> law = durations.constant([6, 1, 1, 1])
      >>> for options in ({}, {"tokens": 5, "backup": 1}, {"tokens": 5, "backup": 1, "skip": 5}):
      ...     rule = rules.hop(topology.ring, optax.sgd(0.1), **options)
      ...     run = replay.run(rule, durations=law, workers=4, seconds=600)
      ...     print(len(run.trace.gradients))
      404
      416
      1604

    References:
      Luo, Lin, Zhuo, Qian, "Hop: heterogeneity-aware decentralized training", arXiv:1902.01064, 2019. Lian, Zhang,
      Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform centralized algorithms?", arXiv:1705.09056,
      2017 (the iteration).
    """
    _check(tokens, backup, staleness, skip)

    def moved(params: PyTree, opt_state: PyTree, gradient: PyTree, weights: Any, *others: PyTree) -> tuple:
        updates, opt_state = optimizer.update(gradient, opt_state, params)

        def mixed(*leaves: Any) -> Any:
            total = sum(weights[k] * leaf.astype(jnp.float32) for k, leaf in enumerate(leaves))
            return jnp.asarray(total).astype(leaves[0].dtype)

        return optax.apply_updates(jax.tree.map(mixed, params, *others), updates), opt_state

    start = numeric(optimizer.init, shared=True)
    move = numeric(moved, outputs=2)

    @no_type_check
    def enter(state: HopState, near: Neighbors) -> Actions:
        k, sends = state.iteration, ()
        if tokens is not None:
            sends = tuple([Send(j, Message(TOKEN, None, k)) for j in near.sources])
        return (*sends, *[Send(j, Message(PARAMS, state.params, k)) for j in near.destinations])

    def init(site: Site, params: Any) -> tuple[HopState, Actions]:
        found = neighbors_in(graph, site.workers)
        for index, near in enumerate(found):
            if backup and backup >= len(near.sources):
                raise ValueError(
                    f"backup must be less than the {len(near.sources)} neighbors of worker {index}, got {backup}"
                )
        near = found[site.index]
        empty = ((),) * len(near.sources)
        state = HopState(site, params, start(params), 0, None, empty, (0,) * len(near.destinations))
        return state, (*enter(state, near), Compute(params, 0))

    @no_type_check
    def following(state: HopState) -> int:
        """The iteration that the tokens allow to enter, or that of now if there are none."""
        k = state.iteration
        if tokens is None or not state.leads:
            return k + 1
        least = min(state.leads)
        if skip and state.queues and least >= k + 2:
            return min(least, k + skip, k + tokens)
        return k + 1 if k + 1 <= least + tokens else k

    @no_type_check
    def onward(state: HopState) -> tuple[HopState, Actions]:
        site, params, opt_state, k, gradient, queues, leads = state
        entered = following(state)
        if gradient is None or entered == k:
            return state, ()
        near = neighbors_in(graph, site.workers)[site.index]
        found = usable(queues, entered - 1, staleness)
        if len(found) < len(queues) - backup:
            return state, ()
        weights = near.weights if entered == k + 1 else (0.0, *near.weights[1:])
        given = shares(weights, found, entered - 1, staleness)
        params, opt_state = move(params, opt_state, gradient, given, *[model for _, _, model in found])
        books = (Counted(site.index, k, entered - 1), Stepped(entered, k))
        queues = queues if staleness else since(queues, entered)
        state = HopState(site, params, opt_state, entered, None, queues, leads)
        return state, (*books, *enter(state, near), Compute(params, entered))

    @no_type_check
    def receive(state: HopState, sender: int, message: Message) -> tuple[HopState, Actions]:
        kind = message.kind
        if kind == COMPUTED:
            return onward(state._replace(gradient=message.value))
        near = neighbors_in(graph, state.site.workers)[state.site.index]
        if kind == PARAMS:
            if not staleness and message.version < state.iteration:
                return state, ()  # late
            which = near.sources.index(sender)
            queue = arrived(state.queues[which], message.version, message.value, newest=staleness > 0)
            return onward(state._replace(queues=put(state.queues, which, queue)))
        if kind == TOKEN:
            which = near.destinations.index(sender)
            lead = max(state.leads[which], message.version)
            return onward(state._replace(leads=put(state.leads, which, lead)))
        if kind == PULL:  # of one who was gone
            return state, tuple([send for send in enter(state, near) if send.to == sender])
        if kind == RECOVERED:
            # What others asked for meanwhile is lost too: they are told, and asked.
            ask = tuple([Send(j, Message(PULL)) for j in sorted({*near.sources, *near.destinations})])
            begin = (Compute(state.params, state.iteration),) if state.gradient is None else ()
            return state, (*enter(state, near), *ask, *begin)
        raise ValueError(f"a worker of hop does not know the message {kind!r}")

    def waits_for(state: HopState) -> tuple[int, ...]:
        if state.gradient is None:
            return ()
        near, entered = neighbors_in(graph, state.site.workers)[state.site.index], following(state)
        if entered == state.iteration:
            assert tokens is not None
            return tuple(j for j, lead in zip(near.destinations, state.leads) if lead + tokens <= entered)
        there = {which for which, _, _ in usable(state.queues, entered - 1, staleness)}
        return tuple(j for which, j in enumerate(near.sources) if which not in there)

    return Rule("hop", Role(init, receive, lambda state: state.params, waits_for))


def _check(tokens: int | None, backup: int, staleness: int, skip: int) -> None:
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens must be at least 1, or None for no token queues, got {tokens}")
    for name, value in (("backup", backup), ("staleness", staleness)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if skip < 0 or skip == 1:
        raise ValueError(f"skip must be at least 2 iterations, or 0 for no skipping, got {skip}")
    if backup and tokens is None:
        raise ValueError(
            f"backup={backup} needs token queues, as nothing else bounds how far a worker leads those that it does not "
            "wait for: set tokens="
        )
    if skip and tokens is None:
        raise ValueError(f"skip={skip} needs token queues, which tell how far the neighbors are: set tokens=")
    if skip and not (backup or staleness):
        raise ValueError(
            f"skip={skip} needs neighbors that may be ahead, and those that wait for every model are not: set backup= "
            "or staleness="
        )
