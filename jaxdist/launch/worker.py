"""One process of the job: how it is started, what it prints, how it ended."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from .tether import tethered

LAST_LINES = 20
LONGEST_LINE = 1 << 16  # a longer one is cut
MOST_LEFT = 16  # as much as Linux keeps in a pipe, in longest lines


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
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("wb", buffering=0)
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
    return Worker(number, process, log, path, pipes)


def read(worker: Worker, pipe: IO[bytes]) -> bool:
    """Passes on the lines that have come through a pipe; False where nothing has, as at its end."""
    try:
        part = os.read(pipe.fileno(), LONGEST_LINE)
    except BlockingIOError:
        return False
    worker.pipes[pipe] += part
    begun = worker.pipes[pipe]
    whole = max(begun.rfind(b"\n"), begun.rfind(b"\r")) + 1  # a bar of progress returns to where it began
    _pass_on(worker, pipe, len(begun) if len(begun) > LONGEST_LINE else whole)
    return bool(part)


def finish(worker: Worker) -> None:
    """What a process that has ended left in its pipes; then whoever it left behind ends too."""
    worker.ended = True
    kill(worker)
    for pipe in worker.pipes:
        for _ in range(MOST_LEFT):  # who fled into a session of its own may go on writing
            if not read(worker, pipe):
                break
        _pass_on(worker, pipe, len(worker.pipes[pipe]))
        pipe.close()
    worker.log.close()


def _pass_on(worker: Worker, pipe: IO[bytes], end: int) -> None:
    """So much of what came, to the log and to where the launcher prints."""
    lines = bytes(worker.pipes[pipe][:end]).splitlines()
    del worker.pipes[pipe][:end]
    worker.last.extend(lines)
    with contextlib.suppress(OSError):  # a full disk must not end the launcher
        worker.log.write(b"".join(line + b"\n" for line in lines))
    out = sys.stdout if pipe is worker.process.stdout else sys.stderr
    show(out, b"".join(b"[%d] %s\n" % (worker.number, line) for line in lines))


def show(out: Any, text: bytes) -> None:
    """Prints, unless it cannot: a reader that has gone, or an output that was closed, must not end the launcher."""
    with contextlib.suppress(OSError):
        if out is not None and hasattr(out, "buffer"):
            out.buffer.write(text)
            out.flush()
        elif out is not None:  # a notebook's
            out.write(text.decode(errors="replace"))


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
