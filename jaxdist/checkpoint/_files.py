"""The folders of a run's checkpoints: how one appears and goes, and whether its files are as they were written."""

import hashlib
import os
import shutil
from pathlib import Path

from .errors import CheckpointDamagedError

ARRAYS = "arrays"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
# Endings of folders that are no checkpoints: being filled, about to go, and set aside.
UNFINISHED, REPLACED, DELETED, DAMAGED = ".unfinished", ".replaced", ".deleted", ".damaged"


def steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    found = [one for one in root.iterdir() if one.name.isdecimal() and one.is_dir()] if root.is_dir() else []
    return sorted(int(one.name) for one in found)


def begin(root: Path, step: int) -> None:
    """Makes the folder to fill; what an interrupted save of the same step left goes."""
    unfinished = root / f"{step}{UNFINISHED}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def commit(root: Path, step: int, manifest: str, keep: int | None) -> None:
    """Makes a filled folder a checkpoint by a rename, and drops all but the last `keep` up to this step."""
    unfinished, folder = root / f"{step}{UNFINISHED}", root / str(step)
    _write(unfinished / MANIFEST, manifest)
    _write(unfinished / SUMS, _sums(unfinished))
    _sync(unfinished)
    if folder.exists():
        _drop(folder, REPLACED, then=lambda: unfinished.rename(folder))
    else:
        unfinished.rename(folder)
    _sync(root)
    if keep is not None:
        # Later steps are of a run that went on from there and was given up: theirs is not this run's to take.
        for old in [one for one in steps(root) if one <= step][:-keep]:
            _drop(root / str(old), DELETED)


def sweep(root: Path) -> None:
    """Takes away what killed processes left. Nothing may be saving into the folder."""
    for one in list(root.iterdir()) if root.is_dir() else []:
        if Path(one.name).stem.isdecimal() and one.suffix in (UNFINISHED, REPLACED, DELETED):
            shutil.rmtree(one, ignore_errors=True)


def set_aside(root: Path, step: int) -> None:
    """Keeps a damaged checkpoint for whoever wants to look, where nobody takes it for a good one."""
    aside = root / f"{step}{DAMAGED}"
    shutil.rmtree(aside, ignore_errors=True)
    (root / str(step)).rename(aside)


def listed(folder: Path) -> list[tuple[str, str]]:
    """The checksum and the name of every file that a checkpoint was written with."""
    try:
        *lines, last = (folder / SUMS).read_text().splitlines()
        whole = last == _own_line(lines)
        found = [(line[:64], line[66:]) for line in lines]
    except (OSError, ValueError):  # missing, empty, or no text
        whole, found = False, []
    if not whole:
        raise CheckpointDamagedError(folder / SUMS, int(folder.name))
    return found


def first_damaged(folder: Path, files: list[tuple[str, str]], part: int, parts: int) -> int:
    """The number of the first file that is not as it was written, looking at one in `parts`; -1: none."""
    for number in range(part, len(files), parts):
        digest, name = files[number]
        try:
            if _digest(folder / name) != digest:
                return number
        except OSError:
            return number
    return -1


def _sums(folder: Path) -> str:
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    lines = [f"{_digest(folder / name)}  {name}" for name in names]
    return "\n".join([*lines, _own_line(lines)]) + "\n"


def _own_line(lines: list[str]) -> str:
    """`sha256sum` takes it for a comment."""
    return "# " + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _drop(folder: Path, ending: str, then=lambda: None) -> None:
    """Out of sight by a rename first: half a folder is never seen."""
    going = folder.with_name(folder.name + ending)
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    then()
    shutil.rmtree(going, ignore_errors=True)


def _write(file: Path, text: str) -> None:
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(folder: Path) -> None:
    """New names last through a power cut only after this."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
