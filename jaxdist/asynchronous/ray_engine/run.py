"""A rule on real processes, from the driver's side."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from ..._core.types import Number
from ..portable import read
from ..protocol import SERVER, Rule
from ..replay.task import Task
from ..replay.trace import Result
from ..values import mean_of
from .actor import Setup
from .cluster import STARTING, Crew, connected
from .errors import Stalled, WorkerLost
from .results import result

LOOK, QUIET = 0.1, 2.0  # seconds between two looks at the run; seconds without a sign of life that are remarkable


class Status(NamedTuple):
    """How a run is getting on.

    Attributes:
      seconds: since all processes began.
      steps: updates of the model.
      gradients: gradients that reached where they were to be used.
      loss: of the last evaluation, or None.
      processes: the number of each place's process at the beginning; the server is -1.
      starts: how often each place was started: 1, and one more after each death.
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
    """Runs a rule on Ray actors: one process a worker, one for the server, on wall time.

    The same rules, tasks and results as `replay.run`, with the clock on the wall: a tick of the trace is a nanosecond.
    Every process keeps its state with an actor of the run, the keeper, before it sends what follows from it; messages
    are numbered; and a process that dies is replaced by one that goes on from there. To the rule it was slow, and no
    message or gradient that arrived is lost or counted twice.

    On the wire: the rule's messages, as text and flat arrays that hold no code; parts of a collective go to the first
    of its group, which sends all the result. To the keeper, of each state the arrays that changed: for a worker of a
    parameter server a model and a gradient per gradient.

    State: the keeper has the last state of each place.

    Args:
      rule: from `asynchronous.rules`, or your own.
      task: model and data. Its functions are pickled by Ray, from this process to the others.
      workers: how many.
      seconds: how long, in wall time from when all processes are ready.
      steps: how many updates of the model.
      gradients: how many gradients that arrive.
      target: until an evaluation is as low.
      seed: of data and choices.
      evaluate_every: seconds between evaluations, from 0 on, by this process; None for none.
      slow: `{worker: factor}`: sleeps so long after each gradient that it takes so many times longer. For
        demonstrations.
      on_death: of a worker. `"restart"` starts another process in its place; `"continue"` goes on without it, for rules
        with a server. A server is always restarted.
      restarts: how often each place is started again before the run fails.
      timeout: seconds after which a silent process counts as dead, and a run in which nothing happens as stalled. More
        than the longest gradient, and than the start of a process with its compilations; all together may take five
        times as long to start.
      address: of a running Ray cluster, as in `"auto"` or `"10.0.0.1:6379"`; None: the one that this process is
        connected to, or one on this machine that ends with the run.
      resources: what each worker takes: arguments of Ray's `Actor.options` such as `{"num_gpus": 1}`. The default is a
        CPU, and workers then see no accelerator.
      progress: called about ten times a second.

    Returns:
      The `Result`, as from a replay; `params` and `losses` are of kept states.

    Raises:
      ValueError: an argument cannot work, or Ray is not installed.
      WorkerLost: a place could not be started, or died too often.
      Stalled: nobody gets any further.
      NonFiniteGradient: a worker's gradient has a NaN or an infinity.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import ray_engine, replay, rules
      >>> task = replay.Task({"w": np.zeros(3)}, lambda x, batch: ((x["w"] - batch) ** 2).sum(), lambda *job: 1.0)
      >>> run = ray_engine.run(rules.asgd(optax.sgd(0.1)), task, workers=2, steps=100)  # doctest: +SKIP
      >>> run.params["w"].round(2).tolist()  # doctest: +SKIP
      [1.0, 1.0, 1.0]

    References:
      Moritz et al., "Ray: a distributed framework for emerging AI applications", arXiv:1712.05889, 2017; Elnozahy,
      Alvisi, Wang, Johnson, "A survey of rollback-recovery protocols in message-passing systems", 2002 (what is sent
      waits for what is kept).
    """
    slow = {worker: float(factor) for worker, factor in (slow or {}).items()}
    _check(
        rule, task, workers, seconds, steps, gradients, target, seed, evaluate_every, slow, on_death, restarts, timeout
    )
    task = task._replace(params=jax.tree.map(np.asarray, task.params))
    # The driver evaluates: what it does so with stays here.
    setup = Setup(rule, task._replace(evaluate=None), workers, seed, slow)
    with connected(address, workers + 1) as ray:
        crew = Crew(
            ray,
            setup,
            restarts=restarts if on_death == "restart" else 0,
            server_restarts=restarts,
            timeout=float(timeout),
            resources=resources or {},
        )
        try:
            return _Driver(crew, rule, task, workers, on_death).drive(
                seconds, steps, gradients, target, evaluate_every, progress
            )
        finally:
            crew.close()


class _Driver:
    """What one run knows of itself."""

    def __init__(self, crew: Crew, rule: Rule, task: Task, workers: int, on_death: str):
        self.crew, self.rule, self.task, self.workers = crew, rule, task, workers
        self.on_death = on_death
        self.times: list[float] = []
        self.losses: list[float] = []
        self.ended: dict[int, int] = {}  # the last process of a place that is known to have ended

    def drive(
        self,
        seconds: Number | None,
        steps: int | None,
        gradients: int | None,
        target: Number | None,
        every: Number | None,
        progress: Callable[[Status], None] | None,
    ) -> Result:
        crew = self.crew
        pids = crew.begin()
        started = moved = time.monotonic()
        before: Any = None
        due = 0.0
        while True:
            now = time.monotonic() - started
            places, step_count, gradient_count = crew.ask("status")
            if every is not None and now >= due:
                self.evaluate(now)
                due = (now // every + 1) * every
            if progress is not None:
                starts = {place: one.life for place, one in places.items()}
                loss = self.losses[-1] if self.losses else None
                progress(Status(now, step_count, gradient_count, loss, pids, starts))
            over = (seconds is not None and now >= seconds) or (steps is not None and step_count >= steps)
            over |= gradients is not None and gradient_count >= gradients
            if over or (target is not None and bool(self.losses) and self.losses[-1] <= target):
                break
            self.mourn(places)
            # That one falls silent or is back is something that happens.
            heard = [(one.commits, one.life, one.silent > QUIET) for one in places.values()]
            if heard != before:
                before, moved = heard, time.monotonic()
            elif time.monotonic() - moved > crew.timeout and not any(quiet for _, _, quiet in heard):
                waiting = {place: one.report.waits_for for place, one in places.items() if one.report.waits_for}
                computing = tuple([place for place, one in places.items() if one.report.computing])
                raise Stalled(waiting, computing, crew.timeout)
        crew.stop()
        now = time.monotonic() - started
        if every is not None:
            self.evaluate(now)
        return result(
            *crew.ask("ledger"),
            workers=self.workers,
            seconds=now,
            times=self.times,
            losses=self.losses,
            params=self.model(),
        )

    def mourn(self, places: Mapping[int, Any]) -> None:
        """Looks after the dead: those that ended, and those that have been silent for too long."""
        for place, problem in self.crew.dead(LOOK):
            if self.on_death == "continue" and place != SERVER:
                self.crew.dismiss(place)
                if not self.crew.actors.keys() - {SERVER}:
                    raise WorkerLost(place, "has died, and was the last")
            elif self.crew.final(problem):
                raise WorkerLost(place, f"has died and is not started again: {problem}")
            else:
                self.crew.watch(place)
                if place in places:
                    self.ended[place] = places[place].life
        for place, one in places.items():
            if place not in self.crew.actors:
                continue
            if self.ended.get(place) == one.life:  # the next one may take its time to start
                if one.silent > (1 + STARTING) * self.crew.timeout:
                    raise WorkerLost(place, f"has been silent for {one.silent:.0f} s, and could not be replaced")
            elif one.silent > self.crew.timeout:
                self.ended[place] = one.life
                self.crew.kill(place, for_good=False)

    def evaluate(self, now: float) -> None:
        assert self.task.evaluate is not None
        self.losses.append(float(self.task.evaluate(self.model())))
        self.times.append(now)

    def model(self) -> Any:
        """What the rule would ship, of the states that were kept last."""
        for places in [(SERVER,), tuple(range(self.workers))] if self.rule.server else [tuple(range(self.workers))]:
            found = self.crew.ask("models", places)
            models = [read(text, arrays.__getitem__) for _, (text, arrays) in sorted(found.items())]
            models = [model for model in models if model is not None]
            if models:
                return models[0] if all(_equal(model, models[0]) for model in models) else mean_of(models)
        return self.task.params


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
        raise ValueError("say how far: seconds=, steps=, gradients= or target=")
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
            raise ValueError(f"slow must be factors of at least 1 of workers below {workers}, got {worker}: {factor}")
    if restarts < 0:
        raise ValueError(f"restarts must be at least 0, got {restarts}")
    if on_death == "continue" and rule.server is None:
        raise ValueError(f"on_death='continue' needs a rule with a server, and {rule.name} has none: use 'restart'")
