"""When an island that waits for the end of a round looks into the store: a few times, however long the wait is.

Islands of unequal speed wait alike in each round. So the first look comes when most of the shortest of the last waits
is over, the next ones soon after it, and later ones at growing distances.
"""

from collections.abc import Collection

# Waits that are remembered: one of them may be that of a round that something held up.
REMEMBERED_WAITS = 4
# The part of the shortest of them before the first look.
FIRST_LOOK = 0.8
# The longest pause as a part of the wait so far, which is also the part by which a look may come late.
LATENESS = 0.125
# Before another island commits in the place of the one whose turn it is, that one has had so many times what it needs.
TURNS = 4


class Looks:
    """The looks of one island at one round. All times are seconds, on the clock of the island.

    Args:
      waits: for how long it waited for the drifts of others in the last rounds.
      started: when it begins to wait.
      sent_at: when its own drift came into the store.
      request: how long a request takes.
      members: the number of islands that are expected.
      is_first: whether it is this island's turn to commit.
      longest: a pause that is short in any case.

    Attributes:
      pause: before the first look.
    """

    def __init__(
        self,
        waits: Collection[float],
        *,
        started: float,
        sent_at: float,
        request: float,
        members: int,
        is_first: bool,
        longest: float,
    ):
        self._started, self._longest, self._is_first = started, longest, is_first
        # The island whose turn it is lists the round, reads records and bodies, and creates the commit.
        self._turn = min((2 * members + 1) * request, 2 * longest)
        usual = min(waits, default=0.0)
        self.pause = FIRST_LOOK * usual
        if not is_first:
            self.pause += max(self._turn - (started - sent_at), 0.0)
        self._next_pause = max(request, LATENESS * self.pause)
        self._lists_at = started + (1 + 2 * LATENESS) * usual + TURNS * self._turn

    def is_for_all(self, now: float) -> bool:
        """Whether this look is for the drifts of all islands, and not for the commit alone."""
        return self._is_first or now >= self._lists_at

    def listed(self, now: float, *, is_due: bool) -> None:
        """Says that such a look was made, and whether a commit was due."""
        waited = now - self._started
        self._lists_at = now + (TURNS * self._turn if is_due else waited)

    def next_pause(self, now: float) -> float:
        """The pause after a look."""
        pause = self._next_pause
        self._next_pause = min(2 * pause, max(self._longest, LATENESS * (now - self._started)))
        return pause

    def seconds_for_others(self, now: float) -> float:
        """How long the others took, where the round has ended now."""
        return max(now - self._started - (0.0 if self._is_first else self._turn), 0.0)
