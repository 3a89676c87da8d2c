"""Where the launcher prints: from a thread, since a pager that waits, or Ctrl-S, stops whatever writes to it."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MOST_WAITING = 1 << 20  # bytes, before lines are dropped
PATIENCE = 1.0  # seconds in which nothing was read, before lines are dropped
PIECE = 4096  # bytes in a write: the smaller, the sooner it is seen that some were read
RETRY = 0.05  # seconds, where an output that never blocks is full


class Printer:
    """Writes lines to an output in a thread of its own. What is not read in time is dropped, and its lines counted."""

    def __init__(self, out: Any):
        self._out = out
        self._changed = threading.Condition()
        self._waiting, self._written = bytearray(), 0
        self._own: list[int] = []  # where the launcher's own lines end, of all bytes that ever waited
        self._dropped, self._told = 0, 0  # lines that were dropped, and those of them that a line says were
        self._moved = time.monotonic()  # when something was read, or began to wait
        self._closed = False
        # A daemon: the process must be able to end while the thread is inside a write.
        self._thread = threading.Thread(target=self._run, name="jaxdist launch printer", daemon=True)
        self._thread.start()

    def show(self, text: bytes) -> None:
        """Prints lines. Where too much waits already it waits too, and drops them if nothing is read meanwhile."""
        with self._changed:
            self._wait_while(lambda: len(self._waiting) > MOST_WAITING)
            if len(self._waiting) > MOST_WAITING:
                self._dropped += text.count(b"\n")
            else:
                self._say_what_was_dropped()
                self._add(text)

    def tell(self, line: bytes) -> None:
        """Prints a line of the launcher's own, which is never dropped, and waits for nothing."""
        with self._changed:
            self._say_what_was_dropped()
            self._add_own(line)

    def close(self) -> int:
        """Waits as long as the rest is being read, and drops what is not. How many lines were dropped in all."""
        with self._changed:
            self._say_what_was_dropped()
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

    def _say_what_was_dropped(self) -> None:
        if more := self._dropped - self._told:
            self._told = self._dropped
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
    """Printers for the launcher's output and for its errors. In the end it says how much of the output was dropped."""
    out, err = Printer(sys.stdout), Printer(sys.stderr)
    try:
        yield out, err
    finally:
        if dropped := out.close():
            err.tell(b"%d lines of the output were not read and dropped; %s has them" % (dropped, os.fsencode(logs)))
        err.close()


def tell(text: str) -> None:
    """Prints a line of the launcher's own on stderr."""
    printer = Printer(sys.stderr)
    printer.tell(text.encode(errors="replace"))
    printer.close()


def _writer(out: Any) -> tuple[Callable[[bytes], int], int | None]:
    """What writes some of a text and says how much, and how much to give it at most.

    An output that cannot be written to takes everything: a reader that has gone must not end the launcher.
    """

    def write_text(text: bytes) -> int:  # a notebook's, or none at all
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
    return write_bytes, PIECE
