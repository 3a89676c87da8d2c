"""Any-batch rounds on a graph: workers compute for a fixed time, step, and average with their neighbors."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax

from ...._core.checks import check_range
from ...._core.types import Number, PyTree
from ....transforms.extra_args import with_extra_args
from ... import protocol
from ...protocol import After, Cancel, Compute, GradientRecord, Message, Reaction, Role, Rule, Site, StepRecord
from ...values import add, numeric, zeros_for_sum
from ..base import Graph, apply_gradient, graph_of
from .d_psgd import (
    NeighborState,
    combine,
    end_iteration,
    models_of_iteration,
    receive_from_peer,
    rounds_of_workers,
    send_model,
    waits_for,
)


class _RoundState(NamedTuple):
    """A worker's model and neighbors, and the sum and number of its gradients in this round."""

    peers: NeighborState
    total: Any
    count: int


def any_batch_gossip(
    window: Number,
    graph: Graph,
    optimizer: optax.GradientTransformation,
    *,
    weights: Literal["batch", "uniform"] = "batch",
) -> Rule:
    """Each worker computes at its model for T seconds, steps, and averages with its neighbors.

        z_i = x_i + u(S_i / b_i),     x_i <- Σ_j W_ij b_j z_j / Σ_j W_ij b_j

    `S_i` is the sum of the `b_i` gradients that fit into the window, and `u` the optimizer's update. No worker waits
    for a slow one: a round takes T and one message to each neighbor. A worker without gradients takes no step and has
    no weight. With a mirror step, `jd.online.mirror_descent(geometry, rate, axis=None)`, this is DABMD: the same
    computation as that transformation has with this topology. `any_batch` is the same with an exact mean.

    A `Compute` is one sample, or one microbatch; a gradient that is unfinished at the end of the window is discarded,
    and its data count as used. A worker that failed ends its window when it recovers; its neighbors wait for it.

    *On the wire*: a model and its weight, 4 bytes, to each neighbor per round, kind `"params"`.

    *State*: as `d_psgd`, and a sum of gradients per worker.

    Args:
      window: T, in seconds. Several times the duration of a gradient, or much work is discarded;
        `schedule.anytime_window` returns the window in which workers complete a given batch on average.
      graph: a topology with doubly stochastic weights, which may change with the round, or a function that makes one
        for a number of workers, such as `jd.topology.ring`.
      optimizer: the local optimizer of each worker.
      weights: `"batch"` pools all examples: least variance when workers draw from the same source. `"uniform"` counts
        workers alike: for data that differ between workers, whose fast ones would count more.

    Raises:
      ValueError: the window is not positive and finite, `weights` is unknown, or the graph does not fit.

    Examples:
      >>> import jaxdist as jd
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> mirror = jd.online.mirror_descent(jd.online.euclidean(), 0.1, axis=None)
      >>> rule = rules.any_batch_gossip(3.5, jd.topology.ring, mirror)
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 3]), workers=3, seconds=35)
      >>> len(run.trace.steps), len(run.trace.gradients)  # 3 + 3 + 1 in each of ten rounds
      (30, 70)

    References:
      Eshraghi, Liang, "Distributed Online Optimization over a Heterogeneous Network with Any-Batch Mirror Descent",
      ICML, 2020 (the weights are ours).
    """
    check_range("window", window, 0, ends="()")
    if weights not in ("batch", "uniform"):
        raise ValueError(f'weights must be "batch" or "uniform", got {weights!r}')
    with_extra_args(optimizer)  # raises for what is no optimizer
    adapt = numeric(partial(_adapt, optimizer, weights == "batch"), outputs=2)
    rule = _AnyBatchGossip(window, graph, numeric(optimizer.init), adapt, numeric(_average))
    role = Role(
        rule.init,
        rule.receive,
        params=lambda state: state.peers.params,
        waits_for=lambda state: waits_for(state.peers),
    )
    return Rule("any_batch_gossip", role)


def _adapt(
    optimizer: optax.GradientTransformation,
    by_batch: bool,
    params: PyTree,
    opt_state: PyTree,
    total: PyTree,
    count: Any,
) -> tuple[tuple[PyTree, Any], PyTree]:
    """The message of a round, `(z, b)`, or `(z, 1)` with uniform weights, and the optimizer's state."""
    gradient = jax.tree.map(lambda s, x: (s / jnp.maximum(count, 1)).astype(x.dtype), total, params)
    stepped = apply_gradient(optimizer, params, opt_state, gradient)
    # A worker without gradients takes no step, and the optimizer's counts stay as they were.
    model, opt_state = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), stepped, (params, opt_state))
    return (model, jnp.asarray(count if by_batch else 1, jnp.float32)), opt_state


def _average(params: PyTree, own: tuple[PyTree, Any], weights: Any, *others: tuple[PyTree, Any]) -> PyTree:
    """`Σ_j W_ij b_j z_j / Σ_j W_ij b_j`; without any examples the model stays."""
    model, count = own
    total = combine(count, weights, *[count for _, count in others])
    divisor = jnp.where(total > 0, total, 1)
    shares = [weight * count / divisor for weight, (_, count) in zip(weights, others, strict=True)]
    # A model without examples may hold anything, and 0 times infinity is NaN.
    seen = [
        jax.tree.map(lambda z, x, share=share: jnp.where(share > 0, z, x), other, model)
        for share, (other, _) in zip(shares, others, strict=True)
    ]
    mean = combine(model, shares, *seen)
    return jax.tree.map(lambda old, x: jnp.where(total > 0, x, old), params, mean)


class _AnyBatchGossip(NamedTuple):
    """The window, the graph, and functions of values: the optimizer's first state, its step, and the average."""

    window: Number
    graph: Graph
    start: Callable[..., Any]
    adapt: Callable[..., Any]
    average: Callable[..., Any]

    def init(self, site: Site, params: Any) -> Reaction:
        rounds = rounds_of_workers(graph_of(self.graph, site.workers))[site.index]
        return self._begin_round(NeighborState(site, rounds, params, self.start(params), 0, True, None, {}, {}))

    def _begin_round(self, peers: NeighborState) -> Reaction:
        state = _RoundState(peers, zeros_for_sum(peers.params), 0)
        # The timer has the tag of its round, so that one of an earlier round is ignored.
        return state, (After(self.window, peers.version), Compute(peers.params, peers.version))

    @no_type_check
    def receive(self, state: _RoundState, sender: int, message: Message) -> Reaction:
        kind, peers = message.kind, state.peers
        if kind == protocol.COMPUTED:
            state = state._replace(total=add(state.total, message.value), count=state.count + 1)
            record = GradientRecord(peers.site.index, peers.version, peers.version)
            return state, (record, Compute(peers.params, peers.version))
        if kind == protocol.TIMER:
            return self._end_window(state) if peers.computing and message.tag == peers.version else (state, ())
        peers, replies = receive_from_peer(peers, sender, message)
        state = state._replace(peers=peers)
        # The timer may have expired during an outage.
        end = self._end_window if kind == protocol.RECOVERED and peers.computing else self._try_advance
        state, actions = end(state)
        return state, replies + actions

    @no_type_check
    def _end_window(self, state: _RoundState) -> Reaction:
        peers = state.peers
        message, opt_state = self.adapt(peers.params, peers.opt_state, state.total, float(state.count))
        peers = peers._replace(computing=False, result=message, opt_state=opt_state)
        peers, sends = send_model(peers, message)
        state, actions = self._try_advance(state._replace(peers=peers))
        return state, (Cancel(), *sends, *actions)

    @no_type_check
    def _try_advance(self, state: _RoundState) -> Reaction:
        """Begins the next round if the window has ended and all messages of this one are there."""
        peers, found = state.peers, models_of_iteration(state.peers)
        if found is None:
            return state, ()
        round_number, (weights, others) = peers.version, found
        params = self.average(peers.params, peers.result, weights, *others)
        peers, used = end_iteration(peers, params, peers.opt_state)
        state, actions = self._begin_round(peers)
        return state, (StepRecord(round_number + 1, round_number), *actions, *used)
