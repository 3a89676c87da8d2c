"""StragglAR: an all-reduce that waits less for one slow worker."""

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from .._core.checks import check_range
from .._core.types import Number


class Transfer(NamedTuple):
    """Chunk `chunk` of n - 1 from one worker to another.

    If the destination sends in this round, it sends to the source. It adds the chunk to its own part if `adds`, which
    is so between the straggler and an owner, or stores it.
    """

    source: int
    destination: int
    chunk: int
    adds: bool


def stragglar(workers: int) -> tuple[tuple[Transfer, ...], ...]:
    """The rounds of transfers after the straggler has arrived, of pairs: `n - 2 + log2 n` for `n = 2^k` workers.

    While they wait, workers `0 ... n - 2` reduce-scatter among themselves: worker i then owns chunk i of n - 1, the sum
    of all parts except that of the straggler, worker n - 1. In round `t < n - 1` the straggler and worker t exchange
    their parts of chunk t, and both have its sum. All others exchange finished chunks in pairs, at most one each way.
    In the last `log2 n - 1` rounds the straggler does so too.

    The pairs are those of a field of 2^k elements with generator g: the straggler is 0, worker t is `g^t`, and in round
    t the partner of `x` is `x + g^t`. Any k successive powers are a basis; in that of the last k rounds, the workers
    that received chunk r are those whose first term is `g^r`. So each worker has one chunk that its partner lacks.

    For other even numbers the pairs are found by a randomized search that is the same everywhere: 7 rounds for 6
    workers and 15 for 12, as in the paper, 12 for 10, 25 for 20, 30 for 24 (27 in the paper). The search
    takes up to some seconds for a hundred workers.

    Args:
      workers: n, an even number.

    Raises:
      ValueError: n is odd, or less than 2.

    Examples:
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
    _check_even(workers)
    if workers.bit_count() != 1:
        return _search_rounds(workers)
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
    for modulus in range(2**k + 1, 2 ** (k + 1), 2):
        powers, element = [1], 1
        while (element := (element << 1) ^ (modulus if element >> (k - 1) else 0)) != 1:
            powers.append(element)
        if len(powers) == workers - 1:
            return powers
    raise AssertionError("every finite field has a generator")


def _check_even(workers: int) -> None:
    if workers < 2 or workers % 2:
        raise ValueError(f"workers must be an even number, since workers send in pairs, got {workers}: use a ring")


@functools.lru_cache(maxsize=16)
def _search_rounds(workers: int) -> tuple[tuple[Transfer, ...], ...]:
    """The shortest of several randomized greedy schedules; the generator's seed is the number of workers."""
    rng, best = random.Random(workers), None
    # About as much work for any number of workers: an attempt takes time in proportion to its cube.
    for _ in range(max(2, 60_000 // workers**3)):
        found = _attempt_rounds(workers, rng, 4 * workers if best is None else len(best))
        best = found or best
    assert best is not None, "an attempt without a limit always ends"
    return best


def _attempt_rounds(workers: int, rng: random.Random, limit: int) -> tuple[tuple[Transfer, ...], ...] | None:
    """Pairs workers that can exchange the most, in random order, until all have all chunks; None from `limit` on."""
    last, rounds = workers - 1, []
    # The finished chunks of each worker as bits, and the number of workers that have each chunk.
    has, copies = [0] * workers, [0] * last
    complete = (1 << last) - 1
    while any(chunks != complete for chunks in has):
        t = len(rounds)
        if t + 1 >= limit:
            return None
        sent, free = [], [worker for worker in range(workers) if t >= last or worker not in (t, last)]
        if t < last:
            sent += [Transfer(last, t, t, adds=True), Transfer(t, last, t, adds=True)]
        pairs = [(i, j) for k, i in enumerate(free) for j in free[k + 1 :] if has[i] != has[j]]
        rng.shuffle(pairs)
        # Pairs that exchange in both directions come first.
        pairs.sort(key=lambda pair: not (has[pair[0]] & ~has[pair[1]] and has[pair[1]] & ~has[pair[0]]))
        matched: set[int] = set()
        for i, j in pairs:
            if i in matched or j in matched:
                continue
            matched |= {i, j}
            for source, destination in ((i, j), (j, i)):
                missing = [c for c in range(last) if (has[source] & ~has[destination]) >> c & 1]
                if missing:
                    # The rarest chunk spreads first.
                    chunk = min(missing, key=lambda c: (copies[c], rng.random()))
                    copies[chunk] += 1
                    sent.append(Transfer(source, destination, chunk, adds=False))
        # Chunks that arrive in a round can be sent on in the next one.
        for move in sent:
            has[move.destination] |= 1 << move.chunk
        copies[t : t + 1] = [2] if t < last else copies[t : t + 1]
        rounds.append(tuple(sorted(sent)))
    return tuple(rounds)


def stragglar_reduce(parts: Sequence[Shaped[np.ndarray, " size"]]) -> Shaped[np.ndarray, "workers size"]:
    """Runs `stragglar` on arrays in one process, the straggler's last: the sums on all workers, equal to the last bit.

    Examples:
      >>> import numpy as np
      >>> from jaxdist.schedule import stragglar_reduce
      >>> stragglar_reduce([np.array([1, 2, 3]), np.array([10, 20, 30])]).tolist()
      [[11, 22, 33], [11, 22, 33]]
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
    """The time of StragglAR from the arrival of the straggler: `r (α + S β/(n - 1))` for r rounds, `n - 2 + log2 n`.

    The others have finished their reduce-scatter by then if they arrived `(n - 2)(α + S β/(n - 1))` earlier; otherwise
    the rest is added. It takes down to half of `ring_seconds`, for many workers and large arrays.

    Args:
      workers: n, an even number; r is that of `stragglar`, and larger where n is not a power of 2.
      nbytes: S, of one worker's part.
      latency: α, seconds of each round.
      bandwidth: 1/β, bytes per second and direction.
      lead: the seconds from the arrival of the others to that of the straggler.

    Examples:
      >>> from jaxdist.schedule import ring_seconds, stragglar_seconds
      >>> link = {"latency": 3e-6, "bandwidth": 450 * 2**30}
      >>> round(ring_seconds(8, 2**30, **link) * 1e3, 4), round(stragglar_seconds(8, 2**30, **link) * 1e3, 4)
      (3.9309, 2.8841)
    """
    _check(nbytes, latency, bandwidth)
    check_range("lead", lead, 0, ends="[]")
    _check_even(workers)
    rounds = workers - 2 + workers.bit_length() - 1 if workers.bit_count() == 1 else len(_search_rounds(workers))
    each = latency + nbytes / bandwidth / (workers - 1)
    missing = max(0.0, (workers - 2) * each - lead)
    return missing + rounds * each


def ring_seconds(workers: int, nbytes: Number, *, latency: Number, bandwidth: Number) -> float:
    """The time of a ring all-reduce from the arrival of the last worker: `2 (n - 1) α + 2 (n - 1)/n S β`.

    The symbols are those of `stragglar_seconds`.

    Examples:
      >>> from jaxdist.schedule import ring_seconds
      >>> ring_seconds(4, 8e6, latency=1e-3, bandwidth=2e9)
      0.012

    References:
      Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009.
    """
    _check(nbytes, latency, bandwidth)
    check_range("workers", workers, 1, ends="[]")
    return 2 * (workers - 1) * latency + 2 * (workers - 1) / workers * nbytes / bandwidth


def _check(nbytes: Number, latency: Number, bandwidth: Number) -> None:
    check_range("nbytes", nbytes, 0, ends="[]")
    check_range("latency", latency, 0, ends="[]")
    check_range("bandwidth", bandwidth, 0, ends="(]")
