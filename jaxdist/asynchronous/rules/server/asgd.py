"""Asynchronous SGD: the server takes a step with every gradient, however stale."""

from collections.abc import Callable

import optax

from ...._core.types import Number
from ...protocol import Actions, GradientRecord, Message, Rule
from .base import Core, reply, server_rule, stepper


def asgd(optimizer: optax.GradientTransformation, *, rate: Callable[[int], float] | None = None) -> Rule:
    """The server steps with each gradient that arrives, `x <- x - γ(d) g`, and sends its worker the new x.

    The delay `d` of a gradient is the number of steps between reading x and using the gradient; on average it is the
    number of workers minus one. With data that differ between workers the limit is the optimum weighted by the workers'
    speeds, not the mean: see `ringleader` and `dude`.

    On the wire: a gradient up and a model down per step.

    State: the server's model and optimizer; a worker's model.

    Args:
      optimizer: the optimizer of the server. Momentum compounds the staleness: lower it with more workers.
      rate: a factor of each update, as a function of the delay of its gradient, such as `staleness_aware()` or
        `delay_adaptive(...)`.

    Returns:
      The rule.

    Example:
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
    init, step = stepper(optimizer)
    factor = rate or (lambda delay: 1.0)

    def on_gradient(core: Core, worker: int, message: Message) -> tuple[Core, Actions]:
        read, version = message.version, core.version
        # x <- x - γ(d) g, where d is the number of steps since the worker read its parameters.
        core, record = step(core, message.value, factor(version - read), read)
        core, sent = reply(core, worker)
        return core, (GradientRecord(worker, read, version), record, sent)

    return server_rule("asgd", init, on_gradient, core=lambda state: state)


def staleness_aware() -> Callable[[int], float]:
    """The rate `1 / max(d, 1)` for `asgd`: a gradient that is d steps old is weighted by 1/d.

    Returns:
      A function of the delay.

    Example:
      >>> from jaxdist.asynchronous import rules
      >>> rules.staleness_aware()(4)
      0.25

    References:
      Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD for distributed deep learning", arXiv:1511.05950, 2016.
    """
    # A gradient at the current model has delay 0 and the full rate.
    return lambda delay: 1.0 / max(delay, 1)


def delay_adaptive(concurrency: int, learning_rate: Number, smoothness: Number) -> Callable[[int], float]:
    """The rate for `asgd` that scales down only late gradients: `γ_d = γ` up to the usual delay, then `1 / (4 L d)`.

    Args:
      concurrency: the largest delay with the full rate; the number of workers.
      learning_rate: γ, the rate of the server's optimizer.
      smoothness: L, the Lipschitz constant of the gradient. A larger value scales late gradients down more.

    Returns:
      A function of the delay.

    Raises:
      ValueError: an argument is not positive.

    Example:
      >>> from jaxdist.asynchronous import rules
      >>> rate = rules.delay_adaptive(8, learning_rate=0.1, smoothness=1.0)
      >>> rate(8), rate(25)
      (1.0, 0.1)

    References:
      Mishchenko, Bach, Even, Woodworth, "Asynchronous SGD beats minibatch SGD under arbitrary delays",
      arXiv:2206.07638, 2022; Koloskova, Stich, Jaggi, "Sharper convergence guarantees for asynchronous SGD",
      arXiv:2206.08307, 2022.
    """
    for name, value in (("concurrency", concurrency), ("learning_rate", learning_rate), ("smoothness", smoothness)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")

    # The ratio γ_d / γ, since `asgd` multiplies the whole update by it.
    def rate(delay: int) -> float:
        return 1.0 if delay <= concurrency else min(1.0, 1.0 / (4 * smoothness * learning_rate * delay))

    return rate
