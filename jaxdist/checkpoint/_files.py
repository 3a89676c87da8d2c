"""The folders of a run's checkpoints: how one appears and goes, and whether its files are as they were written."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import CheckpointDamagedError

ARRAYS = "arrays"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
WRITER = ".writer"
# Later checkpoints that a new one ends the run of, until they are set aside.
JOURNAL = ".abandoned"
# Endings of folders that are no checkpoints: being filled, about to go, and set aside.
UNFINISHED, REPLACED, DELETED, DAMAGED, ABANDONED = ".unfinished", ".replaced", ".deleted", ".damaged", ".abandoned"
GONE, ALTERED = "is missing", "holds other bytes than were written"
MISSING = (errno.ENOENT, errno.ENOTDIR)

# The folders that this process writes into. A second lock would be granted, and its end would free the first: the
# system's locks are those of processes. A child of a fork has another number, and has none of its parent's locks.
_written: set[tuple[int, int, int]] = set()
_guard = threading.Lock()


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
    numbers = {number for name in _names(root) if (number := _number(name.removesuffix(REPLACED))) is not None}
    return [
        step
        for step in sorted(numbers.difference(_abandoned(root)))
        if any(_mode(folder_of(root, step) / part) is not None for part in (SUMS, MANIFEST, ARRAYS))
    ]


def damaged_steps(root: Path) -> list[int]:
    """The steps of the checkpoints that were set aside as damaged."""
    found = (_number(name.partition(DAMAGED)[0]) for name in _names(root) if DAMAGED in name)
    return sorted({number for number in found if number is not None})


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


def _number(name: str) -> int | None:
    """The step of a folder with this name, if it is a checkpoint's."""
    return int(name) if name.isdecimal() and str(int(name)) == name else None


def _mode(path: Path) -> int | None:
    """What lies there, None for nothing. Where the system does not let us look, an `OSError`, unlike `Path.exists`."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in MISSING:
            return None
        raise


def is_folder(path: Path) -> bool:
    """Whether there is a folder; an `OSError` where the system does not let us look."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _is_file(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies. One that was killed between two renames left the old one aside."""
    folder, aside = root / str(step), root / f"{step}{REPLACED}"
    return aside if not is_folder(folder) and is_folder(aside) else folder


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Keeps other writers out of a folder, and takes away what killed ones left. The lock ends with the process."""
    root.mkdir(parents=True, exist_ok=True)
    this = _identity(root)
    with _guard:
        if this in _written:
            raise ValueError(
                f"this process writes checkpoints into {root} already: use the writer that `writing` gave, and end one "
                "save before another begins"
            )
        _written.add(this)
    try:
        with _locked(root):
            yield
    finally:
        _written.discard(this)


@contextlib.contextmanager
def alone_or_inside(root: Path) -> Iterator[None]:
    """As `alone`, and nothing where this process writes into the folder already."""
    with contextlib.nullcontext() if _identity(root) in _written else alone(root):
        yield


def _identity(root: Path) -> tuple[int, int, int]:
    """Of a folder, by whatever name, in this process."""
    found = os.stat(root)
    return (found.st_dev, found.st_ino, os.getpid())


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    import fcntl  # not everywhere, and only writers need it

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
        _set_abandoned_aside(root)
        _sweep(root)
        yield


def begin(root: Path, step: int) -> None:
    """Makes the folder to fill; what an interrupted save of the same step left goes."""
    unfinished = root / f"{step}{UNFINISHED}"
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / ARRAYS).mkdir(parents=True)


def commit(root: Path, step: int, manifest: str, keep: int | None) -> None:
    """Makes a filled folder the newest checkpoint by a rename; sets later ones aside, and drops all but `keep`.

    Later ones are of a run that was given up: this one went on from before them. From the rename on no reader takes
    them, also where we die before they are aside.
    """
    unfinished, folder = root / f"{step}{UNFINISHED}", root / str(step)
    _write(unfinished / MANIFEST, manifest)
    _write(unfinished / SUMS, _sums(unfinished))
    for one in (*unfinished.rglob("*"), unfinished):
        _sync(one)
    if later := [one for one in steps(root) if one > step]:
        _write(root / JOURNAL, json.dumps({"by": step, "stamp": _digest(unfinished / SUMS), "steps": later}))
        _sync(root)
    if is_folder(folder):
        _drop(folder, REPLACED, then=lambda: unfinished.rename(folder))
    else:
        unfinished.rename(folder)
    _sync(root)
    _set_abandoned_aside(root)
    if keep is not None:
        for old in steps(root)[:-keep]:
            _drop(folder_of(root, old), DELETED)


def discard(root: Path, step: int) -> None:
    """Takes away what a save that failed has filled."""
    shutil.rmtree(root / f"{step}{UNFINISHED}", ignore_errors=True)


def set_aside(root: Path, step: int, ending: str) -> None:
    """Keeps a checkpoint under a name that is not taken for a good one's, beside those that were set aside before."""
    names = (root / f"{step}{ending}{more}" for more in ("", *(f"-{number}" for number in range(2, 1000))))
    folder_of(root, step).rename(next(name for name in names if _mode(name) is None))


def _abandoned(root: Path) -> list[int]:
    """The steps that are to be set aside, if the checkpoint is there that ended their run."""
    try:
        told = json.loads((root / JOURNAL).read_text())
        folder = folder_of(root, told["by"])
        return told["steps"] if _digest(folder / SUMS) == told["stamp"] else []
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no journal or half of one, or it never came to it
        return []


def _set_abandoned_aside(root: Path) -> None:
    if _mode(root / JOURNAL) is None:
        return
    for step in _abandoned(root):
        if is_folder(folder_of(root, step)):
            set_aside(root, step, ABANDONED)
    (root / JOURNAL).unlink(missing_ok=True)
    _sync(root)


def stamp(folder: Path) -> bytes | None:
    """No two checkpoints have the same; None where it lacks, as where the folder is gone."""
    try:
        return (folder / SUMS).read_bytes()
    except OSError:
        return None


def listed(folder: Path) -> list[tuple[str, str]]:
    """The checksum and the name of every file that a checkpoint was written with."""
    if not _is_file(folder / SUMS):
        raise CheckpointDamagedError(folder / SUMS, int(folder.stem), GONE)
    try:
        *lines, last = (folder / SUMS).read_text().splitlines()
        found = [(line[:64], line[66:]) for line in lines]
        inside = not any(Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name for _, name in found)
        whole = last == _own_line(lines) and inside
    except ValueError:  # empty, or no text
        whole, found = False, []
    if not whole:
        raise CheckpointDamagedError(folder / SUMS, int(folder.stem), ALTERED)
    return found


def check(folder: Path, files: list[tuple[str, str]], part: int, parts: int) -> None:
    """Raises unless all files are as they were written, looking at one in `parts`."""
    for digest, name in files[part::parts]:
        if not _is_file(folder / name):
            raise CheckpointDamagedError(folder / name, int(folder.stem), GONE)
        if _digest(folder / name) != digest:
            raise CheckpointDamagedError(folder / name, int(folder.stem), ALTERED)


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
        if one.suffix == REPLACED and _mode(root / one.stem) is None:
            one.rename(root / one.stem)
        else:
            shutil.rmtree(one, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _drop(folder: Path, ending: str, then: Callable[[], object] = lambda: None) -> None:
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
