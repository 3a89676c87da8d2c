"""What an island is told, and what a meeting tells."""

from typing import NamedTuple


class Report(NamedTuple):
    """What a meeting found.

    Attributes:
      round: the round that this island takes part in next.
      members: the islands whose drifts the last round took.
      missing: those that it waited for in vain.
      counted: whether this island's drift is among them.
      late: whether a round had ended before this island's drift came; the progress is kept, and sent again.
      offline: whether the store was out of reach; the progress is kept.
      nonfinite: whether this island's parameters were not finite; it has taken the global parameters instead.
      wait_seconds: the time in `meet`.
      sent_bytes: bytes that went into the store.
      received_bytes: bytes that came out of it.
      digest: a short name for the bits of the global parameters and the outer optimizer's state.
    """

    round: int
    members: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    counted: bool = False
    late: bool = False
    offline: bool = False
    nonfinite: bool = False
    wait_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    digest: str = ""


class JoinOptions(NamedTuple):
    """The arguments of `join`, checked."""

    name: str
    round_timeout: float
    begin_with: int
    quorum: int
    patience: float
    overlap: bool
    keep_every: int
