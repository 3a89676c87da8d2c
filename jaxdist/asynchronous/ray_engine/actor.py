"""The process of one place, a worker or the server: a thread for its role, one for gradients, and remote methods."""

import contextlib
import os
import queue
import threading
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import ActorLostError
from ..portable import flat, know_classes, read, write
from ..protocol import SERVER, Rule, Site
from ..replay.base import Task, gradient_function
from ..values import force
from .role_runner import RoleRunner
from .state_store import ActorReport, Entry, StatePacker, clock_since

# Seconds between signs of life, and until envelopes that could not be delivered are sent again.
BEAT_SECONDS, RETRY_SECONDS = 0.5, 0.5


class RunConfig(NamedTuple):
    """The constants of a run, which the driver sends to every process; `slow` maps workers to slowdown factors."""

    rule: Rule
    task: Task
    workers: int
    seed: int
    slow: dict[int, float]


class Actor:
    """The Ray actor of a place, which Ray restarts after a failure.

    `store` is the name of the `StateStore` actor, whose answers may take `timeout` seconds; `platform` is that of JAX.
    """

    def __init__(self, index: int, store: str, timeout: float, platform: str | None):
        import ray

        # One computation thread, since the workers of a machine share its cores. JAX reads this when it starts.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
        if platform is not None:
            jax.config.update("jax_platforms", platform)
        self.ray: Any = ray
        self.index, self.timeout = index, timeout
        self.store = ray.get_actor(store)
        self.entry: Entry = self._call_store("enter", index)
        self.config: RunConfig = self.ray.cloudpickle.loads(self.entry.config)
        # Functions of the runner, which the thread of the role calls one after the other; None ends it.
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        # The running job; the gradient thread drops a gradient whose job is no longer this one.
        self.current_job = -1
        self.ended, self.failure, self.started = threading.Event(), None, threading.Lock()
        self.gradient = gradient_function(self.config.task, self.config.seed)
        self.params = jax.tree.map(jax.numpy.asarray, self.config.task.params)
        # Compiles the gradient before the run begins.
        if index != SERVER:
            # An error, as of a gradient that is not finite, is that of the first gradient of the run, which reports it.
            with contextlib.suppress(Exception):
                jax.block_until_ready(force(self.gradient(self.params, index, 0)))
        if self.entry.peers:
            self.begin(self.entry.peers, self.entry.begun)

    # Remote methods, called by the driver and by other places.

    def ready(self) -> int:
        """Returns the process id, once the process is ready to begin."""
        return os.getpid()

    def begin(self, peers: dict[int, Any], begun: int) -> None:
        """Starts the two threads; later calls do nothing."""
        if self.started.acquire(blocking=False):
            self.peers = peers
            site = Site(self.index, self.config.workers, self.config.seed)
            self.runner = RoleRunner(self.config.rule, site, self.params, clock_since(begun))
            for work in (self._compute_gradients, self._run_role):
                threading.Thread(target=self._run_thread, args=(work,), daemon=True).start()

    def deliver(self, source: int, acknowledged: int, text: str, arrays: list[np.ndarray]) -> None:
        """Accepts envelopes as text and flat arrays."""

        def accept(runner: RoleRunner) -> None:
            runner.acknowledge(source, acknowledged)
            for envelope in read(text, arrays.__getitem__) if text else ():
                runner.arrive(source, envelope)

        self.inbox.put(accept)

    def on_replaced(self, other: int) -> None:
        """Notes that another place has a new process."""
        self.inbox.put(lambda runner: runner.resend(other))

    def on_gone(self, other: int) -> None:
        """Notes that another place is gone for good."""
        self.inbox.put(lambda runner: runner.forget(other))

    def watch(self) -> None:
        """Returns when this place has stopped, and raises its failure."""
        self.ended.wait()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Stops after handling the messages that have arrived."""
        self.inbox.put(None)
        self.ended.wait(self.timeout)

    # Threads.

    def _run_thread(self, work: Any) -> None:
        try:
            work()
        except BaseException as problem:
            self.failure = problem
        self.ended.set()
        self.jobs.put(None)

    def _compute_gradients(self) -> None:
        """Computes the gradients of jobs, one after the other."""
        extra = self.config.slow.get(self.index, 1.0) - 1.0
        while (request := self.jobs.get()) is not None:
            job, params = request
            start = time.perf_counter()
            gradient = jax.block_until_ready(force(self.gradient(params, self.index, job)))
            # A slow worker is imitated by sleep, in short pieces so that a cancelled job ends early.
            end = time.perf_counter() + extra * (time.perf_counter() - start)
            while self.current_job == job and (left := end - time.perf_counter()) > 0:
                time.sleep(min(left, 0.01))
            if self.current_job == job:
                self.inbox.put(partial(RoleRunner.on_gradient, job=job, gradient=gradient))

    def _run_role(self) -> None:
        """Runs the loop of a role: handle what arrives, store the state, then send, in this order."""
        runner, packer, life = self.runner, StatePacker(self.entry.life), self.entry.life
        # The calls that are not known to be complete, and the times at which to send again after one has failed.
        self.calls: dict[int, list[Any]] = {}
        self.retry: dict[int, float] = {}
        # First: a message, or the state of a dead process, is read before this process has written any.
        self._know_classes()
        if self.entry.kept is None:
            runner.begin()
        else:
            text, arrays = self.entry.kept
            runner.restore(read(text, arrays.__getitem__))
        # A replacement announces itself, so that the others send again what the dead process did not acknowledge.
        if life > 1:
            self._call_store("record_death", self.index, replaced=True)
            for other, peer in self.peers.items():
                if other != self.index:
                    peer.on_replaced.remote(self.index)
        last_beat, stopped = 0.0, False
        while not stopped:
            stopped = self._handle_inbox(runner)
            runner.fire_timers()
            running = runner.state.running
            before, self.current_job = self.current_job, -1 if running is None else running.job
            if running is not None and running.job != before:
                self.jobs.put((running.job, running.params))
            if runner.changed:
                state = runner.state
                packed = packer.pack(runner.content(), runner.role.params(state.role))
                waits_for = tuple(runner.role.waits_for(state.role)) if running is None else ()
                report = ActorReport(waits_for, running is not None, state.computed, state.received, state.sent)
                # Otherwise a newer process has this place.
                if not self._call_store("commit", self.index, life, packed, runner.take_records(), report):
                    return
                last_beat = time.monotonic()
            elif time.monotonic() - last_beat > BEAT_SECONDS:
                self.store.beat.remote(self.index, life)
                last_beat = time.monotonic()
            self._send_envelopes(runner)

    def _know_classes(self) -> None:
        """Makes the NamedTuples of the rule and of the model known to `read`."""
        rule, site = self.config.rule, Site(0, self.config.workers, self.config.seed)
        for role in (rule.worker, rule.server):
            if role is not None:
                know_classes(role.init(site, self.config.task.params))

    def _handle_inbox(self, runner: RoleRunner) -> bool:
        """Passes on what has arrived, or waits for a short time; returns whether to stop."""
        timeout = min([BEAT_SECONDS] + [(due - runner.now()) / 1e9 for due, _ in runner.state.timers])
        timeout = min([timeout] + [at - time.monotonic() for at in self.retry.values()])
        try:
            events = [self.inbox.get(timeout=max(timeout, 0.001))]
            while not self.inbox.empty():
                events.append(self.inbox.get())
        except queue.Empty:
            return False
        for handle in events:
            if handle is not None:
                handle(runner)
        return None in events

    def _send_envelopes(self, runner: RoleRunner) -> None:
        """Sends envelopes; those that could not be delivered are sent again a little later."""
        now = time.monotonic()
        for to, calls in self.calls.items():
            # Deliveries are not waited for: finished calls are only checked for failures.
            finished, self.calls[to] = self.ray.wait(calls, num_returns=len(calls), timeout=0)
            if any(self._has_failed(call) for call in finished):
                self.retry[to] = now + RETRY_SECONDS
        for to in [to for to, at in self.retry.items() if at <= now]:
            del self.retry[to]
            runner.resend(to)
        for to, (acknowledged, envelopes) in runner.post().items():
            arrays: list[np.ndarray] = []
            text = write(envelopes, lambda value, arrays=arrays: arrays.append(flat(value)) or len(arrays) - 1)
            call = self.peers[to].deliver.remote(self.index, acknowledged, text if envelopes else "", arrays)
            self.calls.setdefault(to, []).append(call)
        self.calls = {to: calls for to, calls in self.calls.items() if calls}

    def _has_failed(self, call: Any) -> bool:
        try:
            self.ray.get(call)
        except self.ray.exceptions.RayActorError:
            return True
        return False

    def _call_store(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls the state store, and waits for the answer within the timeout."""
        try:
            return self.ray.get(getattr(self.store, method).remote(*arguments, **named), timeout=self.timeout)
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError) as problem:
            raise ActorLostError(self.index, f"cannot reach the state store of the run: {problem}") from None
