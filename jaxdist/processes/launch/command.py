"""`jaxdist launch`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .job import WorkerLost, launch
from .printer import tell

USAGE = "jaxdist launch [-n N] [--restarts K] [options] SCRIPT.py [arguments]"


def main(arguments: Sequence[str]) -> int:
    """Runs what follows `jaxdist launch`.

    Returns:
      The exit code: 0, 2 for arguments that cannot work, or that of the process that failed first, 128 and the number
      for a signal, as in shells.
    """
    chosen = _parser().parse_args(arguments)
    script = [chosen.script, *chosen.arguments]
    try:
        if not chosen.module and not Path(chosen.script).is_file():
            raise ValueError(f"there is no file {chosen.script!r}; a module is -m NAME")
        launch(
            [sys.executable, *(["-m"] if chosen.module else []), *script],
            chosen.processes,
            restarts=chosen.restarts,
            port=chosen.port,
            logs=chosen.logs,
            grace_seconds=chosen.grace,
        )
    except WorkerLost as lost:
        tell(f"WorkerLost: {lost}")
        return lost.code if lost.code > 0 else 128 - lost.code
    except (ValueError, OSError) as problem:
        if os.environ.get("JAXDIST_TRACEBACK"):
            raise
        tell(f"error: {' '.join(str(problem).split())}")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxdist launch", usage=USAGE, description="Starts processes of one script here.")
    add = parser.add_argument
    add("-n", "--processes", type=int, default=1, metavar="N", help="how many (default: 1)")
    add("--restarts", type=int, default=0, metavar="K", help="start all anew after a failure, at most so many times")
    add("--port", type=int, default=0, help="where process 0 listens (default: a free one)")
    add("--logs", type=Path, default=Path("runs/launch"), metavar="FOLDER", help="default: runs/launch")
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="to save after SIGTERM or Ctrl-C (default: 30)")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT")
    add("arguments", nargs=argparse.REMAINDER, help="for the script")
    return parser
