"""DuDe-ASGD: steps along the mean of every worker's last gradient."""

from typing import Any, NamedTuple

import optax

from ...protocol import GradientRecord, Message, Reaction, Rule
from ...values import replace_term, scale_like, sum_of
from ..base import replace_at
from .base import Core, reuse_params, send_params, server_rule, stepper


class _DuDeState(NamedTuple):
    """The server's core, each worker's last gradient and its version, and the sum of gradients (None at first)."""

    core: Core
    gradients: tuple[Any, ...]
    reads: tuple[int, ...]
    total: Any


def dude(optimizer: optax.GradientTransformation) -> Rule:
    """Each gradient replaces its worker's last one; every step uses the mean of all: `x <- x - γ (1/n) Σ_i G_i`.

    Slow workers count as much as fast ones, so that data may differ between workers: the limit is the optimum of the
    mean loss, where that of `asgd` is weighted by speeds. Steps begin when every worker has sent a gradient; until then
    workers compute at the initial model.

    *On the wire*: a gradient up and a model down per step.

    *State*: the server's model, optimizer, and n + 1 gradients; a worker's model.

    Args:
      optimizer: the optimizer of the server. The slowest worker's gradients are as stale as its computation is long:
        lower the rate accordingly.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.dude(optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 2, 4]), workers=3, seconds=400)
      >>> len(run.trace.steps)  # 700 gradients, minus those before the last worker's first
      694

    References:
      Wang, Sun, Wai, Zhang, "Dual-Delayed Asynchronous SGD for Arbitrarily Heterogeneous Data", arXiv:2405.16966, 2024;
      Gurbuzbalaban, Ozdaglar, Parrilo, "On the convergence rate of incremental aggregated gradient algorithms",
      arXiv:1506.02081, 2015.
    """
    server = stepper(optimizer)

    def begin(core: Core) -> _DuDeState:
        # All workers begin at version 0.
        return _DuDeState(core, (None,) * len(core.reads), core.reads, None)

    def on_gradient(state: _DuDeState, worker: int, message: Message) -> Reaction:
        core, gradients, reads, total = state
        record = GradientRecord(worker, message.version, core.version)
        old, workers = gradients[worker], len(reads)
        gradients = replace_at(gradients, worker, message.value)
        reads = replace_at(reads, worker, message.version)
        # The first step waits for a gradient of every worker, all at the initial model.
        if total is None and any(gradient is None for gradient in gradients):
            return _DuDeState(core, gradients, reads, None), (record, reuse_params(core, worker))
        # The running sum is recomputed every n steps, so that rounding errors do not accumulate.
        recompute = total is None or core.version % workers == 0
        total = sum_of(gradients) if recompute else replace_term(total, old, message.value)
        # x <- x - γ (1/n) Σ_i G_i; the step is as stale as its oldest gradient.
        mean = scale_like(total, 1 / workers, message.value)
        core, step_record = server.step(core, mean, 1.0, min(reads))
        core, sent = send_params(core, worker)
        return _DuDeState(core, gradients, reads, total), (record, step_record, sent)

    return server_rule("dude", server, on_gradient, begin=begin)
