"""Durations that were measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ..._typing import Number
from .base import Durations


def recorded(seconds: Sequence[Sequence[Number]], *, mode: Literal["cycle", "stop"] = "cycle") -> Durations:
    """Durations that were measured: `seconds[i][k]` for job k of worker i.

    Args:
      seconds: a list for each worker; their lengths may differ.
      mode: begin again at the end, or never finish another gradient.

    Returns:
      The law.

    Raises:
      ValueError: a list is empty, or a time is not positive.

    Example:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.recorded([[1.0, 2.0], [3.0]])
      >>> list(islice(durations.stream(law, 0, worker=0), 3))
      [1.0, 2.0, 1.0]
    """
    rows = [np.asarray(row, float) for row in seconds]
    for i, row in enumerate(rows):
        if row.ndim != 1 or not len(row) or not (row > 0).all():
            raise ValueError(f"seconds of worker {i} must be one or more positive numbers, got {seconds[i]}")

    def draw(rng, worker, first, count, state):
        row, jobs = rows[worker], np.arange(first, first + count)
        out = row[jobs % len(row)]
        return (out if mode == "cycle" else np.where(jobs < len(row), out, np.inf)), None

    return Durations("recorded", draw, len(rows))


def from_file(path: Path, *, mode: Literal["cycle", "stop"] = "cycle") -> Durations:
    """`recorded` from a JSON file: a list of seconds for each worker.

    Args:
      path: the file.
      mode: begin again at the end, or never finish another gradient.

    Returns:
      The law.

    Raises:
      ValueError: the file has something else in it.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxdist.asynchronous import durations
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "seconds.json"
      >>> _ = file.write_text("[[1.0, 2.5], [3.0]]")
      >>> durations.from_file(file).workers
      2
    """
    rows = json.loads(path.read_text())
    if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        raise ValueError(f"{path} must have a list of lists of seconds in it, one for each worker")
    for row in rows:
        if not all(isinstance(value, float | int) for value in row):
            raise ValueError(f"{path} must have a list of lists of seconds in it, got {row}")
    return recorded(rows, mode=mode)
