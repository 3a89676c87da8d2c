"""The process of one place: a thread for the rule, a thread for gradients, and what Ray calls."""

import contextlib
import os
import queue
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from ..portable import flat, read, write
from ..protocol import SERVER, Rule, Site
from ..replay.errors import NonFiniteGradient
from ..replay.task import Task, gradients
from ..values import force
from .errors import WorkerLost
from .keeper import Entry, Report, Shelf
from .place import Place

BEAT, AGAIN = 0.5, 0.5  # seconds between signs of life, and until a letter that did not get through is sent again


class Setup(NamedTuple):
    """What the driver gives every process: the rule, the task, and how to run."""

    rule: Rule
    task: Task
    workers: int
    seed: int
    slow: dict[int, float]


def one_thread(platform: str | None) -> None:
    """Before JAX starts: one thread of computation a process, and no accelerator but one's own."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if platform is not None:
        jax.config.update("jax_platforms", platform)


class Actor:
    """What Ray starts, and starts again, for each place.

    Args:
      index: which place.
      keeper: the name of the `Keeper`.
      timeout: seconds to wait for its answers.
      platform: of JAX, or None for what there is.
    """

    def __init__(self, index: int, keeper: str, timeout: float, platform: str | None):
        import ray

        one_thread(platform)
        self.ray: Any = ray
        self.index, self.timeout = index, timeout
        self.keeper = ray.get_actor(keeper)
        self.entry: Entry = self.ask("enter", index)
        self.setup: Setup = self.ray.cloudpickle.loads(self.entry.setup)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.wanted = -1
        self.ended, self.failure, self.started = threading.Event(), None, threading.Lock()
        self.gradient = gradients(self.setup.task, self.setup.seed)
        self.params = jax.tree.map(jax.numpy.asarray, self.setup.task.params)
        if index != SERVER:  # compiled before the clock starts
            with contextlib.suppress(NonFiniteGradient):  # it is one of the run, too, which then says so
                jax.block_until_ready(force(self.gradient(self.params, index, 0)))
        if self.entry.peers:
            self.begin(self.entry.peers, self.entry.begun)

    # What the driver and the other places call.

    def ready(self) -> int:
        """The number of the process, once it could begin."""
        return os.getpid()

    def begin(self, peers: dict[int, Any], begun: int) -> None:
        """Starts the two threads, once."""
        if self.started.acquire(blocking=False):
            self.peers = peers
            site = Site(self.index, self.setup.workers, self.setup.seed)
            self.place = Place(self.setup.rule, site, self.params, lambda: time.time_ns() - begun)
            for work in (self.computing, self.living):
                threading.Thread(target=self.guarded, args=(work,), daemon=True).start()

    def deliver(self, source: int, acknowledged: int, text: str, arrays: list[np.ndarray]) -> None:
        """Letters, as text and flat arrays."""
        self.inbox.put(("letters", source, acknowledged, text, arrays))

    def replaced(self, other: int) -> None:
        """Another place has a new process."""
        self.inbox.put(("again", other))

    def without(self, other: int) -> None:
        """Another place is gone for good."""
        self.inbox.put(("without", other))

    def watch(self) -> None:
        """Returns when this place has stopped, and raises what it failed with."""
        self.ended.wait()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Ends after what has arrived."""
        self.inbox.put(("stop",))
        self.ended.wait(self.timeout)

    # The threads.

    def guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as problem:
            self.failure = problem
        self.ended.set()
        self.jobs.put(None)

    def computing(self) -> None:
        """Gradients, one after the other."""
        slowed = self.setup.slow.get(self.index, 1.0) - 1.0
        while (found := self.jobs.get()) is not None:
            job, params = found
            start = time.perf_counter()
            gradient = jax.block_until_ready(force(self.gradient(params, self.index, job)))
            end = time.perf_counter() + slowed * (time.perf_counter() - start)
            while self.wanted == job and (left := end - time.perf_counter()) > 0:
                time.sleep(min(left, 0.01))
            if self.wanted == job:
                self.inbox.put(("computed", job, gradient))

    def living(self) -> None:
        """What arrives, what follows from it, what is kept, what is sent: in this order, over and over."""
        place, shelf, life = self.place, Shelf(self.entry.life), self.entry.life
        self.waiting: dict[int, list[Any]] = {}
        self.retry: dict[int, float] = {}
        if self.entry.kept is None:
            place.begin()
        else:
            text, arrays = self.entry.kept
            place.restore(read(text, arrays.__getitem__))
        if life > 1:
            self.ask("died", self.index, replaced=True)
            for other, peer in self.peers.items():
                if other != self.index:
                    peer.replaced.remote(self.index)
        beat, stopped = 0.0, False
        while not stopped:
            stopped = self.take(place)
            place.due()
            running = place.state.running
            before, self.wanted = self.wanted, -1 if running is None else running.job
            if running is not None and running.job != before:
                self.jobs.put((running.job, running.params))
            if place.changed:
                model = place.role.params(place.state.role)
                packed, report = shelf.pack(place.content(), model), self.report(place)
                if not self.ask("commit", self.index, life, packed, place.take_books(), report):
                    return  # another process has this place
                beat = time.monotonic()
            elif time.monotonic() - beat > BEAT:
                self.keeper.beat.remote(self.index, life)
                beat = time.monotonic()
            self.send(place)

    def report(self, place: Place) -> Report:
        state = place.state
        computing = state.running is not None
        waits_for = () if computing else tuple(place.role.waits_for(state.role))
        return Report(waits_for, computing, state.computed, state.received, state.sent)

    def take(self, place: Place) -> bool:
        """Hands the place what has arrived, or waits a little; true if it shall stop."""
        soon = min([BEAT] + [(due - place.now()) / 1e9 for due, _ in place.state.timers])
        soon = min([soon] + [at - time.monotonic() for at in self.retry.values()])
        try:
            found = self.inbox.get(timeout=max(soon, 0.001))
        except queue.Empty:
            return False
        stop = False
        while True:
            what, *data = found
            if what == "letters":
                source, acknowledged, text, arrays = data
                place.acknowledged(source, acknowledged)
                for letter in read(text, arrays.__getitem__) if text else ():
                    place.arrive(source, letter)
            elif what == "computed":
                place.computed(*data)
            elif what == "again":
                place.again(data[0])
            elif what == "without":
                place.without(data[0])
            else:
                stop = True
            try:
                found = self.inbox.get_nowait()
            except queue.Empty:
                return stop

    def send(self, place: Place) -> None:
        """Posts letters; those to a process that could not be reached are posted again a little later."""
        now = time.monotonic()
        for to, references in self.waiting.items():
            done, self.waiting[to] = self.ray.wait(references, num_returns=len(references), timeout=0)
            if any(self.failed(one) for one in done):
                self.retry[to] = now + AGAIN
        for to in [to for to, at in self.retry.items() if at <= now]:
            del self.retry[to]
            place.again(to)
        for to, (acknowledged, letters) in place.post().items():
            arrays: list[np.ndarray] = []
            text = write(letters, lambda one, arrays=arrays: arrays.append(flat(one)) or len(arrays) - 1)
            call = self.peers[to].deliver.remote(self.index, acknowledged, text if letters else "", arrays)
            self.waiting.setdefault(to, []).append(call)
        self.waiting = {to: references for to, references in self.waiting.items() if references}

    def failed(self, reference: Any) -> bool:
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayActorError:
            return True
        return False

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Calls the keeper, and waits for the answer as long as anything is waited for."""
        try:
            return self.ray.get(getattr(self.keeper, what).remote(*arguments, **named), timeout=self.timeout)
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError) as problem:
            raise WorkerLost(self.index, f"cannot reach the keeper of the run: {problem}") from None
