"""DuDe-ASGD: the last gradient of every worker in every step."""

from typing import Any, NamedTuple

import optax

from ...protocol import Actions, Counted, Message, Rule, Site
from ...values import replaced, scale, sum_of
from .base import Core, again, fresh, put, server_rule, stepper


class DuDeState(NamedTuple):
    """The server's core, the last gradient of each worker, the versions they are at, and their sum (None at first)."""

    core: Core
    gradients: tuple[Any, ...]
    reads: tuple[int, ...]
    total: Any


def dude(optimizer: optax.GradientTransformation) -> Rule:
    """Each gradient replaces its worker's last one; every step is along the mean of all: `x <- x - γ (1/n) Σ_i G_i`.

    A slow worker counts as much as a fast one, so that data may differ between workers: the limit is the optimum of the
    mean, where that of `asgd` is weighted by speeds. Steps begin when every worker has sent one gradient; until then
    they compute at the first model.

    On the wire: a gradient up and a model down per step.

    State: the server's model, optimizer, and n + 1 gradients; a worker's model.

    Args:
      optimizer: what the server steps with. Gradients of the slowest worker are as old as its computation takes: lower
        the rate with that.

    Returns:
      The rule.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.dude(optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 2, 4]), workers=3, seconds=400)
      >>> len(run.trace.steps)  # 700 gradients, without those that came before the last worker's first
      694

    References:
      Wang, Sun, et al., "Dual-delayed asynchronous SGD for arbitrarily heterogeneous data", arXiv:2405.16966, 2024;
      Gurbuzbalaban, Ozdaglar, Parrilo, "On the convergence rate of incremental aggregated gradient algorithms",
      arXiv:1506.02081, 2015.
    """
    begin, step = stepper(optimizer)

    def init(site: Site, params: Any) -> DuDeState:
        return DuDeState(begin(site, params), (None,) * site.workers, (0,) * site.workers, None)

    def on_gradient(state: DuDeState, worker: int, message: Message) -> tuple[DuDeState, Actions]:
        core, gradients, reads, total = state
        counted = Counted(worker, message.version, core.version)
        old, workers = gradients[worker], len(reads)
        gradients = put(gradients, worker, message.value)
        reads = put(reads, worker, message.version)
        if total is None and any(gradient is None for gradient in gradients):
            return DuDeState(core, gradients, reads, None), (counted, again(core, worker))
        # Summed anew every n steps, so that rounding errors do not add up.
        anew = total is None or core.version % workers == 0
        total = sum_of(gradients) if anew else replaced(total, old, message.value)
        core, stepped = step(core, scale(total, 1 / workers), 1.0, min(reads))
        core, sent = fresh(core, worker)
        return DuDeState(core, gradients, reads, total), (counted, stepped, sent)

    return server_rule("dude", init, on_gradient)
