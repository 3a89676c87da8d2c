"""What a run leaves behind: one line of JSON a step, and a summary."""

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from .. import checkpoint
from .._core.types import State
from ..runtime.json_log import json_line
from .training.train import Record, Run

LAST_SHARE = 10  # the final loss is the mean over the last tenth of the steps


class Evaluation(NamedTuple):
    """What the model could do on the way.

    Attributes:
      step: after how many.
      total_wire_bytes: sent by one worker until then.
      held_out: what the evaluation reported.
    """

    step: int
    total_wire_bytes: float
    held_out: dict[str, float]


class Result(NamedTuple):
    """A finished run.

    Attributes:
      name: the reducer as it was spelled.
      records: one for each step.
      held_out: what the evaluation reported, `"loss"` first.
      wire_bytes: sent by one worker in one step, on average.
      compile_seconds: what tracing and compiling took.
      evaluations: those before the end, if any were asked for.
    """

    name: str
    records: tuple[Record, ...]
    held_out: dict[str, float]
    wire_bytes: float
    compile_seconds: float
    evaluations: tuple[Evaluation, ...] = ()


class Summary(NamedTuple):
    """A `Result` in numbers, beside the baseline (None where none was run).

    Attributes:
      name: the reducer as it was spelled.
      steps: how many.
      wire_bytes_per_step: sent by one worker.
      times_fewer_bytes: the baseline's bytes over these.
      train_loss: mean over the last tenth of the steps.
      held_out_loss: on text or images never trained on.
      difference: `held_out_loss` less the baseline's: above zero is worse.
      step_milliseconds: median wall clock.
      units_per_second: median.
      compile_seconds: what tracing and compiling took.
      held_out: everything that the evaluation reported.
    """

    name: str
    steps: int
    wire_bytes_per_step: float
    times_fewer_bytes: float | None
    train_loss: float
    held_out_loss: float
    difference: float | None
    step_milliseconds: float
    units_per_second: float
    compile_seconds: float
    held_out: dict[str, float]


def summarize(result: Result, baseline: Result | None = None) -> Summary:
    """Puts a run into numbers.

    Args:
      result: a run of one step or more.
      baseline: the run to compare with: same seed, same steps, plain all-reduce.

    Returns:
      A `Summary`.
    """
    losses = np.array([record.loss for record in result.records])
    seconds = float(np.median([record.seconds for record in result.records]))
    last = max(1, len(losses) // LAST_SHARE)
    ratio = None
    if baseline is not None:
        ratio = baseline.wire_bytes / result.wire_bytes if result.wire_bytes else 1.0  # a single worker sends nothing
    return Summary(
        name=result.name,
        steps=len(losses),
        wire_bytes_per_step=result.wire_bytes,
        times_fewer_bytes=ratio,
        train_loss=float(losses[-last:].mean()),
        held_out_loss=result.held_out["loss"],
        difference=None if baseline is None else result.held_out["loss"] - baseline.held_out["loss"],
        step_milliseconds=1e3 * seconds,
        units_per_second=float(np.median([record.units_per_second for record in result.records])),
        compile_seconds=result.compile_seconds,
        held_out=result.held_out,
    )


def header(run: Run, **settings: Any) -> dict[str, Any]:
    """The first line of a run's log: what was asked for, and on what it ran."""
    return {
        "kind": "run",
        **settings,
        "workers": run.workers,
        "wire_bytes_per_step": run.wire_bytes,
        "compile_seconds": run.compile_seconds,
        "parameters": run.parameters,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def write_line(log: TextIO, line: dict[str, Any]) -> None:
    """Appends one JSON object."""
    log.write(json_line(line))


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log, as dictionaries."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """The mean over a window around each value, so that nothing is delayed.

    At the start the window shrinks on both sides (the first loss stays what it is); at the end it loses its right side.
    """
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, np.float64)]))
    places = np.arange(len(sums) - 1)
    left = np.minimum(window // 2, places)
    right = np.minimum(left, places[::-1])
    with np.errstate(invalid="ignore"):  # a run that overflowed: not a number from there on
        return (sums[places + right + 1] - sums[places - left]) / (left + right + 1)


def save(directory: str | Path, state: State) -> Path:
    """Writes a state; an older one in the same place is replaced.

    Args:
      directory: a folder to make.
      state: any pytree of arrays and typed keys, marks included.

    Returns:
      The absolute path of the folder.
    """
    return checkpoint.save(directory, state, step=0).parent


@contextmanager
def saving(directory: str | Path) -> Iterator[Callable[[State, int], None]]:
    """As `save`, beside the training, with the number of steps that the state has behind it: `save(state, steps)`."""
    with checkpoint.writing(directory) as writer:
        yield lambda state, steps: writer.save(state, 0, data={"steps": steps})


def restore(directory: str | Path, like: State) -> State:
    """Reads a state that `save` wrote.

    Args:
      directory: the folder.
      like: a state with the same tree and dtypes, as arrays or as `ShapeDtypeStruct`s; its shardings say where the
        leaves go.

    Returns:
      The state, equal in every bit.
    """
    return checkpoint.restore(directory, like)


def gone_on(directory: str | Path, run: Run) -> Run:
    """The run from where it was saved, on as many workers as it has now; from its beginning where nothing was."""
    found = checkpoint.resume(directory, run.state)
    return run._replace(state=found.state, first=found.data["steps"] if found.data else run.first)
