"""Ringleader ASGD: steps along a table of the gradients of all workers in rounds."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from ...protocol import GradientRecord, Message, Reaction, Rule
from ...values import numeric, replace_term, scale_like, sum_of, widen_floats
from ..base import replace_at
from .base import Core, reuse_params, send_current, send_params, server_rule, stepper


class _Table(NamedTuple):
    """For each worker the mean and the number of its gradients, and the version at which they were computed."""

    means: tuple[Any, ...]
    counts: tuple[int, ...]
    reads: tuple[int, ...]


class _RingleaderState(NamedTuple):
    """The server's core, the tables of this and the next round, the sum of means, and the workers served so far."""

    core: Core
    table: _Table
    later: _Table
    # None in the first phase of a round.
    total: Any
    served: tuple[bool, ...]


def ringleader(optimizer: optax.GradientTransformation) -> Rule:
    """Rounds of n steps, one per worker, each along the mean over workers of each worker's mean gradient.

    In the first phase of a round the server gathers until it has a gradient of every worker; meanwhile workers continue
    at the models that they have. In the second phase, the gradient that completed the table, and then the next one of
    each other worker, triggers a step `x <- x - γ (1/n) Σ_i G_i / b_i` and its worker receives the new model; further
    gradients of workers that were served go to the table of the next round. No gradient is discarded, no worker idles,
    no gradient in a step is older than `2n - 2`, and all workers count the same however fast they are. In theory
    `γ = min(1/(8 n L), ε n/(10 L σ²))`, with n the least number of gradients in the table.

    *On the wire*: a gradient up per gradient, n models down per round.

    *State*: the server's model, optimizer, and 2n + 1 gradients; a worker's model.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.ringleader(optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 2, 4]), workers=3, seconds=1000)
      >>> replay.step_delays(run.trace).max().item()
      4

    References:
      Maranjyan, Richtárik, "Ringleader ASGD: the first asynchronous SGD with optimal time complexity under data
      heterogeneity", arXiv:2509.22860, 2025.
    """
    server = stepper(optimizer)
    on_gradient = partial(_on_gradient, server.step)
    return server_rule("ringleader", server, on_gradient, begin=_begin, on_pull=_on_pull, waits_for=_waits_for)


def _begin(core: Core) -> _RingleaderState:
    workers = len(core.reads)
    empty = _empty_table(workers)
    return _RingleaderState(core, empty, empty, None, (False,) * workers)


def _on_gradient(step: Callable[..., Any], state: _RingleaderState, worker: int, message: Message) -> Reaction:
    core, table, later, total, served = state
    record = GradientRecord(worker, message.version, core.version)

    # A worker that was served in this round contributes to the next one.
    if total is not None and served[worker]:
        return state._replace(later=_add_gradient(later, worker, message)), (record, reuse_params(core, worker))

    old_mean = table.means[worker]
    table = _add_gradient(table, worker, message)
    if total is not None:
        # Second phase: only this worker's term of the sum has changed.
        total = replace_term(total, old_mean, table.means[worker])
    elif all(table.counts):
        # The table is complete: the second phase begins with this gradient.
        total = sum_of(table.means)
    else:
        return state._replace(table=table), (record, reuse_params(core, worker))

    workers = len(served)
    # x <- x - γ (1/n) Σ_i G_i / b_i
    mean = scale_like(total, 1 / workers, message.value)
    core, step_record = step(core, mean, 1.0, min(table.reads))
    core, sent = send_params(core, worker)
    served = replace_at(served, worker, True)
    # The round is complete: gradients that arrived early form the table of the next one.
    if all(served):
        table, later, total, served = later, _empty_table(workers), None, (False,) * workers
    return _RingleaderState(core, table, later, total, served), (record, step_record, sent)


def _on_pull(state: _RingleaderState, worker: int, message: Message) -> Reaction:
    table = state.later if state.total is not None and state.served[worker] else state.table
    # All gradients in an entry of a table are at one model, so the worker must keep that model until the entry is used.
    if table.counts[worker] and message.version == table.reads[worker]:
        return state, (reuse_params(state.core, worker),)
    return send_current(state, worker, message)


def _waits_for(state: _RingleaderState) -> tuple[int, ...]:
    # The first phase waits for every worker without a gradient in the table.
    return tuple(i for i, count in enumerate(state.table.counts) if not count)


def _empty_table(workers: int) -> _Table:
    return _Table((None,) * workers, (0,) * workers, (0,) * workers)


def _add_to_mean_leaf(old: Any, new: Any, count: Any) -> Any:
    old = widen_floats(old)
    return old + (widen_floats(new) - old) / count


# The mean after `count` gradients, without a stored sum.
_add_to_mean = numeric(
    lambda mean, gradient, count: jax.tree.map(partial(_add_to_mean_leaf, count=count), mean, gradient)
)


def _add_gradient(table: _Table, worker: int, message: Message) -> _Table:
    count = table.counts[worker] + 1
    mean = message.value if count == 1 else _add_to_mean(table.means[worker], message.value, float(count))
    new = (mean, count, message.version)
    return _Table(*[replace_at(column, worker, entry) for column, entry in zip(table, new)])
