"""The command `jaxdist launch`, also `python -m jaxdist.processes.launch`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..cluster import AgreementError
from .failures import NodeLostError, ProcessFailedError
from .job import launch
from .worker import tell

USAGE = "jaxdist launch [-n N] [--nodes M --node I --address HOST:PORT] [--restarts K] [options] SCRIPT.py [arguments]"


def main(arguments: Sequence[str]) -> int:
    """Runs `jaxdist launch` with the arguments that follow it.

    Returns:
      The exit code: 0, 2 for invalid arguments, or the code of the process that failed first, 128 plus the number for a
      signal, as in shells; 1 if another node was lost, 130 if a signal came before the processes were started.
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
            nodes=options.nodes,
            node=options.node,
            address=options.address,
            timeout_seconds=options.timeout,
        )
    except ProcessFailedError as failure:
        tell(f"ProcessFailedError: {failure}")
        return failure.code if failure.code > 0 else 128 - failure.code
    except NodeLostError as lost:
        tell(f"NodeLostError: {lost}")
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as problem:
        if os.environ.get("JAXDIST_TRACEBACK"):
            raise
        kind = type(problem).__name__ if isinstance(problem, AgreementError) else "error"
        tell(f"{kind}: {' '.join(str(problem).split())}")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    purpose = "Starts several processes of a script on this machine, or on several, and stops them together."
    parser = argparse.ArgumentParser("jaxdist launch", usage=USAGE, description=purpose)
    add = parser.add_argument
    add("-n", "--processes", type=int, default=1, metavar="N", help="number of processes on each node (default: 1)")
    add("--nodes", type=int, default=1, metavar="M", help="number of machines; run the command on each (default: 1)")
    add("--node", type=int, default=0, metavar="I", help="number of this machine, from 0")
    add("--address", default="", metavar="HOST:PORT", help="of node 0, the same on all; the network between them")
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
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="to wait for other nodes (default: 300)")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    add("script", metavar="SCRIPT", help="the Python script that each process runs")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
