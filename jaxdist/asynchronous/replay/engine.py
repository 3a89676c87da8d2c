"""The virtual clock: one event after the other, in an order that depends on nothing but the seed."""

import heapq
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, no_type_check

from ..durations.base import Durations, outages, stream
from ..links import Links
from ..protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    SERVER,
    After,
    Cancel,
    Compute,
    Counted,
    Message,
    Reduce,
    Rule,
    Send,
    Site,
    Stepped,
)
from ..protocol import TIMER as TIMER_KIND
from ..values import force, mean_of, nbytes_of
from .errors import Deadlock, TooManyEvents
from .state import COLLECTIVE, DONE, EVALUATION, FAULT, MESSAGE, TIMER, ReplayState, empty


class Setup(NamedTuple):
    """What a run has that never changes: `gradient(params, worker, job)`, `evaluate(params)` or None; whole ticks."""

    rule: Rule
    workers: int
    params: Any
    gradient: Callable[[Any, int, int], Any]
    evaluate: Callable[[Any], float] | None
    durations: Durations
    links: Links
    seed: int
    ticks_per_second: int
    evaluate_ticks: int
    events_per_tick: int
    record_events: bool


# Called for every event: the type checks of the test suite would take nearly all the time.
@no_type_check
class Engine:
    """One state in motion. Methods are what can happen; the loop is `advance`."""

    def __init__(self, setup: Setup, state: ReplayState):
        self.setup, self.state = setup, state
        self.roles = [setup.rule.worker] * setup.workers + ([setup.rule.server] if setup.rule.server else [])
        self.streams: dict[int, Iterator[float]] = {}
        self.faults: dict[int, Iterator[tuple[float, float]]] = {}

    def push(self, tick: int, what: int, place: int, data: tuple) -> None:
        state = self.state
        heapq.heappush(state.heap, (tick, what, place, state.sequence, data))
        state.sequence += 1
        if what != EVALUATION:
            state.live += 1

    def ticks(self, seconds: float) -> int:
        return round(seconds * self.setup.ticks_per_second)

    # What a role asks for.

    def send(self, place: int, action: Send) -> None:
        state, message, to = self.state, action.message, action.to
        nbytes = nbytes_of(message.value)
        arrival = state.tick
        seconds = self.setup.links.seconds
        if seconds is not None:
            start = max(arrival, state.link_free.get((place, to), 0))
            if self.setup.links.nic:
                start = max(start, state.out_free[place], state.in_free[to])
            arrival = start + self.ticks(seconds(place, to, nbytes))
            state.link_free[place, to] = arrival
            state.out_free[place] = state.in_free[to] = arrival
        if nbytes:
            state.sent[place] += nbytes
            state.links[place, to] = state.links.get((place, to), 0) + nbytes
        self.push(arrival, MESSAGE, to, (place, message, nbytes))

    def compute(self, place: int, action: Compute) -> None:
        state, setup = self.state, self.setup
        if place == SERVER or state.running[place] is not None:
            raise RuntimeError(f"place {place} of {setup.rule.name} computes already, or is the server")
        job = state.jobs[place]
        state.jobs[place] = job + 1
        if place not in self.streams:
            self.streams[place] = stream(setup.durations, setup.seed, place, job)
        seconds, start = next(self.streams[place]), state.tick
        if setup.durations.finish is not None:
            seconds = (
                setup.durations.finish(place, start / setup.ticks_per_second, seconds) - start / setup.ticks_per_second
            )
        end = -1  # never
        if seconds != float("inf"):
            end = start + max(1, self.ticks(seconds))
            self.push(end, DONE, place, (job,))
        state.running[place] = (job, start, end, action.version, action.params)

    def cancel(self, place: int, action: Cancel | None = None) -> None:
        running = self.state.running[place]
        if running is not None:
            self.state.computed[place] += self.state.tick - running[1]
            self.state.running[place] = None

    def reduce(self, place: int, action: Reduce) -> None:
        state, group = self.state, action.group
        key = (group, action.tag)
        parts = state.collectives.setdefault(key, {})
        parts[place] = (action.value, action.op, state.tick)
        if len(parts) == len(group):
            nbytes = nbytes_of(action.value)
            came = [tick for _, _, tick in parts.values()]
            lead = (came[-1] - came[-2:][0]) / self.setup.ticks_per_second  # none without others
            taken = self.ticks(self.setup.links.collective(group, nbytes, action.op, lead))
            n = len(group)
            each = (n - 1) * nbytes if action.op == "gather" else 2 * (n - 1) * nbytes // n
            for member in group:
                state.sent[member] += each
            self.push(state.tick + taken, COLLECTIVE, group[0], (key, each))

    def after(self, place: int, action: After) -> None:
        self.push(self.state.tick + max(1, self.ticks(action.seconds)), TIMER, place, (action.tag,))

    def counted(self, place: int, action: Counted) -> None:
        self.state.gradients.extend((self.state.tick, *action))

    def stepped(self, place: int, action: Stepped) -> None:
        self.state.steps.extend((self.state.tick, *action))

    asked: ClassVar = {
        Send: send,
        Compute: compute,
        Cancel: cancel,
        Reduce: reduce,
        After: after,
        Counted: counted,
        Stepped: stepped,
    }

    def tell(self, place: int, sender: int, message: Message) -> None:
        roles = self.state.roles
        roles[place], actions = self.roles[place].receive(roles[place], sender, message)
        asked = self.asked
        for action in actions:
            asked[type(action)](self, place, action)

    # What happens.

    def record(self, what: int, place: int, sender: int, kind: str, nbytes: int = 0) -> None:
        state = self.state
        if self.setup.record_events:
            word = state.words.setdefault(kind, len(state.words))
            state.events.extend((state.tick, what, place, sender, word, nbytes))

    def on_message(self, place: int, data: tuple) -> None:
        sender, message, nbytes = data
        if place != SERVER and self.state.gone[place] >= 0:
            return self.record(MESSAGE, place, sender, "lost", nbytes)
        self.state.received[place] += nbytes
        self.record(MESSAGE, place, sender, message.kind, nbytes)
        self.tell(place, sender, message)

    def on_done(self, place: int, data: tuple) -> None:
        state = self.state
        running = state.running[place]
        if running is None or running[0] != data[0]:
            return  # given up
        job, start, end, version, params = running
        state.running[place] = None
        state.computed[place] += end - start
        self.record(DONE, place, place, COMPUTED)
        gradient, seconds = self.setup.gradient(params, place, job), (end - start) / self.setup.ticks_per_second
        self.tell(place, place, Message(COMPUTED, gradient, version, job, seconds))

    def on_collective(self, place: int, data: tuple) -> None:
        state = self.state
        (group, tag), each = data
        if any(state.gone[member] >= 0 for member in group):
            state.late.append(data)
            return
        parts = state.collectives.pop((group, tag))
        values, op = [parts[member][0] for member in group], parts[group[0]][1]
        value = tuple(map(force, values)) if op == "gather" else mean_of(values)
        for member in group:
            state.received[member] += each
            self.record(COLLECTIVE, member, place, REDUCED, each)
            self.tell(member, member, Message(REDUCED, value, 0, tag))

    def on_timer(self, place: int, data: tuple) -> None:
        if place == SERVER or self.state.gone[place] < 0:
            self.record(TIMER, place, place, TIMER_KIND)
            self.tell(place, place, Message(TIMER_KIND, None, 0, data[0]))

    def on_fault(self, place: int, data: tuple) -> None:
        state = self.state
        _, down = data
        state.faults[place] += 1
        if state.gone[place] < 0:
            self.record(FAULT, place, place, "failed")
            self.cancel(place)
            state.gone[place] = state.tick
            self.push(state.tick + max(1, self.ticks(down)), FAULT, place, data)
            return
        self.record(FAULT, place, place, RECOVERED)
        state.down[place] += state.tick - state.gone[place]
        state.gone[place] = -1
        self.next_fault(place)
        late, state.late = state.late, []
        for waiting in late:
            self.push(state.tick, COLLECTIVE, waiting[0][0][0], waiting)
        self.tell(place, place, Message(RECOVERED))

    def on_evaluation(self, place: int, data: tuple) -> None:
        state, setup = self.state, self.setup
        assert setup.evaluate is not None
        state.times.append(state.tick)
        state.losses.append(float(setup.evaluate(force(self.model()))))
        self.push(state.tick + setup.evaluate_ticks, EVALUATION, 0, ())

    happens = (on_fault, on_message, on_done, on_collective, on_timer, on_evaluation)

    def next_fault(self, place: int) -> None:
        if self.setup.durations.outages is None:
            return
        if place not in self.faults:
            self.faults[place] = outages(self.setup.durations, self.setup.seed, place)
            for _ in range(self.state.faults[place] // 2):
                next(self.faults[place])
        up, down = next(self.faults[place])
        self.push(self.state.tick + max(1, self.ticks(up)), FAULT, place, (up, down))

    def model(self) -> Any:
        """What the rule would ship: the server's model, or the mean of the workers'."""
        setup, roles = self.setup, self.state.roles
        shipped = setup.rule.server.params(roles[SERVER]) if setup.rule.server else None
        if shipped is not None:
            return shipped
        models = [setup.rule.worker.params(role) for role in roles[: setup.workers]]
        return models[0] if all(model is models[0] for model in models) else mean_of(models)

    def begin(self) -> None:
        setup, roles = self.setup, self.state.roles
        started = []
        for place in ([SERVER] if setup.rule.server else []) + list(range(setup.workers)):
            roles[place], actions = self.roles[place].init(Site(place, setup.workers, setup.seed), setup.params)
            started.append((place, actions))
        for place, actions in started:
            for action in actions:
                self.asked[type(action)](self, place, action)
        for place in range(setup.workers):
            self.next_fault(place)
        if setup.evaluate is not None:
            self.push(0, EVALUATION, 0, ())

    def waiting(self) -> dict[int, tuple[int, ...]]:
        """Who waits for whom."""
        found = {}
        for place in [*range(self.setup.workers), *([SERVER] if self.setup.rule.server else [])]:
            running = self.state.running[place] if place != SERVER else None
            whom = self.roles[place].waits_for(self.state.roles[place])
            if whom and running is None:
                found[place] = whom
        return found

    def advance(self, until: int, enough: Callable[[ReplayState], bool] | None) -> None:
        """Until a tick (its events included), or until enough has happened."""
        state, happens, limit = self.state, self.happens, self.setup.events_per_tick
        heap, pop, at, count = state.heap, heapq.heappop, state.tick, 0
        while enough is None or not enough(state):
            if not state.live:
                endless = tuple([i for i, running in enumerate(state.running) if running is not None])
                raise Deadlock(self.waiting(), state.tick / self.setup.ticks_per_second, endless)
            if heap[0][0] > until:
                state.tick = until
                return
            tick, what, place, _, data = pop(heap)
            if what != EVALUATION:
                state.live -= 1
            count = count + 1 if tick == at else 1
            state.tick = at = tick
            if count > limit:
                raise TooManyEvents(
                    f"more than {limit} events at {tick / self.setup.ticks_per_second:g} s: messages go in a circle, "
                    "in no time; if they do not, raise events_per_tick"
                )
            happens[what](self, place, data)


def begun(setup: Setup) -> ReplayState:
    """The state before the first event."""
    engine = Engine(setup, empty(setup.workers))
    engine.begin()
    return engine.state
