"""Bounds of the time of a step over all orders of messages, in closed form."""

import math

import numpy as np

from .profile import Profile, not_negative, positive, profile_lists
from .timeline import counts_of


def optimum(profile: Profile, *, bandwidth: float | int, barrier: bool = False) -> float:
    """The time of a step with infinitely small messages, free preemption and no overhead, in the best order.

    `T* = max_{i <= k} [ r_i + (Σ_{j <= k, r_j >= r_i} s_j) / B + Σ_{j >= k} f_j ]`: layers `0..k` that are ready at
    `r_i` or later cannot be sent before, and layers `k..` compute after all of these have been sent. For gradients that
    become ready last layer first the sum is over all `j <= k` at `i = k`. The order by layer attains it: minimizing the
    latest `done_k + Σ_{j >= k} f_j` is the scheduling problem "1 | r_j, pmtn | L_max", and earliest due date first
    is optimal for it.

    With a barrier `T* = max_i [ r_i + (Σ_{r_j >= r_i} s_j) / B ] + Σ f`, in any order: priority cannot help.

    Args:
      profile: the layers.
      bandwidth: bytes a second.
      barrier: whether the forward pass waits for all gradients.

    Returns:
      Seconds from the start of the backward pass to the end of the next forward pass. `timeline` never takes less.

    Raises:
      ValueError: `bandwidth` is not positive, or the profile's lists do not match or have a negative number.

    Example:
      >>> from jaxdist.schedule import Profile, optimum
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> optimum(profile, bandwidth=1), optimum(profile, bandwidth=1, barrier=True)
      (13.0, 16.0)

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019, theorem 1.
      Lawler, Lenstra, Rinnooy Kan, Shmoys, "Sequencing and scheduling: Algorithms and complexity", 1993 (the problem).
    """
    ready, sizes, forward = map(np.asarray, profile_lists(profile))
    positive(bandwidth=bandwidth)
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
    """An upper bound with priority, partition and credit: `T* + θ Σ n_i + (c + δ) / B + θ (ceil(c / δ) + 1)`.

    `n_i = ceil(s_i / δ)` messages of a layer cost `θ` each, and an urgent layer waits for `c + δ` bytes that the
    link got before. Its minimum over `δ` at `c = δ`, `sqrt(θ B Σ s / 2)`, is a good place to start tuning.

    Args:
      profile: the layers.
      bandwidth: `B`, bytes a second.
      partition_bytes: `δ`.
      credit_bytes: `c`.
      overhead: `θ`, seconds that each message occupies the link beside its bytes.

    Returns:
      Seconds; `timeline` with no latency and no barrier never takes more.

    Raises:
      ValueError: a number is not positive (`overhead`: negative), or the profile's lists do not match.

    Example:
      >>> from jaxdist.schedule import Profile, bound, timeline
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> settings = {"bandwidth": 1, "partition_bytes": 2, "credit_bytes": 2, "overhead": 0.5}
      >>> timeline(profile, **settings).makespan, bound(profile, **settings)
      (16.0, 20.5)

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019.
    """
    positive(bandwidth=bandwidth, partition_bytes=partition_bytes, credit_bytes=credit_bytes)
    not_negative(overhead=overhead)
    messages = sum(counts_of(profile_lists(profile)[1], partition_bytes))
    window = overhead * (math.ceil(credit_bytes / partition_bytes) + 1) + (credit_bytes + partition_bytes) / bandwidth
    return optimum(profile, bandwidth=bandwidth) + overhead * messages + window
