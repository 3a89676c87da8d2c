"""The state of a replay as a file of numbers and names: no code in it."""

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
    """Writes a state, from which `restore` goes on exactly as it would have.

    One `.npz` file of numbers, and the names of NamedTuples: arrays that many workers share are written once, and
    gradients that nobody has asked for yet as the model and the job that they come from. Written beside, then renamed.

    Args:
      path: the file, `.npz`.
      clock: whose state it is.
      state: to write.

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

    def store(one: Any) -> str:
        name = f"a{len(arrays)}"
        arrays[name] = flat(one)
        return name

    content = {one.name: getattr(state, one.name) for one in fields(state)}
    text = write({"of": _identity(clock), "state": content}, store)
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        parts: Any = arrays | {"text": np.frombuffer(text.encode(), np.uint8)}
        np.savez(file, **parts)
    os.replace(beside, path)


def restore(path: Path, clock: Simulator) -> ReplayState:
    """Reads what `save` wrote.

    Args:
      path: the file.
      clock: made as the one that was saved.

    Returns:
      The state.

    Raises:
      ValueError: the file is of another rule, seed or number of workers, or names something that is no NamedTuple.

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
    content = read(arrays.pop("text").tobytes().decode(), arrays.__getitem__, clock.setup.gradient)
    if content["of"] != _identity(clock):
        raise ValueError(f"{path} is of {content['of']}, not of {_identity(clock)}")
    return ReplayState(**content["state"])


def _identity(clock: Simulator) -> dict[str, Any]:
    setup = clock.setup
    timing = isinstance(setup.params, Spec)
    return {"rule": setup.rule.name, "workers": setup.workers, "seed": setup.seed, "timing_only": timing}
