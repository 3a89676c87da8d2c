"""What can go wrong on real processes."""

from collections.abc import Mapping

from ..._core.errors import Portable


class WorkerLost(Portable, RuntimeError):
    """A process is gone, or does not answer, and the run cannot go on without it.

    Attributes:
      place: which worker; the server is -1.
    """

    def __init__(self, place: int, why: str):
        self.place = place
        super().__init__(f"{place_name(place)} {why}")


class Stalled(Portable, RuntimeError):
    """All processes answer, and none has got any further for too long.

    Attributes:
      waiting: for each place that waits, whom it waits for.
      computing: the workers that compute.
    """

    def __init__(self, waiting: Mapping[int, tuple[int, ...]], computing: tuple[int, ...], seconds: float):
        self.waiting, self.computing = dict(waiting), computing
        lines = [f"{place_name(who)} waits for {', '.join(map(place_name, whom))}" for who, whom in waiting.items()]
        lines += [f"{place_name(who)} computes" for who in computing]
        super().__init__(
            f"nothing has happened for {seconds:g} s: {'; '.join(lines) or 'nobody does anything'}; if gradients or "
            "messages may take as long, raise timeout"
        )


def place_name(place: int) -> str:
    """`worker 3`, or `the server`."""
    return "the server" if place < 0 else f"worker {place}"
