"""How long messages take."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .._core.types import Number
from ..schedule.stragglar import straggl_ar_seconds


class Links(NamedTuple):
    """How long messages and collectives take. Messages of one link arrive in order, one after the other.

    Attributes:
      name: for messages and plots.
      seconds: `seconds(source, destination, nbytes)`, without waiting; the server is -1. None: nothing takes time.
      collective: `collective(group, nbytes, op, lead)` for `"mean"` or `"gather"` of so many bytes of each worker, from
        when the last is there, which came `lead` seconds after the one before.
      nic: a place sends one message at a time, whomever to, and receives one at a time.
      workers: for how many workers they are, or None for any number.
    """

    name: str
    seconds: Callable[[int, int, int], float] | None
    collective: Callable[..., float]
    nic: bool = False
    workers: int | None = None


def instant() -> Links:
    """Messages take no time.

    Returns:
      The links.

    Example:
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
    """A message of B bytes takes `α + B β`; a ring all-reduce of n workers `2 (n - 1) α + 2 (n - 1)/n B β`.

    A gather takes `(n - 1) (α + B β)`. In a ring of unequal links the slowest decides.

    Args:
      latency: α in seconds; or a matrix for n workers and the server, which is last: `[source, destination]`, of
        `n + 1` rows.
      bandwidth: 1/β in bytes per second; or a matrix. Unequal halves of it are links with slower uploads.
      nic: places send one message at a time and receive one at a time, as with one network card: where a server is the
        bottleneck, this shows it. Otherwise only a link is busy.

    Returns:
      The links.

    Raises:
      ValueError: a latency is negative, a bandwidth not positive, or a matrix not square.

    Example:
      >>> from jaxdist.asynchronous import links
      >>> round(links.alpha_beta(3e-6, 450 * 2**30).collective(tuple(range(8)), 2**30, "mean") * 1e3, 4)
      3.9309

    References:
      Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner, Gropp, "Optimization of collective
      communication operations in MPICH", 2005.
    """
    alpha, beta = np.asarray(latency, float), np.asarray(1 / np.asarray(bandwidth, float))
    if not ((alpha >= 0) & np.isfinite(alpha)).all():
        raise ValueError(f"latency must be at least 0 and finite, got {latency}")
    if not ((beta >= 0) & np.isfinite(beta)).all():
        raise ValueError(f"bandwidth must be positive, got {bandwidth}")
    sizes = {len(one) for one in (alpha, beta) if one.ndim}
    if any(one.ndim not in (0, 2) or (one.ndim and one.shape[0] != one.shape[1]) for one in (alpha, beta)) or (
        len(sizes) > 1
    ):
        raise ValueError(
            "latency and bandwidth must be numbers or matrices [source, destination] of n workers and the server, got "
            f"shapes {alpha.shape} and {beta.shape}"
        )
    places = sizes.pop() if sizes else None

    def at(what: np.ndarray, source: int, destination: int) -> float:
        return float(what[source, destination] if what.ndim else what)

    def seconds(source: int, destination: int, nbytes: int) -> float:
        return at(alpha, source, destination) + nbytes * at(beta, source, destination)

    def collective(group: tuple[int, ...], nbytes: int, op: str, lead: float = 0.0) -> float:
        n = len(group)
        ring = [(group[k], group[(k + 1) % n]) for k in range(n)]
        # The slowest link of the ring, at each of the two.
        a, b = (max(at(what, *pair) for pair in ring) for what in (alpha, beta))
        if n == 1:
            return 0.0
        return (n - 1) * (a + nbytes * b) if op == "gather" else 2 * (n - 1) * a + 2 * (n - 1) / n * nbytes * b

    return Links("alpha_beta", seconds, collective, nic, None if places is None else places - 1)


def stragglar(latency: Number = 0.0, bandwidth: Number = float("inf"), *, nic: bool = False) -> Links:
    """As `alpha_beta`, with all-reduces by StragglAR, which the others have half done when the last of n comes.

    From then on it takes `(n - 2 + log2 n)(α + B β/(n - 1))`, and what is missing where the last comes sooner: see
    `schedule.straggl_ar_seconds`. Groups whose size is no power of 2 take a ring.

    Args:
      latency: α in seconds.
      bandwidth: 1/β in bytes per second.
      nic: as for `alpha_beta`.

    Returns:
      The links.

    Raises:
      ValueError: the latency is negative, or the bandwidth not positive.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, links, replay, rules
      >>> cluster = {"workers": 8, "durations": durations.one_slow(durations.constant(5.0), worker=7, factor=2)}
      >>> for one in (links.alpha_beta(0.1), links.stragglar(0.1)):  # 1.4 s and 0.9 s
      ...     print(len(replay.run(rules.bsp(optax.sgd(0.1)), seconds=1140, links=one, **cluster).trace.steps))
      100
      104

    References:
      Devraj, Ding, Vijaya Kumar, Kleinberg, Singh, "Efficient AllReduce with Stragglers", arXiv:2505.23523, 2025.
    """
    ring = alpha_beta(latency, bandwidth, nic=nic)

    def collective(group: tuple[int, ...], nbytes: int, op: str, lead: float = 0.0) -> float:
        n = len(group)
        if op != "mean" or n < 2 or n.bit_count() != 1:
            return ring.collective(group, nbytes, op)
        return straggl_ar_seconds(n, nbytes, latency=latency, bandwidth=bandwidth, lead=lead)

    return ring._replace(name="stragglar", collective=collective)
