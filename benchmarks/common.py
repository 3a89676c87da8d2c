"""What the commands of this folder share: subcommands, records, and processes that print JSON.

It imports the standard library alone: JAX reads its settings when it is imported, and some of the processes run under a
Python that does not have it.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Freed memory stays mapped: else much of a short step is page faults, PyTorch's as much as ours.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def run_subcommand(about: str | None, subcommands: dict[str, str]) -> int | None:
    """Runs the module that the first argument names: its `add_options(parser)`, and then `main(given)`.

    The others are not imported, since each module sets JAX up for itself.

    Args:
      about: the docstring of the command.
      subcommands: the names of the modules, and a line of help for each.
    """
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=as_written)
    parsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, line in subcommands.items():
        own = parsers.add_parser(name, help=line, formatter_class=as_written)
        if sys.argv[1:2] == [name]:
            module = importlib.import_module(name)
            own.description = module.__doc__
            module.add_options(own)
    given = parser.parse_args()
    # As Ctrl-C does, so that what a command has started is ended, and what it has made is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return importlib.import_module(vars(given).pop("subcommand")).main(given)


def write_record(folder: Path | None, name: str, found: Any, table: str | None = None) -> None:
    """Writes `NAME.json`, and `NAME.md` if there is a table; nothing if there is no folder."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    if table is not None:
        (folder / f"{name}.md").write_text(table.rstrip("\n") + "\n")


def append_rows(folder: Path | None, name: str, rows: list[dict[str, Any]]) -> None:
    """Appends records to `NAME.jsonl`, one a line, so that those of several runs add up; nothing without a folder."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def run_process(command: list[str], settings: dict[str, str] | None = None) -> Any:
    """Runs a command with more environment variables, and returns the JSON of its last line."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path} | (settings or {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_of(process: int | str, kind: str) -> int:
    """Bytes of memory that a process, or `"self"`, uses, `VmRSS`, or has used at most, `VmHWM`."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])
