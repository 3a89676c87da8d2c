"""Runs a rule on real processes: the driver."""

import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from ..._core.types import Number
from ..errors import ActorLost, Stalled
from ..portable import read
from ..protocol import RECOVERED, SERVER, Rule
from ..replay.task import Task
from ..replay.trace import Result, Trace, columns
from ..values import mean_of
from .actor import RunConfig
from .cluster import START_FACTOR, WorkerPool, connect
from .role_runner import Records
from .state_store import Fault, PlaceStatus, Report

# Seconds between two polls of the run, and without a sign of life after which a process counts as silent.
POLL_SECONDS, SILENT_SECONDS = 0.1, 2.0
# Ticks of the trace per second, and the event class of faults in `replay.trace.CLASSES`.
TICKS = 10**9
ON_FAULT = 0


class Status(NamedTuple):
    """The progress of a run.

    Attributes:
      seconds: since all processes began.
      steps: updates of the model.
      gradients: gradients that arrived, applied or discarded.
      loss: of the last evaluation, or None.
      processes: the initial process id of each worker and, at -1, of the server.
      starts: the number of starts of each: 1, plus one per restart.
    """

    seconds: float
    steps: int
    gradients: int
    loss: float | None
    processes: Mapping[int, int]
    starts: Mapping[int, int]


def run(
    rule: Rule,
    task: Task,
    *,
    workers: int,
    seconds: Number | None = None,
    steps: int | None = None,
    gradients: int | None = None,
    target: Number | None = None,
    seed: int = 0,
    evaluate_every: Number | None = None,
    slow: Mapping[int, Number] | None = None,
    on_death: Literal["restart", "continue"] = "restart",
    restarts: int = 3,
    timeout: Number = 60.0,
    address: str | None = None,
    resources: Mapping[str, Any] | None = None,
    progress: Callable[[Status], None] | None = None,
) -> Result:
    """Runs a rule on Ray actors: one process per worker and one for the server, on wall time.

    The same rules, tasks and results as in `replay.run`, on wall time: a tick of the trace is a nanosecond. Every
    process stores its state in an actor of the run, the state store, before it sends the messages that follow from it;
    messages are numbered; and a process that dies is replaced by one that continues from the stored state. To the rule
    the worker was slow, and no message or gradient that arrived is lost or counted twice.

    On the wire: the rule's messages, as text and flat arrays without code; contributions to a collective go to the
    first member of its group, which sends the result to all. To the state store, the arrays of each state that changed:
    for a worker of a parameter server a model and a gradient per gradient.

    State: the state store has the last state of each worker and of the server.

    Args:
      rule: from `asynchronous.rules`, or your own.
      task: model and data. Ray pickles its functions and sends them to the other processes.
      workers: the number of workers.
      seconds: stop after this wall time, from the time at which all processes are ready.
      steps: stop after this number of updates of the model.
      gradients: stop after this number of gradients that arrived.
      target: stop at an evaluation at or below this loss.
      seed: the seed of data and random choices.
      evaluate_every: seconds between evaluations, starting at 0, in this process; None for none.
      slow: `{worker: factor}`: sleeps after each gradient so that it takes `factor` times as long. For demonstrations.
      on_death: of a worker. `"restart"` replaces it by another process; `"continue"` runs on without it, for rules with
        a server. A server is always restarted.
      restarts: the number of restarts of each process before the run fails.
      timeout: seconds after which a silent process counts as dead, and a run without progress as stalled. Longer than
        the longest gradient, and than the start of a process with its compilations; the initial start of all processes
        may take five times as long.
      address: of a running Ray cluster, such as `"auto"` or `"10.0.0.1:6379"`; None: the one that this process is
        connected to, or a new one on this machine that ends with the run.
      resources: of each worker: arguments of Ray's `Actor.options` such as `{"num_gpus": 1}`. The default is one CPU,
        and workers then see no accelerator.
      progress: called about ten times a second.

    Returns:
      The `Result`, as from a replay; `params` and `losses` are of stored states.

    Raises:
      ValueError: an argument is out of its range, or Ray is not installed.
      ActorLost: a process could not be started, or died too often.
      Stalled: no process makes progress.
      NonFiniteGradient: a worker's gradient contains a NaN or an infinity.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import ray_engine, replay, rules
      >>> task = replay.Task({"w": np.zeros(3)}, lambda x, batch: ((x["w"] - batch) ** 2).sum(), lambda *job: 1.0)
      >>> run = ray_engine.run(rules.asgd(optax.sgd(0.1)), task, workers=2, steps=100)  # doctest: +SKIP
      >>> run.params["w"].round(2).tolist()  # doctest: +SKIP
      [1.0, 1.0, 1.0]

    References:
      Moritz et al., "Ray: a distributed framework for emerging AI applications", arXiv:1712.05889, 2017; Elnozahy,
      Alvisi, Wang, Johnson, "A survey of rollback-recovery protocols in message-passing systems", 2002 (states
      are stored before messages are sent).
    """
    slow = {worker: float(factor) for worker, factor in (slow or {}).items()}
    _check(
        rule, task, workers, seconds, steps, gradients, target, seed, evaluate_every, slow, on_death, restarts, timeout
    )
    task = task._replace(params=jax.tree.map(np.asarray, task.params))
    # Only the driver evaluates, so `evaluate` is not sent to the others.
    config = RunConfig(rule, task._replace(evaluate=None), workers, seed, slow)
    with connect(address, workers + 1) as ray:
        pool = WorkerPool(
            ray,
            config,
            restarts=restarts if on_death == "restart" else 0,
            server_restarts=restarts,
            timeout=float(timeout),
            resources=resources or {},
        )
        try:
            return _Driver(pool, rule, task, workers, on_death).run(
                seconds, steps, gradients, target, evaluate_every, progress
            )
        finally:
            pool.close()


class _Driver:
    """Polls a run until it is complete, replaces dead processes, and evaluates."""

    def __init__(self, pool: WorkerPool, rule: Rule, task: Task, workers: int, on_death: str):
        self.pool, self.rule, self.task, self.workers = pool, rule, task, workers
        self.on_death = on_death
        self.times: list[float] = []
        self.losses: list[float] = []
        # For each place, the last of its processes that is known to have ended.
        self.ended: dict[int, int] = {}
        # The progress at the last poll at which it had changed, and the time of that poll.
        self.last_progress: Any = None
        self.progressed = time.monotonic()

    def run(
        self,
        seconds: Number | None,
        steps: int | None,
        gradients: int | None,
        target: Number | None,
        every: Number | None,
        progress: Callable[[Status], None] | None,
    ) -> Result:
        pids = self.pool.begin()
        started = self.progressed = time.monotonic()
        next_evaluation = 0.0
        while True:
            now = time.monotonic() - started
            places, step_count, gradient_count = self.pool.call_store("status")
            if every is not None and now >= next_evaluation:
                self.evaluate(now)
                next_evaluation = (now // every + 1) * every
            if progress is not None:
                starts = {place: status.life for place, status in places.items()}
                loss = self.losses[-1] if self.losses else None
                progress(Status(now, step_count, gradient_count, loss, pids, starts))
            complete = (seconds is not None and now >= seconds) or (steps is not None and step_count >= steps)
            complete |= gradients is not None and gradient_count >= gradients
            if complete or (target is not None and bool(self.losses) and self.losses[-1] <= target):
                break
            self.handle_failures(places)
            self.check_progress(places)
        self.pool.stop()
        now = time.monotonic() - started
        if every is not None:
            self.evaluate(now)
        return self.result(now, *self.pool.call_store("log"))

    def handle_failures(self, places: Mapping[int, PlaceStatus]) -> None:
        """Replaces or dismisses processes that died, and kills those that have been silent for too long."""
        for place, problem in self.pool.find_dead(POLL_SECONDS):
            if self.on_death == "continue" and place != SERVER:
                self.pool.dismiss(place)
                if not self.pool.actors.keys() - {SERVER}:
                    raise ActorLost(place, "has died, and was the last worker")
            elif self.pool.is_final(problem):
                raise ActorLost(place, f"has died and is not started again: {problem}")
            else:
                self.pool.watch(place)
                if place in places:
                    self.ended[place] = places[place].life
        for place, status in places.items():
            if place not in self.pool.actors:
                continue
            # After a death the next process may take its time to start.
            if self.ended.get(place) == status.life:
                if status.silent > (1 + START_FACTOR) * self.pool.timeout:
                    raise ActorLost(place, f"has been silent for {status.silent:.0f} s, and could not be replaced")
            elif status.silent > self.pool.timeout:
                self.ended[place] = status.life
                self.pool.kill(place, for_good=False)

    def check_progress(self, places: Mapping[int, PlaceStatus]) -> None:
        """Raises `Stalled` if all processes answer, but none has made progress within the timeout."""
        # A process that falls silent or is replaced counts as progress.
        current = [(status.commits, status.life, status.silent > SILENT_SECONDS) for status in places.values()]
        if current != self.last_progress:
            self.last_progress, self.progressed = current, time.monotonic()
        elif time.monotonic() - self.progressed > self.pool.timeout and not any(silent for _, _, silent in current):
            waiting = {place: status.report.waits_for for place, status in places.items() if status.report.waits_for}
            computing = tuple([place for place, status in places.items() if status.report.computing])
            raise Stalled(waiting, computing, self.pool.timeout)

    def evaluate(self, now: float) -> None:
        assert self.task.evaluate is not None
        self.losses.append(float(self.task.evaluate(self.model())))
        self.times.append(now)

    def model(self) -> Any:
        """Returns the rule's model from the states that were stored last."""
        all_workers = tuple(range(self.workers))
        # A server without a model leaves the mean of the workers.
        for places in [(SERVER,), all_workers] if self.rule.server else [all_workers]:
            stored = self.pool.call_store("models", places)
            models = [read(text, arrays.__getitem__) for _, (text, arrays) in sorted(stored.items())]
            models = [model for model in models if model is not None]
            if models:
                return models[0] if all(_equal(model, models[0]) for model in models) else mean_of(models)
        return self.task.params

    def result(self, seconds: float, records: Records, faults: list[Fault], reports: dict[int, Report]) -> Result:
        """Merges the records of all places in the order of time, in the form of a replay."""
        end = round(seconds * TICKS)
        down = np.zeros(self.workers)
        events = list(records.events)
        for place, died, back in faults:
            events.append((died, ON_FAULT, place, place, "failed", 0))
            if back is not None:
                events.append((back, ON_FAULT, place, place, RECOVERED, 0))
            if place != SERVER:
                down[place] += (end if back is None else back) - died
        # Stable: events of a place at the same tick keep their order.
        events.sort(key=lambda row: row[0])
        words: dict[str, int] = {}
        rows = [(*row[:4], words.setdefault(row[4], len(words)), row[5]) for row in events]
        no_report = Report()
        by_place = [reports.get(place, no_report) for place in [*range(self.workers), SERVER]]
        return Result(
            trace=Trace(
                columns(_flatten(rows), "tick what place sender word bytes"),
                columns(_flatten(sorted(records.gradients)), "tick worker read version accepted", "accepted"),
                columns(_flatten(sorted(records.steps)), "tick version oldest"),
                tuple(words),
            ),
            seconds=seconds,
            times=np.array(self.times, float),
            losses=np.array(self.losses, float),
            params=self.model(),
            computing=np.array([report.computed for report in by_place[:-1]]) / max(end, 1),
            down=down / max(end, 1),
            sent=np.array([sum(report.sent.values()) for report in by_place]),
            received=np.array([report.received for report in by_place]),
            links={
                (place, to): nbytes
                for place, report in sorted(reports.items())
                for to, nbytes in sorted(report.sent.items())
                if nbytes
            },
            ticks_per_second=TICKS,
        )


def _flatten(rows: list[tuple]) -> array:
    return array("q", [int(number) for row in rows for number in row])


def _equal(left: Any, right: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(left), jax.tree.leaves(right)))


def _check(
    rule: Rule,
    task: Task,
    workers: int,
    seconds: Number | None,
    steps: int | None,
    gradients: int | None,
    target: Number | None,
    seed: int,
    evaluate_every: Number | None,
    slow: Mapping[int, float],
    on_death: str,
    restarts: int,
    timeout: Number,
) -> None:
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if seconds is None and steps is None and gradients is None and target is None:
        raise ValueError("no stopping criterion: pass seconds=, steps=, gradients= or target=")
    if target is not None and evaluate_every is None:
        raise ValueError(f"target={target} needs evaluate_every=")
    if evaluate_every is not None and task.evaluate is None:
        raise ValueError(f"evaluate_every={evaluate_every} needs a task with evaluate=")
    for name, value in (("evaluate_every", evaluate_every), ("timeout", timeout), ("seconds", seconds)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    for worker, factor in slow.items():
        if not (0 <= worker < workers and factor >= 1):
            raise ValueError(f"slow must map workers below {workers} to factors of at least 1, got {worker}: {factor}")
    if restarts < 0:
        raise ValueError(f"restarts must be at least 0, got {restarts}")
    if on_death == "continue" and rule.server is None:
        raise ValueError(f"on_death='continue' needs a rule with a server, and {rule.name} has none: use 'restart'")
