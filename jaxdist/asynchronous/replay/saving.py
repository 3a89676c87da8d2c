"""Saves and restores the state of a replay as a file of numbers and names, without code."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ..portable import flat, read, write
from ..values import Spec
from .run import Simulator
from .state import ReplayState


def save(path: Path, clock: Simulator, state: ReplayState) -> None:
    """Writes a state, from which a restored run continues exactly as the original would.

    One `.npz` file of numbers and names of NamedTuples: arrays that many workers share are written once, and gradients
    that are not computed yet as their model and job. The file is written under a temporary name, then renamed.

    Args:
      path: the file, `.npz`.
      clock: the simulator of the state.
      state: the state.

    Raises:
      ValueError: the model or a state has nodes other than dicts, lists, tuples and NamedTuples.

    Example:
      >>> import optax, tempfile, pathlib
      >>> from jaxdist.asynchronous import replay, rules
      >>> clock = replay.simulator(rules.asgd(optax.sgd(0.1)), workers=2)
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.npz"
      >>> replay.save(file, clock, clock.advance(clock.init(), seconds=3))
      >>> clock.advance(replay.restore(file, clock), seconds=5).tick
      5000000000
    """
    arrays: dict[str, np.ndarray] = {}

    def store(value: Any) -> str:
        name = f"a{len(arrays)}"
        arrays[name] = flat(value)
        return name

    content = {entry.name: getattr(state, entry.name) for entry in fields(state)}
    text = write({"of": _identity(clock), "state": content}, store)
    # Renamed when complete, so that a run that is killed here leaves the last file intact.
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        parts: Any = arrays | {"text": np.frombuffer(text.encode(), np.uint8)}
        np.savez(file, **parts)
    os.replace(temporary, path)


def restore(path: Path, clock: Simulator) -> ReplayState:
    """Reads a state that `save` wrote.

    Args:
      path: the file.
      clock: a simulator made with the same arguments as the saved one.

    Returns:
      The state.

    Raises:
      ValueError: the file is of another rule, seed or number of workers, or names a class that is not a NamedTuple.

    Example:
      >>> import optax, tempfile, pathlib
      >>> from jaxdist.asynchronous import replay, rules
      >>> clock = replay.simulator(rules.asgd(optax.sgd(0.1)), workers=2)
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.npz"
      >>> replay.save(file, clock, clock.init())
      >>> replay.restore(file, clock).jobs
      [1, 1]
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    content = read(arrays.pop("text").tobytes().decode(), arrays.__getitem__, clock.config.gradient)
    if content["of"] != _identity(clock):
        raise ValueError(
            f"{path} is a replay of {content['of']}, not of {_identity(clock)}: use the arguments of the first run"
        )
    return ReplayState(**content["state"])


def _identity(clock: Simulator) -> dict[str, Any]:
    config = clock.config
    timing = isinstance(config.params, Spec)
    return {"rule": config.rule.name, "workers": config.workers, "seed": config.seed, "timing_only": timing}
