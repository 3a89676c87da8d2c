"""Hop: decentralized training with queues of models and tokens, backup workers, bounded staleness and skipping."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import numpy as np
import optax
from jaxtyping import Float

from ...._core.checks import check_range
from ...._core.types import PyTree
from ....topology.base import matrix
from ... import protocol
from ...protocol import Actions, Compute, GradientRecord, Message, Reaction, Role, Rule, Send, Site, StepRecord
from ..base import Graph, combine_and_adapt, graph_of, optimizer_on_values, params_of, replace_at, unknown_message
from .d_psgd import combine

PARAMS, TOKEN, PULL = "params", "token", "pull"

# The models of one neighbor that are not used yet, as `(iteration, model)`, the oldest first.
Queue = tuple[tuple[int, Any], ...]


class _Neighbors(NamedTuple):
    """A worker's sources and destinations, and the weights of its own model and of its sources'."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    weights: tuple[float, ...]


class _HopState(NamedTuple):
    """A worker's model at the beginning of its iteration, and what its neighbors have sent."""

    site: Site
    params: Any
    opt_state: Any
    # The number of completed iterations, and the gradient of this one, or None while it is running.
    iteration: int
    gradient: Any
    # For each source its queue of models; for each destination the iteration that its tokens report.
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

    Entering iteration k, a worker sends `x_i^k` and computes its gradient there; then
    `x_i^(k+1) = Σ_j w_ij x_j^k + u_i` with the optimizer's update `u_i`. A worker leads another by at most the hops
    between them, and all are as fast as the slowest, unless options relax that:

    - *token queues*: no worker leads a neighbor by more than `tokens`;
    - *backup workers*: an iteration waits for all but `backup` neighbors and drops late models; weights are divided by
      their sum;
    - *bounded staleness*: each neighbor's newest model counts from iteration `k - s` on, with the weight
      `w_ij (k_j - (k - s) + 1)` over the sum of these;
    - *skipping*: a worker at least two iterations behind all its destinations enters the iteration of the nearest one.

    Versions in the trace are iterations.

    *On the wire*: a model to each neighbor per iteration; with tokens an empty message from each.

    *State*: each worker's model and optimizer, and per neighbor the models that arrived early: one without tokens in an
    undirected graph, up to `tokens + 1` with them, one with staleness.

    Args:
      graph: a static topology, or a function that makes one for a number of workers, such as `jd.topology.ring`.
      optimizer: the local optimizer of each worker.
      tokens: the largest lead over a neighbor (`max_ig` in the paper), or None for no queues. More stores more early
        models.
      backup: `N_b`. 1 for one slow neighbor.
      staleness: s, for random slowdowns of as many iterations.
      skip: the most iterations to advance at once (`max_jump`), or 0; for a worker that is always slow.

    Raises:
      ValueError: there are backup workers without tokens, or skipping without tokens or without both backup workers and
        staleness.

    Examples:
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
      Luo, Lin, Zhuo, Qian, "Hop: Heterogeneity-Aware Decentralized Training", arXiv:1902.01064, 2019. The iteration is
      that of `d_psgd`.
    """
    _check(tokens, backup, staleness, skip)
    on_values = optimizer_on_values(optimizer, partial(combine_and_adapt, _combine))
    rule = _Hop(graph, tokens, backup, staleness, skip, *on_values)
    return Rule("hop", Role(rule.init, rule.receive, params_of, rule.waits_for))


def _combine(params: PyTree, weights: Any, *others: PyTree) -> PyTree:
    # Σ_j w_ij x_j^k, the own model first; the weights sum to 1.
    return combine(params, weights[1:], *others)


class _Hop(NamedTuple):
    """The arguments of `hop`; the optimizer as functions of values."""

    graph: Graph
    tokens: int | None
    backup: int
    staleness: int
    skip: int
    start: Callable[..., Any]
    step: Callable[..., Any]

    def init(self, site: Site, params: Any) -> Reaction:
        by_worker = _neighbors_of_workers(self.graph, site.workers)
        for index, neighbors in enumerate(by_worker):
            if self.backup and self.backup >= len(neighbors.sources):
                raise ValueError(
                    f"backup must be less than the {len(neighbors.sources)} neighbors of worker {index}, "
                    f"got {self.backup}"
                )
        neighbors = by_worker[site.index]
        queues, leads = ((),) * len(neighbors.sources), (0,) * len(neighbors.destinations)
        state = _HopState(site, params, self.start(params), 0, None, queues, leads)
        return state, (*self._announce(state, neighbors), Compute(params, 0))

    @no_type_check
    def _neighbors(self, state: _HopState) -> _Neighbors:
        return _neighbors_of_workers(self.graph, state.site.workers)[state.site.index]

    @no_type_check
    def _announce(self, state: _HopState, neighbors: _Neighbors) -> Actions:
        """Sends what entering an iteration sends: tokens to sources, and the model to destinations."""
        k, tokens = state.iteration, ()
        if self.tokens is not None:
            tokens = tuple([Send(j, Message(TOKEN, None, k)) for j in neighbors.sources])
        return (*tokens, *[Send(j, Message(PARAMS, state.params, k)) for j in neighbors.destinations])

    @no_type_check
    def receive(self, state: _HopState, sender: int, message: Message) -> Reaction:
        kind = message.kind
        if kind == protocol.COMPUTED:
            return self._try_advance(state._replace(gradient=message.value))
        if kind == PARAMS:
            return self._on_model(state, sender, message)
        neighbors = self._neighbors(state)
        if kind == TOKEN:
            which = neighbors.destinations.index(sender)
            lead = max(state.leads[which], message.version)
            return self._try_advance(state._replace(leads=replace_at(state.leads, which, lead)))
        if kind == PULL:
            # The sender was down, and may have missed this worker's token and model.
            return state, tuple([send for send in self._announce(state, neighbors) if send.to == sender])
        if kind == protocol.RECOVERED:
            # Messages in both directions may be lost: announce again, and ask the neighbors to do the same.
            pulls = tuple([Send(j, Message(PULL)) for j in sorted({*neighbors.sources, *neighbors.destinations})])
            restart = (Compute(state.params, state.iteration),) if state.gradient is None else ()
            return state, (*self._announce(state, neighbors), *pulls, *restart)
        raise unknown_message("a worker of hop", message)

    @no_type_check
    def _on_model(self, state: _HopState, sender: int, message: Message) -> Reaction:
        # Without staleness a model of an earlier iteration arrived too late.
        if not self.staleness and message.version < state.iteration:
            return state, ()
        which = self._neighbors(state).sources.index(sender)
        queue = state.queues[which]
        # After an outage the neighbor repeats its last model.
        if not queue or queue[-1][0] < message.version:
            # With staleness only the newest model is used.
            queue = (*(() if self.staleness else queue), (message.version, message.value))
        return self._try_advance(state._replace(queues=replace_at(state.queues, which, queue)))

    @no_type_check
    def _next_iteration(self, state: _HopState) -> int:
        """Returns the iteration that the tokens allow to enter, or the current one if there are none."""
        k = state.iteration
        if self.tokens is None or not state.leads:
            return k + 1
        # Tokens of a destination at iteration l allow to enter up to l + `tokens`.
        least = min(state.leads)
        if self.skip and state.queues and least >= k + 2:
            return min(least, k + self.skip, k + self.tokens)
        return k + 1 if k + 1 <= least + self.tokens else k

    @no_type_check
    def _try_advance(self, state: _HopState) -> Reaction:
        """Enters the next iteration if the gradient, the tokens and enough models are there."""
        k, entered = state.iteration, self._next_iteration(state)
        if state.gradient is None or entered == k:
            return state, ()
        found = _usable_models(state.queues, entered - 1, self.staleness)
        if len(found) < len(state.queues) - self.backup:
            return state, ()
        neighbors = self._neighbors(state)
        # A skipping worker's own model is of an old iteration: weight 0.
        base_weights = neighbors.weights if entered == k + 1 else (0.0, *neighbors.weights[1:])
        weights = model_weights(base_weights, found, entered - 1, self.staleness)
        models = [model for _, _, model in found]
        queues = state.queues
        if not self.staleness:
            # Models of earlier iterations are too old now.
            queues = tuple([tuple([entry for entry in queue if entry[0] >= entered]) for queue in queues])
        params, opt_state = self.step(state.params, state.opt_state, state.gradient, weights, *models)
        state = _HopState(state.site, params, opt_state, entered, None, queues, state.leads)
        records = GradientRecord(state.site.index, k, entered - 1), StepRecord(entered, k)
        return state, (*records, *self._announce(state, neighbors), Compute(params, entered))

    def waits_for(self, state: _HopState) -> tuple[int, ...]:
        if state.gradient is None:
            return ()
        neighbors, entered = self._neighbors(state), self._next_iteration(state)
        if entered == state.iteration:
            assert self.tokens is not None
            return tuple(j for j, lead in zip(neighbors.destinations, state.leads) if lead + self.tokens <= entered)
        present = {which for which, _, _ in _usable_models(state.queues, entered - 1, self.staleness)}
        return tuple(j for which, j in enumerate(neighbors.sources) if which not in present)


@functools.lru_cache(maxsize=16)
def _neighbors_of_workers(graph: Graph, workers: int) -> tuple[_Neighbors, ...]:
    """Returns the neighbors of each worker; checks that the topology is static and fits the number of workers."""
    topology = graph_of(graph, workers)
    if len(topology.rounds) > 1:
        raise ValueError(f"the {topology.name} changes from step to step, but hop needs a static topology")
    weights = matrix(topology)
    if np.max(abs(weights.sum(1) - 1)) > 1e-6:
        raise ValueError(f"the rows of the {topology.name} must sum to 1: hop does not support push-sum weights")
    # Row i of the matrix has the weights that worker i applies.
    own, others = np.diag(weights), weights - np.diag(np.diag(weights))
    by_worker = []
    for index in range(workers):
        sources = np.flatnonzero(others[index])
        destinations = tuple(np.flatnonzero(others[:, index]).tolist())
        row = (own[index].item(), *others[index, sources].tolist())
        by_worker.append(_Neighbors(tuple(sources.tolist()), destinations, row))
    return tuple(by_worker)


@no_type_check
def _usable_models(queues: tuple[Queue, ...], iteration: int, staleness: int) -> list[tuple[int, int, Any]]:
    """Returns `(index of the neighbor, iteration, model)` for each model that this iteration may use.

    Without staleness that is the model of this iteration. If it was lost during an outage, the next later one is first
    in the queue and replaces it: links keep the order of messages, so the lost one cannot arrive any more.
    """
    found = []
    for which, queue in enumerate(queues):
        for sent, model in queue:
            if sent >= iteration - staleness:
                found.append((which, sent, model))
                break
    return found


def model_weights(
    weights: tuple[float, ...], found: list[tuple[int, int, Any]], iteration: int, staleness: int
) -> Float[np.ndarray, " models"]:
    """Computes the weights of the own model and of those found, which sum to 1 and fall linearly with staleness.

    `w_ij (k_j - (k - s) + 1)`, normalized; the own model is of iteration `k`. Without staleness, `w_ij`.
    """
    # k_j - (k - s) + 1, which is s + 1 for the own model.
    ages = [staleness + 1, *[sent - iteration + staleness + 1 if staleness else 1 for _, sent, _ in found]]
    unnormalized = np.array([weights[0], *[weights[which + 1] for which, _, _ in found]]) * ages
    return unnormalized / unnormalized.sum()


def _check(tokens: int | None, backup: int, staleness: int, skip: int) -> None:
    if tokens is not None:
        check_range("tokens", tokens, 1, ends="[]")
    for name, value in (("backup", backup), ("staleness", staleness)):
        check_range(name, value, 0, ends="[]")
    if skip < 0 or skip == 1:
        raise ValueError(f"skip must be at least 2 iterations, or 0 for no skipping, got {skip}")
    if backup and tokens is None:
        raise ValueError(
            f"backup={backup} needs token queues, since nothing else bounds the lead over neighbors that a worker does "
            "not wait for: set tokens="
        )
    if skip and tokens is None:
        raise ValueError(f"skip={skip} needs token queues, which report the neighbors' iterations: set tokens=")
    if skip and not (backup or staleness):
        raise ValueError(
            f"skip={skip} needs neighbors that may be ahead, but without backup workers or staleness they wait for "
            "every model: set backup= or staleness="
        )
