"""The driver of a run: starts the processes, polls them until it is complete, replaces the dead, and evaluates."""

import time
import uuid
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._core.types import Number
from ..errors import ActorLostError, StalledError
from ..portable import read
from ..protocol import RECOVERED, SERVER, Rule
from ..replay.base import FAULT, TICKS, Result, Task, trace_of
from ..values import mean_of
from .actor import Actor, RunConfig
from .role_runner import Records
from .state_store import ActorReport, Fault, PlaceStatus, StateStore

# Seconds between two polls of the run, and without a sign of life after which a process counts as silent.
POLL_SECONDS, SILENT_SECONDS = 0.1, 2.0
# The start may take this many timeouts: processes import JAX and compile, on cores that they may share.
START_FACTOR = 5.0


class RunOptions(NamedTuple):
    """The arguments of `run`."""

    rule: Rule
    task: Task
    workers: int
    seconds: Number | None
    steps: int | None
    gradients: int | None
    target: Number | None
    seed: int
    evaluate_every: Number | None
    slow: dict[int, float]
    on_death: str
    restarts: int
    timeout: float
    resources: Mapping[str, Any]
    progress: Callable[["Status"], None] | None


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


class Driver:
    """Polls a run until it is complete. Creates the actors, which end with `close`."""

    def __init__(self, ray: Any, options: RunOptions):
        self.ray, self.options, self.timeout = ray, options, options.timeout
        rule, workers = options.rule, options.workers
        # Only the driver evaluates, so `evaluate` is not sent to the others.
        config = RunConfig(rule, options.task._replace(evaluate=None), workers, options.seed, options.slow)
        # Actors get the name of the store: a handle might be outdated when an actor is restarted.
        name = f"jaxdist-{uuid.uuid4().hex}"
        self.store = ray.remote(StateStore).options(name=name, num_cpus=0).remote(ray.cloudpickle.dumps(config))
        self.actors: dict[int, Any] = {}
        for place in ([SERVER] if rule.server else []) + list(range(workers)):
            requested = {"num_cpus": 0} if place == SERVER else {"num_cpus": 1, **options.resources}
            platform = None if requested.get("num_gpus") or requested.get("resources") else "cpu"
            # A server is restarted in any case.
            restarts = options.restarts if place == SERVER or options.on_death == "restart" else 0
            requested |= {"max_restarts": restarts, "max_concurrency": 8}
            self.actors[place] = ray.remote(Actor).options(**requested).remote(place, name, self.timeout, platform)
        # The running call of `Actor.watch` of each place, which fails when its process dies.
        self.watched: dict[Any, int] = {}
        # For each place, the last of its processes that is known to have ended.
        self.ended: dict[int, int] = {}
        # The progress at the last poll at which it had changed, and the time of that poll.
        self.last_progress: Any = None
        self.progressed = time.monotonic()
        self.times: list[float] = []
        self.losses: list[float] = []

    def run(self) -> Result:
        """Runs until a stopping criterion is met."""
        options = self.options
        pids = self._begin()
        started = self.progressed = time.monotonic()
        next_evaluation = 0.0
        while True:
            polled = time.monotonic()
            now = polled - started
            places, steps, gradients = self._call_store("status")
            if options.evaluate_every is not None and now >= next_evaluation:
                self._evaluate(now)
                next_evaluation = (now // options.evaluate_every + 1) * options.evaluate_every
            loss = self.losses[-1] if self.losses else None
            if options.progress is not None:
                starts = {place: status.life for place, status in places.items()}
                options.progress(Status(now, steps, gradients, loss, pids, starts))
            counts = ((now, options.seconds), (steps, options.steps), (gradients, options.gradients))
            if any(limit is not None and count >= limit for count, limit in counts):
                break
            if options.target is not None and loss is not None and loss <= options.target:
                break
            self._replace_dead(places)
            self._kill_silent(places)
            self._check_progress(places, polled)
        # All processes handle the messages that have arrived.
        calls = [actor.stop.remote() for actor in self.actors.values()]
        self.ray.wait(calls, num_returns=len(calls), timeout=self.timeout)
        now = time.monotonic() - started
        if options.evaluate_every is not None:
            self._evaluate(now)
        return self._result(now, *self._call_store("log"))

    def _begin(self) -> dict[int, int]:
        """Waits until all processes are ready, and starts them; returns their process ids."""
        calls = {place: actor.ready.remote() for place, actor in self.actors.items()}
        pids = {}
        seconds = START_FACTOR * self.timeout
        end = time.monotonic() + seconds
        for place, call in calls.items():
            try:
                pids[place] = self.ray.get(call, timeout=max(0.0, end - time.monotonic()))
            except self.ray.exceptions.GetTimeoutError:
                available = self.ray.cluster_resources()
                raise ActorLostError(
                    place,
                    f"was not started within {seconds:g} s. It may be waiting for resources: the cluster has "
                    f"{ {name: available[name] for name in ('CPU', 'GPU') if name in available} } in total",
                ) from None
            except self.ray.exceptions.RayActorError as problem:
                raise ActorLostError(place, f"could not be started: {problem}") from None
        begun = time.time_ns()
        self._call_store("open", self.actors, begun)
        for place, actor in self.actors.items():
            actor.begin.remote(self.actors, begun)
            self.watched[actor.watch.remote()] = place
        return pids

    def close(self) -> None:
        """Kills all processes."""
        for actor in [*self.actors.values(), self.store]:
            self.ray.kill(actor, no_restart=True)

    def _call_store(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls the state store."""
        try:
            return self.ray.get(getattr(self.store, method).remote(*arguments, **named), timeout=self.timeout)
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError) as problem:
            raise RuntimeError(f"the state store of the run died, and with it all states: {problem}") from None

    def _find_dead(self) -> list[tuple[int, Exception]]:
        """Returns the places that died since the last poll, and how; raises the exception of a rule or a task."""
        done, _ = self.ray.wait(list(self.watched), num_returns=1, timeout=POLL_SECONDS)
        found = []
        for call in done:
            place = self.watched.pop(call)
            try:
                self.ray.get(call)
            except self.ray.exceptions.RayActorError as problem:
                found.append((place, problem))
        return found

    def _replace_dead(self, places: Mapping[int, PlaceStatus]) -> None:
        for place, problem in self._find_dead():
            if self.options.on_death == "continue" and place != SERVER:
                self._dismiss(place)
                if not self.actors.keys() - {SERVER}:
                    raise ActorLostError(place, "has died, and was the last worker")
            # Ray raises `ActorDiedError` if it will not restart the process, and another `RayActorError` if it will.
            elif isinstance(problem, self.ray.exceptions.ActorDiedError):
                raise ActorLostError(place, f"has died and is not started again: {problem}")
            else:
                self.watched[self.actors[place].watch.remote()] = place
                if place in places:
                    self.ended[place] = places[place].life

    def _kill_silent(self, places: Mapping[int, PlaceStatus]) -> None:
        for place, status in places.items():
            if place not in self.actors:
                continue
            # After a death the next process may take its time to start.
            if self.ended.get(place) == status.life:
                if status.silent > (1 + START_FACTOR) * self.timeout:
                    raise ActorLostError(place, f"has been silent for {status.silent:.0f} s, and could not be replaced")
            elif status.silent > self.timeout:
                self.ended[place] = status.life
                self.ray.kill(self.actors[place], no_restart=False)

    def _dismiss(self, place: int) -> None:
        """Continues without a place."""
        self.ray.kill(self.actors.pop(place), no_restart=True)
        self._call_store("record_death", place, replaced=False)
        for actor in self.actors.values():
            actor.on_gone.remote(place)

    def _check_progress(self, places: Mapping[int, PlaceStatus], polled: float) -> None:
        """Raises `StalledError` if all processes answer, but none has made progress within the timeout."""
        # Since the poll, an evaluation may have taken longer than the timeout.
        # A process that falls silent or is replaced counts as progress.
        current = [(status.commits, status.life, status.silent > SILENT_SECONDS) for status in places.values()]
        if current != self.last_progress:
            self.last_progress, self.progressed = current, polled
        elif polled - self.progressed > self.timeout and not any(silent for _, _, silent in current):
            by_place = sorted(places.items())
            waiting = {place: status.report.waits_for for place, status in by_place if status.report.waits_for}
            computing = tuple([place for place, status in places.items() if status.report.computing])
            raise StalledError(waiting, computing, self.timeout)

    def _evaluate(self, now: float) -> None:
        """Evaluates the model of the states that were stored last."""
        assert self.options.task.evaluate is not None
        self.losses.append(float(self.options.task.evaluate(self._model())))
        self.times.append(now)

    def _model(self) -> Any:
        """Returns the rule's model from the states that were stored last."""
        all_workers = tuple(range(self.options.workers))
        # A server without a model leaves the mean of the workers.
        for places in [(SERVER,), all_workers] if self.options.rule.server else [all_workers]:
            stored = self._call_store("models", places)
            models = [read(text, arrays.__getitem__) for _, (text, arrays) in sorted(stored.items())]
            models = [model for model in models if model is not None]
            if models:
                return models[0] if all(_equal(model, models[0]) for model in models) else mean_of(models)
        return self.options.task.params

    def _result(self, seconds: float, records: Records, faults: list[Fault], reports: dict[int, ActorReport]) -> Result:
        """Merges the records of all places in the order of time, in the form of a replay."""
        end = round(seconds * TICKS)
        down = np.zeros(self.options.workers)
        events = list(records.events)
        for place, died, back in faults:
            events.append((died, FAULT, place, place, "failed", 0))
            if back is not None:
                events.append((back, FAULT, place, place, RECOVERED, 0))
            if place != SERVER:
                down[place] += (end if back is None else back) - died
        # Stable: events of a place at the same tick keep their order.
        events.sort(key=lambda row: row[0])
        words: dict[str, int] = {}
        rows = [(*row[:4], words.setdefault(row[4], len(words)), row[5]) for row in events]
        no_report = ActorReport()
        by_place = [reports.get(place, no_report) for place in [*range(self.options.workers), SERVER]]
        return Result(
            trace=trace_of(_flatten(rows), _flatten(sorted(records.gradients)), _flatten(sorted(records.steps)), words),
            seconds=seconds,
            times=np.array(self.times, float),
            losses=np.array(self.losses, float),
            params=self._model(),
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
