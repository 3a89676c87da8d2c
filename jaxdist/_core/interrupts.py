"""Ctrl-C while a command of this package loads its modules: importing this one prepares for it.

JAX takes seconds to import. A `KeyboardInterrupt` in them would print the stack of an import, which is not the
command's, or be lost in a callback of the import system, which ignores exceptions.
"""

import itertools
import signal
import sys
import threading
from pathlib import Path

MODULES = ("jaxdist._cli", "jaxdist.processes.launch")


def is_command(arguments: list[str], original: list[str]) -> bool:
    """Whether this process is a command of jaxdist, by `sys.argv` and `sys.orig_argv`, and no program that imports it.

    Examples:
      >>> is_command(["/usr/bin/jaxdist", "launch"], ["python", "/usr/bin/jaxdist", "launch"])
      True
      >>> is_command(["train.py"], ["python", "train.py"])
      False
    """
    is_module = any(pair[0] == "-m" and pair[1] in MODULES for pair in itertools.pairwise(original))
    return is_module or Path(arguments[0] if arguments else "").stem == "jaxdist"


def raise_interrupts() -> None:
    """From here on Ctrl-C raises `KeyboardInterrupt` again, unless it is ignored, as in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if (
    is_command(getattr(sys, "argv", []), sys.orig_argv)
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
