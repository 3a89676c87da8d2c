"""AD-PSGD between groups of workers, synchronous within each group."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.types import PyTree
from ...protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    Actions,
    Compute,
    GradientRecord,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
    StepRecord,
)
from ...values import numeric
from ..base import params_of, unknown_message
from .exchange import Exchange, whole_models
from .neighbors import Choice, Graph, Halves, check_choice, graph_of, halves
from .pairs import BACK, PARAMS, PairProtocol, Pairs, Peer, pair_protocol, peer_of


class _HierarchicalState(NamedTuple):
    """The state of a worker, and of its group's exchanges if it is the first worker of the group.

    Attributes:
      site: where it runs.
      peer: its group.
      graph: the halves of the graph of groups.
      params: the group's model, replicated within the group.
      opt_state: the group's optimizer state, replicated within the group.
      version: the group's step count.
      averaged: at the first worker, the model with the changes by exchanges since the last step.
      shared: at the first worker, the averaged model when it joined the all-reduce that distributes these changes.
      pairs: the exchanges.
      waiting: whether it has joined the all-reduce of this step.
    """

    site: Site
    peer: Peer
    graph: Halves
    params: Any
    opt_state: Any
    version: int
    averaged: Any
    shared: Any
    pairs: Pairs
    waiting: bool


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

    On the wire: within a group an all-reduce of the gradient and of the change by exchanges, two models, per step;
    between groups a model each way per step of the half that initiates.

    State: the group's model and optimizer at each worker; first workers also store the averaged model and, in the half
    that replies, the last reply to each neighbor.

    Args:
      graph: a bipartite topology of the groups, or a function that makes one for a number of groups, such as
        `jd.topology.ring`.
      optimizer: the optimizer of each group.
      group_size: workers in a group; workers 0 to `group_size - 1` are the first group.
      choice: of the neighbors, `"uniform"` or `"in_turn"`.
      exchange: how a pair averages, as for `ad_psgd`.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: the number of workers is not a multiple of `group_size`, the graph has another number of groups or an
        odd cycle, or `choice` is unknown.

    Example:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.hierarchical_ad_psgd(jd.topology.ring, optax.sgd(0.1), group_size=2)
      >>> law = durations.constant([1, 1, 1, 1, 1, 1, 1, 6])  # one group of four is slow
      >>> len(replay.run(rule, durations=law, workers=8, seconds=600).trace.steps)
      1900

    References:
      Zhang, Cui, Finkler, Saon, Kayi, Buyuktosunoglu, Kingsbury, Kung, Picheny, "A highly efficient distributed deep
      learning system for automatic speech recognition", arXiv:1907.05701, 2019.
    """
    check_choice(choice)
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    cfg = _Config(
        graph,
        group_size,
        pair_protocol(exchange or whole_models(), choice),
        numeric(optimizer.init, shared=True),
        numeric(partial(_step_group, optimizer, group_size), outputs=2, shared=True),
    )
    worker = Role(partial(_init, cfg), partial(_receive, cfg), params_of, partial(_waits_for, group_size))
    return Rule("hierarchical_ad_psgd", worker)


class _Config(NamedTuple):
    """The graph of groups, their size, the exchanges, and the optimizer on values."""

    graph: Graph
    group_size: int
    pairs: PairProtocol
    start: Callable[..., Any]
    step: Callable[..., Any]


def _step_group(
    optimizer: optax.GradientTransformation, group_size: int, params: PyTree, opt_state: PyTree, mean: dict[str, PyTree]
) -> tuple[PyTree, PyTree]:
    # Only the first worker contributes a change that is not zero; times the group size its mean is that change.
    params = jax.tree.map(lambda x, change: x + change * group_size, params, mean["change"])
    updates, opt_state = optimizer.update(mean["gradient"], opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _with_change(gradient: PyTree, averaged: PyTree, params: PyTree) -> dict[str, PyTree]:
    return {"gradient": gradient, "change": jax.tree.map(lambda a, x: a - x, averaged, params)}


def _without_change(gradient: PyTree) -> dict[str, PyTree]:
    return {"gradient": gradient, "change": jax.tree.map(jnp.zeros_like, gradient)}


def _add_later_changes(params: PyTree, averaged: PyTree, shared: PyTree) -> PyTree:
    return jax.tree.map(lambda x, a, s: x + (a - s), params, averaged, shared)


_first_contribution = numeric(_with_change)
_contribution = numeric(_without_change)
_catch_up = numeric(_add_later_changes)


def _is_first(cfg: _Config, state: _HierarchicalState) -> bool:
    return state.site.index % cfg.group_size == 0


def _init(cfg: _Config, site: Site, params: Any) -> tuple[_HierarchicalState, Actions]:
    if site.workers % cfg.group_size:
        raise ValueError(f"{site.workers} workers cannot be divided into groups of {cfg.group_size}: use a multiple")
    peer = peer_of(site, cfg.group_size)
    split = halves(graph_of(cfg.graph, site.workers // cfg.group_size, "groups"))
    pairs = cfg.pairs.init(peer, split, params)
    opt_state = cfg.start(params)
    state = _HierarchicalState(site, peer, split, params, opt_state, 0, params, params, pairs, False)
    return _begin_gradient(cfg, state)


def _begin_gradient(cfg: _Config, state: _HierarchicalState) -> tuple[_HierarchicalState, Actions]:
    """Starts a gradient; the first worker of a group also starts an exchange."""
    compute = Compute(state.params, state.version)
    if not _is_first(cfg, state):
        return state, (compute,)
    pairs, sends = cfg.pairs.begin(state.pairs, state.peer, state.graph, state.averaged)
    return state._replace(pairs=pairs), (compute, *sends)


@no_type_check
def _receive(
    cfg: _Config, state: _HierarchicalState, sender: int, message: Message
) -> tuple[_HierarchicalState, Actions]:
    if message.kind == COMPUTED:
        return _on_gradient(cfg, state, message)
    if message.kind == REDUCED:
        return _on_mean(cfg, state, message)
    if message.kind in (PARAMS, BACK):
        pairs, averaged, actions = cfg.pairs.receive(
            state.pairs, state.peer, state.graph, state.averaged, sender, message
        )
        return state._replace(averaged=averaged, pairs=pairs), actions
    if message.kind == RECOVERED:
        restart = () if state.waiting else (Compute(state.params, state.version),)
        repeat = cfg.pairs.recover(state.pairs, state.peer, state.graph) if _is_first(cfg, state) else ()
        return state, (*restart, *repeat)
    raise unknown_message("a worker of hierarchical_ad_psgd", message)


@no_type_check
def _on_gradient(cfg: _Config, state: _HierarchicalState, message: Message) -> tuple[_HierarchicalState, Actions]:
    if _is_first(cfg, state):
        value = _first_contribution(message.value, state.averaged, state.params)
    else:
        value = _contribution(message.value)
    first = state.peer.index * cfg.group_size
    group = tuple(range(first, first + cfg.group_size))
    actions = GradientRecord(state.site.index, message.version, state.version), Reduce(group, state.version, value)
    return state._replace(shared=state.averaged, waiting=True), actions


@no_type_check
def _on_mean(cfg: _Config, state: _HierarchicalState, message: Message) -> tuple[_HierarchicalState, Actions]:
    params, opt_state = cfg.step(state.params, state.opt_state, message.value)
    version, is_first = state.version + 1, _is_first(cfg, state)
    # Exchanges that completed during the all-reduce are not in its result.
    averaged = _catch_up(params, state.averaged, state.shared) if is_first else params
    state = state._replace(
        params=params, opt_state=opt_state, version=version, averaged=averaged, shared=averaged, waiting=False
    )
    state, actions = _begin_gradient(cfg, state)
    return state, ((StepRecord(version, version - 1), *actions) if is_first else actions)


def _waits_for(group_size: int, state: _HierarchicalState) -> tuple[int, ...]:
    first = state.peer.index * group_size
    others = (i for i in range(first, first + group_size) if i != state.site.index)
    return tuple(others) if state.waiting else ()
