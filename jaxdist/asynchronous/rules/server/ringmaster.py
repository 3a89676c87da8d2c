"""Ringmaster ASGD: gradients staler than a threshold are discarded."""

import optax

from ...._core.checks import check_count
from ...protocol import GradientRecord, Message, Reaction, Rule
from .base import Core, reply, send_params, server_rule, stepper


def ringmaster(max_delay: int, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """The server steps with gradients that are less than R steps old and discards older ones.

    With the right R it attains the optimal time complexity for workers of unequal, fixed speeds that draw from the same
    data: very slow workers do not contribute. In theory `R = max(1, ⌈σ²/ε⌉)` and `γ = min(1/(2 R L), ε/(4 L σ²))` for
    the gradient's variance σ² and the wanted accuracy ε.

    *On the wire*: a gradient up and a model down per gradient, used or discarded.

    *State*: the server's model and optimizer; a worker's model.

    Args:
      max_delay: R. 1 uses only gradients at the current model; no bound is `asgd`. With R equally fast workers every
        gradient is R - 1 steps old, so the number of those discards none of theirs, as below.
      optimizer: the optimizer of the server.
      stop: send a worker the current model as soon as its gradient will be too old, so that it restarts there instead
        of finishing a gradient that would be discarded.

    Examples:
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
    if max_delay != float("inf"):
        check_count("max_delay", max_delay, 1)
    server = stepper(optimizer)

    def on_gradient(core: Core, worker: int, message: Message) -> Reaction:
        read, version = message.version, core.version
        accepted = version - read < max_delay
        actions: list = [GradientRecord(worker, read, version, accepted)]
        if accepted:
            # x <- x - γ g, if the gradient is less than R steps old.
            core, record = server.step(core, message.value, 1.0, read)
            actions.append(record)
        core, sent = reply(core, worker)
        actions.append(sent)
        if stop and accepted:
            # Gradients of these workers could only be discarded, so they restart at the new model.
            for other, read_last in enumerate(core.reads):
                if core.version - read_last >= max_delay:
                    core, sent = send_params(core, other)
                    actions.append(sent)
        return core, tuple(actions)

    return server_rule("ringmaster", server, on_gradient, discard_outdated=True)
