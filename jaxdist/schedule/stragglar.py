"""StragglAR: an all-reduce, half of which is done before the last worker arrives."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from .._core.types import Number


class Transfer(NamedTuple):
    """One chunk from one worker to another.

    Attributes:
      source: the worker that sends.
      destination: the worker that receives; if it sends in this round, it sends to `source`.
      chunk: the number of the chunk, of n - 1.
      adds: whether the receiver adds it to its own part (between the straggler and an owner) or stores it.
    """

    source: int
    destination: int
    chunk: int
    adds: bool


def stragglar(workers: int) -> tuple[tuple[Transfer, ...], ...]:
    """The transfers after the straggler has arrived: `n - 2 + log2 n` rounds of pairs, for `n = 2^k` workers.

    While they wait, workers `0 ... n - 2` reduce-scatter among themselves: worker i then owns chunk i of n - 1, the sum
    of all parts except that of the straggler, worker n - 1. In round `t < n - 1` the straggler and worker t exchange
    their parts of chunk t, and both have its sum. All others exchange finished chunks in pairs, at most one each way.
    In the last `log2 n - 1` rounds the straggler does so too.

    The pairs are those of a field of 2^k elements with generator g: the straggler is 0, worker t is `g^t`, and in round
    t the partner of `x` is `x + g^t`. Any k successive powers are a basis; in that of the last k rounds, the workers
    that received chunk r are those whose first term is `g^r`. So each worker has one chunk that its partner lacks.

    Args:
      workers: n, a power of 2.

    Returns:
      The transfers of each round; those of a round run at the same time.

    Raises:
      ValueError: n is not a power of 2. For some other even numbers the paper found rounds by search (7 for 6 workers,
        15 for 12); these are not implemented.

    Example:
      >>> from jaxdist.schedule import stragglar
      >>> for transfers in stragglar(4):
      ...     print([f"{move.source}->{move.destination} {move.chunk}" for move in transfers])
      ['0->3 0', '3->0 0']
      ['0->2 0', '1->3 1', '3->1 1']
      ['0->1 0', '1->0 1', '2->3 2', '3->2 2']
      ['1->2 1', '2->1 2', '3->0 2']

    References:
      Devraj, Ding, Vijaya Kumar, Kleinberg, Singh, "Efficient AllReduce with Stragglers", arXiv:2505.23523, 2025 (the
      method and the number of rounds; the pairs are ours).
    """
    powers = _powers(workers)
    last, k = workers - 1, workers.bit_length() - 1
    rank = {0: last} | {element: t for t, element in enumerate(powers)}
    return tuple(_round(t, powers, rank, last, k) for t in range(last + k - 1))


def _round(t: int, powers: list[int], rank: dict[int, int], last: int, k: int) -> tuple[Transfer, ...]:
    # The first term of each element in the basis g^(t-k) ... g^(t-1).
    first, span = {}, [0]
    for r in range(t - 1, t - k - 1, -1):
        first |= {element ^ powers[r % last]: r for element in span}
        span += [element ^ powers[r % last] for element in span]
    sent = []
    for element, worker in rank.items():
        partner = rank[element ^ powers[t % last]]
        if t < last and last in (worker, partner):
            sent.append(Transfer(worker, partner, t, adds=True))
        # After all exchanges the straggler has every chunk and sends the last one, as do the workers that it reached.
        elif partner != last and (chunk := min(first.get(element, t), last - 1)) >= 0:
            sent.append(Transfer(worker, partner, chunk, adds=False))
    return tuple(sorted(sent))


def _powers(workers: int) -> list[int]:
    """The powers of a generator of the field with one element per worker, as polynomials in bits."""
    k = workers.bit_length() - 1
    if workers < 2 or workers != 2**k:
        raise ValueError(
            f"workers must be a power of 2, got {workers}: other numbers need rounds found by search; use a ring"
        )
    for modulus in range(2**k + 1, 2 ** (k + 1), 2):
        powers, element = [1], 1
        while (element := (element << 1) ^ (modulus if element >> (k - 1) else 0)) != 1:
            powers.append(element)
        if len(powers) == workers - 1:
            return powers
    raise AssertionError("every finite field has a generator")


def stragglar_reduce(parts: Sequence[Shaped[np.ndarray, " size"]]) -> Shaped[np.ndarray, "workers size"]:
    """Runs `stragglar` on arrays in one process.

    Args:
      parts: one array for each worker; the straggler's is last.

    Returns:
      The sum on each worker; all are equal to the last bit.

    Raises:
      ValueError: the number of parts is not a power of 2.

    Example:
      >>> import numpy as np
      >>> from jaxdist.schedule import stragglar_reduce
      >>> stragglar_reduce([np.array([1, 2, 3]), np.array([10, 20, 30])]).tolist()
      [[11, 22, 33], [11, 22, 33]]

    References:
      Devraj, Ding, Vijaya Kumar, Kleinberg, Singh, "Efficient AllReduce with Stragglers", arXiv:2505.23523, 2025.
    """
    rounds, last = stragglar(len(parts)), len(parts) - 1
    chunks = [np.array_split(part, last) for part in parts]
    # The chunks of each worker: after the reduce-scatter of the others, and all parts of the straggler.
    owned = [{i: np.sum([chunks[j][i] for j in range(last)], axis=0)} for i in range(last)]
    owned.append(dict(enumerate(chunks[last])))
    for transfers in rounds:
        # All values are read before any is written, since transfers of a round are simultaneous.
        values = [owned[move.source][move.chunk] for move in transfers]
        for move, value in zip(transfers, values, strict=True):
            own = owned[move.destination]
            own[move.chunk] = own[move.chunk] + value if move.adds else value
    return np.stack([np.concatenate([own[chunk] for chunk in range(last)]) for own in owned])


def stragglar_seconds(
    workers: int, nbytes: Number, *, latency: Number, bandwidth: Number, lead: Number = float("inf")
) -> float:
    """The time of StragglAR from the arrival of the straggler: `(n - 2 + log2 n)(α + S β/(n - 1))`.

    The others have finished their reduce-scatter by then if they arrived `(n - 2)(α + S β/(n - 1))` earlier; otherwise
    the rest is added. It takes down to half of `ring_seconds`, for many workers and large arrays.

    Args:
      workers: n, a power of 2.
      nbytes: S, of one worker's part.
      latency: α, seconds of each round.
      bandwidth: 1/β, bytes per second and direction.
      lead: the seconds from the arrival of the others to that of the straggler.

    Returns:
      Seconds.

    Raises:
      ValueError: n is not a power of 2, or a number is out of range.

    Example:
      >>> from jaxdist.schedule import ring_seconds, stragglar_seconds
      >>> link = {"latency": 3e-6, "bandwidth": 450 * 2**30}
      >>> round(ring_seconds(8, 2**30, **link) * 1e3, 4), round(stragglar_seconds(8, 2**30, **link) * 1e3, 4)
      (3.9309, 2.8841)

    References:
      Devraj, Ding, Vijaya Kumar, Kleinberg, Singh, "Efficient AllReduce with Stragglers", arXiv:2505.23523, 2025.
    """
    _check(nbytes, latency, bandwidth)
    if not lead >= 0:
        raise ValueError(f"lead must be at least 0, got {lead}")
    _powers(workers)
    each = latency + nbytes / bandwidth / (workers - 1)
    missing = max(0.0, (workers - 2) * each - lead)
    return missing + (workers - 2 + workers.bit_length() - 1) * each


def ring_seconds(workers: int, nbytes: Number, *, latency: Number, bandwidth: Number) -> float:
    """The time of a ring all-reduce from the arrival of the last worker: `2 (n - 1) α + 2 (n - 1)/n S β`.

    Args:
      workers: n.
      nbytes: S, of one worker's part.
      latency: α, seconds of each message.
      bandwidth: 1/β, bytes per second and direction.

    Returns:
      Seconds.

    Raises:
      ValueError: a number is out of range.

    Example:
      >>> from jaxdist.schedule import ring_seconds
      >>> ring_seconds(4, 8e6, latency=1e-3, bandwidth=2e9)
      0.012

    References:
      Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    _check(nbytes, latency, bandwidth)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    return 2 * (workers - 1) * latency + 2 * (workers - 1) / workers * nbytes / bandwidth


def _check(nbytes: Number, latency: Number, bandwidth: Number) -> None:
    if not (nbytes >= 0 and latency >= 0 and bandwidth > 0):
        raise ValueError(
            f"nbytes and latency must be at least 0 and bandwidth positive, got {nbytes}, {latency} and {bandwidth}"
        )
