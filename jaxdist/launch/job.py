"""A job: its processes are started together, and the first that fails ends all."""

import contextlib
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from . import devices
from .keeper import keeper
from .ports import hold_port, number_of
from .worker import Worker, finish, how_it_ended, kill, read, show, start

STOP_SECONDS = 1.0  # from the first failure to SIGKILL for the others
PAUSE_SECONDS, LONGEST_PAUSE = 0.5, 30.0  # before the first restart, and at most
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOHUP = (signal.SIGHUP, signal.SIG_IGN)  # `nohup` wants the job to outlive its terminal


class WorkerLost(RuntimeError):
    """A process of the job failed, and the others were stopped.

    Attributes:
      process: its number.
      code: what it ended with, as in `subprocess`: negative for a signal.
      log: the file with what it printed.
    """

    def __init__(self, process: int, code: int, log: Path, last: Sequence[str] = ()):
        lines = "".join(f"\n  {line}" for line in last)
        super().__init__(f"process {process} {how_it_ended(code)}; {log} ends with{lines or ' nothing'}")
        self.process, self.code, self.log = process, code, log


def launch(
    command: Sequence[str],
    processes: int,
    *,
    restarts: int = 0,
    port: int = 0,
    logs: Path | str = "runs/launch",
    grace_seconds: float = 30.0,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Runs a command in several processes on this machine, and waits for them. Call it from the main thread.

    Each process finds `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, which `jaxdist.initialize`
    reads, and `JAXDIST_ATTEMPT`: 0, and one more after each restart. What it prints is shown behind its number and kept
    in `logs/NUMBER.log`. When one fails, the others get SIGTERM, and SIGKILL a second later. SIGINT, SIGTERM and SIGHUP
    are passed on, the second one as SIGKILL. Whatever ends the launcher, SIGKILL too, ends all processes and what they
    started, but for what has begun a session of its own.

    Args:
      command: what each process runs.
      processes: how many.
      restarts: how many times to start all anew after a failure, after a pause of half a second, then of twice as long
        each time, up to 30 s. The script goes on from what it saved last.
      port: where process 0 listens for the others; a free one by default.
      logs: the folder for the logs; those of later attempts go to `logs/attempt-1` and so on.
      grace_seconds: how long processes may go on after a signal was passed on, to save.
      environment: their environment.

    Raises:
      WorkerLost: a process failed, and there were no restarts left.
      ValueError: a number is out of range, or the port is taken.

    Example:
      >>> import sys, tempfile
      >>> from jaxdist.launch import launch
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     launch([sys.executable, "-c", "pass"], 2, logs=folder)
    """
    if processes < 1 or restarts < 0 or not 0 <= grace_seconds < math.inf:
        raise ValueError(
            f"at least 1 process, 0 restarts and 0 seconds of grace, got {processes}, {restarts} and {grace_seconds}"
        )
    given = devices.given(processes, environment)
    with _signals() as (wakeup, received):
        for attempt in range(restarts + 1):
            folder = Path(logs, f"attempt-{attempt}") if attempt else Path(logs)
            with hold_port(port) as held, keeper() as note:
                address = f"127.0.0.1:{number_of(held)}"
                own = {**environment, "PYTHONUNBUFFERED": "1", "JAXDIST_ATTEMPT": str(attempt)}
                # Processes of one machine: nobody else needs to reach them.
                own |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
                own |= {"JAX_NUM_PROCESSES": str(processes)}
                workers: list[Worker] = []
                try:
                    for number in range(processes):
                        variables = own | given[number] | {"JAX_PROCESS_ID": str(number)}
                        workers.append(start(command, number, variables, folder / f"{number}.log"))
                        note(workers[-1].process.pid, True)
                    lost = _watch(workers, wakeup, received, grace_seconds, note)
                finally:
                    for worker in workers:
                        if not worker.ended:
                            kill(worker)
                            worker.process.wait()
                            finish(worker)
            if lost is None:
                return
            if attempt < restarts and not received:
                text = f"jaxdist launch: WorkerLost: {lost}\njaxdist launch: restart {attempt + 1} of {restarts}\n"
                show(sys.stderr, text.encode())
                _pause(wakeup, received, min(PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE))
            if attempt == restarts or received:
                raise lost


def _pause(wakeup: socket.socket, received: Sequence[int], seconds: float) -> None:
    """Waits, unless a signal comes: what fails at once would otherwise have used up its restarts in seconds."""
    until = time.monotonic() + seconds
    while not received and (left := until - time.monotonic()) > 0:
        wakeup.settimeout(left)
        with contextlib.suppress(TimeoutError):
            wakeup.recv(4096)


def _watch(
    workers: Sequence[Worker],
    wakeup: socket.socket,
    received: Sequence[int],
    grace: float,
    note: Callable[[int, bool], None],
) -> WorkerLost | None:
    """Passes on output and signals until all processes have ended. Who failed first, if any did."""
    lost, passed_on, deadline = None, 0, None
    with selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ)
        for worker in workers:
            for pipe in worker.pipes:
                selector.register(pipe, selectors.EVENT_READ, (worker, pipe))
        while alive := [worker for worker in workers if not worker.ended]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in selector.select(left):
                if key.data is None:
                    wakeup.recv(4096)
                elif not read(*key.data):
                    selector.unregister(key.fileobj)
            for number in received[passed_on:]:
                deadline = time.monotonic() + (0.0 if passed_on else grace)  # the second time, at once
                passed_on += 1
                _send(alive, number)
            failed = [worker for worker in alive if _has_ended(worker, selector, note) and worker.process.returncode]
            if failed and lost is None:
                lost = _lost(failed)
                deadline = min(deadline or float("inf"), time.monotonic() + STOP_SECONDS)
                _send([worker for worker in alive if not worker.ended], signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                for worker in alive:
                    if not worker.ended:
                        kill(worker)
                deadline = None
    return lost


def _has_ended(worker: Worker, selector: selectors.BaseSelector, note: Callable[[int, bool], None]) -> bool:
    """Whether it has; then its pipes are emptied and closed."""
    if worker.process.poll() is None:
        return False
    for pipe in worker.pipes:
        with contextlib.suppress(KeyError):
            selector.unregister(pipe)
    finish(worker)
    note(worker.process.pid, False)
    return True


def _lost(failed: Sequence[Worker]) -> WorkerLost:
    """The cause among processes that were found together: one whose peer was killed exits, or is aborted by JAX."""
    order = {-signal.SIGABRT: 2}
    first = min(failed, key=lambda one: (order.get(code := one.process.returncode, int(code > 0)), one.number))
    last = [line.decode(errors="replace") for line in first.last]
    return WorkerLost(first.number, first.process.returncode, first.path, last)


def _send(workers: Sequence[Worker], number: int) -> None:
    """To the processes alone: what they started themselves, such as readers of data, is theirs to end."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(number)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[socket.socket, list[int]]]:
    """A socket that wakes the launcher when a signal comes or a process ends, and the signals to pass on."""
    received: list[int] = []
    wakeup, end = socket.socketpair()
    end.setblocking(False)
    asking = [number for number in ASKING if (number, signal.getsignal(number)) != NOHUP]
    old = {number: signal.signal(number, lambda number, _: received.append(number)) for number in asking}
    old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    old_wakeup = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
    try:
        yield wakeup, received
    finally:
        signal.set_wakeup_fd(old_wakeup)
        for number, handler in old.items():
            signal.signal(number, handler)
        wakeup.close()
        end.close()
