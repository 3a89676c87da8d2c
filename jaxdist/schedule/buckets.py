"""Buckets: leaves that share a collective."""

from collections.abc import Sequence
from typing import Any


def assign_buckets(
    sizes: Sequence[int],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
    kinds: Sequence[Any] | None = None,
) -> list[list[int]]:
    """Cuts leaves, in order, into buckets of about `bucket_bytes`, and returns the buckets last leaf first.

    A bucket is closed when it reaches its cap, so it may exceed it by one leaf; a leaf larger than the cap has its own
    bucket. The order of buckets is that in which a backward pass computes gradients.

    Args:
      sizes: bytes of each leaf.
      bucket_bytes: the cap. Too small pays latency for every bucket, too large leaves no overlap; start at 25 MiB.
      first_bucket_bytes: the cap of the first bucket in definition order, whose gradients come last.
      kinds: one for each leaf; leaves of different kinds (dtypes) are in different buckets.

    Returns:
      Lists of leaf numbers; every leaf is in exactly one.

    Raises:
      ValueError: a cap is not positive.

    Example:
      >>> from jaxdist.schedule import assign_buckets
      >>> assign_buckets([5, 6, 300, 100, 200], bucket_bytes=250, first_bucket_bytes=10)
      [[3, 4], [2], [0, 1]]

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704, 2020.
    """
    for name, cap in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if cap is not None and cap < 1:
            raise ValueError(f"{name} must be positive, got {cap}")
    buckets: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    caps = {}
    for i, size in enumerate(sizes):
        kind = None if kinds is None else kinds[i]
        members, filled = filling.get(kind, ([], 0))
        if not members:
            buckets.append(members)
            caps[kind] = bucket_bytes if kind in caps or first_bucket_bytes is None else first_bucket_bytes
        members.append(i)
        filled += size
        filling[kind] = ([], 0) if filled >= caps[kind] else (members, filled)
    return buckets[::-1]
