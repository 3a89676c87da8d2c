"""What can go wrong on the virtual clock."""

from collections.abc import Mapping


class Deadlock(RuntimeError):
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


class TooManyEvents(RuntimeError):
    """The clock stands still: more events at one tick than could be meant. Messages go in a circle, in no time."""


def _name(place: int) -> str:
    return "the server" if place < 0 else f"worker {place}"
