"""The rows of `gpu.py`: what is measured, how large, and the file that keeps them."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """What is measured, and how often: `entries` are those of codes, `params` those of optimizers."""

    entries: int = 2**27
    params: int = 2**26
    matrices: tuple[tuple[int, int], ...] = ((1024, 1024), (4096, 1024))
    ranks: tuple[int, ...] = (4, 32)
    turns: int = 7
    calls: int = 20
    models: tuple[str, ...] = ("gpt:125m", "gpt:1b")
    steps: int = 8
    products: tuple[int, ...] = (2048, 4096, 8192)
    kernels: int = 300
    tiles: tuple[int, ...] = (1024, 2048, 4096)
    warps: tuple[int, ...] = (2, 4, 8)


SMALLEST = Sizes(2**14, 2**14, ((64, 32),), (2,), 1, 1, ("gpt:tiny",), 2, (64,), 8, (2048,), (2,))


class Rows:
    """The rows of a file: those that are known, and new ones as they come."""

    def __init__(self, path: Path):
        self.path = path

    def known(self) -> dict[tuple[str, str], dict]:
        """All rows, the last of each name. A line that a lost machine cut short counts as not written."""
        found = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                found[row["section"], row["name"]] = row
        return found

    def has(self, section: str, name: str) -> bool:
        """Whether a row was measured. One that was skipped is tried again: what it needs may be there by now."""
        return "skipped" not in self.known().get((section, name), {"skipped": ""})

    def measure(self, section: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Appends what `run` returns, or the reason why there is nothing, unless it was measured before."""
        if self.has(section, name):
            return
        try:
            self.append(section, name, run())
        except Exception as error:
            # A kernel that a backend has not is a result too, and the other rows must go on.
            self.skip(section, name, f"{type(error).__name__}: {error}"[:400])

    def skip(self, section: str, name: str, why: str) -> None:
        """Appends the reason why there is no result, once."""
        if self.known().get((section, name), {}).get("skipped") != why:
            self.append(section, name, {"skipped": why})

    def append(self, section: str, name: str, found: dict[str, Any]) -> None:
        """Appends a row; it is on the disk when this returns."""
        line = json.dumps({"section": section, "name": name, **found})
        print(line, flush=True)
        is_whole = not self.path.exists() or self.path.read_text()[-1:] in ("", "\n")
        with self.path.open("a") as file:
            file.write(("" if is_whole else "\n") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
