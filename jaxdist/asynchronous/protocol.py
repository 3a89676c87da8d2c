"""The interface of an asynchronous method: roles as pure state machines, their messages and the actions they return."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .._core.types import Number, PyTree

# The index of the server or coordinator; workers are numbered from 0.
SERVER = -1
# The kinds of the messages that an engine delivers. All other kinds belong to the rule.
COMPUTED, REDUCED, TIMER, RECOVERED = "computed", "reduced", "timer", "recovered"


class Message(NamedTuple):
    """A message from one role to another, or from the engine to a role.

    Attributes:
      kind: chosen by the rule, or by the engine: `"computed"` (the gradient of a `Compute`), `"reduced"` (the result of
        a `Reduce`), `"timer"` and `"recovered"`.
      value: a pytree of arrays, which a compressor can encode, or None.
      version: the version of the model that the value belongs to: for `"computed"` that of the `Compute`.
      tag: one more number: for `"computed"` the worker's job count.
      seconds: for `"computed"` the duration of the computation, simulated or measured.
    """

    kind: str
    value: Any = None
    version: int = 0
    tag: int = 0
    seconds: float = 0.0


class Send(NamedTuple):
    """Send a message to a worker or to `SERVER`."""

    to: int
    message: Message


class Compute(NamedTuple):
    """Start a gradient at these parameters; `"computed"` arrives when it is done. A worker runs one at a time."""

    params: Any
    version: int = 0


class Cancel(NamedTuple):
    """Discard the running gradient, if any: `"computed"` never arrives for it, but its data count as used."""


class Reduce(NamedTuple):
    """Join a collective of `group` (sorted); once all members have joined, each of them receives `"reduced"`.

    `tag` distinguishes collectives of the same group. The result of `"gather"` is a tuple of all contributions, in the
    group's order.
    """

    group: tuple[int, ...]
    tag: int
    value: Any
    op: Literal["mean", "gather"] = "mean"


class After(NamedTuple):
    """Set a timer: `"timer"` with this tag arrives after the given number of seconds."""

    seconds: Number
    tag: int = 0


class GradientRecord(NamedTuple):
    """Log record: a gradient of `worker`, computed at version `read`, was applied or discarded at version `version`."""

    worker: int
    read: int
    version: int
    accepted: bool = True


class StepRecord(NamedTuple):
    """Log record: the model became `version`; the oldest gradient in the step was computed at version `oldest`."""

    version: int
    oldest: int


Action = Send | Compute | Cancel | Reduce | After | GradientRecord | StepRecord
Actions = tuple[Any, ...]
# The next state of a role, and its actions.
Reaction = tuple[Any, Actions]


class Site(NamedTuple):
    """The position of a role: its index (`SERVER` for the server), the number of workers, and the seed of the run."""

    index: int
    workers: int
    seed: int = 0


class Role(NamedTuple):
    """The behavior of one worker or of the server, which sees the others only through messages.

    A state is a NamedTuple of plain numbers, tuples and values. Decisions depend on numbers and message kinds, never on
    array contents, so that a replay without numerics takes the same decisions.

    Attributes:
      init: `init(site, params) -> (state, actions)`, before the first event.
      receive: `receive(state, sender, message) -> (state, actions)`. For the engine's messages `sender` is the role's
        own index.
      params: `params(state)`, the role's current model.
      waits_for: `waits_for(state)`, the indices that it waits for; empty if it is not waiting. For deadlock reports.
    """

    init: Callable[[Site, PyTree], Reaction]
    receive: Callable[[Any, int, Message], Reaction]
    params: Callable[[Any], Any]
    waits_for: Callable[[Any], tuple[int, ...]] = lambda state: ()


class Rule(NamedTuple):
    """An asynchronous method: the role of its workers and, if it has one, that of its server or coordinator.

    The same rule runs on the virtual clock of `replay` and on real processes. Its final model is the server's; without
    a server, or if `server.params` returns None, the mean of the workers' models.
    """

    name: str
    worker: Role
    server: Role | None = None
