"""Staleness-aware learning rates: divided by the staleness of the gradient."""

from collections.abc import Callable


def staleness_aware() -> Callable[[int], float]:
    """The rate `1 / max(d, 1)` for `asgd`: a gradient that is d steps old is weighted by 1/d.

    Examples:
      >>> from jaxdist.asynchronous import rules
      >>> rules.staleness_aware()(4)
      0.25

    References:
      Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD for distributed deep learning", arXiv:1511.05950, 2016.
    """
    # A gradient at the current model has delay 0 and the full rate.
    return lambda delay: 1.0 / max(delay, 1)
