"""When an island that waits for the end of a round looks into the store: a few times, however long the wait is.

Islands of unequal speed wait alike in each round. So the first look comes when most of the shortest of the last waits
is over, the next ones soon after it, and later ones at growing distances. With a grace it comes when that may be over,
which is so if the quorum was there from the start; and later ones are close enough to tell when it begins.
"""

import math
from collections.abc import Collection

# Waits that are remembered: one of them may be that of a round that something held up.
REMEMBERED_WAITS = 4
# The part of the shortest of them before the first look.
FIRST_LOOK = 0.8
# The longest pause as a part of the wait so far, or of the grace, which is also the part by which a look may come late.
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
      enough: the number of drifts with which the grace of those that are missing begins.
      grace: how long that is; infinite if they have all the time.
      is_first: whether it is this island's turn to commit.
      longest: a pause that is short in any case.

    Attributes:
      pause: before the first look.
      few_at: the last time at which there were not enough drifts, as far as this island knows: of its last look that
        found too few, or of its own drift.
    """

    def __init__(
        self,
        waits: Collection[float],
        *,
        started: float,
        sent_at: float,
        request: float,
        members: int,
        enough: int,
        grace: float,
        is_first: bool,
        longest: float,
    ):
        self._started, self._is_first = started, is_first
        # The island whose turn it is lists the round, reads records and bodies, and creates the commit.
        self._turn = min((2 * members + 1) * request, 2 * longest)
        self._longest = min(longest, max(LATENESS * grace, LATENESS * longest))
        self._enough, self._grace, self.few_at = enough, grace, sent_at
        # When the grace is over, as far as that is known.
        self._due_at = sent_at + grace
        usual = min(waits, default=0.0)
        self._usual_at = started + FIRST_LOOK * usual
        self._usual_list_at = started + (1 + 2 * LATENESS) * usual
        self.pause = max(min(self._usual_at, self._due_at) - started, 0.0)
        if not is_first:
            self.pause += max(self._turn - (started - sent_at), 0.0)
        self._next_pause = max(request, LATENESS * self.pause)
        self._lists_at = min(self._usual_list_at, max(self._due_at, started)) + TURNS * self._turn

    def is_for_all(self, now: float) -> bool:
        """Whether this look is for the drifts of all islands, and not for the commit alone."""
        return self._is_first or now >= self._lists_at

    def listed(self, now: float, count: int) -> None:
        """Says that such a look has found so many drifts."""
        if count < self._enough:
            self.few_at, self._due_at = now, math.inf
        else:
            self._due_at = self.few_at + self._grace

    def decided(self, now: float, *, is_due: bool) -> None:
        """Says whether a commit was due after it."""
        later = min(max(2 * now - self._started, self._usual_list_at), self._due_at)
        self._lists_at = now + TURNS * self._turn if is_due else later

    def next_pause(self, now: float) -> float:
        """The pause after a look."""
        pause = self._next_pause
        self._next_pause = min(2 * pause, max(self._longest, LATENESS * (now - self._started)))
        if now < self._due_at < math.inf:
            return min(pause, self._due_at - now)
        # Too few drifts: that was a look of the grace alone.
        return max(pause, self._usual_at - now) if self._due_at == math.inf else pause

    def seconds_for_others(self, now: float) -> float:
        """How long the others took, where the round has ended now.

        With a grace the island whose turn it is remembers for how long they were too few: its next first look should
        come before there are enough, and so tell when the grace begins.
        """
        if self._is_first and self._grace < math.inf:
            return max(self.few_at - self._started, 0.0)
        return max(now - self._started - (0.0 if self._is_first else self._turn), 0.0)
