"""One process of the job: how it is started, what it prints, how it ended."""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from .printer import Printer
from .reaper import tethered

LAST_LINES = 20
LONGEST_LINE = 1 << 16  # a longer one is cut
MOST_LEFT = 16  # as much as Linux keeps in a pipe, in longest lines


@dataclass
class Pipe:
    """The end of a pipe, where to show what comes out of it, and what came so far of a line."""

    file: IO[bytes]
    printer: Printer
    begun: bytearray = field(default_factory=bytearray)


@dataclass
class Worker:
    """A process, its log, and the thread that reads what it prints, until `ending` is closed."""

    number: int
    process: subprocess.Popen[bytes]
    log: BinaryIO
    path: Path
    ending: int
    reader: threading.Thread = field(init=False)
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    ended: bool = False


def start(
    command: Sequence[str], number: int, environment: Mapping[str, str], path: Path, printers: tuple[Printer, Printer]
) -> Worker:
    """Starts a process in a session of its own, which dies with the launcher, whatever ends that one.

    A thread reads what it prints: neither a log on a disk that hangs nor an output that is not read may keep the
    launcher from its signals and from processes that end.
    """
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
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = [Pipe(process.stdout, printers[0]), Pipe(process.stderr, printers[1])]
    ended, ending = os.pipe()
    worker = Worker(number, process, log, path, ending)
    worker.reader = threading.Thread(target=_read_all, args=(worker, pipes, ended), daemon=True)
    worker.reader.start()
    return worker


def finish(worker: Worker) -> None:
    """Ends what a process that has ended left behind; the thread then reads what is left in its pipes."""
    worker.ended = True
    kill(worker)
    os.close(worker.ending)


def _read_all(worker: Worker, pipes: Sequence[Pipe], ended: int) -> None:
    """Passes on all that the process prints, then closes its pipes and its log."""
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ)
        for pipe in pipes:
            os.set_blocking(pipe.file.fileno(), False)
            selector.register(pipe.file, selectors.EVENT_READ, pipe)
        running = True
        while running:
            for key, _ in selector.select():
                if key.data is None:
                    running = False
                elif not _read(worker, key.data):
                    selector.unregister(key.fileobj)
    for pipe in pipes:
        for _ in range(MOST_LEFT):  # what fled into a session of its own may go on writing
            if not _read(worker, pipe):
                break
        _pass_on(worker, pipe, len(pipe.begun))
        pipe.file.close()
    worker.log.close()
    os.close(ended)


def _read(worker: Worker, pipe: Pipe) -> bool:
    """Passes on the lines that have come through a pipe; False where nothing has, as at its end."""
    try:
        part = os.read(pipe.file.fileno(), LONGEST_LINE)
    except BlockingIOError:
        return False
    pipe.begun += part
    whole = max(pipe.begun.rfind(b"\n"), pipe.begun.rfind(b"\r")) + 1  # a bar of progress returns to where it began
    _pass_on(worker, pipe, len(pipe.begun) if len(pipe.begun) > LONGEST_LINE else whole)
    return bool(part)


def _pass_on(worker: Worker, pipe: Pipe, end: int) -> None:
    """So much of what came, to the log and to where the launcher prints."""
    lines = bytes(pipe.begun[:end]).splitlines()
    del pipe.begun[:end]
    if not lines:
        return
    worker.last.extend(lines)
    with contextlib.suppress(OSError):  # a full disk must not end the launcher
        worker.log.write(b"".join(line + b"\n" for line in lines))
    pipe.printer.show(b"".join(b"[%d] %s\n" % (worker.number, line) for line in lines))


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
