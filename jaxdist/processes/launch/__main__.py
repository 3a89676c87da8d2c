"""The command `jaxdist launch`, also `python -m jaxdist.processes.launch`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .job import ProcessFailedError, launch
from .worker import tell

USAGE = "jaxdist launch [-n N] [--restarts K] [options] SCRIPT.py [arguments]"


def main(arguments: Sequence[str]) -> int:
    """Runs `jaxdist launch` with the arguments that follow it.

    Returns:
      The exit code: 0, 2 for invalid arguments, or the code of the process that failed first, 128 plus the number for a
      signal, as in shells.
    """
    options = _parser().parse_args(arguments)
    script = [options.script, *options.arguments]
    try:
        if not options.module and not Path(options.script).is_file():
            raise ValueError(f"there is no file {options.script!r}; run a module with -m NAME")
        launch(
            [sys.executable, *(["-m"] if options.module else []), *script],
            options.processes,
            restarts=options.restarts,
            port=options.port,
            logs=options.logs,
            grace_seconds=options.grace,
        )
    except ProcessFailedError as failure:
        tell(f"ProcessFailedError: {failure}")
        return failure.code if failure.code > 0 else 128 - failure.code
    except (ValueError, OSError) as problem:
        if os.environ.get("JAXDIST_TRACEBACK"):
            raise
        tell(f"error: {' '.join(str(problem).split())}")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    purpose = "Starts several processes of a script on this machine, and stops them together."
    parser = argparse.ArgumentParser("jaxdist launch", usage=USAGE, description=purpose)
    add = parser.add_argument
    add("-n", "--processes", type=int, default=1, metavar="N", help="number of processes (default: 1)")
    add("--restarts", type=int, default=0, metavar="K", help="restart all processes after a failure, up to K times")
    add("--port", type=int, default=0, help="port of process 0 (default: a free one)")
    add(
        "--logs",
        type=Path,
        default=Path("runs/launch"),
        metavar="FOLDER",
        help="folder of the outputs (default: runs/launch)",
    )
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="to save after SIGTERM or Ctrl-C (default: 30)")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    add("script", metavar="SCRIPT", help="the Python script that each process runs")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
