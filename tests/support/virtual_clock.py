"""A clock that only sleeps move: islands in threads take turns on it, and no measurement depends on the machine."""

import heapq
import itertools
import threading
import types

from jaxdist.islands import connection, outbox


class VirtualClock:
    """The time of some threads; it goes on when all of them sleep, to the moment at which the first one wakes.

    What a thread does between two sleeps takes no time. A sleep in another thread that a thread waits for, as in that
    of a request, counts as its own.
    """

    def __init__(self, threads):
        self._now, self._awake, self._sleepers = 1000.0, threads, []
        self._changed, self._numbers = threading.Condition(), itertools.count()

    def monotonic(self):
        return self._now

    def sleep(self, seconds):
        with self._changed:
            number = next(self._numbers)
            sleeper = (self._now + max(seconds, 0.0), number)
            heapq.heappush(self._sleepers, sleeper)
            self._awake -= 1
            self._go_on()
            self._changed.wait_for(lambda: sleeper not in self._sleepers)

    def leave(self):
        """One thread less."""
        with self._changed:
            self._awake -= 1
            self._go_on()

    def _go_on(self):
        if not self._awake and self._sleepers:
            self._now, _ = heapq.heappop(self._sleepers)
            self._awake += 1
            self._changed.notify_all()

    def rule(self, patch):
        """Puts it in the place of the time that islands use."""
        time = types.SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep)
        for module in (connection, outbox):
            patch.setattr(module, "time", time)
