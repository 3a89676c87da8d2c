"""Errors of asynchronous runs, on the virtual clock and on real processes."""

from collections.abc import Mapping

from .._core.checks import Portable


class DeadlockError(Portable, RuntimeError):
    """No event is left on the virtual clock before the run is complete: some worker waits forever.

    Attributes:
      waiting: for each waiting worker (the server is -1), the indices that it waits for.
      endless: the workers whose gradients never finish.
    """

    def __init__(self, waiting: Mapping[int, tuple[int, ...]], seconds: float, endless: tuple[int, ...] = ()):
        self.waiting, self.endless = dict(waiting), endless
        lines = _waiting_lines(waiting)
        lines += [f"{place_name(worker)} computes forever" for worker in endless]
        super().__init__(f"no event is left at {seconds:g} s: {'; '.join(lines) or 'all workers are idle'}")


class NonFiniteGradientError(Portable, FloatingPointError):
    """A gradient that a rule was about to use contains a NaN or an infinity, which would never leave the model.

    Attributes:
      worker: the worker that computed the gradient.
      step: the worker's gradient count, from 0; `Task.batch(seed, worker, step)` returns its data.
    """

    def __init__(self, worker: int, step: int, *, diverged: bool = False):
        self.worker, self.step, self.diverged = worker, step, diverged
        super().__init__(
            f"the model that worker {worker} read for its step {step} is not finite: earlier updates overflowed; lower "
            "the learning rate, or clip gradients in the optimizer"
            if diverged
            else f"the gradient of worker {worker} at its step {step} is not finite, although its model is: inspect "
            f"the batch that the task returns for (seed, {worker}, {step}), and its loss"
        )


class TooManyEventsError(Portable, RuntimeError):
    """Too many events happened at one tick of the virtual clock: messages form a zero-latency cycle."""


class ActorLostError(Portable, RuntimeError):
    """A process of a Ray run died or does not answer, and the run cannot continue without it.

    Attributes:
      place: the index of the worker; the server is -1.
    """

    def __init__(self, place: int, why: str):
        self.place = place
        super().__init__(f"{place_name(place)} {why}")


class StalledError(Portable, RuntimeError):
    """All processes of a Ray run answer, but none has made progress within the timeout.

    Attributes:
      waiting: for each waiting worker (the server is -1), the indices that it waits for.
      computing: the workers that are computing.
    """

    def __init__(self, waiting: Mapping[int, tuple[int, ...]], computing: tuple[int, ...], seconds: float):
        self.waiting, self.computing = dict(waiting), computing
        lines = _waiting_lines(waiting)
        lines += [f"{place_name(worker)} computes" for worker in computing]
        super().__init__(
            f"no progress for {seconds:g} s: {'; '.join(lines) or 'all workers are idle'}; raise timeout if gradients "
            "or messages may take this long"
        )


def place_name(place: int) -> str:
    """Returns `worker 3`, or `the server` for -1."""
    return "the server" if place < 0 else f"worker {place}"


def _waiting_lines(waiting: Mapping[int, tuple[int, ...]]) -> list[str]:
    return [f"{place_name(place)} waits for {', '.join(map(place_name, others))}" for place, others in waiting.items()]
