"""Collectives between the parts of a mesh: those whose workers differ in their place along an axis."""

from collections.abc import Callable

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .._core.types import AxisNames
from ..state.marks import axis_tuple
from .base import Collective


def crossing(mesh: Mesh | AbstractMesh, axis: AxisNames) -> Callable[[Collective], bool]:
    """Returns a function: whether a collective has a group of workers that differ in their place along the axis.

    Raises:
      ValueError: the mesh has no such axis; the function, if the program runs on more devices than the mesh has.
    """
    names = axis_tuple(axis)
    if absent := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(f"the mesh has no axis {absent[0]!r}, its axes are {', '.join(map(str, mesh.axis_names))}")
    sizes = tuple(mesh.shape.values())
    places = np.indices(sizes).reshape(len(sizes), -1)[[mesh.axis_names.index(name) for name in names]]

    def crosses(op: Collective) -> bool:
        # Groups that the text does not state are of all devices.
        groups = op.replica_groups if op.replica_groups is not None else (tuple(range(places.shape[1])),)
        if max((member for group in groups for member in group), default=0) >= places.shape[1]:
            raise ValueError(f"the program runs on more than the {places.shape[1]} devices of the mesh: pass its own")
        return any(len(np.unique(places[:, list(group)], axis=1).T) > 1 for group in groups)

    return crosses
