"""The time of a step that defers the reduction of its first layers to the next step, and the best number of layers."""

from .profile import Profile, not_negative, positive, profile_lists
from .timeline import counts_of


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

    Args:
      profile: the layers.
      defer: `k`. 0 reduces all inside the step, as plain data parallelism does.
      bandwidth: `B`, bytes a second.
      overhead: `θ`, seconds that each message takes beside its bytes.
      partition_bytes: the size of the messages that layers are cut into. None: each layer is one.

    Returns:
      Seconds. Never less than `optimum`.

    Raises:
      ValueError: `defer` is not in [0, number of layers], a number is not positive (`overhead`: negative), or the
        profile's lists do not match.

    Example:
      >>> from jaxdist.schedule import Profile, pipelined_time
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2])
      >>> [pipelined_time(profile, defer=k, bandwidth=1) for k in range(4)]
      [16.0, 16.0, 15.0, 16.0]

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019 (crossing
      the global barrier).
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
    profile: Profile,
    *,
    bandwidth: float | int,
    overhead: float | int = 0.0,
    partition_bytes: float | int | None = None,
) -> int:
    """The number of first layers to defer: the smallest `k` with the shortest `pipelined_time`.

    Args:
      profile: the layers.
      bandwidth: bytes a second.
      overhead: seconds that each message takes beside its bytes.
      partition_bytes: the size of the messages that layers are cut into. None: each layer is one.

    Returns:
      `k`, between 0 and the number of layers.

    Raises:
      ValueError: a number is not positive (`overhead`: negative), or the profile's lists do not match.

    Example:
      >>> from jaxdist.schedule import Profile, choose_defer
      >>> choose_defer(Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2]), bandwidth=1)
      2

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019.
    """
    link = {"bandwidth": bandwidth, "overhead": overhead, "partition_bytes": partition_bytes}
    return min(range(len(profile.ready) + 1), key=lambda k: pipelined_time(profile, defer=k, **link))
