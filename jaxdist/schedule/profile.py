"""The times and sizes of the layers of a step, and closed forms of the time that the step takes.

Everywhere `bandwidth` is B, bytes a second, and `overhead` is θ, the seconds that each message occupies the link beside
its bytes.

References:
  Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP, 2019
  (ByteScheduler).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._core.checks import check_range


class Profile(NamedTuple):
    """A step from the start of its backward pass to the end of the next forward pass, layer by layer.

    Layers are numbered in the order of the forward pass; the backward pass computes the last gradient first.

    Attributes:
      ready: the time when the gradient of each layer is computed, in seconds from the start of the backward pass. The
        largest is the end of that pass.
      sizes: the bytes of each layer on the link. In a ring all-reduce a worker sends `2(W-1)/W` of the gradient.
      forward: the seconds of each layer's forward pass.
    """

    ready: Sequence[float | int]
    sizes: Sequence[float | int]
    forward: Sequence[float | int]


def profile_of(
    *, forward: Sequence[float | int], backward: Sequence[float | int], sizes: Sequence[float | int]
) -> Profile:
    """The profile, in floats, of layers whose backward passes follow each other: `ready_i = Σ_{j >= i} backward_j`.

    Args:
      forward: seconds of each layer's forward pass.
      backward: seconds of each layer's backward pass; about twice those of the forward pass.
      sizes: bytes that each layer sends.

    Examples:
      >>> from jaxdist.schedule import profile_of
      >>> profile_of(forward=[1, 1, 1], backward=[2, 2, 2], sizes=[1, 1, 6]).ready
      (6.0, 4.0, 2.0)
    """
    _check({"forward": forward, "backward": backward, "sizes": sizes})
    ready = np.cumsum(np.asarray(backward, np.float64)[::-1])[::-1]
    return Profile(tuple(ready.tolist()), tuple(map(float, sizes)), tuple(map(float, forward)))


def merge_layers(profile: Profile, groups: Sequence[Sequence[int]]) -> Profile:
    """Merges layers: each new one is ready with the last of its layers, and has the sum of their sizes and times.

    `groups` has, for each new layer, the numbers of its layers, each once, in forward order.

    Examples:
      >>> from jaxdist.schedule import Profile, merge_layers
      >>> merge_layers(Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2]), [[0, 1], [2]])
      Profile(ready=(6.0, 2.0), sizes=(2.0, 6.0), forward=(4.0, 2.0))
    """
    ready, sizes, forward = profile_lists(profile)
    if sorted(i for group in groups for i in group) != list(range(len(ready))):
        raise ValueError(f"groups must name each of {len(ready)} layers once, got {[list(group) for group in groups]}")
    return Profile(
        tuple(max(ready[i] for i in group) for group in groups),
        tuple(sum(sizes[i] for i in group) for group in groups),
        tuple(sum(forward[i] for i in group) for group in groups),
    )


def profile_lists(profile: Profile) -> tuple[list[float], list[float], list[float]]:
    """Checks the lists of a profile and returns them as floats."""
    _check(profile._asdict())
    ready, sizes, forward = ([float(number) for number in numbers] for numbers in profile)
    return ready, sizes, forward


def counts_of(sizes: list[float], partition_bytes: float | int | None) -> list[int]:
    """The number of messages of each layer."""
    most = math.inf if partition_bytes is None else partition_bytes
    return [math.ceil(size / most) if size > most else int(size > 0) for size in sizes]


def positive(**values: float | int | None) -> None:
    """Checks that all values are None or positive."""
    for name, value in values.items():
        if value is not None:
            check_range(name, value, 0, ends="(]")


def limits(**values: float | int | None) -> None:
    """Checks that all values are None, for no limit, or positive and finite."""
    for name, value in values.items():
        if value is not None:
            check_range(name, value, 0, ends="()", hint="None means no limit")


def not_negative(**values: float | int) -> None:
    """Checks that all values are finite and not negative."""
    for name, value in values.items():
        check_range(name, value, 0)


def _check(lists: dict[str, Sequence[float | int]]) -> None:
    lengths = {name: len(numbers) for name, numbers in lists.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ValueError(f"each list of a profile must have one number for each layer, got lists of {lengths}")
    for name, numbers in lists.items():
        if all(0 <= number < math.inf for number in numbers):
            continue
        for layer, number in enumerate(numbers):
            not_negative(**{f"{name}[{layer}]": number})


def optimum(profile: Profile, *, bandwidth: float | int, barrier: bool = False) -> float:
    """The time of a step with infinitely small messages, free preemption and no overhead, in the best order.

    `T* = max_{i <= k} [ r_i + (Σ_{j <= k, r_j >= r_i} s_j) / B + Σ_{j >= k} f_j ]`: layers `0..k` that are ready at
    `r_i` or later cannot be sent before, and layers `k..` compute after all of these have been sent. For gradients that
    become ready last layer first the sum is over all `j <= k` at `i = k`. The order by layer attains it: minimizing the
    latest `done_k + Σ_{j >= k} f_j` is the scheduling problem "1 | r_j, pmtn | L_max", and earliest due date first
    is optimal for it.

    With a barrier the forward pass waits for all gradients, and `T* = max_i [ r_i + (Σ_{r_j >= r_i} s_j) / B ] + Σ f`
    in any order: priority cannot help.

    Returns:
      Seconds from the start of the backward pass to the end of the next forward pass. `timeline` never takes less.

    Examples:
      >>> from jaxdist.schedule import Profile, optimum
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> optimum(profile, bandwidth=1), optimum(profile, bandwidth=1, barrier=True)
      (13.0, 16.0)

    References:
      Lawler et al., "Sequencing and scheduling: Algorithms and complexity", 1993 (the problem).
    """
    ready, sizes, forward = map(np.asarray, profile_lists(profile))
    positive(bandwidth=bandwidth)
    # Without any communication.
    whole = ready.max() + forward.sum()
    # later[i, j]: layer j is ready when layer i is, or later.
    later = ready >= ready[:, None]
    if barrier:
        return float(max(whole, (ready + later @ sizes / bandwidth).max() + forward.sum()))
    ends = ready[:, None] + np.cumsum(later * sizes, axis=1) / bandwidth + np.cumsum(forward[::-1])[::-1]
    return float(max(whole, np.triu(ends).max()))


def bound(
    profile: Profile,
    *,
    bandwidth: float | int,
    partition_bytes: float | int,
    credit_bytes: float | int,
    overhead: float | int = 0.0,
) -> float:
    """An upper bound with priority, partition δ and credit c: `T* + θ Σ n_i + (c + δ) / B + θ (ceil(c / δ) + 1)`.

    `n_i = ceil(s_i / δ)` messages of a layer cost `θ` each, and an urgent layer waits for `c + δ` bytes that the
    link got before. Its minimum over `δ` at `c = δ`, `sqrt(θ B Σ s / 2)`, is a good place to start tuning. `timeline`
    with no latency and no barrier never takes longer.

    Examples:
      >>> from jaxdist.schedule import Profile, bound, timeline
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> settings = {"bandwidth": 1, "partition_bytes": 2, "credit_bytes": 2, "overhead": 0.5}
      >>> timeline(profile, **settings).makespan, bound(profile, **settings)
      (16.0, 20.5)
    """
    positive(bandwidth=bandwidth)
    limits(partition_bytes=partition_bytes, credit_bytes=credit_bytes)
    not_negative(overhead=overhead)
    messages = sum(counts_of(profile_lists(profile)[1], partition_bytes))
    # What an urgent layer waits for: the bytes on the link, and the overhead of their messages.
    window = overhead * (math.ceil(credit_bytes / partition_bytes) + 1) + (credit_bytes + partition_bytes) / bandwidth
    return optimum(profile, bandwidth=bandwidth) + overhead * messages + window


def pipelined_time(
    profile: Profile,
    *,
    defer: int,
    bandwidth: float | int,
    overhead: float | int = 0.0,
    partition_bytes: float | int | None = None,
) -> float:
    """The time of a step that reduces its first `defer` layers in the next one, before their forward pass.

    Such a step is one program: it reduces the gradients of layers `0..k-1` (`k = defer`) of the last step, in this
    order, and the forward pass follows layer by layer; then, during the backward pass, it reduces layers `k..` as they
    become ready, and ends with the last of them. With `c_i = θ n_i + s_i / B` for the `n_i` messages of a layer

        T(k) = max( Σ f, max_{i < k} [ Σ_{j <= i} c_j + Σ_{j >= i} f_j ] )
             + max( max r, max_{i >= k} [ r_i + Σ_{j >= k, r_j >= r_i} c_j ] ).

    With k = 0 the step reduces all gradients, as plain data parallelism does; without `partition_bytes` each layer is
    one message. T is never less than `optimum`.

    Examples:
      >>> from jaxdist.schedule import Profile, pipelined_time
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> [pipelined_time(profile, defer=k, bandwidth=1) for k in range(4)]
      [16.0, 16.0, 15.0, 16.0]
    """
    ready, sizes, forward = profile_lists(profile)
    positive(bandwidth=bandwidth, partition_bytes=partition_bytes)
    not_negative(overhead=overhead)
    if not 0 <= defer <= len(ready):
        raise ValueError(f"defer must be in [0, {len(ready)}], the number of layers, got {defer}")
    counts = counts_of(sizes, partition_bytes)
    costs = [overhead * n + size / bandwidth for n, size in zip(counts, sizes, strict=True)]
    # The deferred layers, each just before its forward pass.
    now = link = 0.0
    for layer, seconds in enumerate(forward):
        if layer < defer:
            link += costs[layer]
            now = max(now, link)
        now += seconds
    # The others, in the order in which the backward pass computes them.
    link = 0.0
    for layer in sorted(range(defer, len(ready)), key=lambda layer: ready[layer]):
        link = max(link, ready[layer]) + costs[layer]
    return now + max(link, *ready)


def choose_defer(
    profile: Profile, *, bandwidth: float | int, overhead: float | int = 0.0, partition_bytes: float | int | None = None
) -> int:
    """The number of first layers to defer: the smallest `k` with the shortest `pipelined_time`.

    Examples:
      >>> from jaxdist.schedule import Profile, choose_defer
      >>> choose_defer(Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2]), bandwidth=1)
      2
    """
    link = {"bandwidth": bandwidth, "overhead": overhead, "partition_bytes": partition_bytes}
    return min(range(len(profile.ready) + 1), key=lambda k: pipelined_time(profile, defer=k, **link))
