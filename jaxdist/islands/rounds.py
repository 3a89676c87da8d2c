"""What an island does next in a round, from the names that it sees and its own clock. Pure: no store, no devices."""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .records import Commit, Drift, Member


class Next(enum.Enum):
    """The next action: read the commit, create it, or look again later."""

    READ = "read"
    COMMIT = "commit"
    WAIT = "wait"


class Seen(NamedTuple):
    """The names of one round: whether it is committed, and the islands that sent a drift, are here, or have left."""

    committed: bool
    drifts: frozenset[str]
    here: frozenset[str]
    left: frozenset[str]


def see(names: Iterable[str]) -> Seen:
    """Sorts the names below a round, `drift/NAME` and so on."""
    found: dict[str, set[str]] = {"drift": set(), "here": set(), "left": set()}
    committed = False
    for name in names:
        kind, _, island = name.partition("/")
        committed |= kind == "commit"
        if kind in found:
            found[kind].add(island)
    return Seen(committed, *(frozenset(found[kind]) for kind in ("drift", "here", "left")))


def missing_islands(seen: Seen, expected: Iterable[str]) -> frozenset[str]:
    """Islands whose drifts this round waits for: those that the last commit expects, and those that are here."""
    return (frozenset(expected) | seen.here) - seen.left - seen.drifts


def decide(
    seen: Seen, expected: Iterable[str], *, elapsed: float | int, round_timeout: float | int, at_least: int, quorum: int
) -> Next:
    """The next action of an island whose own drift is in the store.

    A commit ends the round for all, even if some are missing. It is due when nothing is left to wait for, or
    `round_timeout` seconds after one's own drift, on one's own clock; never with fewer than `quorum` drifts.

    Args:
      seen: the names of the round.
      expected: the islands that the last commit expects.
      elapsed: seconds since one's own drift.
      round_timeout: how long to wait for others, in seconds.
      at_least: the number of drifts to wait for in the first round.
      quorum: the fewest drifts that make a round.
    """
    if seen.committed:
        return Next.READ
    complete = not missing_islands(seen, expected) and len(seen.drifts) >= at_least
    if len(seen.drifts) >= quorum and (complete or elapsed >= round_timeout):
        return Next.COMMIT
    return Next.WAIT


def make_commit(
    seen: Seen, expected: Iterable[str], drifts: Mapping[str, Drift], damaged: Iterable[str], own_base: str
) -> Commit:
    """The commit of these drifts, in the order of names.

    Drifts start from the global parameters of the round; where they differ, those that most of them start from count
    (one's own among equals), since sums of different starts would mean nothing.
    """
    damaged = frozenset(damaged)
    sound = {name: drift for name, drift in sorted(drifts.items()) if name not in damaged}
    bases = [drift.base for drift in sound.values()]
    base = max(sorted(set(bases)), key=lambda one: (bases.count(one), one == own_base), default=own_base)
    members = {name: drift for name, drift in sound.items() if drift.base == base}
    return Commit(
        base=base,
        members=tuple(Member(name, drift.body, drift.weight, drift.rate) for name, drift in members.items()),
        missing=tuple(sorted(missing_islands(seen, expected))),
        differing=tuple(sorted(set(sound) - set(members))),
        damaged=tuple(sorted(damaged)),
        expected=tuple(sorted(name for name, drift in drifts.items() if drift.waited and not drift.leaving)),
    )
