"""What can go wrong on the virtual clock."""

from collections.abc import Mapping

from ..._core.errors import Portable


class Deadlock(Portable, RuntimeError):
    """Nothing is left that could happen, and the run is not over: somebody waits for ever.

    Attributes:
      waiting: for each place that waits (the server is -1), whom it waits for.
      endless: the workers whose gradients are never done.
    """

    def __init__(self, waiting: Mapping[int, tuple[int, ...]], seconds: float, endless: tuple[int, ...] = ()):
        self.waiting, self.endless = dict(waiting), endless
        lines = [f"{_name(who)} waits for {', '.join(map(_name, whom))}" for who, whom in self.waiting.items()]
        lines += [f"{_name(who)} computes for ever" for who in endless]
        super().__init__(f"at {seconds:g} s nothing can happen any more: {'; '.join(lines) or 'nobody does anything'}")


class NonFiniteGradient(Portable, FloatingPointError):
    """A gradient that a rule was to use holds a NaN or an infinity: one of them would stay in the model for ever.

    Attributes:
      worker: whose gradient.
      step: the worker's own count of gradients, from 0; `Task.batch(seed, worker, step)` gives its data.
    """

    def __init__(self, worker: int, step: int, *, diverged: bool = False):
        self.worker, self.step, self.diverged = worker, step, diverged
        super().__init__(
            f"the model that worker {worker} read for its step {step} is not finite: the updates before have "
            "overflowed, so lower the learning rate, or let the optimizer clip"
            if diverged
            else f"the gradient of worker {worker} at its step {step} is not finite, and its model is: look "
            f"at the batch that the task gives for (seed, {worker}, {step}), and at the loss of it"
        )


class TooManyEvents(Portable, RuntimeError):
    """The clock stands still: more events at one tick than could be meant. Messages go in a circle, in no time."""


def _name(place: int) -> str:
    return "the server" if place < 0 else f"worker {place}"
