"""What an island is told, what a meeting reports, and the exceptions of both."""

from typing import Literal, NamedTuple

from .._core.checks import Portable

Moments = Literal["own", "fresh"]


class Report(NamedTuple):
    """What a meeting found.

    Attributes:
      round: the round that this island takes part in next.
      members: the islands whose drifts the last round took.
      missing: those that it waited for in vain.
      counted: whether this island's drift is among them.
      late: whether a round had ended before this island's drift came; the progress is kept, and sent again.
      offline: whether the store was out of reach; the progress is kept.
      uploading: whether this island's drift is still on its way into the store; it counts in a later round.
      nonfinite: whether this island's parameters were not finite; it has taken the global parameters instead, and its
        inner optimizer has the moments of `init` again.
      expected: the islands that the last round waited for or took.
      examples: of this island's drift, if it was counted: all that it was trained on, in several rounds if its upload
        took so long.
      wait_seconds: the time in `meet`.
      sent_bytes: bytes that went into the store.
      received_bytes: bytes that came out of it.
      requests: the number of requests to the store since the last report.
      retries: those of them that repeated one that had failed.
      problem: of the last request that failed since the last report; `None` if none did.
      digest: a short name for the bits of the global parameters and the outer optimizer's state.
      fragment: of the round before `round`, which `members`, `missing` and `counted` are about where this meeting took
        it; `None` before the first.
    """

    round: int
    members: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    counted: bool = False
    late: bool = False
    offline: bool = False
    uploading: bool = False
    nonfinite: bool = False
    expected: tuple[str, ...] = ()
    examples: float = 0.0
    wait_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0
    retries: int = 0
    problem: str | None = None
    digest: str = ""
    fragment: int | None = None


class JoinOptions(NamedTuple):
    """The arguments of `join`, checked."""

    name: str
    place: str
    on_disk: bool
    round_timeout: float
    begin_with: int
    quorum: int
    grace: float
    patience: float
    overlap: bool
    eager: bool
    keep_every: int
    owners: int
    begin: bool
    moments: Moments


class IslandError(Portable, RuntimeError):
    """The base of the exceptions of `jaxdist.islands`."""


class StoreUnusableError(IslandError):
    """The store cannot create a name if, and only if, it is absent, or refuses to be read or written."""


class RunMismatchError(IslandError):
    """The store has another run than this island's, or one of another model, method or format; it names the two."""


class RunMissingError(IslandError, ValueError):
    """There is no run in the store, and `begin=False`; or there are rounds of one, and its description is gone."""


class NameTakenError(IslandError):
    """A newer process has joined under the same name: this one must stop, and has written nothing since."""


class AnchorDiffersError(IslandError):
    """The global parameters of an island differ from those of the run again and again: other hardware, or a defect."""


class OfflineError(IslandError):
    """The store was out of reach, refused requests, or did not end an upload, for `patience` seconds; it says why."""


class TooFewIslandsError(IslandError):
    """Fewer islands than `quorum` (or `begin_with`, at the start) were there for `patience` seconds."""


class DamagedError(IslandError):
    """Bytes in the store are not those that were written. Its message says which name and why."""
