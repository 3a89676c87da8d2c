"""Links between workers: durations of messages and collectives, and network cards that are busy."""

import heapq
from collections.abc import Callable
from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float

from .._core.types import Number
from ..schedule.stragglar import stragglar_seconds


class Links(NamedTuple):
    """Durations of messages and collectives. Messages of one link are sent one at a time and arrive in order.

    Attributes:
      name: for messages and plots.
      seconds: `seconds(source, destination, nbytes)`, without queueing; the server is -1. None: messages take no time.
      collective: `collective(group, nbytes, op, lead)` for `"mean"` or `"gather"` of `nbytes` per worker, from the time
        at which the last member joins, `lead` seconds after the previous one.
      nic: workers and server send one message at a time to all destinations together, and receive one at a time.
      workers: the number of workers, or None for any number.
    """

    name: str
    seconds: Callable[[int, int, int], float] | None
    collective: Callable[..., float]
    nic: bool = False
    workers: int | None = None


def instant() -> Links:
    """Links on which messages take no time.

    Examples:
      >>> from jaxdist.asynchronous import links
      >>> links.instant().collective((0, 1, 2), 1000, "mean")
      0.0
    """
    return Links("instant", None, lambda group, nbytes, op, lead=0.0: 0.0)


def alpha_beta(
    latency: Number | Float[np.ndarray, "places places"] = 0.0,
    bandwidth: Number | Float[np.ndarray, "places places"] = float("inf"),
    *,
    nic: bool = False,
) -> Links:
    """Links on which a message of B bytes takes `α + B β`, a ring all-reduce `2 (n - 1) α + 2 (n - 1)/n B β`.

    A gather takes `(n - 1) (α + B β)`. The slowest link of a ring determines its speed.

    Args:
      latency: α in seconds; or a matrix `[source, destination]` of `n + 1` rows for n workers and, last, the server.
      bandwidth: 1/β in bytes per second; or a matrix, which is not symmetric if uploads are slower.
      nic: workers and server send one message at a time and receive one at a time, as with a single network card; use
        it to see whether the server is a bottleneck. Otherwise a message occupies only its link.

    Examples:
      >>> from jaxdist.asynchronous import links
      >>> round(links.alpha_beta(3e-6, 450 * 2**30).collective(tuple(range(8)), 2**30, "mean") * 1e3, 4)
      3.9309

    References:
      Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner, Gropp, "Optimization of Collective
      Communication Operations in MPICH", IJHPCA 19(1), 2005.
    """
    alpha, beta = np.asarray(latency, float), np.asarray(1 / np.asarray(bandwidth, float))
    if not ((alpha >= 0) & np.isfinite(alpha)).all():
        raise ValueError(f"latency must be at least 0 and finite, got {latency}")
    if not ((beta >= 0) & np.isfinite(beta)).all():
        raise ValueError(f"bandwidth must be positive, got {bandwidth}")
    sizes = {len(values) for values in (alpha, beta) if values.ndim}
    if any(values.ndim not in (0, 2) or len(set(values.shape)) > 1 for values in (alpha, beta)) or len(sizes) > 1:
        raise ValueError(
            "latency and bandwidth must be numbers or equal square matrices of n workers and the server, "
            f"got shapes {alpha.shape} and {beta.shape}"
        )
    places = sizes.pop() if sizes else None

    # The server's index -1 finds the last row and column.
    def at(values: np.ndarray, source: int, destination: int) -> float:
        return float(values[source, destination] if values.ndim else values)

    def seconds(source: int, destination: int, nbytes: int) -> float:
        return at(alpha, source, destination) + nbytes * at(beta, source, destination)

    def collective(group: tuple[int, ...], nbytes: int, op: str, lead: float = 0.0) -> float:
        n = len(group)
        ring = [(group[k], group[(k + 1) % n]) for k in range(n)]
        # The slowest link of the ring, separately in latency and in bandwidth.
        a, b = (max(at(values, *pair) for pair in ring) for values in (alpha, beta))
        # A group of one needs no messages.
        if n == 1:
            return 0.0
        return (n - 1) * (a + nbytes * b) if op == "gather" else 2 * (n - 1) * a + 2 * (n - 1) / n * nbytes * b

    return Links("alpha_beta", seconds, collective, nic, None if places is None else places - 1)


def stragglar(latency: Number = 0.0, bandwidth: Number = float("inf")) -> Links:
    """Links as `alpha_beta`, with all-reduces by StragglAR, which the other workers begin before the last one joins.

    After the last one joins it takes `(n - 2 + log2 n)(α + B β/(n - 1))`, slightly more if n is not a power of 2, plus
    the unfinished part of the others' work if it joins early: see `schedule.stragglar_seconds`. Groups of an odd number
    use a ring.

    Args:
      latency: α in seconds.
      bandwidth: 1/β in bytes per second.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, links, replay, rules
      >>> cluster = {"workers": 8, "durations": durations.one_slow(durations.constant(5.0), worker=7, factor=2)}
      >>> for kind in (links.alpha_beta(0.1), links.stragglar(0.1)):  # 1.4 s and 0.9 s
      ...     print(len(replay.run(rules.bsp(optax.sgd(0.1)), seconds=1140, links=kind, **cluster).trace.steps))
      100
      104

    References:
      Devraj, Ding, Vijaya Kumar, Kleinberg, Singh, "Efficient AllReduce with Stragglers", arXiv:2505.23523, 2025.
    """
    if np.ndim(latency) or np.ndim(bandwidth):
        raise ValueError("stragglar needs one latency and one bandwidth for all links; alpha_beta takes matrices")
    ring = alpha_beta(latency, bandwidth)

    def collective(group: tuple[int, ...], nbytes: int, op: str, lead: float = 0.0) -> float:
        n = len(group)
        # StragglAR is an all-reduce of pairs.
        if op != "mean" or n % 2:
            return ring.collective(group, nbytes, op)
        return stragglar_seconds(n, nbytes, latency=latency, bandwidth=bandwidth, lead=lead)

    return ring._replace(name="stragglar", collective=collective)


# When a card is busy: intervals of ticks `(begin, end)` that do not overlap, in order.
Busy = tuple[tuple[int, int], ...]


# Called for every message: the runtime type checks of the tests would take most of the time.
@no_type_check
def first_gap(start: int, length: int, sender: Busy, receiver: Busy) -> int:
    """Returns the first tick from `start` on from which sender and receiver are both free for `length` ticks.

    A message may precede one that was sent before it and still waits for another receiver: otherwise one busy receiver
    would hold up its senders, these their other receivers, and so on around a ring.
    """
    for begin, end in heapq.merge(sender, receiver):
        if begin >= start + length:
            break
        start = max(start, end)
    return start


@no_type_check
def book(busy: Busy, begin: int, end: int, *, now: int) -> Busy:
    """Returns the intervals with one more; what has passed is left out, and intervals that touch become one."""
    kept: list[tuple[int, int]] = []
    for interval in sorted((*busy, (begin, end))):
        if interval[1] <= now:
            continue
        if kept and interval[0] <= kept[-1][1]:
            kept[-1] = kept[-1][0], max(kept[-1][1], interval[1])
        else:
            kept.append(interval)
    return tuple(kept)
