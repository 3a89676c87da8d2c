"""One leaf as it was saved, for other workers or in other marks: in host memory, by numpy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._marks import Sharded
from .._typing import Shape
from ..placement import cutting, refit


def whole_shape(marks: Sequence[Any], shape: Shape) -> Shape:
    """The shape of the array that the marks distribute: without a dimension for workers, and not cut."""
    cuts = cutting(marks)
    return tuple(cuts[-1].shape) if cuts and isinstance(cuts[-1], Sharded) else shape[len(cuts) :]


def same_kinds(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two leaves are distributed in the same way, over however many workers."""
    return [type(mark) for mark in cutting(left)] == [type(mark) for mark in cutting(right)]


def moved(was: Sequence[Any], found: np.ndarray, marks: Sequence[Any], shape: Shape) -> np.ndarray:
    """The global array in these marks and this shape. Where they are of other kinds, by way of the whole array."""
    if not same_kinds(was, marks):
        found = _distributed(marks, _whole(was, found), shape)
    return np.asarray(refit(marks, found, shape))


def _whole(marks: Sequence[Any], found: np.ndarray) -> np.ndarray:
    """As `jd.consensus`: what was per worker by its rule for one worker, what was cut in one piece."""
    for mark in cutting(marks):
        if isinstance(mark, Sharded):
            found = found[: math.prod(mark.shape)].reshape(*mark.shape, *found.shape[1:])
        else:
            found = np.asarray(refit([mark], found, (1, *found.shape[1:])))[0, ...]  # of scalars too, an array
    return found


def _distributed(marks: Sequence[Any], whole: np.ndarray, shape: Shape) -> np.ndarray:
    """As `jd.place`: the innermost mark first, each adds or cuts its dimension."""
    cuts = cutting(marks)
    for dimension in reversed(range(len(cuts))):
        mark, length = cuts[dimension], shape[dimension]
        if isinstance(mark, Sharded):
            flat = whole.reshape(math.prod(mark.shape), *whole.shape[len(mark.shape) :])
            whole = np.pad(flat, [(0, length - len(flat))] + [(0, 0)] * (flat.ndim - 1))
        else:
            whole = np.broadcast_to(whole, (length, *whole.shape))
    return whole
