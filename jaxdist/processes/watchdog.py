"""Ends a process with an error when a step does not end in time, and names the process that blocks it.

Each process writes a heartbeat, a line of JSON with the step that it has started, to the key-value store of JAX's
coordination service. The service runs in process 0 in separate threads, which Python cannot block.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core import compat
from .._core.checks import Portable, check_range
from .._core.trees import is_key
from .._core.types import Number

LONGEST_PAUSE = 0.2  # seconds between two heartbeats, and between two checks of the running steps
HEARTBEATS = 20  # at least this many within the time limit
SILENCE = 5  # a process that has missed this many is lost
LAST_HEARTBEAT_SECONDS = 1.0
KNOWN = 64  # so many programs have the time limit of a step; one that was forgotten has that of a first call again
# The events of JAX before and after XLA compiles. Those of tracing are no sign: `jax.eval_shape` has them, too.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
_numbers = itertools.count()


class StepTimeoutError(Portable, RuntimeError):
    """A step has not ended in time: `step`. The others wait for `process`; None if all have started the step."""

    def __init__(self, message: str, process: int | None, step: int):
        super().__init__(message)
        self.process, self.step = process, step


class ProcessLostError(Portable, RuntimeError):
    """A process, of number `process`, has died, or shows no sign of life; `step` is the last that it started."""

    def __init__(self, message: str, process: int, step: int):
        super().__init__(message)
        self.process, self.step = process, step


class Heartbeat(NamedTuple):
    """The last step that a process has started, a counter, whether the process is done, and whether it compiles."""

    step: int
    count: int
    done: bool = False
    compiling: bool = False


class Channel(NamedTuple):
    """Where heartbeats are exchanged: `write(process, text)`, and `read()` for the last text of every process."""

    write: Callable[[int, str], None]
    read: Callable[[], dict[int, str]]


class Received(NamedTuple):
    """The last heartbeat of a process, and when it arrived."""

    heartbeat: Heartbeat
    when: float


def open_channel(name: str) -> Channel:
    """Opens a channel between the processes of a job; `name` is new, and the same in all of them."""
    client = compat.coordination_client()
    folder = f"jaxdist/{name}/"

    def write(process: int, text: str) -> None:
        client.key_value_set(f"{folder}{process}", text, allow_overwrite=True)

    def read() -> dict[int, str]:
        return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(folder)}

    return Channel(write, read)


def merge_heartbeats(received: Mapping[int, Received], texts: Mapping[int, str], now: float) -> dict[int, Received]:
    """Updates the heartbeats of the processes whose counter has changed; the others have been silent."""
    found = dict(received)
    for process, text in texts.items():
        # By the clock of the reader, and by its counter: clocks of machines differ, and text may be old.
        heartbeat = Heartbeat(**json.loads(text))
        if process not in received or received[process].heartbeat.count != heartbeat.count:
            found[process] = Received(heartbeat, now)
    return found


def silent_processes(
    received: Mapping[int, Received], others: Iterable[int], now: float, seconds: float
) -> tuple[int, ...]:
    """Returns those of the others that are not done and have sent no heartbeat for `seconds`."""

    def is_silent(process: int) -> bool:
        last = received.get(process)
        return last is None or (not last.heartbeat.done and now - last.when > seconds)

    return tuple(filter(is_silent, others))


def any_compiling(received: Mapping[int, Received], silent: tuple[int, ...]) -> bool:
    """Returns whether a process that is alive is compiling."""
    alive = (last.heartbeat for process, last in received.items() if process not in silent)
    return any(heartbeat.compiling and not heartbeat.done for heartbeat in alive)


def lost_error(received: Mapping[int, Received], silent: tuple[int, ...]) -> ProcessLostError:
    """Makes the error that names the first of the silent processes."""
    process, step, since = silent[0], -1, " and never did" if received else ""
    if process in received:
        step = received[process].heartbeat.step
        since = f" since it started step {step}"
    return ProcessLostError(f"process {process} shows no sign of life{since}: it died or is stopped", process, step)


def timeout_error(
    received: Mapping[int, Received], silent: tuple[int, ...], own: int, step: int, seconds: float
) -> StepTimeoutError:
    """Makes the error of a step in process `own`, which names the process that blocks the step."""
    timeout, waiting = f"step {step} timed out after {round(seconds, 1):g} s", f"(process {own} is waiting)"
    # A silent process is a better answer than one that is alive and late: it may be the reason for that.
    if silent:
        return StepTimeoutError(f"{timeout}: {lost_error(received, silent)} {waiting}", silent[0], step)
    # All are alive: the step waits for a process that has not started it.
    behind = [process for process, last in sorted(received.items()) if last.heartbeat.step < step]
    if not behind:
        return StepTimeoutError(f"{timeout} in process {own}, but all processes have started it", None, step)
    last = received[behind[0]].heartbeat
    missing = "it" if last.step + 1 == step else f"step {last.step + 1}"
    what = f"left after step {last.step}" if last.done else f"is alive but has not started {missing}"
    return StepTimeoutError(f"{timeout}: process {behind[0]} {what} {waiting}", behind[0], step)


class _Call(NamedTuple):
    """A call of a step: its number, when it started, and its time limit in seconds."""

    step: int
    started: float
    limit: float


class Watchdog:
    """Watches the steps that are called through it, in a `with` block; made by `watchdog`."""

    def __init__(
        self,
        seconds: Number,
        first_seconds: Number,
        step: int,
        on_timeout: Callable[[StepTimeoutError], Any] | None,
        channel: Channel | None,
        own: int,
        processes: int,
    ):
        self._seconds, self._first_seconds, self._on_timeout = seconds, first_seconds, on_timeout
        self._channel, self._own, self._step = channel, own, step - 1
        self._others = [process for process in range(processes) if process != own]
        # Fast enough to tell a dead process from a late one within the time limit.
        self._pause = min(LONGEST_PAUSE, seconds / HEARTBEATS)
        self._call: _Call | None = None  # a call that has not returned
        # Calls that returned, with pending results.
        self._running: deque[tuple[_Call, list[jax.Array]]] = deque()
        # When the results of the last of them were ready.
        self._ended = 0.0
        # When this process continued after it was stopped, perhaps with all others.
        self._resumed = 0.0
        # When another process was last known to compile.
        self._excused = 0.0
        # The thread that calls steps, and whether it compiles.
        self._thread, self._compiling = 0, False
        # (function, instance, signature) of the last calls that compiled; more would keep all functions of a run alive.
        self._known: deque[tuple[Any, Any, int]] = deque(maxlen=KNOWN)
        self._received: dict[int, Received] = {}
        self._polled = time.monotonic()  # when the channel last answered
        self._late, self._failed, self._stopped = threading.Event(), threading.Event(), threading.Event()
        tasks = [self._watch_steps] + ([] if channel is None else [self._publish_heartbeats])
        self._threads = [threading.Thread(target=task, daemon=True) for task in tasks]

    def __call__(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls the step and returns its results, which are watched until they are ready."""
        if not self._threads[0].is_alive():
            raise ValueError("use the watchdog inside its context manager: `with watchdog(...) as watch:`")
        # A bound method is a new object on each access: compare its function and its instance.
        call = getattr(step, "__func__", step), getattr(step, "__self__", None), _signature((args, kwargs))
        known = any(call[0] is f and call[1] is of and call[2] == signature for f, of, signature in self._known)
        # The first call compiles, which takes far longer than a step.
        limit = self._seconds if known else self._first_seconds
        self._step += 1
        self._thread, self._compiling = threading.get_ident(), not known
        self._call = _Call(self._step, time.monotonic(), limit)
        try:
            results = step(*args, **kwargs)
        except (jax.errors.JaxRuntimeError, ValueError) as problem:
            if lost := self._find_lost(problem):
                raise lost from problem
            raise
        else:
            self._running.append((self._call, _smallest(results)))
            if not known:
                self._known.append(call)
            return results
        finally:
            self._call, self._compiling = None, False

    def __enter__(self) -> "Watchdog":
        if self._threads[0].ident is not None:
            raise ValueError("this watchdog has been entered before: make another one, `with watchdog(...) as watch:`")
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._hear_compiler)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        success = problem is None or (isinstance(problem, SystemExit) and not problem.code)
        if self._channel is not None and problem is not None and not success:
            if lost := self._find_lost(problem):
                lost.__cause__, problem = problem, lost
            _end_process(problem)
        while success and self._running:
            # The thread removes them as they end, or ends the process.
            time.sleep(self._pause / 4)
        self._stopped.set()
        jax.monitoring.unregister_event_duration_listener(self._hear_compiler)
        for thread in self._threads:
            thread.join(LAST_HEARTBEAT_SECONDS)

    def _hear_compiler(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Gives a step that compiles the time limit of a first one; called by JAX with all of its events."""
        # The events reveal what `_signature` misses: static arguments, shardings, and recompilations between steps.
        del duration_secs
        if event in (LOWERED, COMPILED) and threading.get_ident() == self._thread:
            self._compiling = event == LOWERED
            if self._call is not None:
                self._call = self._call._replace(limit=self._first_seconds)

    def _watch_steps(self) -> None:
        """Checks which steps have ended, and ends the process when one is late; the body of a thread."""
        now = time.monotonic()
        while not self._stopped.wait(self._pause):
            before, now = now, time.monotonic()
            # This process was stopped, and the others perhaps with it: that time does not count.
            if now - before > (SILENCE + 1) * self._pause:
                self._resumed = now
            while self._running and all(_is_ready(x) for x in self._running[0][1]):
                self._running.popleft()
                self._ended = now
            call = self._running[0][0] if self._running else self._call
            # A step that is queued behind another has not begun.
            since = 0.0 if call is None else max(call.started, self._ended, self._resumed)
            waited = 0.0 if call is None else now - max(since, self._excused)
            if call is not None and waited > call.limit:
                silent = self._find_silent()
                if any_compiling(self._received, silent) and now - since < self._first_seconds:
                    self._excused = now
                    continue
                error = timeout_error(self._received, silent, self._own, call.step, waited)
                # An error of the callback must not keep the process from its end.
                if self._on_timeout is not None:
                    with contextlib.suppress(Exception):
                        self._on_timeout(error)
                _end_process(error)
            # The others are polled only from half of the limit on.
            if call is not None and waited > call.limit / 2:
                self._late.set()
            else:
                self._late.clear()

    def _publish_heartbeats(self) -> None:
        """Publishes the progress of this process, and polls the others if a step is late; the body of a thread."""
        assert self._channel is not None
        for count in itertools.count():
            done = self._stopped.wait(self._pause)
            # The service may be gone, with process 0; that shows in the age of `_polled`.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                own = Heartbeat(self._step, count, done, self._compiling)
                self._channel.write(self._own, json.dumps(own._asdict()))
                # A process that is on time need not read: that costs process 0 a message of every process.
                if self._late.is_set() or self._failed.is_set():
                    self._received = merge_heartbeats(self._received, self._channel.read(), time.monotonic())
                self._polled = time.monotonic()
            if done:
                return

    def _find_silent(self) -> tuple[int, ...]:
        """Returns the processes without a sign of life."""
        # Process 0 serves the channel: if that does not answer, the others cannot be blamed.
        now, longest = time.monotonic(), SILENCE * self._pause
        if self._channel is not None and now - self._polled > longest:
            return (0,) if self._own else ()
        return silent_processes(self._received, self._others, now, longest)

    def _find_lost(self, problem: BaseException) -> ProcessLostError | None:
        """Returns an error for the process that died, if that is the cause of an error of XLA."""
        # A program that fails before its call has returned raises ValueError with the name of the status.
        of_xla = isinstance(problem, jax.errors.JaxRuntimeError) or str(problem).startswith("UNKNOWN: ")
        if self._channel is None or not of_xla:
            return None
        # Wait long enough for a dead process to become silent.
        self._failed.set()
        time.sleep((SILENCE + 3) * self._pause)
        self._failed.clear()
        silent = self._find_silent()
        return lost_error(self._received, silent) if silent else None


def watchdog(
    timeout_seconds: Number,
    *,
    step: int = 0,
    first_timeout_seconds: Number = 600,
    on_timeout: Callable[[StepTimeoutError], Any] | None = None,
) -> Watchdog:
    """Ends this process if a step does not end in time, with an error that names the process that blocks it.

    A collective waits for a slow or stuck process forever, and nothing can interrupt it. A thread therefore watches the
    steps that are called through the watchdog; it prints a `StepTimeoutError` and ends the process by `os._exit`.
    `jaxdist launch` then ends the others. Dispatch stays asynchronous: only the thread waits for results. In a job of
    several processes, any exception inside the block also ends the process at once: JAX would wait for the others, and
    they for it. All processes must make the same watchdogs in the same order.

    Time in which this process itself did not run is not counted, so that a job can be suspended as a whole and
    continued, as by `scontrol suspend`. JAX ends it after `heartbeat_timeout_seconds` of `initialize`.

    *On the wire*: a line of JSON five times a second from each process to process 0, through JAX's coordination
    service: the number of steps started, and whether the process compiles. The lines are read only after half of the
    time limit. No collective.

    Args:
      timeout_seconds: the time limit of a step; longer than the longest pause of any process, as for a checkpoint.
      step: the number of the first step.
      first_timeout_seconds: the time limit of the first call of each function, and of later calls that compile, as for
        a short last batch, in this process or in another. A function that is created for each call is always new, and
        after 64 new ones a function is new again.
      on_timeout: called with the error before the process ends, for instance to close a log.

    Raises:
      ProcessLostError: in the block, from a step that failed because another process died.

    Examples:
      >>> import jax, jaxdist as jd
      >>> step = jax.jit(lambda state, batch: (state + batch, {"sum": state}))
      >>> with jd.processes.watchdog(60) as watch:
      ...     state, metrics = watch(step, 1.0, 2.0)
      >>> float(state)
      3.0
    """
    check_range("timeout_seconds", timeout_seconds, 0, ends="(]")
    check_range("first_timeout_seconds", first_timeout_seconds, 0, ends="(]")
    processes = jax.process_count()
    channel = open_channel(f"watchdog-{next(_numbers)}") if processes > 1 else None
    first = max(timeout_seconds, first_timeout_seconds)
    return Watchdog(timeout_seconds, first, step, on_timeout, channel, jax.process_index(), processes)


def _smallest(results: Any) -> list[jax.Array]:
    """Returns the smallest array of each part of the results, as all results of a program are ready together."""
    # One array of each part: the next step may take a part as donated and delete it. Typed keys have no `is_ready`.
    parts = results if isinstance(results, tuple) else (results,)
    leaves = ([x for x in jax.tree.leaves(part) if isinstance(x, jax.Array) and not is_key(x)] for part in parts)
    return [min(part, key=lambda x: x.size) for part in leaves if part]


def _signature(arguments: Any) -> int:
    """Hashes what a program is compiled for: trees, shapes and dtypes, but not the values of Python numbers."""
    leaves, tree = jax.tree.flatten(arguments)
    return hash((tree, *((x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else type(x) for x in leaves)))


def _is_ready(x: Any) -> bool:
    try:
        return x.is_ready()
    except RuntimeError:
        # Deleted: it was donated to the next step.
        return True


def _end_process(problem: BaseException) -> None:
    """Prints the error and ends the process at once, where an ordinary exit would wait for the other processes."""
    # The codes that Python itself and shells would give.
    code = {SystemExit: getattr(problem, "code", 1), KeyboardInterrupt: 130}.get(type(problem), 1)
    with contextlib.suppress(OSError):
        traceback.print_exception(problem)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
