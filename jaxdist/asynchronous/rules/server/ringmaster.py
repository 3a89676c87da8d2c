"""Ringmaster ASGD: asynchronous SGD that throws gradients away that are too old."""

import optax

from ...protocol import Actions, Counted, Message, Rule
from .base import Core, fresh, outdated, reply, server_rule, stepper


def ringmaster(max_delay: int, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """A gradient that is less than R steps old is a step of the server; an older one is thrown away.

    With the right R it is as fast as any method can be on workers of unequal, fixed speeds that draw from the same
    data: hopelessly slow workers take no part. In theory `R = max(1, ⌈σ²/ε⌉)` and `γ = min(1/(2 R L), ε/(4 L σ²))` for
    the gradient's variance σ² and the wanted accuracy ε.

    On the wire: a gradient up and a model down per gradient, thrown away or not.

    State: the server's model and optimizer; a worker's model.

    Args:
      max_delay: R. 1 uses only gradients at the current model; no bound is `asgd`. The number of workers that are about
        equally fast is a start.
      optimizer: what the server steps with.
      stop: tell a worker as soon as its gradient will be too old to give it up, so that slow workers start anew from
        the current model instead of finishing in vain.

    Returns:
      The rule.

    Raises:
      ValueError: `max_delay` is below 1.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.ringmaster(3, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 1, 10]), workers=4, seconds=1000)
      >>> run.trace.gradients.accepted.sum().item(), len(run.trace.gradients)
      (3000, 3100)

    References:
      Maranjyan, Tyurin, Richtárik, "Ringmaster ASGD: the first asynchronous SGD with optimal time complexity",
      arXiv:2501.16168, 2025.
    """
    if max_delay < 1:
        raise ValueError(f"max_delay must be at least 1, got {max_delay}")
    init, step = stepper(optimizer)

    def on_gradient(core: Core, worker: int, message: Message) -> tuple[Core, Actions]:
        late, ignored = outdated(core, worker, message)
        if ignored:
            return core, late
        read, version = message.version, core.version
        accepted = version - read < max_delay
        actions: list = [Counted(worker, read, version, accepted)]
        if accepted:
            core, stepped = step(core, message.value, 1.0, read)
            actions.append(stepped)
        core, sent = reply(core, worker)
        actions.append(sent)
        if stop and accepted:
            for other, has in enumerate(core.reads):
                if core.version - has >= max_delay:
                    core, sent = fresh(core, other)
                    actions.append(sent)
        return core, tuple(actions)

    return server_rule("ringmaster", init, on_gradient, core=lambda state: state)
