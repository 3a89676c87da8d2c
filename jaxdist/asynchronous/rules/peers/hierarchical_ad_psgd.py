"""AD-PSGD between groups of workers that are synchronous inside."""

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
    Counted,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
    Stepped,
)
from ...values import numeric
from .exchange import Exchange, whole_models
from .neighbors import Choice, Graph, Halves, check_choice, graph_of, halves
from .pairs import BACK, PARAMS, Node, Pairs, node_of, protocol


class GroupState(NamedTuple):
    """A worker's place, group, the halves of the graph, the group's model, optimizer state and count of steps.

    The first worker of the group has further the model with what exchanges changed since (`ahead`), that of which the
    others are being told (`told`), and the exchanges. `waiting`: the gradient is in the group's mean already.
    """

    site: Site
    node: Node
    graph: Halves
    params: Any
    opt_state: Any
    version: int
    ahead: Any
    told: Any
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

    Workers of a group have one model and take the mean of their gradients; its first worker exchanges models with that
    of another group meanwhile, and what this changes reaches the others with the next mean. So groups, such as the
    devices of a machine, wait for their own slowest worker and for no other group, and n/|G| models have less to agree
    on than n.

    On the wire: in a group an all-reduce of the gradient and of what exchanges changed, two models, per step; between
    groups a model each way per step of the half that asks.

    State: each worker has the group's model and optimizer; first workers also the model that exchanges made of it, and
    of the half that replies the last reply to each neighbor.

    Args:
      graph: a bipartite topology of the groups, or what makes one for any number, such as `jd.topology.ring`.
      optimizer: what each group steps with.
      group_size: workers in a group; 0 to `group_size - 1` are the first group.
      choice: of the neighbors, `"uniform"` or `"in_turn"`.
      exchange: how a pair averages, as for `ad_psgd`.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: the workers are no multiple of `group_size`; the graph is of another number of groups, or has an odd
        cycle; no such choice.

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
    talk = protocol(exchange or whole_models(), choice)

    def parted(gradient: PyTree, ahead: PyTree, params: PyTree) -> dict[str, PyTree]:
        return {"gradient": gradient, "change": jax.tree.map(lambda a, x: a - x, ahead, params)}

    def silent(gradient: PyTree) -> dict[str, PyTree]:
        return {"gradient": gradient, "change": jax.tree.map(jnp.zeros_like, gradient)}

    def moved(params: PyTree, opt_state: PyTree, mean: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        # Only the first worker's change is not zero, and it must count whole.
        params = jax.tree.map(lambda x, change: x + change * group_size, params, mean["change"])
        updates, opt_state = optimizer.update(mean["gradient"], opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def caught_up(params: PyTree, ahead: PyTree, told: PyTree) -> PyTree:
        return jax.tree.map(lambda x, a, t: x + (a - t), params, ahead, told)

    start, move = numeric(optimizer.init, shared=True), numeric(moved, outputs=2, shared=True)
    part, plain, catch_up = numeric(parted), numeric(silent), numeric(caught_up)

    def leads(state: GroupState) -> bool:
        return state.site.index % group_size == 0

    def begun(state: GroupState) -> tuple[GroupState, Actions]:
        if not leads(state):
            return state, (Compute(state.params, state.version),)
        pairs, sent = talk.begin(state.pairs, state.node, state.graph, state.ahead)
        return state._replace(pairs=pairs), (Compute(state.params, state.version), *sent)

    def init(site: Site, params: Any) -> tuple[GroupState, Actions]:
        if site.workers % group_size:
            raise ValueError(f"{site.workers} workers do not make groups of {group_size}: take a multiple of it")
        node, split = node_of(site, group_size), halves(graph_of(graph, site.workers // group_size, "groups"))
        pairs = talk.init(node, split, params)
        return begun(GroupState(site, node, split, params, start(params), 0, params, params, pairs, False))

    @no_type_check
    def receive(state: GroupState, sender: int, message: Message) -> tuple[GroupState, Actions]:
        site, node, split, params, opt_state, version, ahead, told, pairs, waiting = state
        if message.kind == COMPUTED:
            value = part(message.value, ahead, params) if leads(state) else plain(message.value)
            first = node.index * group_size
            group = tuple(range(first, first + group_size))
            actions = Counted(site.index, message.version, version), Reduce(group, version, value)
            return state._replace(told=ahead, waiting=True), actions
        if message.kind == REDUCED:
            params, opt_state = move(params, opt_state, message.value)
            version += 1
            ahead = catch_up(params, ahead, told) if leads(state) else params
            state = GroupState(site, node, split, params, opt_state, version, ahead, ahead, pairs, False)
            state, actions = begun(state)
            return state, ((Stepped(version, version - 1), *actions) if leads(state) else actions)
        if message.kind in (PARAMS, BACK):
            pairs, ahead, actions = talk.receive(pairs, node, split, ahead, sender, message)
            return state._replace(ahead=ahead, pairs=pairs), actions
        if message.kind == RECOVERED:
            restart = () if waiting else (Compute(params, version),)
            return state, (*restart, *(talk.recovered(pairs, node, split) if leads(state) else ()))
        raise ValueError(f"a worker of hierarchical_ad_psgd does not know the message {message.kind!r}")

    def waits_for(state: GroupState) -> tuple[int, ...]:
        first = state.node.index * group_size
        others = (i for i in range(first, first + group_size) if i != state.site.index)
        return tuple(others) if state.waiting else ()

    return Rule("hierarchical_ad_psgd", Role(init, receive, lambda state: state.params, waits_for))
