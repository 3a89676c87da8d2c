"""A clock that only waits move: threads take turns on it, and no measurement depends on the machine."""

import heapq
import itertools
import math
import threading
import types
from functools import partial

from jaxdist.islands import bodies, cleanup, connection, outbox, store

ISLANDS = (bodies, cleanup, connection, outbox, store)


class VirtualClock:
    """The time of some threads; it goes on when all of them wait, to the moment at which the first one wakes.

    What a thread does between two waits takes no time. The threads are those that begin with it, so many, and those
    that are made by its `Thread`; they wait in its `sleep`, in its `Event` and for the end of its threads.
    """

    def __init__(self, threads):
        self._now, self._awake, self._sleepers = 1000.0, threads, []
        self._changed, self._numbers = threading.Condition(threading.RLock()), itertools.count()
        self.Event, self.Thread = partial(VirtualEvent, self), partial(VirtualThread, self)

    def monotonic(self):
        return self._now

    def sleep(self, seconds):
        with self._changed:
            self._wait(seconds, [])

    def suspend(self, seconds):
        """Stops all threads for so long, as the system can."""
        self._now += seconds

    def leave(self):
        """One thread less."""
        with self._changed:
            self._awake -= 1
            self._go_on()

    def _wait(self, seconds, waiting):
        sleeper = types.SimpleNamespace(wakes=False)
        waiting.append(sleeper)
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._numbers), sleeper))
        self._awake -= 1
        self._go_on()
        self._changed.wait_for(lambda: sleeper.wakes)

    def _wake(self, sleeper):
        if not sleeper.wakes:
            sleeper.wakes = True
            self._awake += 1
            self._changed.notify_all()

    def _go_on(self):
        while not self._awake and self._sleepers:
            when, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.wakes:
                if when == math.inf:
                    raise RuntimeError("each thread waits for another one")
                self._now = max(when, self._now)
                self._wake(sleeper)

    def rule(self, patch, modules=ISLANDS):
        """Puts it in the place of the time and the threads that modules use."""
        time = types.SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep)
        threads = types.SimpleNamespace(**{**vars(threading), "Event": self.Event, "Thread": self.Thread})
        for module in modules:
            for name, its in (("time", time), ("threading", threads)):
                if hasattr(module, name):
                    patch.setattr(module, name, its)


class VirtualEvent(threading.Event):
    """An event that threads of a clock wait for in its time."""

    def __init__(self, clock):
        super().__init__()
        self._clock, self._waiting = clock, []

    def set(self):
        with self._clock._changed:
            super().set()
            for sleeper in self._waiting:
                self._clock._wake(sleeper)
            self._waiting.clear()

    def wait(self, timeout=None):
        with self._clock._changed:
            if not self.is_set():
                self._clock._wait(math.inf if timeout is None else timeout, self._waiting)
            return self.is_set()


class VirtualThread(threading.Thread):
    """A thread that is one of a clock's until it ends."""

    def __init__(self, clock, *args, **options):
        super().__init__(*args, **options)
        self._clock, self._has_ended = clock, VirtualEvent(clock)

    def start(self):
        with self._clock._changed:
            self._clock._awake += 1
        super().start()

    def run(self):
        try:
            super().run()
        finally:
            self._has_ended.set()
            self._clock.leave()

    def join(self, timeout=None):
        if self._has_ended.wait(timeout):
            super().join()
