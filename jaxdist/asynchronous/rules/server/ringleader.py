"""Ringleader ASGD: asynchronous, and unbiased on data that differ between workers."""

from typing import Any, NamedTuple

import jax
import optax

from ...._core.types import PyTree
from ...protocol import Actions, Counted, Message, Rule, Site
from ...values import numeric, replaced, scale, sum_of
from .base import Core, again, fresh, put, server_rule, stepper


class Table(NamedTuple):
    """For each worker the mean of its gradients, how many they are, and the version of the model they are at."""

    means: tuple[Any, ...]
    counts: tuple[int, ...]
    reads: tuple[int, ...]


class RingleaderState(NamedTuple):
    """The server's core, the table in use and the next one, the sum of means (None while gathering), who was served."""

    core: Core
    table: Table
    later: Table
    total: Any
    served: tuple[bool, ...]


def _added(mean: PyTree, gradient: PyTree, count: Any) -> PyTree:
    return jax.tree.map(lambda old, new: old + (new - old) / count, mean, gradient)


_into_mean = numeric(_added)


def ringleader(optimizer: optax.GradientTransformation) -> Rule:
    """Rounds of n steps, one for each worker, along the mean over workers of the mean of each worker's gradients.

    In the first phase of a round the server gathers until it has a gradient of every worker; meanwhile workers go on at
    the models that they have. In the second the gradient that completed the table, and then the next one of each other
    worker, triggers a step `x <- x - γ (1/n) Σ_i G_i / b_i` and gets its worker the new model; further gradients of
    workers that were served go to the table of the next round. Nothing is thrown away, nobody idles, no gradient in a
    step is older than `2n - 2`, and every worker counts the same however fast it is. In theory `γ = min(1/(8 n L), ε
    n/(10 L σ²))`, with n the least number of gradients in the table.

    On the wire: a gradient up per gradient, n models down per round.

    State: the server's model, optimizer, and 2n + 1 gradients; a worker's model.

    Args:
      optimizer: what the server steps with. One step is along a mean over all workers.

    Returns:
      The rule.

    Example:
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
    begin, step = stepper(optimizer)

    def init(site: Site, params: Any) -> RingleaderState:
        empty = _empty(site.workers)
        return RingleaderState(begin(site, params), empty, empty, None, (False,) * site.workers)

    def on_gradient(state: RingleaderState, worker: int, message: Message) -> tuple[RingleaderState, Actions]:
        core, table, later, total, served = state
        counted = Counted(worker, message.version, core.version)
        if total is not None and served[worker]:
            later = _fold(later, worker, message)
            return state._replace(later=later), (counted, again(core, worker))
        old = table.means[worker]
        table = _fold(table, worker, message)
        if total is not None:
            total = replaced(total, old, table.means[worker])
        elif all(table.counts):
            total = sum_of(table.means)
        else:
            return state._replace(table=table), (counted, again(core, worker))
        workers = len(served)
        core, stepped = step(core, scale(total, 1 / workers), 1.0, min(table.reads))
        core, sent = fresh(core, worker)
        served = put(served, worker, True)
        if all(served):
            table, later, total, served = later, _empty(workers), None, (False,) * workers
        return RingleaderState(core, table, later, total, served), (counted, stepped, sent)

    def on_pull(state: RingleaderState, worker: int, message: Message) -> tuple[RingleaderState, Actions]:
        table = state.later if state.total is not None and state.served[worker] else state.table
        if table.counts[worker] and message.version == table.reads[worker]:
            return state, (again(state.core, worker),)  # one entry of a table, one model
        core, sent = fresh(state.core, worker)
        return state._replace(core=core), (sent,)

    def waits_for(state: RingleaderState) -> tuple[int, ...]:
        return tuple(i for i, count in enumerate(state.table.counts) if not count)

    return server_rule("ringleader", init, on_gradient, on_pull=on_pull, waits_for=waits_for)


def _empty(workers: int) -> Table:
    return Table((None,) * workers, (0,) * workers, (0,) * workers)


def _fold(table: Table, worker: int, message: Message) -> Table:
    means, counts, reads = table
    count = counts[worker] + 1
    mean = message.value if count == 1 else _into_mean(means[worker], message.value, float(count))
    return Table(put(means, worker, mean), put(counts, worker, count), put(reads, worker, message.version))
