"""The profile of a step: the times and sizes of its layers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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
    """The profile of layers whose backward passes follow each other: `ready_i = Σ_{j >= i} backward_j`.

    Args:
      forward: seconds of each layer's forward pass.
      backward: seconds of each layer's backward pass; about twice those of the forward pass.
      sizes: bytes that each layer sends.

    Returns:
      The profile, in tuples of floats.

    Raises:
      ValueError: the lists differ in length, are empty, or contain a negative or infinite number.

    Example:
      >>> from jaxdist.schedule import profile_of
      >>> profile_of(forward=[1, 1, 1], backward=[2, 2, 2], sizes=[1, 1, 6]).ready
      (6.0, 4.0, 2.0)

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019.
    """
    _check({"forward": forward, "backward": backward, "sizes": sizes})
    ready = np.cumsum(np.asarray(backward, np.float64)[::-1])[::-1]
    return Profile(tuple(ready.tolist()), tuple(map(float, sizes)), tuple(map(float, forward)))


def merged(profile: Profile, groups: Sequence[Sequence[int]]) -> Profile:
    """Merges layers: each new one is ready with the last of its layers, and has the sum of their sizes and times.

    Args:
      profile: the layers.
      groups: for each new layer the numbers of its layers, each once, in forward order.

    Returns:
      The profile.

    Example:
      >>> from jaxdist.schedule import Profile, merged
      >>> merged(Profile(ready=[6, 4, 2], sizes=[1, 1, 6], forward=[2, 2, 2]), [[0, 1], [2]])
      Profile(ready=(6.0, 2.0), sizes=(2.0, 6.0), forward=(4.0, 2.0))
    """
    ready, sizes, forward = profile_lists(profile)
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


def positive(**values: float | int | None) -> None:
    """Checks that all values are None or positive."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def not_negative(**values: float | int) -> None:
    """Checks that all values are finite and not negative."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")


def _check(lists: dict[str, Sequence[float | int]]) -> None:
    lengths = {name: len(numbers) for name, numbers in lists.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ValueError(f"each list of a profile must have one number for each layer, got lists of {lengths}")
    for name, numbers in lists.items():
        if all(0 <= number < math.inf for number in numbers):
            continue
        for layer, number in enumerate(numbers):
            not_negative(**{f"{name}[{layer}]": number})
