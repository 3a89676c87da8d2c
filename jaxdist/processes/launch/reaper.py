"""Ends what a launcher that was killed leaves behind.

The kernel ends the processes of the job with it (on Linux), but not what they started themselves, such as readers of
data. A process beside the launcher knows their groups, and ends them when it hears no more.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence


@contextlib.contextmanager
def keeper() -> Iterator[Callable[[int, bool], None]]:
    """Inside, `note(group, alive)` says which process groups there are. What is left of them ends with the launcher."""
    command = [sys.executable, "-I", "-S", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0) as process:
        pipe = process.stdin
        assert pipe is not None

        def note(group: int, alive: bool) -> None:
            with contextlib.suppress(OSError):  # somebody ended it
                pipe.write(b"%d\n" % (group if alive else -group))

        try:
            yield note
        finally:
            process.kill()


def left(lines: Iterable[str]) -> set[int]:
    """The groups that were noted and not taken back."""
    groups: set[int] = set()
    for line in lines:
        group = int(line)
        (groups.add if group > 0 else groups.discard)(abs(group))
    return groups


if __name__ == "__main__":
    for group in left(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def tethered(command: Sequence[str]) -> list[str]:
    """The command, tied to this process. Other systems than Linux have nothing of the kind."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before
        sys.exit(1)
    os.execvp(command[0], command)
