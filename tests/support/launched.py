"""What scripts under the launcher begin with, and what its tests wait for. None of it starts JAX."""

import pathlib
import time

SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
me, attempt = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAXDIST_ATTEMPT"])
def until(path):
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
def note(name, text=""):
    pathlib.Path("part" + name).write_text(text)
    os.rename("part" + name, name)
def saved(*_):
    print("saved", flush=True)
    sys.exit(0)
"""


def wait_for(path: pathlib.Path, size: int = 0) -> None:
    until = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size >= size):
        assert time.monotonic() < until
        time.sleep(0.01)


def gone(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
