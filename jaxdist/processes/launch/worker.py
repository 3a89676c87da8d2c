"""One process of a job: start, output, end."""

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
from .reaper import die_with_parent

LAST_LINES = 20
LONGEST_LINE = 1 << 16  # a longer one is cut
MOST_READS = 16  # as much as Linux keeps in a pipe, in reads of the longest line


@dataclass
class Pipe:
    """The end of a pipe, the printer of its lines, and the beginning of a line that is not complete."""

    file: IO[bytes]
    printer: Printer
    partial: bytearray = field(default_factory=bytearray)


@dataclass
class Worker:
    """A process, its log, and the thread that reads its output until `ending` is closed."""

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
    """Starts a process in a new session; it is killed when the launcher ends, for whatever reason.

    A thread reads its output, so that neither a hanging disk nor an unread terminal keeps the launcher from its signals
    and from processes that end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("wb", buffering=0)
    process = subprocess.Popen(
        die_with_parent(command),
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
    """Kills the children of a process that has ended; the thread then reads the rest of its pipes."""
    worker.ended = True
    kill(worker)
    os.close(worker.ending)


def _read_all(worker: Worker, pipes: Sequence[Pipe], ended: int) -> None:
    """Passes on the output of the process, then closes its pipes and its log."""
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
        # A child in another session may continue to write.
        for _ in range(MOST_READS):
            if not _read(worker, pipe):
                break
        _pass_on(worker, pipe, len(pipe.partial))
        pipe.file.close()
    worker.log.close()
    os.close(ended)


def _read(worker: Worker, pipe: Pipe) -> bool:
    """Passes on the lines that have come through a pipe; returns False if there are none, as at its end."""
    try:
        part = os.read(pipe.file.fileno(), LONGEST_LINE)
    except BlockingIOError:
        return False
    pipe.partial += part
    # Progress bars end their lines with a carriage return.
    complete = max(pipe.partial.rfind(b"\n"), pipe.partial.rfind(b"\r")) + 1
    _pass_on(worker, pipe, len(pipe.partial) if len(pipe.partial) > LONGEST_LINE else complete)
    return bool(part)


def _pass_on(worker: Worker, pipe: Pipe, end: int) -> None:
    """Passes on the first `end` bytes, to the log and to the printer."""
    lines = bytes(pipe.partial[:end]).splitlines()
    del pipe.partial[:end]
    if not lines:
        return
    worker.last.extend(lines)
    with contextlib.suppress(OSError):  # a full disk must not end the launcher
        worker.log.write(b"".join(line + b"\n" for line in lines))
    pipe.printer.show(b"".join(b"[%d] %s\n" % (worker.number, line) for line in lines))


def kill(worker: Worker) -> None:
    """Kills the process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Describes a return code: `exited with code 3`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
