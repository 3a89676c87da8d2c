"""What a run is given and what it returns: a task, and a result with columns of events, gradients and steps."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..._core.checks import check_range
from ..._core.types import Array, Number, PyTree
from ...state.marks import name_leaf
from ..errors import NonFiniteGradientError
from ..values import Lazy, Spec, force, spec_of

# The classes of events, in the order in which events of the same tick happen, and their names in a trace.
FAULT, MESSAGE, DONE, COLLECTIVE, TIMER, EVALUATION = range(6)
CLASSES = ("fault", "message", "computed", "collective", "timer", "evaluation")
# Ticks per second of the clocks.
TICKS = 10**9


class Task(NamedTuple):
    """A model and its data, as pure functions.

    Attributes:
      params: the initial model.
      loss: `loss(params, batch) -> scalar`, whose gradients the workers compute.
      batch: `batch(seed, worker, job) -> Batch`: the data depend on the worker and its own job count, so that they are
        the same under every rule. Called only for gradients that are used.
      evaluate: `evaluate(params) -> float`, plotted over virtual time; None for no evaluations.
    """

    params: PyTree
    loss: Callable[[PyTree, Any], Any]
    batch: Callable[[int, int, int], Any]
    evaluate: Callable[[PyTree], Any] | None = None


@functools.lru_cache(maxsize=32)
def _check_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    def compute(params: PyTree, batch: Any) -> tuple[PyTree, Array]:
        gradient = jax.grad(loss)(params, batch)
        return gradient, _all_finite(gradient)

    return jax.jit(compute)


def _all_finite(tree: PyTree) -> Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)], bool).all()


def gradient_function(task: Task, seed: int) -> Callable[[Any, int, int], Any]:
    """Makes `gradient(params, worker, job)`: lazy, or shapes if `params` are; raises if the result is not finite."""
    gradient, shapes = _check_gradient(task.loss), spec_of(task.params)
    _check_differentiable(shapes.tree)

    @no_type_check
    def compute(params: Any, worker: int, job: int) -> Any:
        params = force(params)
        result, finite = gradient(params, task.batch(seed, worker, job))
        # The model tells a bad batch from a run that diverged before.
        if not finite:
            raise NonFiniteGradientError(worker, job, diverged=not _all_finite(params))
        return result

    @no_type_check
    def defer(params: Any, worker: int, job: int) -> Any:
        if type(params) is Spec:
            return params
        # The recipe is stored in files instead of the gradient.
        recipe = (params, worker, job)
        return Lazy(lambda: compute(*recipe), shapes, recipe)

    return defer


def _check_differentiable(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"{name_leaf('the model', path)} has dtype {leaf.dtype} and so no gradient: keep counters, tables and "
                "random keys out of Task.params, in the loss or in what Task.batch returns"
            )


class Trace(NamedTuple):
    """Columns of a run, such as `trace.gradients.read`; `len(trace.steps)` counts rows. Times are integer ticks.

    Attributes:
      events: `tick, what (an index into CLASSES), place, sender, word (an index into words), bytes`, in order; a place
        is a worker, or -1 for the server.
      gradients: `tick, worker, read, version, accepted`: each gradient that arrived, applied or discarded.
      steps: `tick, version, oldest`: each update of the model, and the oldest version at which a gradient in it was
        computed.
      words: the message kinds.
    """

    events: np.recarray
    gradients: np.recarray
    steps: np.recarray
    words: tuple[str, ...]


class Result(NamedTuple):
    """The result of a run, on the virtual clock or on real processes.

    Attributes:
      trace: events, gradients and steps.
      seconds: the time that passed.
      times: the times of evaluations.
      losses: the results of `Task.evaluate`.
      params: the final model: the server's, or the mean of the workers'. Shapes after a run with `timing_only`.
      computing: for each worker, the fraction of time that it computed.
      down: for each worker, the fraction of time that it was down.
      sent: bytes that each worker sent, and last the server; collectives are counted as a ring or a gather.
      received: bytes that each received, likewise.
      links: bytes for each `(source, destination)`.
      ticks_per_second: the unit of time of the trace.
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


def trace_of(events: Any, gradients: Any, steps: Any, words: Iterable[str]) -> Trace:
    """Makes a trace from arrays of integers, the rows of each table one after the other."""
    return Trace(
        _columns(events, "tick what place sender word bytes"),
        _columns(gradients, "tick worker read version accepted", "accepted"),
        _columns(steps, "tick version oldest"),
        tuple(words),
    )


def _columns(flat: Any, names: str, flag: str = "") -> np.recarray:
    """Turns consecutive rows into named columns; the column `flag` becomes boolean."""
    words = names.split()
    # `frombuffer` refuses empty buffers.
    rows = np.frombuffer(flat, np.int64).reshape(-1, len(words)) if len(flat) else np.zeros((0, len(words)), np.int64)
    typed = [column.astype(bool) if name == flag else column for name, column in zip(words, rows.T)]
    return np.rec.fromarrays(typed, names=",".join(words))  # pyright: ignore[reportArgumentType]


def delays(trace: Trace, worker: int | None = None) -> Int[np.ndarray, " gradients"]:
    """Returns the staleness of each gradient that was used: versions between reading and using.

    `version - read` of the accepted gradients, of all workers or of one.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> run = replay.run(rules.asgd(optax.sgd(0.1)), durations=durations.constant([1, 2, 4]), workers=3, seconds=4000)
      >>> [round(replay.delays(run.trace, worker=i).mean().item(), 2) for i in range(3)]
      [0.75, 2.5, 6.0]
    """
    rows = trace.gradients
    selected = rows.accepted if worker is None else rows.accepted & (rows.worker == worker)
    # Discarded gradients have no staleness at use.
    return (rows.version - rows.read)[selected]


def step_delays(trace: Trace) -> Int[np.ndarray, " steps"]:
    """Returns the staleness of the oldest gradient of each step: 0 for a gradient at the model that is stepped.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> run = replay.run(rules.rennala(4, optax.sgd(0.1)), workers=4, seconds=10)
      >>> replay.step_delays(run.trace).max().item()
      0
    """
    return trace.steps.version - 1 - trace.steps.oldest


def peer_delays(trace: Trace, worker: int | None = None) -> Int[np.ndarray, " gradients"]:
    """Counts the gradients that all workers applied between reading and using each one, for rules without a server.

    These rules have no common version: versions in the trace are those of a worker, as in `rules.ad_psgd`, and each
    accepted gradient is a step of its worker. The number of a gradient is 0 if no other worker applied one meanwhile.

    Raises:
      ValueError: a version of a worker has several gradients, as with local steps and any-batch rounds.

    Examples:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, rules
      >>> run = replay.run(rules.ad_psgd(jd.topology.ring, optax.sgd(0.1)), workers=4, seconds=100)
      >>> replay.peer_delays(run.trace)[4:].tolist() == [3] * 396
      True
    """
    rows = trace.gradients
    used = rows.accepted
    workers, read, version = rows.worker[used], rows.read[used], rows.version[used]
    counts = np.zeros(len(workers), np.int64)
    for index in np.unique(workers):
        own = np.flatnonzero(workers == index)
        # A step leads from `version` to the next one; with skipped iterations versions jump.
        reached = version[own] + 1
        if (np.diff(reached) <= 0).any():
            raise ValueError(f"worker {index} has several gradients of a version, of which this rule makes one step")
        last = np.searchsorted(reached, read[own], side="right")
        counts[own] = own - np.where(last > 0, own[last - 1] + 1, 0)
    return counts if worker is None else counts[workers == worker]


def time_to_target(result: Result, level: Number, *, persist: int = 1) -> float:
    """Returns the first time from which `persist` consecutive evaluations are at the level or below.

    Args:
      result: the result of a run with evaluations.
      level: the loss to reach.
      persist: the number of consecutive evaluations at the level, so that a single lucky one does not count.

    Returns:
      Virtual seconds, or infinity.

    Examples:
      >>> import numpy as np
      >>> from jaxdist.asynchronous import replay, rules
      >>> import optax
      >>> run = replay.run(rules.asgd(optax.sgd(0.1)), workers=1, seconds=1)
      >>> run = run._replace(times=np.arange(4.0), losses=np.array([2.0, 0.9, 1.1, 0.8]))
      >>> replay.time_to_target(run, 1.0), replay.time_to_target(run, 1.0, persist=2)
      (1.0, inf)
    """
    check_range("persist", persist, 1, ends="[]")
    # Differences of a running count of evaluations at the level find windows in which all are.
    low = np.concatenate([[0], np.cumsum(np.asarray(result.losses) <= level)])
    runs = np.flatnonzero(low[persist:] - low[:-persist] == persist) if len(low) > persist else []
    return float(result.times[runs[0]]) if len(runs) else float("inf")


def event_lines(trace: Trace) -> Iterator[str]:
    """Yields each event as a line of JSON: `{"tick", "event", "place", "from", "kind", "bytes"}`.

    Lines have no line ends.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> run = replay.run(rules.asgd(optax.sgd(0.1)), workers=1, seconds=1)
      >>> next(replay.event_lines(run.trace))
      '{"tick": 1000000000, "event": "computed", "place": 0, "from": 0, "kind": "computed", "bytes": 0}'
    """
    for tick, what, place, sender, word, nbytes in trace.events.tolist():
        line = {"tick": tick, "event": CLASSES[what], "place": place, "from": sender}
        yield json.dumps(line | {"kind": trace.words[word], "bytes": nbytes})


def write_events(trace: Trace, path: Path) -> None:
    """Writes the lines of `event_lines` to a file."""
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in event_lines(trace))
