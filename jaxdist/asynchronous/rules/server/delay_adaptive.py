"""Delay-adaptive learning rates: smaller for gradients staler than a bound."""

from collections.abc import Callable

from ...._core.checks import check_range
from ...._core.types import Number


def delay_adaptive(concurrency: int, learning_rate: Number, smoothness: Number) -> Callable[[int], float]:
    """The rate for `asgd` that scales down only late gradients: `γ_d = γ` up to the usual delay, then `1 / (4 L d)`.

    Args:
      concurrency: the largest delay with the full rate; the number of workers.
      learning_rate: γ, the rate of the server's optimizer.
      smoothness: L, the Lipschitz constant of the gradient. A larger value scales late gradients down more.

    Examples:
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
        check_range(name, value, 0, ends="(]")

    # The ratio γ_d / γ, since `asgd` multiplies the whole update by it.
    def rate(delay: int) -> float:
        return 1.0 if delay <= concurrency else min(1.0, 1.0 / (4 * smoothness * learning_rate * delay))

    return rate
