"""One process of the job: how it is started, what it prints, how it ended."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from .tether import tethered

LAST_LINES = 20
LONGEST_LINE = 1 << 16  # a longer one is cut


@dataclass
class Worker:
    """A process, its log, and the ends of its pipes with what came so far of a line."""

    number: int
    process: subprocess.Popen[bytes]
    log: BinaryIO
    path: Path
    pipes: dict[IO[bytes], bytearray]
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    ended: bool = False


def start(command: Sequence[str], number: int, environment: Mapping[str, str], path: Path) -> Worker:
    """Starts a process in a session of its own, which dies with the launcher, whatever ends that one."""
    process = subprocess.Popen(
        tethered(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    pipes = {}
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        pipes[pipe] = bytearray()
    path.parent.mkdir(parents=True, exist_ok=True)
    return Worker(number, process, path.open("wb", buffering=0), path, pipes)


def read(worker: Worker, pipe: IO[bytes]) -> bool:
    """Passes on the lines that have come through a pipe; False at its end."""
    try:
        part = os.read(pipe.fileno(), LONGEST_LINE)
    except BlockingIOError:
        return True
    worker.pipes[pipe] += part
    begun = worker.pipes[pipe]
    _pass_on(worker, pipe, len(begun) if len(begun) > LONGEST_LINE else begun.rfind(b"\n") + 1)
    return bool(part)


def finish(worker: Worker) -> None:
    """What a process that has ended left in its pipes; then whoever it left behind ends too."""
    worker.ended = True
    kill(worker)
    for pipe in worker.pipes:
        while select.select([pipe], [], [], 0)[0] and read(worker, pipe):
            pass
        _pass_on(worker, pipe, len(worker.pipes[pipe]))
        pipe.close()
    worker.log.close()


def _pass_on(worker: Worker, pipe: IO[bytes], end: int) -> None:
    """So much of what came, to the log and to where the launcher prints."""
    out = sys.stdout if pipe is worker.process.stdout else sys.stderr
    for line in bytes(worker.pipes[pipe][:end]).splitlines():
        worker.last.append(line)
        # A full disk or a reader that has gone must not end the launcher.
        with contextlib.suppress(OSError):
            worker.log.write(line + b"\n")
        with contextlib.suppress(OSError):
            out.buffer.write(b"[%d] %s\n" % (worker.number, line))
            out.flush()
    del worker.pipes[pipe][:end]


def kill(worker: Worker) -> None:
    """Ends the process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """`exited with code 3`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
