"""The results of a run: a log with one line of JSON per step, a summary, and checkpoints."""

import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from .. import checkpoint
from .._core.types import State
from ..runtime.json_log import drop_incomplete_line, json_line
from .training.train import Record, Run

KEPT = 2  # checkpoints of a run: one to continue from, and one in case that is damaged
LAST_SHARE = 10  # the final loss is the mean over the last tenth of the steps


class Evaluation(NamedTuple):
    """An evaluation during training."""

    step: int  # the number of steps before it
    total_wire_bytes: float  # bytes sent by one worker until then
    held_out: dict[str, float]  # the metrics


class RunResult(NamedTuple):
    """A finished run."""

    name: str
    records: tuple[Record, ...]  # one for each step
    held_out: dict[str, float]  # the metrics of the last evaluation, `"loss"` first
    wire_bytes: float  # bytes sent by one worker in a step, on average
    compile_seconds: float  # time to trace and compile
    evaluations: tuple[Evaluation, ...] = ()  # the evaluations before the end


class Summary(NamedTuple):
    """A `RunResult` in numbers, compared with the baseline; comparisons are None without one."""

    name: str
    steps: int
    wire_bytes_per_step: float  # bytes sent by one worker
    times_fewer_bytes: float | None  # the baseline's bytes divided by these
    train_loss: float  # mean over the last tenth of the steps
    held_out_loss: float  # loss on data that were never trained on
    difference: float | None  # `held_out_loss` minus the baseline's: above zero is worse
    step_milliseconds: float  # median wall-clock time
    units_per_second: float
    compile_seconds: float  # time to trace and compile
    held_out: dict[str, float]  # all metrics of the evaluation


def summarize(result: RunResult, baseline: RunResult | None = None) -> Summary:
    """Summarizes a run; the baseline is a run of plain all-reduce with the same seed and steps."""
    losses = np.array([record.loss for record in result.records])
    seconds = float(np.median([record.seconds for record in result.records]))
    # Single steps are noisy: the final loss is a mean, the speed a median.
    last = max(1, len(losses) // LAST_SHARE)
    return Summary(
        name=result.name,
        steps=len(losses),
        wire_bytes_per_step=result.wire_bytes,
        times_fewer_bytes=None if baseline is None else times_fewer(result.wire_bytes, baseline.wire_bytes),
        train_loss=float(losses[-last:].mean()),
        held_out_loss=result.held_out["loss"],
        difference=None if baseline is None else result.held_out["loss"] - baseline.held_out["loss"],
        step_milliseconds=1e3 * seconds,
        units_per_second=float(np.median([record.units_per_second for record in result.records])),
        compile_seconds=result.compile_seconds,
        held_out=result.held_out,
    )


def times_fewer(sent: float, baseline: float) -> float:
    """How many times fewer bytes than the baseline's; infinitely many if only the baseline sends any.

    Examples:
      >>> times_fewer(50.0, 100.0), times_fewer(0.0, 100.0), times_fewer(0.0, 0.0)
      (2.0, inf, 1.0)
    """
    if not sent:
        return math.inf if baseline else 1.0
    return baseline / sent


def header(run: Run, **settings: Any) -> dict[str, Any]:
    """The first line of a run's log: its settings and the machine."""
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


def open_log(path: Path, *, append: bool = False) -> TextIO:
    """Opens a log, whose lines are in the file as soon as they are written: a run that is killed leaves them."""
    if append:
        drop_incomplete_line(path)
    return path.open("a" if append else "w", buffering=1)


def write_line(log: TextIO, line: dict[str, Any]) -> None:
    """Writes a record as one line of JSON."""
    log.write(json_line(line))


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log in JSON lines, the first one first."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """The mean over a window centered at each value, so that nothing is delayed.

    At the start the window shrinks on both sides (the first loss is kept as it is); at the end it loses its right side.
    """
    # A difference of two prefix sums is the sum over a window.
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, np.float64)]))
    places = np.arange(len(sums) - 1)
    left = np.minimum(window // 2, places)
    right = np.minimum(left, places[::-1])
    # A run that overflowed has NaN from there on.
    with np.errstate(invalid="ignore"):
        return (sums[places + right + 1] - sums[places - left]) / (left + right + 1)


def save(place: str | Path, state: State, step: int = 0) -> str | Path:
    """Writes the state after this many steps into a folder or a bucket, and returns that."""
    checkpoint.save(place, state, step=step, keep=KEPT)
    return place


@contextmanager
def background_saver(place: str | Path) -> Iterator[Callable[[State, int], None]]:
    """Saves during training: yields `save(state, steps)`, with the number of steps that led to the state."""
    with checkpoint.writing(place, keep=KEPT) as writer:
        yield lambda state, steps: writer.save(state, steps, data={"steps": steps})


def restore(place: str | Path, like: State) -> State:
    """Reads a state that `save` wrote, equal in every bit; `like` has its tree, dtypes and shardings."""
    return checkpoint.restore(place, like)


def resume_run(place: str | Path, run: Run) -> Run:
    """Continues a run from its checkpoint, on any number of workers; returns it unchanged if there is none."""
    found = checkpoint.resume(place, run.state)
    return run._replace(state=found.state, first=found.data["steps"] if found.data else run.first)
