"""Prints from a thread, since a waiting pager, or Ctrl-S, blocks whatever writes to the terminal."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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


@contextmanager
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
    """Returns a function that writes a part of a text and returns its length, and the most to pass to it.

    A broken output accepts everything, so that a reader that has gone does not end the launcher.
    """

    def write_text(text: bytes) -> int:  # for a notebook, or without an output
        with suppress(AttributeError, OSError, ValueError):
            out.write(text.decode(errors="replace"))
        return len(text)

    # Past Python's buffer: its lock, held by a write that does not end, would make the interpreter abort at its end.
    def write_bytes(text: bytes) -> int:
        try:
            return os.write(descriptor, text)
        except BlockingIOError:
            time.sleep(RETRY)
            return 0
        except OSError:
            return len(text)

    try:
        descriptor = out.fileno() if hasattr(out, "buffer") else -1
    except (OSError, ValueError):
        descriptor = -1
    if descriptor < 0:
        return write_text, None
    with suppress(OSError, ValueError):
        out.flush()
    return write_bytes, WRITE_BYTES
