"""An asynchronous method as pure functions: what one worker or the server does when something arrives."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .._core.types import Number, PyTree

SERVER = -1
COMPUTED, REDUCED, TIMER, RECOVERED = "computed", "reduced", "timer", "recovered"


class Message(NamedTuple):
    """What one role sends to another, or the engine tells one.

    Attributes:
      kind: a word of the rule's, or of the engine's: `"computed"` (the gradient of a `Compute`), `"reduced"` (the
        result of a `Reduce`), `"timer"` and `"recovered"`.
      value: a pytree of arrays, which a compressor can encode, or None.
      version: which model the value belongs to: for `"computed"` that of the `Compute`.
      tag: one more number: for `"computed"` the worker's own count of jobs.
      seconds: for `"computed"` how long it took, on the virtual clock or measured.
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
    """Start a gradient at this model; `"computed"` arrives when it is done. One at a time."""

    params: Any
    version: int = 0


class Cancel(NamedTuple):
    """Give up the gradient in the making, if any: it never arrives, but its data are used up."""


class Reduce(NamedTuple):
    """Take part in a collective of `group` (in increasing order); all get `"reduced"` at once when all took part.

    Attributes:
      group: the workers, each of which asks for the same.
      tag: tells collectives of the same group apart.
      value: this worker's part.
      op: `"mean"`, or `"gather"`, which gives a tuple of all parts in the group's order.
    """

    group: tuple[int, ...]
    tag: int
    value: Any
    op: Literal["mean", "gather"] = "mean"


class After(NamedTuple):
    """`"timer"` with this tag arrives in so many seconds."""

    seconds: Number
    tag: int = 0


class Counted(NamedTuple):
    """For the books: a gradient of `worker` at version `read` met version `version`, and was used or thrown away."""

    worker: int
    read: int
    version: int
    accepted: bool = True


class Stepped(NamedTuple):
    """For the books: the model became `version`, with no gradient in the step older than version `oldest`."""

    version: int
    oldest: int


Action = Send | Compute | Cancel | Reduce | After | Counted | Stepped
Actions = tuple[Any, ...]


class Site(NamedTuple):
    """Where a role runs: its number (`SERVER` for the server), the number of workers, and the seed of the run."""

    index: int
    workers: int
    seed: int = 0


class Role(NamedTuple):
    """What runs at one place, with no view of the others but by messages.

    A state is a NamedTuple of plain numbers, tuples and values; decisions follow from numbers and kinds alone, never
    from arrays, so that a replay without numerics decides alike.

    Attributes:
      init: `init(site, params) -> (state, actions)`, before anything happens.
      receive: `receive(state, sender, message) -> (state, actions)`. The engine's own messages come from oneself.
      params: `params(state)`, the model as this role has it.
      waits_for: `waits_for(state)`, whom it waits for; empty if it does not wait. For the report of a deadlock.
    """

    init: Callable[[Site, PyTree], tuple[Any, Actions]]
    receive: Callable[[Any, int, Message], tuple[Any, Actions]]
    params: Callable[[Any], Any]
    waits_for: Callable[[Any], tuple[int, ...]] = lambda state: ()


class Rule(NamedTuple):
    """An asynchronous method: the roles of its workers and, if it has one, of its server or coordinator.

    The same rule runs on the virtual clock of `replay` and on real processes. The model that it would ship is the
    server's; without a server, or if `server.params` gives None, the mean of the workers'.

    Attributes:
      name: for messages and plots.
      worker: what each worker does.
      server: what `SERVER` does; None if there is none.
    """

    name: str
    worker: Role
    server: Role | None = None
