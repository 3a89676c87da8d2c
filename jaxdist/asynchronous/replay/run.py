"""Runs a rule on the virtual clock, in one call or in pieces, and saves its state between pieces as a file."""

import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, no_type_check

import jax
import numpy as np

from ..._core.checks import check_range
from ..._core.types import Number
from ..durations import Durations, constant
from ..links import Links, instant
from ..portable import flat, read, write
from ..protocol import Rule
from ..values import Spec, force, spec_of
from .base import TICKS, Result, Task, gradient_function, trace_of
from .engine import Engine, ReplayConfig, ReplayState, begin_replay, copy_state, count_live

_FOREVER = 2**62
# Integers per row of these columns of a state.
_STEP_COLUMNS, _GRADIENT_COLUMNS = 3, 5


class Simulator(NamedTuple):
    """A replay in pieces, as pure functions.

    Attributes:
      init: `init() -> state`, before the first event.
      advance: `advance(state, seconds=None, steps=None, gradients=None, target=None) -> state`: until a virtual time
        (from the beginning, events at that time included), a number of steps of the model, a number of gradients that
        arrived, or an evaluation at the target or below, whichever is first.
      result: `result(state) -> Result`, at any time.
      config: the constants of the run.
    """

    init: Callable[[], ReplayState]
    advance: Callable[..., ReplayState]
    result: Callable[[ReplayState], Result]
    config: ReplayConfig


def simulator(
    rule: Rule,
    task: Task | None = None,
    *,
    workers: int,
    durations: Durations | None = None,
    links: Links | None = None,
    seed: int = 0,
    evaluate_every: Number | None = None,
    timing_only: bool = False,
    events_per_tick: int | None = None,
    record_events: bool = True,
) -> Simulator:
    """Combines a rule, a task and a cluster into a simulator on a virtual clock (discrete events).

    Time is measured in integer ticks of a nanosecond, and events have a total order (tick, class, place, number), so
    that equal arguments give equal traces, byte for byte. Durations and data are functions of `(seed, worker, job)`,
    with the worker's own job count, and are thus the same under every rule. Gradients are real, and computed only when
    a rule uses them.

    Args:
      rule: from `asynchronous.rules`, or your own.
      task: model and data; None simulates messages and time only, for a model of one number.
      workers: the number of workers.
      durations: of gradients; default: one second each.
      links: of messages; default: they take no time.
      seed: the seed of durations, data and random choices.
      evaluate_every: virtual seconds between evaluations, starting at 0; None for none. Evaluations do not affect the
        run.
      timing_only: simulate shapes instead of arrays: the same events, bytes and steps, at about 10^5 events per second.
      events_per_tick: the largest number of events at one tick; default: 1000 per worker and server.
      record_events: record the list of all events.

    Raises:
      ValueError: an argument is out of its range, or a leaf of the model has no gradient.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> clock = replay.simulator(rules.asgd(optax.sgd(0.1)), workers=2)
      >>> state = clock.advance(clock.init(), seconds=3)
      >>> state = clock.advance(state, seconds=5)
      >>> len(clock.result(state).trace.steps)
      10

    References:
      Fujimoto, "Parallel and distributed simulation systems", 2000.
    """
    # Default cluster: one second per gradient, messages that take no time.
    durations, links = durations or constant(1.0), links or instant()
    check_range("workers", workers, 1, ends="[]")
    for name, size in (("durations", durations.workers), ("links", links.workers)):
        if size is not None and size != workers:
            raise ValueError(f"{name} are for {size} workers, got workers={workers}: the numbers must be equal")
    if workers < durations.least:
        raise ValueError(f"durations {durations.name} name worker {durations.least - 1}, got workers={workers}")
    check_range("seed", seed, 0, ends="[]")
    if evaluate_every is not None and (task is None or task.evaluate is None):
        raise ValueError(f"evaluate_every={evaluate_every} needs a task with evaluate=")
    if evaluate_every is not None and not round(evaluate_every * TICKS) >= 1:
        raise ValueError(f"evaluate_every must be at least a tick, 1/{TICKS} s, got {evaluate_every}")
    if task is not None:
        task = task._replace(params=jax.tree.map(_as_jax_stores, task.params))
    else:
        task, timing_only = Task(np.zeros((), np.float32), lambda params, batch: params, lambda *job: None), True
    evaluates = evaluate_every is not None and not timing_only
    config = ReplayConfig(
        rule=rule,
        workers=workers,
        params=spec_of(task.params) if timing_only else task.params,
        gradient=gradient_function(task, seed),
        evaluate=task.evaluate if evaluates else None,
        durations=durations,
        links=links,
        seed=seed,
        evaluate_ticks=round((evaluate_every or 0) * TICKS),
        events_per_tick=events_per_tick or 1000 * (workers + 1),
        record_events=record_events,
    )
    return Simulator(partial(begin_replay, config), partial(_advance, config), partial(_result, config), config)


def _as_jax_stores(leaf: Any) -> Any:
    """Gives a leaf of a model the dtype of all models that follow: without x64, NumPy's float64 becomes float32."""
    if not isinstance(leaf, np.ndarray | np.generic | float | int):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.result_type(leaf)))


def _advance(
    config: ReplayConfig,
    state: ReplayState,
    *,
    seconds: Number | None = None,
    steps: int | None = None,
    gradients: int | None = None,
    target: Number | None = None,
) -> ReplayState:
    if seconds is None and steps is None and gradients is None and target is None:
        raise ValueError("no stopping criterion: pass seconds=, steps=, gradients= or target=")
    if target is not None and config.evaluate is None:
        raise ValueError(f"target={target} needs evaluate_every= and a run with numerics")
    if target is not None:
        check_range("target", target, -math.inf)
    if seconds is not None:
        check_range("seconds", seconds, 0, ends="[]")

    @no_type_check
    def is_complete(state: ReplayState) -> bool:
        return (
            (steps is not None and len(state.steps) >= _STEP_COLUMNS * steps)
            or (gradients is not None and len(state.gradients) >= _GRADIENT_COLUMNS * gradients)
            or (target is not None and len(state.losses) > 0 and state.losses[-1] <= target)
        )

    # The caller may continue from the old state again.
    engine = Engine(config, copy_state(state))
    counts = steps is not None or gradients is not None or target is not None
    until = _FOREVER if seconds is None or seconds == math.inf else round(seconds * TICKS)
    engine.advance(until, is_complete if counts else None)
    return engine.state


def run(
    rule: Rule,
    task: Task | None = None,
    *,
    seconds: Number | None = None,
    steps: int | None = None,
    gradients: int | None = None,
    target: Number | None = None,
    **settings: Any,
) -> Result:
    """Runs a rule on the virtual clock, once, until the first of the criteria of `Simulator.advance` is met.

    The other arguments are those of `simulator`; `workers` is required.

    Raises:
      DeadlockError: a worker waits forever.
      NonFiniteGradientError: a gradient that the rule uses contains a NaN or an infinity.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> target = jnp.array([0.0, 1.0, 5.0])
      >>> task = replay.Task(jnp.zeros(()), lambda x, b: 0.5 * (x - b) ** 2, lambda seed, worker, job: target[worker])
      >>> settings = {"durations": durations.constant([1, 2, 4]), "workers": 3, "seconds": 600}
      >>> float(replay.run(rules.ringleader(optax.sgd(0.05)), task, **settings).params.round(2))
      2.0
    """
    clock = simulator(rule, task, **settings)
    state = clock.advance(clock.init(), seconds=seconds, steps=steps, gradients=gradients, target=target)
    return clock.result(state)


def _result(config: ReplayConfig, state: ReplayState) -> Result:
    now = max(state.tick, 1)
    # Gradients and outages that are still running count up to now.
    starts = [running[1] if running is not None else state.tick for running in state.running]
    computed = np.array(state.computed) + state.tick - np.array(starts)
    down = np.array(state.down) + [state.tick - since if since >= 0 else 0 for since in state.gone]
    return Result(
        trace=trace_of(state.events, state.gradients, state.steps, state.words),
        seconds=state.tick / TICKS,
        times=np.array(state.times) / TICKS,
        losses=np.array(state.losses),
        params=force(Engine(config, state).final_model()),
        computing=computed / now,
        down=down / now,
        sent=np.array(state.sent),
        received=np.array(state.received),
        links=dict(state.links),
        ticks_per_second=TICKS,
    )


def save(path: str | Path, clock: Simulator, state: ReplayState) -> None:
    """Writes a state, from which a restored run continues exactly as the original would.

    One `.npz` file of numbers and names of NamedTuples: arrays that many workers share are written once, and gradients
    that are not computed yet as their model and job. The file is written under a temporary name, then renamed.

    Raises:
      ValueError: the model or a state has nodes other than dicts, lists, tuples and NamedTuples.

    Examples:
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
    path = Path(path)
    # Renamed when complete, so that a run that is killed here leaves the last file intact.
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        parts: Any = arrays | {"text": np.frombuffer(text.encode(), np.uint8)}
        np.savez(file, **parts)
    os.replace(temporary, path)


def restore(path: str | Path, clock: Simulator) -> ReplayState:
    """Reads a state that `save` wrote, for a simulator made with the same arguments as the saved one.

    Raises:
      ValueError: the file is of another rule, seed or number of workers, or names a class that is not a NamedTuple, or
        is damaged.
      FileNotFoundError: there is no such file.
    """
    try:
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file)
        text = arrays.pop("text").tobytes().decode()
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no file of `replay.save`: {error}") from error
    content = read(text, arrays.__getitem__, clock.config.gradient)
    if content["of"] != _identity(clock):
        raise ValueError(
            f"{path} is a replay of {content['of']}, not of {_identity(clock)}: use the arguments of the first run"
        )
    state = ReplayState(**content["state"])
    # Older files count the faults too.
    state.live = count_live(state.heap)
    return state


def _identity(clock: Simulator) -> dict[str, Any]:
    config = clock.config
    timing = isinstance(config.params, Spec)
    return {"rule": config.rule.name, "workers": config.workers, "seed": config.seed, "timing_only": timing}
