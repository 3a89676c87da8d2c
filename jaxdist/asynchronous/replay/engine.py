"""The virtual clock and its state: one event after the other, in an order that depends on nothing but the seed."""

import copy
import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, no_type_check

from ..durations import Durations, outages, stream
from ..errors import DeadlockError, TooManyEventsError
from ..links import Busy, Links, book, first_gap
from ..protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    SERVER,
    After,
    Cancel,
    Compute,
    GradientRecord,
    Message,
    Reduce,
    Rule,
    Send,
    Site,
    StepRecord,
)
from ..protocol import TIMER as TIMER_KIND
from ..values import force, mean_of, nbytes_of
from .base import COLLECTIVE, DONE, EVALUATION, FAULT, MESSAGE, TICKS, TIMER

# Events that are no progress of the rule.
_PASSIVE = (FAULT, EVALUATION)
# Events that a worker has worked for, or waited for as it wished.
_WORK = (DONE, COLLECTIVE, TIMER)
_IDLE_FAULTS = 100  # of each worker, of which any would have woken a rule that is only waiting


@dataclass
class ReplayState:
    """The state of the virtual clock, which `save` writes to a file. A place is a worker, or the server (index -1).

    Attributes:
      roles: the state of each worker's role and, last, the server's.
      running: for each worker `(job, start, end, version, params)` of its running gradient, or None.
      jobs: the number of gradients that each worker has begun.
      gone: the tick at which each worker failed, or -1 if it is up.
      faults: the number of failures and recoveries of each worker.
      out_busy, in_busy: when the network card of each place sends and receives, from now on.
      computed, down: ticks that each worker computed and was down.
      sent, received: bytes of each place.
      tick: the time.
      sequence: the number of events created so far.
      live: the number of events in the heap other than faults and evaluations.
      idle_faults: the failures and recoveries since a worker last had something to do.
      heap: `(tick, class, place, sequence, data)`; the smallest is the next event.
      link_free: the tick at which each link `(source, destination)` is free again.
      collectives: the contributions so far, by `(group, tag)`.
      late: collectives that wait only for failed members to recover.
      links: bytes of each link.
      words: the numbers of the message kinds.
      events, gradients, steps, times, losses: the columns of the trace.
    """

    roles: list[Any]
    running: list[tuple | None]
    jobs: list[int]
    gone: list[int]
    faults: list[int]
    out_busy: list[Busy]
    in_busy: list[Busy]
    computed: list[int]
    down: list[int]
    sent: list[int]
    received: list[int]
    tick: int = 0
    sequence: int = 0
    live: int = 0
    idle_faults: int = 0
    heap: list[tuple] = field(default_factory=list)
    link_free: dict[tuple[int, int], int] = field(default_factory=dict)
    collectives: dict[tuple[tuple[int, ...], int], dict[int, tuple]] = field(default_factory=dict)
    late: list[tuple] = field(default_factory=list)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    events: array = field(default_factory=lambda: array("q"))
    gradients: array = field(default_factory=lambda: array("q"))
    steps: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("q"))
    losses: array = field(default_factory=lambda: array("d"))


def count_live(heap: list[tuple]) -> int:
    """Counts the events of a heap by which a rule may go on by itself."""
    return sum(event[1] not in _PASSIVE for event in heap)


def copy_state(state: ReplayState) -> ReplayState:
    """Copies a state so that the original stays valid: containers are copied, values are shared."""
    new = ReplayState(**{entry.name: copy.copy(getattr(state, entry.name)) for entry in fields(state)})
    new.collectives = {key: dict(parts) for key, parts in state.collectives.items()}
    return new


class ReplayConfig(NamedTuple):
    """The constants of a run; `gradient(params, worker, job)`, `evaluate(params)` or None; times in ticks."""

    rule: Rule
    workers: int
    params: Any
    gradient: Callable[[Any, int, int], Any]
    evaluate: Callable[[Any], float] | None
    durations: Durations
    links: Links
    seed: int
    evaluate_ticks: int
    events_per_tick: int
    record_events: bool


# Called for every event: the runtime type checks of the tests would take most of the time.
@no_type_check
class Engine:
    """Advances one state. Methods handle one kind of action or of event each; the loop is `advance`."""

    def __init__(self, config: ReplayConfig, state: ReplayState):
        self.config, self.state = config, state
        rule = config.rule
        # The server is last here and in the state, so that its index -1 finds it.
        self.roles = [rule.worker] * config.workers + ([rule.server] if rule.server else [])
        # Created when first needed, at the job or outage that the state is at.
        self.streams: dict[int, Iterator[float]] = {}
        self.outages: dict[int, Iterator[tuple[float, float]]] = {}

    def _push(self, tick: int, what: int, place: int, data: tuple) -> None:
        state = self.state
        # The sequence number makes the order of events total.
        heapq.heappush(state.heap, (tick, what, place, state.sequence, data))
        state.sequence += 1
        if what not in _PASSIVE:
            state.live += 1

    def _ticks(self, seconds: float) -> int:
        # At most a time that no trace can hold, which is after every end.
        return round(min(seconds * TICKS, 2.0**63))

    # Actions of a role.

    def _send(self, place: int, action: Send) -> None:
        state, message, to = self.state, action.message, action.to
        nbytes = nbytes_of(message.value)
        arrival = state.tick
        seconds = self.config.links.seconds
        if seconds is not None:
            # A link transmits one message at a time.
            start = max(arrival, state.link_free.get((place, to), 0))
            length = self._ticks(seconds(place, to, nbytes))
            if self.config.links.nic:
                start = first_gap(start, length, state.out_busy[place], state.in_busy[to])
                for busy, card in ((state.out_busy, place), (state.in_busy, to)):
                    busy[card] = book(busy[card], start, start + length, now=state.tick)
            arrival = state.link_free[place, to] = start + length
        if nbytes:
            state.sent[place] += nbytes
            state.links[place, to] = state.links.get((place, to), 0) + nbytes
        self._push(arrival, MESSAGE, to, (place, message, nbytes))

    def _compute(self, place: int, action: Compute) -> None:
        state, config = self.state, self.config
        if place == SERVER or state.running[place] is not None:
            raise RuntimeError(f"place {place} of {config.rule.name} is computing already, or is the server")
        job = state.jobs[place]
        state.jobs[place] = job + 1
        if place not in self.streams:
            self.streams[place] = stream(config.durations, config.seed, place, job)
        seconds, start = next(self.streams[place]), state.tick
        if config.durations.finish is not None:
            now = start / TICKS
            seconds = config.durations.finish(place, now, seconds) - now
        # An infinite duration never ends, and has no event.
        end = -1
        if seconds != float("inf"):
            end = start + max(1, self._ticks(seconds))
            self._push(end, DONE, place, (job,))
        # Stored at once, and the gradient computed only at its end, if a rule uses it.
        state.running[place] = (job, start, end, action.version, action.params)

    def _cancel(self, place: int, action: Cancel | None = None) -> None:
        running = self.state.running[place]
        if running is not None:
            self.state.computed[place] += self.state.tick - running[1]
            self.state.running[place] = None

    def _reduce(self, place: int, action: Reduce) -> None:
        state, group = self.state, action.group
        key = (group, action.tag)
        parts = state.collectives.setdefault(key, {})
        parts[place] = (action.value, action.op, state.tick)
        if len(parts) < len(group):
            return
        # Codes differ in length: the longest determines how long a gather takes.
        sizes = {member: nbytes_of(value) for member, (value, _, _) in parts.items()}
        n, nbytes = len(group), max(sizes.values())
        # The lead of the last member but one, which some collectives use; 0 in a group of one.
        joined = [tick for _, _, tick in parts.values()]
        lead = (joined[-1] - joined[-2:][0]) / TICKS
        duration = self._ticks(self.config.links.collective(group, nbytes, action.op, lead))
        # Bytes that each member sends: in a gather its value to all others, in a mean those of a ring all-reduce.
        sent = 2 * (n - 1) * nbytes // n
        for member in group:
            state.sent[member] += (n - 1) * sizes[member] if action.op == "gather" else sent
        self._push(state.tick + duration, COLLECTIVE, group[0], (key, sent))

    def _after(self, place: int, action: After) -> None:
        self._push(self.state.tick + max(1, self._ticks(action.seconds)), TIMER, place, (action.tag,))

    def _record_gradient(self, place: int, action: GradientRecord) -> None:
        self.state.gradients.extend((self.state.tick, *action))

    def _record_step(self, place: int, action: StepRecord) -> None:
        self.state.steps.extend((self.state.tick, *action))

    ACTIONS: ClassVar = {
        Send: _send,
        Compute: _compute,
        Cancel: _cancel,
        Reduce: _reduce,
        After: _after,
        GradientRecord: _record_gradient,
        StepRecord: _record_step,
    }

    def _deliver(self, place: int, sender: int, message: Message) -> None:
        roles = self.state.roles
        roles[place], actions = self.roles[place].receive(roles[place], sender, message)
        handlers = self.ACTIONS
        for action in actions:
            handlers[type(action)](self, place, action)

    # Events.

    def _record_event(self, what: int, place: int, sender: int, kind: str, nbytes: int = 0) -> None:
        state = self.state
        if self.config.record_events:
            word = state.words.setdefault(kind, len(state.words))
            state.events.extend((state.tick, what, place, sender, word, nbytes))

    def _on_message(self, place: int, data: tuple) -> None:
        sender, message, nbytes = data
        if place != SERVER and self.state.gone[place] >= 0:
            return self._record_event(MESSAGE, place, sender, "lost", nbytes)
        self.state.received[place] += nbytes
        self._record_event(MESSAGE, place, sender, message.kind, nbytes)
        self._deliver(place, sender, message)

    def _on_done(self, place: int, data: tuple) -> None:
        state = self.state
        running = state.running[place]
        # The gradient was cancelled.
        if running is None or running[0] != data[0]:
            return
        job, start, end, version, params = running
        state.running[place] = None
        state.computed[place] += end - start
        self._record_event(DONE, place, place, COMPUTED)
        gradient, seconds = self.config.gradient(params, place, job), (end - start) / TICKS
        self._deliver(place, place, Message(COMPUTED, gradient, version, job, seconds))

    def _on_collective(self, place: int, data: tuple) -> None:
        state = self.state
        (group, tag), nbytes = data
        # A collective cannot complete while a member is down.
        if any(state.gone[member] >= 0 for member in group):
            state.late.append(data)
            return
        parts = state.collectives.pop((group, tag))
        values, op = [parts[member][0] for member in group], parts[group[0]][1]
        value = tuple(map(force, values)) if op == "gather" else mean_of(values)
        sizes = [nbytes_of(part) for part in values]
        for member, size in zip(group, sizes):
            if op == "gather":
                nbytes = sum(sizes) - size
            state.received[member] += nbytes
            self._record_event(COLLECTIVE, member, place, REDUCED, nbytes)
            self._deliver(member, member, Message(REDUCED, value, 0, tag))

    def _on_timer(self, place: int, data: tuple) -> None:
        if place == SERVER or self.state.gone[place] < 0:
            self._record_event(TIMER, place, place, TIMER_KIND)
            self._deliver(place, place, Message(TIMER_KIND, None, 0, data[0]))

    def _on_fault(self, place: int, data: tuple) -> None:
        """Fails a worker that is up, and recovers one that is down."""
        state = self.state
        _, down = data
        state.faults[place] += 1
        state.idle_faults += 1
        # The worker was up: it fails now, and recovers after `down` seconds.
        if state.gone[place] < 0:
            self._record_event(FAULT, place, place, "failed")
            self._cancel(place)
            state.gone[place] = state.tick
            self._push(state.tick + max(1, self._ticks(down)), FAULT, place, data)
            return
        self._record_event(FAULT, place, place, RECOVERED)
        state.down[place] += state.tick - state.gone[place]
        state.gone[place] = -1
        self._schedule_fault(place)
        # Collectives that had to wait for a failed member are tried again.
        late, state.late = state.late, []
        for waiting in late:
            self._push(state.tick, COLLECTIVE, waiting[0][0][0], waiting)
        self._deliver(place, place, Message(RECOVERED))

    def _on_evaluation(self, place: int, data: tuple) -> None:
        state, config = self.state, self.config
        assert config.evaluate is not None
        state.times.append(state.tick)
        state.losses.append(float(config.evaluate(force(self.final_model()))))
        self._push(state.tick + config.evaluate_ticks, EVALUATION, 0, ())

    # Indexed by event class, in the order of the constants in `trace`.
    EVENTS: ClassVar = (_on_fault, _on_message, _on_done, _on_collective, _on_timer, _on_evaluation)

    def _schedule_fault(self, place: int) -> None:
        if self.config.durations.outages is None:
            return
        if place not in self.outages:
            self.outages[place] = outages(self.config.durations, self.config.seed, place)
            # Two faults, a failure and a recovery, per outage.
            for _ in range(self.state.faults[place] // 2):
                next(self.outages[place])
        outage = next(self.outages[place], None)
        if outage is None:  # it never fails again
            return
        up, down = outage
        self._push(self.state.tick + max(1, self._ticks(up)), FAULT, place, (up, down))

    def final_model(self) -> Any:
        """Returns the rule's model: the server's, or the mean of the workers'."""
        config, roles = self.config, self.state.roles
        model = config.rule.server.params(roles[SERVER]) if config.rule.server else None
        if model is not None:
            return model
        # Replicated models are often one object, which needs no averaging.
        models = [config.rule.worker.params(role) for role in roles[: config.workers]]
        return models[0] if all(model is models[0] for model in models) else mean_of(models)

    def begin(self) -> None:
        """Starts all roles, and schedules the first failures and evaluation."""
        config, roles = self.config, self.state.roles
        first_actions = []
        # All roles exist before the first action is handled.
        for place in ([SERVER] if config.rule.server else []) + list(range(config.workers)):
            roles[place], actions = self.roles[place].init(Site(place, config.workers, config.seed), config.params)
            first_actions += [(place, action) for action in actions]
        for place, action in first_actions:
            self.ACTIONS[type(action)](self, place, action)
        for place in range(config.workers):
            self._schedule_fault(place)
        if config.evaluate is not None:
            self._push(0, EVALUATION, 0, ())

    def _waiting_places(self) -> dict[int, tuple[int, ...]]:
        """Returns the indices that each waiting place waits for; a place that computes does not wait."""
        idle = [place for place, running in enumerate(self.state.running) if running is None]
        places = [*idle, *([SERVER] if self.config.rule.server else [])]
        waiting = {place: self.roles[place].waits_for(self.state.roles[place]) for place in places}
        return {place: others for place, others in waiting.items() if others}

    def _check_alive(self, idle_limit: int) -> None:
        """Raises DeadlockError if no event is to come, or if many faults and their messages have led to no work."""
        state = self.state
        # A recovery may wake a worker, but not one whose next gradient is endless too.
        endless = tuple([i for i, running in enumerate(state.running) if running is not None])
        if state.idle_faults <= idle_limit or (state.live and not endless):
            if state.live or any(event[1] == FAULT for event in state.heap):
                return
        elif any(event[1] in _WORK for event in state.heap):
            return
        raise DeadlockError(self._waiting_places(), state.tick / TICKS, endless)

    def advance(self, until: int, is_complete: Callable[[ReplayState], bool] | None) -> None:
        """Processes events up to and including a tick, or until the run is complete."""
        state, handlers, limit = self.state, self.EVENTS, self.config.events_per_tick
        heap, pop, at, count = state.heap, heapq.heappop, state.tick, 0
        idle_limit = _IDLE_FAULTS * self.config.workers
        while is_complete is None or not is_complete(state):
            if not state.live or state.idle_faults > idle_limit:
                self._check_alive(idle_limit)
            # Events at `until` itself are processed.
            if heap[0][0] > until:
                # Never backwards, to a time that is before that of an earlier call.
                state.tick = max(state.tick, until)
                return
            tick, what, place, _, data = pop(heap)
            if what not in _PASSIVE:
                state.live -= 1
            if what in _WORK:
                state.idle_faults = 0
            count = count + 1 if tick == at else 1
            state.tick = at = tick
            if count > limit:
                raise TooManyEventsError(
                    f"more than {limit} events at {tick / TICKS:g} s: messages form a "
                    "zero-latency cycle; if they do not, raise events_per_tick"
                )
            handlers[what](self, place, data)


def begin_replay(config: ReplayConfig) -> ReplayState:
    """Returns the state before the first event."""
    workers, places = config.workers, config.workers + 1
    state = ReplayState(
        roles=[None] * places,
        running=[None] * workers,
        jobs=[0] * workers,
        gone=[-1] * workers,
        faults=[0] * workers,
        out_busy=[()] * places,
        in_busy=[()] * places,
        computed=[0] * workers,
        down=[0] * workers,
        sent=[0] * places,
        received=[0] * places,
    )
    engine = Engine(config, state)
    engine.begin()
    return engine.state
