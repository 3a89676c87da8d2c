"""What happened in a replay, in columns."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ..._core.types import Number

CLASSES = ("fault", "message", "computed", "collective", "timer", "evaluation")


class Trace(NamedTuple):
    """Columns of a run; `trace.gradients.delay` or `len(trace.steps)`. Times are whole ticks.

    Attributes:
      events: `tick, what (an index into CLASSES), place, sender, word (an index into words), bytes`, in order; the
        server is -1.
      gradients: `tick, worker, read, version, accepted`: each gradient that reached where it was to be used.
      steps: `tick, version, oldest`: each update of the model, and the oldest version that a gradient in it was read
        at.
      words: the kinds of messages.
    """

    events: np.recarray
    gradients: np.recarray
    steps: np.recarray
    words: tuple[str, ...]


class Result(NamedTuple):
    """A run on the virtual clock.

    Attributes:
      trace: what happened.
      seconds: the virtual time that passed.
      times: when the model was evaluated.
      losses: what `Task.evaluate` gave then.
      params: the model at the end: the server's, or the mean of the workers'. Shapes after a run of timing only.
      computing: for each worker, the part of the time that it computed.
      down: the part that it was gone.
      sent: bytes that each worker sent, the server's last; those of collectives are counted as a ring or a gather has
        them.
      received: the same for what came.
      links: bytes for each `(source, destination)`.
      ticks_per_second: the unit of the trace.
    """

    trace: Trace
    seconds: float
    times: Float[np.ndarray, " evaluations"]
    losses: Float[np.ndarray, " evaluations"]
    params: Any
    computing: Float[np.ndarray, " workers"]
    down: Float[np.ndarray, " workers"]
    sent: Int[np.ndarray, " places"]
    received: Int[np.ndarray, " places"]
    links: dict[tuple[int, int], int]
    ticks_per_second: int


def columns(flat: Any, names: str, flags: str = "") -> np.recarray:
    """Rows that lie one after the other, as named columns; those of `flags` as truth values."""
    rows = np.frombuffer(flat, np.int64).reshape(-1, len(names.split())) if len(flat) else None
    columns = [np.zeros(0, np.int64) if rows is None else rows[:, k] for k in range(len(names.split()))]
    typed = [column.astype(bool) if name == flags else column for name, column in zip(names.split(), columns)]
    return np.rec.fromarrays(typed, names=",".join(names.split()))  # pyright: ignore[reportArgumentType]


def delays(trace: Trace, worker: int | None = None) -> Int[np.ndarray, " gradients"]:
    """The staleness of each gradient that was used: versions between reading and using.

    Args:
      trace: of a run.
      worker: of one worker alone.

    Returns:
      `version - read` of the accepted gradients.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> run = replay.run(rules.asgd(optax.sgd(0.1)), durations=durations.constant([1, 2, 4]), workers=3, seconds=4000)
      >>> [round(replay.delays(run.trace, worker=i).mean().item(), 2) for i in range(3)]
      [0.75, 2.5, 6.0]
    """
    rows = trace.gradients
    chosen = rows.accepted if worker is None else rows.accepted & (rows.worker == worker)
    return (rows.version - rows.read)[chosen]


def step_delays(trace: Trace) -> Int[np.ndarray, " steps"]:
    """For each step how old its oldest gradient was.

    Args:
      trace: of a run.

    Returns:
      Versions between reading and the step, 0 for a gradient at the model that is stepped.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> run = replay.run(rules.rennala(4, optax.sgd(0.1)), workers=4, seconds=10)
      >>> replay.step_delays(run.trace).max().item()
      0
    """
    return trace.steps.version - 1 - trace.steps.oldest


def peer_delays(trace: Trace, worker: int | None = None) -> Int[np.ndarray, " gradients"]:
    """For rules without a server: how many gradients all workers applied between reading and using each.

    There is no common version then: those in the trace are a worker's own count of steps, as `rules.ad_psgd` has them.

    Args:
      trace: of a run in which each accepted gradient is one of its worker's steps.
      worker: of one worker alone.

    Returns:
      A number for each accepted gradient, 0 where nobody else applied one meanwhile.

    Example:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, rules
      >>> run = replay.run(rules.ad_psgd(jd.topology.ring, optax.sgd(0.1)), workers=4, seconds=100)
      >>> replay.peer_delays(run.trace)[4:].tolist() == [3] * 396
      True
    """
    used = trace.gradients.accepted
    workers, read = trace.gradients.worker[used], trace.gradients.read[used]
    out = np.zeros(len(workers), np.int64)
    for one in np.unique(workers):
        places = np.flatnonzero(workers == one)
        own = read[places]
        out[places] = places - np.where(own > 0, places[own - 1] + 1, 0)
    return out if worker is None else out[workers == worker]


def time_to_target(result: Result, level: Number, *, persist: int = 1) -> float:
    """The first time from which `persist` evaluations in a row are at the level or below.

    Args:
      result: of a run with evaluations, on a fixed grid.
      level: the loss to reach.
      persist: how many evaluations must be as low, so that one lucky evaluation is not a success.

    Returns:
      Virtual seconds, or infinity.

    Raises:
      ValueError: `persist` is below 1.

    Example:
      >>> import numpy as np
      >>> from jaxdist.asynchronous import replay, rules
      >>> import optax
      >>> run = replay.run(rules.asgd(optax.sgd(0.1)), workers=1, seconds=1)
      >>> run = run._replace(times=np.arange(4.0), losses=np.array([2.0, 0.9, 1.1, 0.8]))
      >>> replay.time_to_target(run, 1.0), replay.time_to_target(run, 1.0, persist=2)
      (1.0, inf)
    """
    if persist < 1:
        raise ValueError(f"persist must be at least 1, got {persist}")
    low = np.concatenate([[0], np.cumsum(np.asarray(result.losses) <= level)])
    runs = np.flatnonzero(low[persist:] - low[:-persist] == persist) if len(low) > persist else []
    return float(result.times[runs[0]]) if len(runs) else float("inf")


def event_lines(trace: Trace, *, first: int = 0) -> Iterator[str]:
    """Each event as a line of JSON: `{"tick", "event", "place", "from", "kind", "bytes"}`.

    Args:
      trace: of a run.
      first: the event to begin with.

    Returns:
      Lines without their ends.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> run = replay.run(rules.asgd(optax.sgd(0.1)), workers=1, seconds=1)
      >>> next(replay.event_lines(run.trace))
      '{"tick": 1000000000, "event": "computed", "place": 0, "from": 0, "kind": "computed", "bytes": 0}'
    """
    for tick, what, place, sender, word, nbytes in trace.events[first:].tolist():
        line = {"tick": tick, "event": CLASSES[what], "place": place, "from": sender}
        yield json.dumps(line | {"kind": trace.words[word], "bytes": nbytes})


def write_events(trace: Trace, path: Path) -> None:
    """The lines of `event_lines` in a file."""
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in event_lines(trace))
