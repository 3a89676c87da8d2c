"""One process of a job: start, output, end.

The launcher prints from a thread, since a waiting pager, or Ctrl-S, blocks whatever writes to the terminal.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from .reaper import die_with_parent, holding_interrupts

LAST_LINES = 20
LONGEST_LINE = 1 << 16  # a longer one is cut
MOST_READS = 16  # as much as Linux keeps in a pipe, in reads of the longest line
MOST_WAITING = 1 << 20  # bytes, before lines are dropped
PATIENCE = 1.0  # seconds without any reading, before lines are dropped
WRITE_BYTES = 4096  # in one write: small, to notice soon that some were read
RETRY = 0.05  # seconds, when a non-blocking output is full


class Printer:
    """Writes lines to an output in a thread. Lines that are not read in time are dropped and counted."""

    def __init__(self, out: Any):
        self._out = out
        self._changed = threading.Condition()
        self._waiting, self._written = bytearray(), 0
        # Offsets of the ends of the launcher's own lines in the stream.
        self._own: list[int] = []
        # Dropped lines, and how many of them have been reported.
        self._dropped, self._reported = 0, 0
        # When something was last read, or began to wait.
        self._moved = time.monotonic()
        self._closed = False
        # A daemon: the process must be able to end while the thread is inside a write.
        self._thread = threading.Thread(target=self._run, name="jaxdist launch printer", daemon=True)
        self._thread.start()

    def show(self, text: bytes) -> None:
        """Prints lines. If too much is waiting it waits too, and drops them if nothing is read meanwhile."""
        with self._changed:
            self._wait_while(lambda: len(self._waiting) > MOST_WAITING)
            if len(self._waiting) > MOST_WAITING:
                self._dropped += text.count(b"\n")
            else:
                self._report_dropped()
                self._add(text)

    def tell(self, line: bytes) -> None:
        """Prints a line of the launcher itself, without waiting; such lines are never dropped."""
        with self._changed:
            self._report_dropped()
            self._add_own(line)

    def close(self) -> int:
        """Waits while the rest is being read, then drops it. Returns the number of all dropped lines."""
        with self._changed:
            self._report_dropped()
            self._wait_while(lambda: bool(self._waiting))
            self._dropped += self._waiting.count(b"\n") - sum(end > self._written for end in self._own)
            self._closed, blocked = True, bool(self._waiting)
            self._changed.notify_all()
        if not blocked:
            self._thread.join()
        return self._dropped

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition is false, or nothing has been read for too long."""
        while condition() and (left := self._moved + PATIENCE - time.monotonic()) > 0:
            self._changed.wait(left)

    def _add(self, text: bytes) -> None:
        if not self._waiting:
            self._moved = time.monotonic()
        self._waiting += text
        self._changed.notify_all()

    def _add_own(self, line: bytes) -> None:
        self._add(b"jaxdist launch: %s\n" % line)
        self._own.append(self._written + len(self._waiting))

    def _report_dropped(self) -> None:
        if more := self._dropped - self._reported:
            self._reported = self._dropped
            self._add_own(b"%d lines are missing here: the output was not read" % more)

    def _run(self) -> None:
        write, most = _writer(self._out)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                text = bytes(self._waiting[:most])
            written = write(text)
            with self._changed:
                del self._waiting[:written]
                self._written += written
                self._moved = time.monotonic() if written else self._moved
                self._changed.notify_all()


@contextlib.contextmanager
def printers(logs: Path) -> Iterator[tuple[Printer, Printer]]:
    """Yields printers for the launcher's output and its errors; reports at the end how many lines were dropped."""
    out, err = Printer(sys.stdout), Printer(sys.stderr)
    try:
        yield out, err
    finally:
        if dropped := out.close():
            err.tell(b"%d lines of the output were not read and dropped; %s has them" % (dropped, os.fsencode(logs)))
        err.close()


def tell(text: str) -> None:
    """Prints a line of the launcher itself on stderr."""
    printer = Printer(sys.stderr)
    printer.tell(text.encode(errors="replace"))
    printer.close()


def _writer(out: Any) -> tuple[Callable[[bytes], int], int | None]:
    """Returns a function that writes a part of a text and returns its length, and the most to pass to it."""

    # For a notebook, or without an output.
    def write_text(text: bytes) -> int:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            out.write(text.decode(errors="replace"))
        return len(text)

    # Past Python's buffer: its lock, held by a write that does not end, would make the interpreter abort at its end.
    def write_bytes(text: bytes) -> int:
        try:
            return os.write(descriptor, text)
        except BlockingIOError:
            time.sleep(RETRY)
            return 0
        # A broken output accepts everything, so that a reader that has gone does not end the launcher.
        except OSError:
            return len(text)

    try:
        descriptor = out.fileno() if hasattr(out, "buffer") else -1
    except (OSError, ValueError):
        descriptor = -1
    if descriptor < 0:
        return write_text, None
    with contextlib.suppress(OSError, ValueError):
        out.flush()
    return write_bytes, WRITE_BYTES


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
    command: Sequence[str], number: int, environment: Mapping[str, str], path: Path, outputs: tuple[Printer, Printer]
) -> Worker:
    """Starts a process in a new session; it is killed when the launcher ends, for whatever reason.

    A thread reads its output, so that neither a hanging disk nor an unread terminal keeps the launcher from its signals
    and from processes that end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("wb", buffering=0)
    with holding_interrupts():
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
    pipes = [Pipe(process.stdout, outputs[0]), Pipe(process.stderr, outputs[1])]
    # A pipe wakes the reader at the end of the process, since its children may keep its output open.
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
    # What is left is one line, or its beginning.
    too_long = len(pipe.partial) - complete > LONGEST_LINE
    _pass_on(worker, pipe, len(pipe.partial) if too_long else complete)
    return bool(part)


def _pass_on(worker: Worker, pipe: Pipe, end: int) -> None:
    """Passes on the first `end` bytes, to the log and to the printer."""
    lines = bytes(pipe.partial[:end]).splitlines()
    del pipe.partial[:end]
    if not lines:
        return
    worker.last.extend(lines)
    # A full disk must not end the launcher.
    with contextlib.suppress(OSError):
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
