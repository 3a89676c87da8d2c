"""Becomes a command that Linux kills when its parent dies: `tether.py PARENT COMMAND...`.

A program of its own, since a fork that runs Python is not safe beside the threads of a launcher that has imported JAX.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

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
