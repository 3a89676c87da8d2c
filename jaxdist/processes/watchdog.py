"""A step that does not end is an error that says who is missing."""

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Number
from . import heartbeat

LONGEST_PAUSE = 0.2  # between two looks at what has ended, and between two signs of life
SIGNS = 20  # at least so many within the time limit
SILENCE = 5  # as many are missing from one who is lost
LAST_WORDS_SECONDS = 1.0
COMPILING = "/jax/core/compile/"  # what JAX says after each part of it: tracing, lowering, and at last
COMPILED = "/jax/core/compile/backend_compile_duration"
_numbers = itertools.count()


class _Call(NamedTuple):
    step: int
    began: float
    limit: float


class Watchdog:
    """Watches the steps that are called through it, in a `with` block. `watchdog` makes it."""

    def __init__(
        self,
        seconds: Number,
        first_seconds: Number,
        step: int,
        on_timeout: Callable[[heartbeat.StepTimeout], Any] | None,
        board: heartbeat.Board | None,
        own: int,
        processes: int,
    ):
        self._seconds, self._first_seconds, self._on_timeout = seconds, first_seconds, on_timeout
        self._board, self._own, self._step = board, own, step - 1
        self._others = [process for process in range(processes) if process != own]
        self._pause = min(LONGEST_PAUSE, seconds / SIGNS)
        self._call: _Call | None = None  # one that has not returned
        self._running: deque[tuple[_Call, list[jax.Array]]] = deque()  # returned, before their results are there
        self._ended = 0.0  # when the last of them was seen to be there
        self._resumed = 0.0  # when this process went on after it was stopped, perhaps with all others
        self._excused = 0.0  # when another was last seen to compile
        self._thread, self._compiling = 0, False  # the thread that calls steps, and whether it compiles
        self._known: list[tuple[Any, Any, int]] = []  # functions that have run, whose methods they are, and with what
        self._seen: dict[int, heartbeat.Seen] = {}
        self._heard = time.monotonic()  # when the board was last read
        self._late, self._failed, self._stopped = threading.Event(), threading.Event(), threading.Event()
        tasks = [self._guard] + ([] if board is None else [self._talk])
        self._threads = [threading.Thread(target=task, daemon=True) for task in tasks]

    def __call__(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls the step and returns what it returns, which is watched until it is there.

        Raises:
          WorkerLost: the step failed because another process did.
        """
        if not self._threads[0].is_alive():
            raise ValueError("nothing is watched outside of the block: with watchdog(...) as watch")
        # A method is another object whenever it is read.
        what = getattr(step, "__func__", step), getattr(step, "__self__", None), _kind((args, kwargs))
        known = any(what[0] is one and what[1] is of and what[2] == kind for one, of, kind in self._known)
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
                self._known.append(what)
            return results
        finally:
            self._call, self._compiling = None, False

    def __enter__(self) -> "Watchdog":
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._hear_compiler)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        well = problem is None or (isinstance(problem, SystemExit) and not problem.code)
        if self._board is not None and problem is not None and not well:
            if lost := self._find_lost(problem):
                lost.__cause__, problem = problem, lost
            _leave(problem)
        while well and self._running:
            time.sleep(self._pause / 4)  # the guard sees them end, or ends the process
        self._stopped.set()
        jax.monitoring.unregister_event_duration_listener(self._hear_compiler)
        for thread in self._threads:
            thread.join(LAST_WORDS_SECONDS)

    def _hear_compiler(self, event: str, duration_secs: float, **_: str | int) -> None:
        """A part of compiling has ended: the step may take as long as a first one.

        What JAX says after it has traced tells of what `_kind` does not see, as other static arguments or shardings,
        and of what is compiled between two steps.
        """
        del duration_secs
        if event.startswith(COMPILING) and threading.get_ident() == self._thread:
            self._compiling = event != COMPILED
            if self._call is not None:
                self._call = self._call._replace(limit=self._first_seconds)

    def _guard(self) -> None:
        """Looks at what has ended; a thread."""
        now = time.monotonic()
        while not self._stopped.wait(self._pause):
            before, now = now, time.monotonic()
            if now - before > (SILENCE + 1) * self._pause:  # this process was stopped, and the others perhaps with it
                self._resumed = now
            while self._running and all(_is_there(x) for x in self._running[0][1]):
                self._running.popleft()
                self._ended = now
            call = self._running[0][0] if self._running else self._call
            since = 0.0 if call is None else max(call.began, self._ended, self._resumed)
            waited = 0.0 if call is None else now - max(since, self._excused)
            if call is not None and waited > call.limit:
                gone = self._silent()
                if heartbeat.compiling(self._seen, gone) and now - since < self._first_seconds:
                    self._excused = now
                    continue
                error = heartbeat.overdue(self._seen, gone, self._own, call.step, waited)
                if self._on_timeout is not None:
                    with contextlib.suppress(Exception):
                        self._on_timeout(error)
                _leave(error)
            if call is not None and waited > call.limit / 2:
                self._late.set()
            else:
                self._late.clear()

    def _talk(self) -> None:
        """Says how far this process is, and, when something is wrong, looks how far the others are; a thread."""
        assert self._board is not None
        for count in itertools.count():
            done = self._stopped.wait(self._pause)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                heartbeat.speak(self._board, self._own, heartbeat.Sign(self._step, count, done, self._compiling))
                if self._late.is_set() or self._failed.is_set():
                    self._seen = heartbeat.look(self._board, self._seen)
                self._heard = time.monotonic()
            if done:
                return

    def _silent(self) -> tuple[int, ...]:
        """Who gives no sign of life. Process 0 keeps the board: where it does not answer, others are not accused."""
        now, longest = time.monotonic(), SILENCE * self._pause
        if self._board is not None and now - self._heard > longest:
            return (0,) if self._own else ()
        return heartbeat.silent(self._seen, self._others, now, longest)

    def _find_lost(self, problem: BaseException) -> heartbeat.WorkerLost | None:
        """After an error of the running step, not one of Python: who died, if anybody did."""
        # A program that fails before its call has returned raises a ValueError with the name of the status.
        of_xla = isinstance(problem, jax.errors.JaxRuntimeError) or str(problem).startswith("UNKNOWN: ")
        if self._board is None or not of_xla:
            return None
        self._failed.set()
        time.sleep((SILENCE + 3) * self._pause)
        self._failed.clear()
        gone = self._silent()
        return heartbeat.lost(self._seen, gone) if gone else None


def watchdog(
    timeout_seconds: Number,
    *,
    step: int = 0,
    first_timeout_seconds: Number = 600,
    on_timeout: Callable[[heartbeat.StepTimeout], Any] | None = None,
) -> Watchdog:
    """Ends this process with the name of whom it waits for, where a step does not end.

    A collective waits for a process that sleeps, or is stuck, as long as that takes, and nothing can interrupt it. So
    the steps that are called through the watchdog are watched by a thread, which prints a `StepTimeout` and ends the
    process by `os._exit`; `jaxdist launch` then ends the others. Steps still run ahead of Python: only the thread waits
    for their results. Whatever is raised inside the block, in a job of several processes, also ends the process at
    once: JAX would wait for the others, and they for it.

    The time in which this process itself did not run does not count: a job that is stopped as a whole and continued, as
    by `scontrol suspend`, goes on. JAX ends it after `heartbeat_timeout_seconds` of `initialize`.

    *On the wire*: a line of JSON five times a second from each process to process 0, through JAX's coordination
    service: how many steps it has begun, and whether it compiles. They are read only when half the time is over. No
    collective.

    Args:
      timeout_seconds: how long a step may take; more than the longest pause of any process, as for a checkpoint.
      step: the number of the first step.
      first_timeout_seconds: how long the first call of each function may take, and each later one that compiles, as
        for a short last batch, in this process or in one that is waited for. A function that is made anew for each call
        is new each time.
      on_timeout: is called with the error before the process ends, as to close a log.

    Returns:
      A context manager; inside, `watch(step, state, batch)` calls the step. All processes make as many watchdogs in the
      same order.

    Raises:
      ValueError: a time is not positive; or a step is called outside of the block.
      WorkerLost: in the block, from a step that failed because another process died.

    Example:
      >>> import jax, jaxdist as jd
      >>> step = jax.jit(lambda state, batch: (state + batch, {"sum": state}))
      >>> with jd.processes.watchdog(60) as watch:
      ...     state, metrics = watch(step, 1.0, 2.0)
      >>> float(state)
      3.0
    """
    if timeout_seconds <= 0 or first_timeout_seconds <= 0:
        raise ValueError(f"times must be positive, got {timeout_seconds} and {first_timeout_seconds} seconds")
    processes = jax.process_count()
    board = heartbeat.shared_board(f"watchdog-{next(_numbers)}") if processes > 1 else None
    first = max(timeout_seconds, first_timeout_seconds)
    return Watchdog(timeout_seconds, first, step, on_timeout, board, jax.process_index(), processes)


def _smallest(results: Any) -> list[jax.Array]:
    """An array of each part of the results: those of a program are there together, and a large one is not kept for it.

    A part that the next step was given to overwrite is then deleted; the others are not. Typed keys do not tell whether
    they are there.
    """
    parts = results if isinstance(results, tuple) else (results,)
    leaves = ([x for x in jax.tree.leaves(part) if isinstance(x, jax.Array) and not _is_key(x)] for part in parts)
    return [min(part, key=lambda x: x.size) for part in leaves if part]


def _kind(arguments: Any) -> int:
    """What a program is compiled for: trees, shapes and dtypes. Numbers of Python, such as a step's, may change."""
    leaves, tree = jax.tree.flatten(arguments)
    return hash((tree, *((x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else type(x) for x in leaves)))


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_there(x: Any) -> bool:
    try:
        return x.is_ready()
    except RuntimeError:  # deleted: the next step has it
        return True


def _leave(problem: BaseException) -> None:
    """Ends the process. JAX would wait for the others first."""
    code = {SystemExit: getattr(problem, "code", 1), KeyboardInterrupt: 130}.get(type(problem), 1)
    with contextlib.suppress(OSError):
        traceback.print_exception(problem)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
