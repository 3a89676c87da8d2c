"""Runs one role of a rule on reliable, ordered links, without processes, a clock or Ray."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, no_type_check

from ..protocol import (
    COMPUTED,
    REDUCED,
    SERVER,
    After,
    Cancel,
    Compute,
    GradientRecord,
    Message,
    Reduce,
    Role,
    Rule,
    Send,
    Site,
    StepRecord,
)
from ..protocol import TIMER as TIMER_KIND
from ..replay.base import COLLECTIVE, DONE, MESSAGE, TIMER
from ..values import force, mean_of, nbytes_of

# The kind of a contribution to a collective, on its way to the first member of the group.
PART = "part"


class Envelope(NamedTuple):
    """A message and its number on its link, from 1; a contribution to or result of a collective names the group."""

    number: int
    message: Message
    group: tuple[int, ...] = ()
    op: str = "mean"


class RunningGradient(NamedTuple):
    """The gradient that is running: the worker's job count, its start, and its model."""

    job: int
    start: int
    version: int
    params: Any


@dataclass
class RunnerState:
    """The state that has to be stored, so that another process can continue a role.

    Attributes:
      role: the state of the rule's role.
      running: the running gradient, or None; `jobs` counts the gradients begun.
      numbers: the number of the last envelope to each destination.
      seen: the number of the last envelope read from each source.
      outbox: for each destination, the envelopes that it has not acknowledged, in order.
      parts: the contributions to the collectives of which this role is the first member, by `(group, tag)`.
      timers: `(tick, tag)`.
      gone: places that are gone for good.
      sent, received, computed: bytes to each place, bytes received, and ticks of computation.
    """

    role: Any
    running: RunningGradient | None = None
    jobs: int = 0
    numbers: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    outbox: dict[int, tuple[Envelope, ...]] = field(default_factory=dict)
    parts: dict[tuple[tuple[int, ...], int], dict[int, Any]] = field(default_factory=dict)
    timers: tuple[tuple[int, int], ...] = ()
    gone: tuple[int, ...] = ()
    sent: dict[int, int] = field(default_factory=dict)
    received: int = 0
    computed: int = 0


class Records(NamedTuple):
    """Rows of the columns of a trace; message kinds of events are strings."""

    events: list[tuple[Any, ...]]
    gradients: list[tuple[Any, ...]]
    steps: list[tuple[Any, ...]]


@no_type_check
def _nbytes(value: Any) -> int:
    # A tuple is the result of a gather.
    return sum(map(nbytes_of, value)) if type(value) is tuple else nbytes_of(value)


# Called for every event: the runtime type checks of the tests would take most of the time.
@no_type_check
class RoleRunner:
    """Runs a role. The public methods are the events that reach it; its actions are in its state and in `post`.

    Envelopes are numbered on each link. They are read in order and once, even if the network repeats, reorders or loses
    them, and remain in the outbox until they are acknowledged. The caller must store the state *before* it sends the
    result of `post`. Then a process that dies can be replaced by another that continues from the stored state, and no
    other place notices: events after that state had no visible effect, and their envelopes, which were not
    acknowledged, are sent again.

    `params` is the initial model, and `now` returns the time in ticks.
    """

    def __init__(self, rule: Rule, site: Site, params: Any, now: Callable[[], int]):
        self.site, self.params, self.now = site, params, now
        self.role: Role = rule.server if site.index == SERVER and rule.server else rule.worker
        self.name = rule.name
        self.state = RunnerState(None)
        self.records = Records([], [], [])
        # Whether the state must be stored before the next `post`.
        self.changed = False
        # The rest is not stored, since others send again what a dead process did not acknowledge: messages that are
        # ready for the role, envelopes that arrived early, the number of the last envelope posted to each place, and
        # the places that wait for an acknowledgment.
        self.ready: deque[tuple[int, Message]] = deque()
        self.early: dict[int, dict[int, Envelope]] = {}
        self.posted: dict[int, int] = {}
        self.unacknowledged: set[int] = set()

    # Events.

    def begin(self) -> None:
        """Starts the role."""
        self.state.role, actions = self.role.init(self.site, self.params)
        self._perform(actions)
        self._deliver_ready()

    def restore(self, content: dict[str, Any]) -> None:
        """Continues from a stored state, instead of `begin`. The running gradient is started again."""
        self.state = RunnerState(**content)
        if self.state.running is not None:
            self.state.running = self.state.running._replace(start=self.now())

    def arrive(self, source: int, envelope: Envelope) -> None:
        """Accepts an envelope, which may be repeated or early."""
        seen = self.state.seen.get(source, 0)
        self.unacknowledged.add(source)
        if envelope.number <= seen:
            return
        early = self.early.setdefault(source, {})
        early[envelope.number] = envelope
        # Envelopes are read in order: one that fills a gap releases those behind it.
        while seen + 1 in early:
            seen += 1
            self.state.seen[source] = seen
            self._read(source, early.pop(seen))
            self._deliver_ready()

    def acknowledge(self, to: int, number: int) -> None:
        """Drops the envelopes that `to` has read and stored."""
        outbox = self.state.outbox.get(to, ())
        if outbox and outbox[0].number <= number:
            self.state.outbox[to] = tuple([envelope for envelope in outbox if envelope.number > number])

    def resend(self, to: int) -> None:
        """Posts unacknowledged envelopes again, since `to` was replaced or could not be reached."""
        self.posted[to] = 0

    def on_gradient(self, job: int, gradient: Any) -> None:
        """Accepts the gradient of a job; ignores it if the job was cancelled."""
        running = self.state.running
        if running is None or running.job != job:
            return
        self._cancel()
        self._record_event(DONE, self.site.index, COMPUTED)
        seconds = (self.now() - running.start) / 1e9
        self.ready.append((self.site.index, Message(COMPUTED, gradient, running.version, job, seconds)))
        self._deliver_ready()

    def fire_timers(self) -> None:
        """Delivers the timers that are due."""
        now = self.now()
        for timer in sorted(timer for timer in self.state.timers if timer[0] <= now):
            self.state.timers = tuple([other for other in self.state.timers if other is not timer])
            self._record_event(TIMER, self.site.index, TIMER_KIND)
            self.ready.append((self.site.index, Message(TIMER_KIND, None, 0, timer[1])))
            self._deliver_ready()

    def forget(self, other: int) -> None:
        """Drops all envelopes to a place that is gone for good."""
        if other not in self.state.gone:
            self.state.gone = (*self.state.gone, other)
            self.state.outbox.pop(other, None)
            self.changed = True

    # Results.

    def post(self) -> dict[int, tuple[int, tuple[Envelope, ...]]]:
        """Returns `(number of the last envelope read from it, envelopes)` to send to each place, after storing."""
        out = {}
        for to in {*self.unacknowledged, *self.state.outbox}.difference(self.state.gone):
            after = self.posted.get(to, 0)
            envelopes = tuple([envelope for envelope in self.state.outbox.get(to, ()) if envelope.number > after])
            if envelopes or to in self.unacknowledged:
                out[to] = (self.state.seen.get(to, 0), envelopes)
                self.posted[to] = envelopes[-1].number if envelopes else after
        self.unacknowledged.clear()
        return out

    def content(self) -> dict[str, Any]:
        """Returns the state to store, for `restore`."""
        return {entry.name: getattr(self.state, entry.name) for entry in fields(self.state)}

    def take_records(self) -> Records:
        """Returns the records since the last call."""
        records, self.records = self.records, Records([], [], [])
        self.changed = False
        return records

    # Messages to the role.

    def _read(self, source: int, envelope: Envelope) -> None:
        message, nbytes = envelope.message, _nbytes(envelope.message.value)
        self.state.received += nbytes
        if not envelope.group:
            self._record_event(MESSAGE, source, message.kind, nbytes)
            self.ready.append((source, message))
        elif message.kind == PART:
            self._record_event(COLLECTIVE, source, PART, nbytes)
            self._add_part(source, envelope.group, message.tag, message.value, envelope.op)
        else:
            self._record_event(COLLECTIVE, source, REDUCED, nbytes)
            self.ready.append((self.site.index, message))

    def _deliver_ready(self) -> None:
        """Delivers the ready messages to the role, and performs its actions."""
        self.changed = True
        while self.ready:
            sender, message = self.ready.popleft()
            self.state.role, actions = self.role.receive(self.state.role, sender, message)
            self._perform(actions)

    def _record_event(self, what: int, sender: int, word: str, nbytes: int = 0) -> None:
        self.changed = True
        self.records.events.append((self.now(), what, self.site.index, sender, word, nbytes))

    # Actions of the role.

    def _perform(self, actions: tuple) -> None:
        for action in actions:
            self.ACTIONS[type(action)](self, action)

    def _enqueue(self, to: int, message: Message, group: tuple[int, ...] = (), op: str = "mean") -> None:
        state = self.state
        if to in state.gone:
            return
        number = state.numbers.get(to, 0) + 1
        state.numbers[to] = number
        state.outbox[to] = (*state.outbox.get(to, ()), Envelope(number, message, group, op))
        state.sent[to] = state.sent.get(to, 0) + _nbytes(message.value)

    def _send(self, action: Send) -> None:
        message = action.message._replace(value=force(action.message.value))
        if action.to == self.site.index:
            self.ready.append((action.to, message))
        else:
            self._enqueue(action.to, message)

    def _compute(self, action: Compute) -> None:
        state = self.state
        if self.site.index == SERVER or state.running is not None:
            raise RuntimeError(f"place {self.site.index} of {self.name} is computing already, or is the server")
        state.running = RunningGradient(state.jobs, self.now(), action.version, action.params)
        state.jobs += 1

    def _cancel(self, action: Cancel | None = None) -> None:
        if self.state.running is not None:
            self.state.computed += self.now() - self.state.running.start
            self.state.running = None

    def _reduce(self, action: Reduce) -> None:
        """Sends the contribution to the first member of the group, which sends the result to all others."""
        value, first = force(action.value), action.group[0]
        if first == self.site.index:
            self._add_part(first, action.group, action.tag, value, action.op)
        else:
            self._enqueue(first, Message(PART, value, 0, action.tag), action.group, action.op)

    def _add_part(self, source: int, group: tuple[int, ...], tag: int, value: Any, op: str) -> None:
        parts = self.state.parts.setdefault((group, tag), {})
        parts[source] = value
        if len(parts) < len(group):
            return
        del self.state.parts[group, tag]
        values = [parts[member] for member in group]
        result = Message(REDUCED, tuple(values) if op == "gather" else mean_of(values), 0, tag)
        # This role is the first member: it distributes the result.
        for member in group[1:]:
            self._enqueue(member, result, group)
        self.ready.append((self.site.index, result))

    def _after(self, action: After) -> None:
        due = self.now() + max(1, round(action.seconds * 10**9))
        self.state.timers = (*self.state.timers, (due, action.tag))

    def _record_gradient(self, action: GradientRecord) -> None:
        self.records.gradients.append((self.now(), *action))

    def _record_step(self, action: StepRecord) -> None:
        self.records.steps.append((self.now(), *action))

    ACTIONS: ClassVar = {
        Send: _send,
        Compute: _compute,
        Cancel: _cancel,
        Reduce: _reduce,
        After: _after,
        GradientRecord: _record_gradient,
        StepRecord: _record_step,
    }
