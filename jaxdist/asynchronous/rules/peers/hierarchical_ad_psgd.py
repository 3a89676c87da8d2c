"""AD-PSGD between groups whose workers average their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.checks import check_range
from ...._core.types import PyTree
from ... import protocol
from ...protocol import Compute, GradientRecord, Message, Reaction, Reduce, Role, Rule, Site, StepRecord
from ...values import numeric
from ..base import Graph, apply_gradient, graph_of, optimizer_on_values, params_of, unknown_message
from .exchange import Exchange
from .pairs import BACK, PARAMS, Choice, Halves, PairProtocol, Pairs, Peer, halves, pair_protocol, peer_of


class _HierarchicalState(NamedTuple):
    """The state of a worker, and of its group's exchanges if it is the first worker of the group."""

    site: Site
    peer: Peer
    graph: Halves
    # The group's model, optimizer state and step count, replicated within the group.
    params: Any
    opt_state: Any
    version: int
    # At the first worker: the model with the changes by exchanges since the last step, and that model when the worker
    # joined the all-reduce, which distributes these changes.
    averaged: Any
    shared: Any
    pairs: Pairs
    # Whether it has joined the all-reduce of this step.
    waiting: bool = False


def hierarchical_ad_psgd(
    graph: Graph,
    optimizer: optax.GradientTransformation,
    *,
    group_size: int,
    choice: Choice = "uniform",
    exchange: Exchange | None = None,
) -> Rule:
    """AD-PSGD in which each node is a group of workers: `x_G <- x_G - γ (1/|G|) Σ_{i in G} g_i(x̂_G)`.

    Workers of a group share one model and average their gradients; meanwhile the first worker exchanges models with
    that of another group, and the change reaches its group with the next mean. Groups, such as the devices of a
    machine, wait for their own slowest worker but for no other group, and n/|G| models reach consensus faster than n.

    *On the wire*: within a group an all-reduce of the gradient and of the change by exchanges, two models, per step;
    between groups a model each way per step of the half that initiates.

    *State*: the group's model and optimizer at each worker; first workers also store the averaged model and, in the
    half that replies, the last reply to each neighbor.

    Args:
      graph: a bipartite topology of the groups, or a function that makes one for a number of groups, such as
        `jd.topology.ring`.
      optimizer: the optimizer of each group.
      group_size: workers in a group; workers 0 to `group_size - 1` are the first group.
      choice: as for `ad_psgd`.
      exchange: as for `ad_psgd`.

    Raises:
      ValueError: the number of workers is not a multiple of `group_size`, or the graph has another number of groups or
        an odd cycle.

    Examples:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.hierarchical_ad_psgd(jd.topology.ring, optax.sgd(0.1), group_size=2)
      >>> law = durations.constant([1, 1, 1, 1, 1, 1, 1, 6])  # one group of four is slow
      >>> len(replay.run(rule, durations=law, workers=8, seconds=600).trace.steps)
      1900

    References:
      Zhang et al., "A Highly Efficient Distributed Deep Learning System for Automatic Speech Recognition",
      arXiv:1907.05701, 2019.
    """
    check_range("group_size", group_size, 1, ends="[]")
    step = partial(_step_group, group_size)
    pairs, on_values = pair_protocol(exchange, choice), optimizer_on_values(optimizer, step, shared=True)
    rule = _Group(graph, group_size, pairs, *on_values)
    worker = Role(rule.init, rule.receive, params_of, rule.waits_for)
    return Rule("hierarchical_ad_psgd", worker)


def _step_group(
    group_size: int, optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, mean: dict[str, PyTree]
) -> tuple[PyTree, PyTree]:
    # Only the first worker contributes a change that is not zero; times the group size its mean is that change.
    params = jax.tree.map(lambda x, change: x + change * group_size, params, mean["change"])
    return apply_gradient(optimizer, params, opt_state, mean["gradient"])


# The contributions of the first worker and of the others, and the changes since the contribution.
_with_change = numeric(
    lambda gradient, averaged, params: {
        "gradient": gradient,
        "change": jax.tree.map(lambda a, x: a - x, averaged, params),
    }
)
_without_change = numeric(lambda gradient: {"gradient": gradient, "change": jax.tree.map(jnp.zeros_like, gradient)})
_add_later_changes = numeric(
    lambda params, averaged, shared: jax.tree.map(lambda x, a, s: x + (a - s), params, averaged, shared)
)


class _Group(NamedTuple):
    """The graph of groups, their size, the exchanges, and the optimizer on values."""

    graph: Graph
    group_size: int
    pairs: PairProtocol
    start: Callable[..., Any]
    step: Callable[..., Any]

    def _members(self, state: _HierarchicalState) -> tuple[int, ...]:
        first = state.peer.index * self.group_size
        return tuple(range(first, first + self.group_size))

    def _is_first(self, state: _HierarchicalState) -> bool:
        return state.site.index % self.group_size == 0

    def init(self, site: Site, params: Any) -> Reaction:
        if site.workers % self.group_size:
            raise ValueError(
                f"{site.workers} workers cannot be divided into groups of {self.group_size}: use a multiple"
            )
        peer = peer_of(site, self.group_size)
        split = halves(graph_of(self.graph, site.workers // self.group_size, "groups"))
        pairs = self.pairs.init(peer, split, params)
        state = _HierarchicalState(site, peer, split, params, self.start(params), 0, params, params, pairs)
        return self._begin_member_gradient(state)

    def _begin_member_gradient(self, state: _HierarchicalState) -> Reaction:
        """Starts a gradient; the first worker of a group also starts an exchange."""
        compute = Compute(state.params, state.version)
        if not self._is_first(state):
            return state, (compute,)
        pairs, sends = self.pairs.begin(state.pairs, state.peer, state.graph, state.averaged)
        return state._replace(pairs=pairs), (compute, *sends)

    @no_type_check
    def receive(self, state: _HierarchicalState, sender: int, message: Message) -> Reaction:
        if message.kind == protocol.COMPUTED:
            return self._on_member_gradient(state, message)
        if message.kind == protocol.REDUCED:
            return self._on_group_mean(state, message)
        if message.kind in (PARAMS, BACK):
            pairs, averaged, actions = self.pairs.receive(
                state.pairs, state.peer, state.graph, state.averaged, sender, message
            )
            return state._replace(averaged=averaged, pairs=pairs), actions
        if message.kind == protocol.RECOVERED:
            restart = () if state.waiting else (Compute(state.params, state.version),)
            repeat = self.pairs.recover(state.pairs, state.peer, state.graph) if self._is_first(state) else ()
            return state, (*restart, *repeat)
        raise unknown_message("a worker of hierarchical_ad_psgd", message)

    @no_type_check
    def _on_member_gradient(self, state: _HierarchicalState, message: Message) -> Reaction:
        if self._is_first(state):
            value = _with_change(message.value, state.averaged, state.params)
        else:
            value = _without_change(message.value)
        record = GradientRecord(state.site.index, message.version, state.version)
        reduce = Reduce(self._members(state), state.version, value)
        return state._replace(shared=state.averaged, waiting=True), (record, reduce)

    @no_type_check
    def _on_group_mean(self, state: _HierarchicalState, message: Message) -> Reaction:
        params, opt_state = self.step(state.params, state.opt_state, message.value)
        version, is_first = state.version + 1, self._is_first(state)
        # Exchanges that completed during the all-reduce are not in its result.
        averaged = _add_later_changes(params, state.averaged, state.shared) if is_first else params
        state = state._replace(
            params=params, opt_state=opt_state, version=version, averaged=averaged, shared=averaged, waiting=False
        )
        state, actions = self._begin_member_gradient(state)
        return state, ((StepRecord(version, version - 1), *actions) if is_first else actions)

    def waits_for(self, state: _HierarchicalState) -> tuple[int, ...]:
        return tuple(i for i in self._members(state) if i != state.site.index) if state.waiting else ()
