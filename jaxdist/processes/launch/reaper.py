"""Ends what a launcher that was killed leaves behind.

On Linux the kernel ends the processes of the job together with the launcher (`die_with_parent`), but not the processes
that they started themselves, such as data loaders. A process beside the launcher knows their process groups, and kills
them when its pipe from the launcher closes (`reaper`). Both run this file as a script.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
SCRIPT = (sys.executable, "-I", "-S", __file__)


@contextlib.contextmanager
def reaper() -> Iterator[Callable[[int, bool], None]]:
    """Yields `note(group, alive)`, which keeps track of process groups; those alive are killed with the launcher."""
    with subprocess.Popen(SCRIPT, stdin=subprocess.PIPE, start_new_session=True, bufsize=0) as process:
        pipe = process.stdin
        assert pipe is not None

        def note(group: int, alive: bool) -> None:
            # The reaper may have been killed.
            with contextlib.suppress(OSError):
                pipe.write(b"%d\n" % (group if alive else -group))

        try:
            yield note
        finally:
            process.kill()


def die_with_parent(command: Sequence[str]) -> list[str]:
    """Wraps a command so that it is killed with this process; Linux only, elsewhere returns it unchanged."""
    return [*SCRIPT, str(os.getpid()), *command] if sys.platform.startswith("linux") else list(command)


@contextlib.contextmanager
def holding_interrupts() -> Iterator[None]:
    """Holds SIGINT back, also in a process that starts meanwhile: until `die_with_parent` runs the program.

    Python would raise it as an exception in the script that does so, and print a stack that is none of the program.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def groups_alive(lines: Iterable[str]) -> set[int]:
    """Returns the groups that were noted as alive and not as ended."""
    groups: set[int] = set()
    for line in lines:
        group = int(line)
        (groups.add if group > 0 else groups.discard)(abs(group))
    return groups


def main(arguments: Sequence[str]) -> None:
    """Without arguments, reaps the groups of stdin at its end; else runs `PARENT COMMAND ...` and dies with PARENT."""
    if not arguments:
        for group in groups_alive(sys.stdin):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        return
    parent, *command = arguments
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # The parent died before the call, which then has no effect.
    if os.getppid() != int(parent):
        sys.exit(1)
    # What `holding_interrupts` has held back ends this process, as it ends the program before its first line.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
