"""AD-PSGD: each worker steps at its own pace and averages with one neighbor at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import optax

from ...protocol import COMPUTED, RECOVERED, Actions, Compute, GradientRecord, Message, Role, Rule, Site, StepRecord
from ..base import local_optimizer, params_of, unknown_message
from .exchange import Exchange, whole_models
from .neighbors import Choice, Graph, Halves, check_choice, graph_of, halves
from .pairs import BACK, PARAMS, PairProtocol, Pairs, Peer, pair_protocol, peer_of


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
    """Each worker steps at its own pace, `x_i <- x_i - γ g(x̂_i)`, and averages with one neighbor meanwhile.

    `x̂_i` is the model when the gradient begins; while the gradient is computed, x_i and the model of a neighbor become
    their mean, and the gradient is applied to the averaged x_i. No worker waits: the exchange overlaps the gradient.
    With data that differ between workers the limit is weighted by the workers' speeds, as for `asgd`.

    One half of the graph initiates an exchange with each gradient that it begins (if its last exchange is complete),
    and the other half only replies, so that no cycle of waiting workers can form: the graph must be bipartite. If a
    worker fails, the others continue; exchanges that it interrupted are repeated when it recovers.

    Versions in the trace are a worker's own step count; `replay.peer_delays` counts the gradients that all workers
    applied between reading and using one: the number of workers minus one, on average.

    On the wire: a model each way per gradient of the half that initiates; other exchanges send less. `compressed` with
    a compressor for `"params"` works too, but its errors are proportional to the models rather than to their
    difference, do not vanish as workers agree, and change the sum of all models by half of each: 16 bits are safe; for
    less use an exchange.

    State: a worker's model and optimizer; in the half that replies the last reply to each neighbor, in case it was
    lost.

    Args:
      graph: a bipartite topology, or a function that makes one for a number of workers, such as `jd.topology.ring`
        (which needs an even number). A topology that changes advances with each exchange of a worker; of the random
        ones, `lambda n: jd.topology.relabeled_ring(n, halves=True)` is bipartite.
      optimizer: the local optimizer of each worker.
      choice: of the neighbors, `"uniform"` or `"in_turn"` (a fixed ring).
      exchange: how pairs average: `whole_models()`, `power_gossip(rank)`, or `choco_exchange(...)`.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: the graph has another number of workers or an odd cycle, or `choice` is unknown.

    Example:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule, law = rules.ad_psgd(jd.topology.ring, optax.sgd(0.1)), durations.constant([1, 1, 1, 6])
      >>> run = replay.run(rule, durations=law, workers=4, seconds=600)
      >>> len(run.trace.steps) / 600, float(replay.peer_delays(run.trace).mean().round(1))
      (3.1666666666666665, 3.0)

    References:
      Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent", arXiv:1710.06952,
      2018; Zhang, Cui, Kayi et al., "Improving efficiency in large-scale decentralized distributed training", 2020 (the
      randomized ring); Cui, Zhang, Kayi et al., "Asynchronous decentralized distributed training of acoustic models",
      arXiv:2110.11199, 2021.
    """
    check_choice(choice)
    cfg = _Config(graph, pair_protocol(exchange or whole_models(), choice), *local_optimizer(optimizer))
    return Rule("ad_psgd", Role(partial(_init, cfg), partial(_receive, cfg), params_of))


class _Config(NamedTuple):
    """The graph, the exchanges, and the optimizer on values."""

    graph: Graph
    pairs: PairProtocol
    start: Callable[..., Any]
    step: Callable[..., Any]


def _init(cfg: _Config, site: Site, params: Any) -> tuple[_ADPSGDState, Actions]:
    peer, split = peer_of(site), halves(graph_of(cfg.graph, site.workers))
    pairs = cfg.pairs.init(peer, split, params)
    return _begin_gradient(cfg, _ADPSGDState(peer, split, params, cfg.start(params), 0, pairs))


def _begin_gradient(cfg: _Config, state: _ADPSGDState) -> tuple[_ADPSGDState, Actions]:
    """Starts a gradient at the current model, and an exchange beside it."""
    # The exchange sends the model at which the gradient is computed, and overlaps it.
    pairs, sends = cfg.pairs.begin(state.pairs, state.peer, state.graph, state.params)
    return state._replace(pairs=pairs), (Compute(state.params, state.version), *sends)


@no_type_check
def _receive(cfg: _Config, state: _ADPSGDState, sender: int, message: Message) -> tuple[_ADPSGDState, Actions]:
    peer, split, params, opt_state, version, pairs = state
    if message.kind == COMPUTED:
        # The gradient of x̂_i is applied to x_i, which exchanges have changed meanwhile.
        params, opt_state = cfg.step(params, opt_state, message.value)
        records = GradientRecord(peer.index, message.version, version), StepRecord(version + 1, message.version)
        state, actions = _begin_gradient(cfg, _ADPSGDState(peer, split, params, opt_state, version + 1, pairs))
        return state, (*records, *actions)
    if message.kind in (PARAMS, BACK):
        pairs, params, actions = cfg.pairs.receive(pairs, peer, split, params, sender, message)
        return state._replace(params=params, pairs=pairs), actions
    if message.kind == RECOVERED:
        return state, (Compute(params, version), *cfg.pairs.recover(pairs, peer, split))
    raise unknown_message("a worker of ad_psgd", message)
