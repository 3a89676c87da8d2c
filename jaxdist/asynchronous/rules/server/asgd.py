"""Asynchronous SGD: a step with every gradient, however stale."""

from collections.abc import Callable

import optax

from ...protocol import GradientRecord, Message, Reaction, Rule
from .base import Core, reply, server_rule, stepper


def asgd(optimizer: optax.GradientTransformation, *, rate: Callable[[int], float] | None = None) -> Rule:
    """The server steps with each gradient that arrives, `x <- x - γ(d) g`, and sends its worker the new x.

    The delay `d` of a gradient is the number of steps between reading x and using the gradient; on average it is the
    number of workers minus one. With data that differ between workers the limit is the optimum weighted by the workers'
    speeds, not the mean: see `ringleader` and `dude`.

    *On the wire*: a gradient up and a model down per step.

    *State*: the server's model and optimizer; a worker's model.

    Args:
      optimizer: the optimizer of the server. Momentum compounds the staleness: lower it with more workers.
      rate: a factor of each update, as a function of the delay of its gradient, such as `staleness_aware()` or
        `delay_adaptive(...)`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule, law = rules.asgd(optax.sgd(0.1)), durations.constant([1.0, 2.0, 4.0])
      >>> run = replay.run(rule, durations=law, workers=3, seconds=400)
      >>> len(run.trace.steps) / 400
      1.75

    References:
      Tsitsiklis, Bertsekas, Athans, "Distributed asynchronous deterministic and stochastic gradient optimization
      algorithms", 1986; Recht, Ré, Wright, Niu, "Hogwild!", arXiv:1106.5730, 2011.
    """
    server = stepper(optimizer)
    factor = rate or (lambda delay: 1.0)

    def on_gradient(core: Core, worker: int, message: Message) -> Reaction:
        read, version = message.version, core.version
        # x <- x - γ(d) g, where d is the number of steps since the worker read its parameters.
        core, record = server.step(core, message.value, factor(version - read), read)
        core, sent = reply(core, worker)
        return core, (GradientRecord(worker, read, version), record, sent)

    return server_rule("asgd", server, on_gradient)
