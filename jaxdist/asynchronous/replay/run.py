"""A rule on the virtual clock, in one call or in pieces."""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import numpy as np

from ..._core.types import Number
from ..durations.base import Durations
from ..durations.laws import constant
from ..links import Links, instant
from ..protocol import Rule
from ..values import force, spec_of
from .engine import Engine, Setup, begun
from .state import ReplayState, copied
from .task import Task, gradients
from .trace import Result, Trace, columns

FOREVER = 2**62


class Simulator(NamedTuple):
    """A replay in pieces, as pure functions.

    Attributes:
      init: `init() -> state`, before the first event.
      advance: `advance(state, seconds=None, steps=None, gradients=None, target=None) -> state`: until a virtual time
        (counted from the beginning, what happens then included), so many steps of the model, so many gradients that
        arrived, or an evaluation at the target or below, whichever is first.
      result: `result(state) -> Result`, at any time.
      setup: what never changes.
    """

    init: Callable[[], ReplayState]
    advance: Callable[..., ReplayState]
    result: Callable[[ReplayState], Result]
    setup: Setup


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
    ticks_per_second: int = 10**9,
    events_per_tick: int | None = None,
    record_events: bool = True,
) -> Simulator:
    """A rule, a task and a cluster, ready to run on a virtual clock.

    Time is whole ticks, and events have a total order (tick, class, place, number), so that equal arguments give equal
    traces, byte for byte. Durations and data follow from `(seed, worker, the worker's own count of jobs)`: worker i
    sees the same under every rule. Gradients are real, and computed only when a rule uses them.

    Args:
      rule: from `asynchronous.rules`, or your own.
      task: model and data; None counts messages and time alone, for a model of one number.
      workers: how many.
      durations: of gradients; default a second each.
      links: of messages; default no time.
      seed: of durations, data and choices.
      evaluate_every: virtual seconds between evaluations, from 0 on; None for none. Evaluations change nothing else.
      timing_only: no arrays, only their shapes: the same events, bytes and steps, at about 10^5 events a second.
      ticks_per_second: time is whole numbers of them.
      events_per_tick: more at one tick is an error; default 1000 for each place.
      record_events: keep the list of all events.

    Returns:
      The `Simulator`.

    Raises:
      ValueError: an argument cannot work.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> clock = replay.simulator(rules.asgd(optax.sgd(0.1)), workers=2)
      >>> state = clock.advance(clock.init(), seconds=3)
      >>> state = clock.advance(state, seconds=5)
      >>> len(clock.result(state).trace.steps)
      10

    References:
      Fujimoto, "Parallel and distributed simulation systems", 2000 (discrete events).
    """
    durations, links = durations or constant(1.0), links or instant()
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    for what, wants in (("durations", durations.workers), ("links", links.workers)):
        if wants is not None and wants != workers:
            raise ValueError(f"{what} are for {wants} workers, got workers={workers}: make them for as many")
    if ticks_per_second < 1:
        raise ValueError(f"ticks_per_second must be at least 1, got {ticks_per_second}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if evaluate_every is not None and (task is None or task.evaluate is None):
        raise ValueError(f"evaluate_every={evaluate_every} needs a task with evaluate=")
    if evaluate_every is not None and not round(evaluate_every * ticks_per_second) >= 1:
        raise ValueError(f"evaluate_every must be at least a tick, 1/{ticks_per_second} s, got {evaluate_every}")
    if task is None:
        task, timing_only = Task(np.zeros((), np.float32), lambda params, batch: params, lambda *job: None), True
    seen = evaluate_every is not None and not timing_only
    setup = Setup(
        rule=rule,
        workers=workers,
        params=spec_of(task.params) if timing_only else task.params,
        gradient=gradients(task, seed),
        evaluate=task.evaluate if seen else None,
        durations=durations,
        links=links,
        seed=seed,
        ticks_per_second=ticks_per_second,
        evaluate_ticks=round((evaluate_every or 0) * ticks_per_second),
        events_per_tick=events_per_tick or 1000 * (workers + 1),
        record_events=record_events,
    )

    def advance(
        state: ReplayState,
        *,
        seconds: Number | None = None,
        steps: int | None = None,
        gradients: int | None = None,
        target: Number | None = None,
    ) -> ReplayState:
        if seconds is None and steps is None and gradients is None and target is None:
            raise ValueError("say how far: seconds=, steps=, gradients= or target=")
        if target is not None and not seen:
            raise ValueError(f"target={target} needs evaluate_every= and a run with numerics")

        @no_type_check
        def enough(state: ReplayState) -> bool:
            return (
                (steps is not None and len(state.steps) >= 3 * steps)
                or (gradients is not None and len(state.gradients) >= 5 * gradients)
                or (target is not None and len(state.losses) > 0 and state.losses[-1] <= target)
            )

        engine = Engine(setup, copied(state))
        counted = steps is not None or gradients is not None or target is not None
        until = FOREVER if seconds is None else round(seconds * ticks_per_second)
        engine.advance(until, enough if counted else None)
        return engine.state

    return Simulator(lambda: begun(setup), advance, lambda state: _result(setup, state), setup)


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
    """Runs a rule on the virtual clock, once.

    Args:
      rule: from `asynchronous.rules`, or your own.
      task: model and data; None counts messages and time alone.
      seconds: how long, in virtual time.
      steps: how many updates of the model.
      gradients: how many gradients that arrive.
      target: until an evaluation is as low.
      **settings: those of `simulator`; `workers` is needed.

    Returns:
      The `Result`.

    Raises:
      ValueError: an argument cannot work, or nothing says how far.
      Deadlock: somebody waits for ever.
      NonFiniteGradient: a gradient that the rule uses has a NaN or an infinity.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> target = jnp.array([0.0, 1.0, 5.0])
      >>> task = replay.Task(jnp.zeros(()), lambda x, b: 0.5 * (x - b) ** 2, lambda seed, worker, job: target[worker])
      >>> settings = {"durations": durations.constant([1, 2, 4]), "workers": 3, "seconds": 3000}
      >>> float(replay.run(rules.ringleader(optax.sgd(0.01)), task, **settings).params.round(2))
      2.0

    References:
      Fujimoto, "Parallel and distributed simulation systems", 2000 (discrete events).
    """
    clock = simulator(rule, task, **settings)
    state = clock.advance(clock.init(), seconds=seconds, steps=steps, gradients=gradients, target=target)
    return clock.result(state)


def _result(setup: Setup, state: ReplayState) -> Result:
    now = max(state.tick, 1)
    ticks = [running[1] if running is not None else state.tick for running in state.running]
    computed = np.array(state.computed) + state.tick - np.array(ticks)
    down = np.array(state.down) + [state.tick - since if since >= 0 else 0 for since in state.gone]
    trace = Trace(
        columns(state.events, "tick what place sender word bytes"),
        columns(state.gradients, "tick worker read version accepted", "accepted"),
        columns(state.steps, "tick version oldest"),
        tuple(state.words),
    )
    return Result(
        trace,
        state.tick / setup.ticks_per_second,
        np.array(state.times) / setup.ticks_per_second,
        np.array(state.losses),
        force(Engine(setup, state).model()),
        computed / now,
        down / now,
        np.array(state.sent),
        np.array(state.received),
        dict(state.links),
        setup.ticks_per_second,
    )
