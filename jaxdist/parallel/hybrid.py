"""Meshes whose inner axes stay on fast links: devices in groups, and the axes between and inside them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def groups(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices in groups with fast links inside: slices where they have numbers, else processes, TPUs together."""

    def place(device):
        number = getattr(device, "slice_index", None)
        if number is None and device.platform == "tpu":
            return 0
        return device.process_index if number is None else number

    found: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda device: (place(device), device.process_index, device.id)):
        found.setdefault(place(device), []).append(device)
    return list(found.values())


def order(outer: Mapping[str, int], inner: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """The devices in the shape `[*outer, *inner]`."""
    twice = set(outer) & set(inner)
    if twice:
        raise ValueError(f"the axis {min(twice)!r} is both outer and inner: give them two names")
    between, inside = math.prod(outer.values()), math.prod(inner.values())
    if between * inside != len(devices):
        raise ValueError(
            f"outer {dict(outer)} and inner {dict(inner)} need {between * inside} devices, but there are {len(devices)}"
        )
    found = groups(devices)
    sizes = sorted({len(group) for group in found})
    if any(size % inside for size in sizes):
        raise ValueError(
            f"inner {dict(inner)} needs groups of {inside} devices with fast links, but there are {len(found)} groups "
            f"of {' and '.join(map(str, sizes))}: an axis over several groups has slow links, name it in outer"
        )
    parts = [_arranged(group, (len(group) // inside, *inner.values())) for group in found]
    return np.concatenate(parts).reshape(*outer.values(), *inner.values())


def mesh(outer: Mapping[str, int], inner: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """The mesh of `make_mesh(outer=, inner=)`."""
    names = (*outer, *inner)
    return Mesh(order(outer, inner, devices), names, axis_types=(AxisType.Auto,) * len(names))


def _arranged(group: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """A group in the order that suits its links: JAX knows the shapes of TPU slices."""
    if group[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, group, allow_split_physical_axes=True)
    return np.array(group, dtype=object).reshape(shape)
