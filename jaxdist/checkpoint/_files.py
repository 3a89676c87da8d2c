"""The folders of a run's checkpoints: how one appears and goes, and whether its files are as they were written."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointDamagedError

ARRAYS = "arrays"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
WRITER = ".writer"
# Endings of folders that are no checkpoints: being filled, about to go, and set aside.
UNFINISHED, REPLACED, DELETED, DAMAGED = ".unfinished", ".replaced", ".deleted", ".damaged"


def root_of(path: str | Path) -> Path:
    """The folder that a user names."""
    if "://" in str(path):
        raise ValueError(f"checkpoints lie in a folder of a file system that can rename, got {path}")
    return Path(path).expanduser().absolute()


def steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints, oldest first. What else lies there, under whatever name, is not ours."""
    found, again = None, _seen(root)
    while found != again:  # a writer may take away what was listed before it was looked at
        found, again = again, _seen(root)
    return again


def _seen(root: Path) -> list[int]:
    names = {one.name.removesuffix(REPLACED) for one in root.iterdir()} if root.exists() else set()
    numbers = sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)
    return [
        step for step in numbers if any((folder_of(root, step) / part).exists() for part in (SUMS, MANIFEST, ARRAYS))
    ]


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies. One that was killed between two renames left the old one aside."""
    folder, aside = root / str(step), root / f"{step}{REPLACED}"
    return aside if not folder.is_dir() and aside.is_dir() else folder


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Keeps other writers out of a folder, and takes away what killed ones left. The lock ends with the process."""
    import fcntl  # not everywhere, and only writers need it

    root.mkdir(parents=True, exist_ok=True)
    with (root / WRITER).open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"another process writes checkpoints into {root}: give each run its own folder, or end the other "
                    f"(if none runs, delete {root / WRITER})"
                ) from error
            # A file system without locks: then as documented, one writer at a time.
        _sweep(root)
        yield


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
    for one in (*unfinished.rglob("*"), unfinished):
        _sync(one)
    if folder.exists():
        _drop(folder, REPLACED, then=lambda: unfinished.rename(folder))
    else:
        unfinished.rename(folder)
    _sync(root)
    if keep is not None:
        # Later steps are of a run that went on from there and was given up: theirs is not this run's to take.
        for old in [one for one in steps(root) if one <= step][:-keep]:
            _drop(folder_of(root, old), DELETED)


@contextlib.contextmanager
def or_nothing(root: Path, step: int) -> Iterator[None]:
    """A save that fails gives back the room that it took: a disk that was full would stay full."""
    try:
        yield
    except BaseException:
        shutil.rmtree(root / f"{step}{UNFINISHED}", ignore_errors=True)
        raise


def set_aside(root: Path, step: int) -> None:
    """Keeps a damaged checkpoint for whoever wants to look, where nobody takes it for a good one."""
    aside = root / f"{step}{DAMAGED}"
    shutil.rmtree(aside, ignore_errors=True)
    folder_of(root, step).rename(aside)


def stamp(folder: Path) -> bytes | None:
    """No two checkpoints have the same; None where it lacks, as where the folder is gone."""
    try:
        return (folder / SUMS).read_bytes()
    except OSError:
        return None


def listed(folder: Path) -> list[tuple[str, str]]:
    """The checksum and the name of every file that a checkpoint was written with."""
    try:
        *lines, last = (folder / SUMS).read_text().splitlines()
        found = [(line[:64], line[66:]) for line in lines]
        inside = not any(Path(name).is_absolute() or ".." in Path(name).parts for _, name in found)
        whole = last == _own_line(lines) and inside
    except (OSError, ValueError):  # missing, empty, or no text
        whole, found = False, []
    if not whole:
        raise CheckpointDamagedError(folder / SUMS, int(folder.stem))
    return found


def first_damaged(folder: Path, files: list[tuple[str, str]], part: int, parts: int) -> int:
    """The number of the first file that is not as it was written, looking at one in `parts`; -1: none."""
    for number in range(part, len(files), parts):
        digest, name = files[number]
        try:
            if not (folder / name).is_file() or _digest(folder / name) != digest:
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


def _sweep(root: Path) -> None:
    for one in list(root.iterdir()):
        if not (one.stem.isdecimal() and one.suffix in (UNFINISHED, REPLACED, DELETED)):
            continue
        if one.suffix == REPLACED and not (root / one.stem).exists():
            one.rename(root / one.stem)
        else:
            shutil.rmtree(one, ignore_errors=True)


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


def _sync(one: Path) -> None:
    """What a file holds, and which names a folder has, lasts through a power cut only after this."""
    number = os.open(one, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
