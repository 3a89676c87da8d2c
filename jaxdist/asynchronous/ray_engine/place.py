"""One role of a rule where it runs: its state, its letters and its books. No process, no clock and no Ray in here."""

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, no_type_check

from ..protocol import (
    COMPUTED,
    REDUCED,
    SERVER,
    TIMER,
    After,
    Cancel,
    Compute,
    Counted,
    Message,
    Reduce,
    Role,
    Rule,
    Send,
    Site,
    Stepped,
)
from ..values import force, mean_of, nbytes_of
from .state import Books, Letter, PlaceState, Running

PART = "part"
ON_MESSAGE, ON_COMPUTED, ON_COLLECTIVE, ON_TIMER = 1, 2, 3, 4  # of `replay.trace.CLASSES`


@no_type_check
def _weight(value: Any) -> int:
    return sum(map(nbytes_of, value)) if type(value) is tuple else nbytes_of(value)  # a tuple is what was gathered


@no_type_check  # for every event
class Place:
    """A role in motion. What happens to it are the public methods; what it wants is in its state and in `post`.

    Letters are numbered on each link. They are read in order and once, whatever a network does with them, and stay in
    the outbox until they are acknowledged. Whoever runs a place keeps its state *before* it sends what `post` gives:
    then a process that dies can be replaced by another that goes on from what was kept, and nobody can tell. What was
    done since was seen by nobody, and its causes, not acknowledged, come again.

    Args:
      rule: the method.
      site: which place.
      params: the model to begin with.
      now: the time in ticks.
    """

    def __init__(self, rule: Rule, site: Site, params: Any, now: Callable[[], int]):
        self.site, self.params, self.now = site, params, now
        self.role: Role = rule.server if site.index == SERVER and rule.server else rule.worker
        self.name = rule.name
        self.state = PlaceState(None)
        self.books = Books([], [], [])
        self.changed = False
        self.own: deque[tuple[int, Message]] = deque()
        self.early: dict[int, dict[int, Letter]] = {}
        self.posted: dict[int, int] = {}
        self.owed: set[int] = set()

    # What happens.

    def begin(self) -> None:
        """Before anything else."""
        self.state.role, actions = self.role.init(self.site, self.params)
        self.act(actions)
        self.settle()

    def restore(self, content: dict[str, Any]) -> None:
        """Goes on from what was kept, instead of `begin`. The gradient in the making is begun again."""
        self.state = PlaceState(**content)
        if self.state.running is not None:
            self.state.running = self.state.running._replace(start=self.now())

    def arrive(self, source: int, letter: Letter) -> None:
        """A letter, perhaps again, perhaps before its turn."""
        seen = self.state.seen.get(source, 0)
        self.owed.add(source)
        if letter.number <= seen:
            return
        early = self.early.setdefault(source, {})
        early[letter.number] = letter
        while seen + 1 in early:
            seen += 1
            self.state.seen[source] = seen
            self.read(source, early.pop(seen))
            self.settle()

    def acknowledged(self, to: int, number: int) -> None:
        """What `to` has read, and kept."""
        letters = self.state.outbox.get(to, ())
        if letters and letters[0].number <= number:
            self.state.outbox[to] = tuple([letter for letter in letters if letter.number > number])

    def again(self, to: int) -> None:
        """What `to` has not acknowledged will be posted again: it was replaced, or could not be reached."""
        self.posted[to] = 0

    def computed(self, job: int, gradient: Any) -> None:
        """The gradient of a job; ignored if it was given up."""
        running = self.state.running
        if running is None or running.job != job:
            return
        self.stop_computing()
        self.record(ON_COMPUTED, self.site.index, COMPUTED)
        seconds = (self.now() - running.start) / 1e9
        self.own.append((self.site.index, Message(COMPUTED, gradient, running.version, job, seconds)))
        self.settle()

    def due(self) -> None:
        """Timers whose time has come."""
        now = self.now()
        for timer in sorted(one for one in self.state.timers if one[0] <= now):
            self.state.timers = tuple([one for one in self.state.timers if one is not timer])
            self.record(ON_TIMER, self.site.index, TIMER)
            self.own.append((self.site.index, Message(TIMER, None, 0, timer[1])))
            self.settle()

    def without(self, other: int) -> None:
        """Another place is gone for good: nothing is kept for it."""
        if other not in self.state.gone:
            self.state.gone = (*self.state.gone, other)
            self.state.outbox.pop(other, None)
            self.changed = True

    # What it wants.

    def post(self) -> dict[int, tuple[int, tuple[Letter, ...]]]:
        """For each place `(the last number read from it, letters)` to be sent now, after the state has been kept."""
        out = {}
        for to in {*self.owed, *self.state.outbox}.difference(self.state.gone):
            after = self.posted.get(to, 0)
            letters = tuple([letter for letter in self.state.outbox.get(to, ()) if letter.number > after])
            if letters or to in self.owed:
                out[to] = (self.state.seen.get(to, 0), letters)
                self.posted[to] = letters[-1].number if letters else after
        self.owed.clear()
        return out

    def content(self) -> dict[str, Any]:
        """What has to be kept, for `restore`."""
        return {one.name: getattr(self.state, one.name) for one in fields(self.state)}

    def take_books(self) -> Books:
        """The rows since the last call."""
        books, self.books = self.books, Books([], [], [])
        self.changed = False
        return books

    # What it does.

    def read(self, source: int, letter: Letter) -> None:
        message, nbytes = letter.message, _weight(letter.message.value)
        self.state.received += nbytes
        if not letter.group:
            self.record(ON_MESSAGE, source, message.kind, nbytes)
            self.own.append((source, message))
        elif message.kind == PART:
            self.record(ON_COLLECTIVE, source, PART, nbytes)
            self.meet(source, letter.group, message.tag, message.value, letter.op)
        else:
            self.record(ON_COLLECTIVE, source, REDUCED, nbytes)
            self.own.append((self.site.index, message))

    def settle(self) -> None:
        """Tells the role what there is to tell."""
        self.changed = True
        while self.own:
            sender, message = self.own.popleft()
            self.state.role, actions = self.role.receive(self.state.role, sender, message)
            self.act(actions)

    def act(self, actions: tuple) -> None:
        for action in actions:
            self.asked[type(action)](self, action)

    def record(self, what: int, sender: int, word: str, nbytes: int = 0) -> None:
        self.changed = True
        self.books.events.append((self.now(), what, self.site.index, sender, word, nbytes))

    def write(self, to: int, message: Message, group: tuple[int, ...] = (), op: str = "mean") -> None:
        state = self.state
        if to in state.gone:
            return
        number = state.numbers.get(to, 0) + 1
        state.numbers[to] = number
        state.outbox[to] = (*state.outbox.get(to, ()), Letter(number, message, group, op))
        state.sent[to] = state.sent.get(to, 0) + _weight(message.value)

    def send(self, action: Send) -> None:
        message = action.message._replace(value=force(action.message.value))
        if action.to == self.site.index:
            self.own.append((action.to, message))
        else:
            self.write(action.to, message)

    def compute(self, action: Compute) -> None:
        state = self.state
        if self.site.index == SERVER or state.running is not None:
            raise RuntimeError(f"place {self.site.index} of {self.name} computes already, or is the server")
        state.running = Running(state.jobs, self.now(), action.version, action.params)
        state.jobs += 1

    def stop_computing(self, action: Cancel | None = None) -> None:
        if self.state.running is not None:
            self.state.computed += self.now() - self.state.running.start
            self.state.running = None

    def reduce(self, action: Reduce) -> None:
        """Parts go to the first of the group, which sends all the result."""
        value, first = force(action.value), action.group[0]
        if first == self.site.index:
            self.meet(first, action.group, action.tag, value, action.op)
        else:
            self.write(first, Message(PART, value, 0, action.tag), action.group, action.op)

    def meet(self, source: int, group: tuple[int, ...], tag: int, value: Any, op: str) -> None:
        parts = self.state.parts.setdefault((group, tag), {})
        parts[source] = value
        if len(parts) < len(group):
            return
        del self.state.parts[group, tag]
        values = [parts[member] for member in group]
        result = Message(REDUCED, tuple(values) if op == "gather" else mean_of(values), 0, tag)
        for member in group[1:]:
            self.write(member, result, group)
        self.own.append((self.site.index, result))

    def after(self, action: After) -> None:
        due = self.now() + max(1, round(action.seconds * 10**9))
        self.state.timers = (*self.state.timers, (due, action.tag))

    def counted(self, action: Counted) -> None:
        self.books.gradients.append((self.now(), *action))

    def stepped(self, action: Stepped) -> None:
        self.books.steps.append((self.now(), *action))

    asked: ClassVar = {
        Send: send,
        Compute: compute,
        Cancel: stop_computing,
        Reduce: reduce,
        After: after,
        Counted: counted,
        Stepped: stepped,
    }
