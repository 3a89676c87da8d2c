"""A job: its processes are started together, and the first that fails ends all."""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import devices
from .keeper import keeper
from .ports import hold_port, number_of
from .worker import Worker, finish, how_it_ended, kill, read, start

STOP_SECONDS = 1.0  # from the first failure to SIGKILL for the others
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


@dataclass(frozen=True)
class _Ended:
    """How one attempt went: who failed first, if any, and whether the launcher had been asked to stop."""

    lost: WorkerLost | None
    asked: bool


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
    are passed on. Whatever ends the launcher, SIGKILL too, ends all processes and what they started.

    Args:
      command: what each process runs.
      processes: how many.
      restarts: how many times to start all anew after a failure. The script goes on from what it saved last.
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
    if processes < 1 or restarts < 0 or grace_seconds < 0:
        raise ValueError(
            f"at least 1 process, 0 restarts and 0 seconds of grace, got {processes}, {restarts} and {grace_seconds}"
        )
    given = devices.given(processes, environment)
    for attempt in range(restarts + 1):
        folder = Path(logs, f"attempt-{attempt}") if attempt else Path(logs)
        with hold_port(port) as held, _signals() as (wakeup, received), keeper() as note:
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
                ended = _watch(workers, wakeup, received, grace_seconds, note)
            finally:
                for worker in workers:
                    if not worker.ended:
                        kill(worker)
                        worker.process.wait()
        if ended.lost is None:
            return
        if ended.asked or attempt == restarts:
            raise ended.lost
        print(f"jaxdist launch: WorkerLost: {ended.lost}", file=sys.stderr)
        print(f"jaxdist launch: restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)


def _watch(
    workers: Sequence[Worker],
    wakeup: socket.socket,
    received: list[int],
    grace: float,
    note: Callable[[int, bool], None],
) -> _Ended:
    """Passes on output and signals until all processes have ended."""
    lost, asked, deadline = None, False, None
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
            while received:
                number = received.pop(0)
                deadline = time.monotonic() + (0.0 if asked else grace)  # the second time, at once
                asked = True
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
    return _Ended(lost, asked)


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
    """The cause among processes that were found together: whose peer died is aborted by JAX, so others come first."""
    first = min(failed, key=lambda worker: (worker.process.returncode == -signal.SIGABRT, worker.number))
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
    old = {number: signal.signal(number, lambda number, _: received.append(number)) for number in ASKING}
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
