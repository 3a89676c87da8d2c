"""The folders of a run's checkpoints: locking, atomic commits, deletion, and checksums."""

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

from .._core.file_lock import FileLock
from .errors import CheckpointDamagedError

ARRAYS = "arrays"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
WRITER = ".writer"
# Lists the later checkpoints that a roll-back abandons, until they are set aside.
JOURNAL = ".abandoned"
# Suffixes of folders that are not checkpoints: being written, being deleted, and set aside.
UNFINISHED, REPLACED, DELETED, DAMAGED, ABANDONED = ".unfinished", ".replaced", ".deleted", ".damaged", ".abandoned"
GONE, ALTERED = "is missing", "holds other bytes than were written"
MISSING = (errno.ENOENT, errno.ENOTDIR)
# Of a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# The folders that this process has locked. POSIX locks belong to a process: a second lock of the same file would be
# granted, and its release would free the first. A forked child has another process id, and none of its parent's locks.
_locked_folders: set[tuple[int, int, int]] = set()
_guard = threading.Lock()


def root_of(path: str | Path) -> Path:
    """Returns the absolute path of the folder that a user names."""
    return Path(str(path).removeprefix("file://")).expanduser().absolute()


def steps(root: Path) -> list[int]:
    """Returns the steps of the complete checkpoints, oldest first; all other files and folders are ignored."""
    before, found = None, _list_steps(root)
    # A writer may delete a folder between its listing and its inspection: list until nothing changes.
    while before != found:
        before, found = found, _list_steps(root)
    return found


def _list_steps(root: Path) -> list[int]:
    numbers = {number for name in _names(root) if (number := _number(name.removesuffix(REPLACED))) is not None}
    return [
        step
        for step in sorted(numbers.difference(_steps_to_abandon(root)))
        if any(_mode(folder_of(root, step) / part) is not None for part in (SUMS, MANIFEST, ARRAYS))
    ]


def list_damaged_steps(root: Path) -> list[int]:
    """Returns the steps of the checkpoints that were set aside as damaged."""
    found = (_number(name.partition(DAMAGED)[0]) for name in _names(root) if DAMAGED in name)
    return sorted({number for number in found if number is not None})


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


def _number(name: str) -> int | None:
    """Returns the step of a folder with this name, if it is a checkpoint's."""
    return int(name) if name.isdecimal() and str(int(name)) == name else None


def _mode(path: Path) -> int | None:
    """Returns the mode of a path, or None if it is missing. Unlike `Path.exists` it raises if access is denied."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in MISSING:
            return None
        raise


def is_folder(path: Path) -> bool:
    """Returns whether a path is a folder; raises `OSError` if access is denied."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _is_file(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def folder_of(root: Path, step: int) -> Path:
    """Returns the folder of a checkpoint."""
    # A writer that was killed between two renames has left the old checkpoint under the second name.
    folder, aside = root / str(step), root / f"{step}{REPLACED}"
    return aside if not is_folder(folder) and is_folder(aside) else folder


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """Locks a folder against other writers and removes leftovers of killed ones. The lock ends with the process."""
    root.mkdir(parents=True, exist_ok=True)
    this = _identity(root)
    with _guard:
        if this in _locked_folders:
            raise ValueError(
                f"this process writes checkpoints into {root} already: use the writer of `writing`, and finish one "
                "save before starting another"
            )
        _locked_folders.add(this)
    try:
        with _lock_file(root):
            yield
    finally:
        _locked_folders.discard(this)


@contextlib.contextmanager
def lock_unless_held(root: Path) -> Iterator[None]:
    """Locks a folder unless this process holds its lock already."""
    with contextlib.nullcontext() if _identity(root) in _locked_folders else lock(root):
        yield


def _identity(root: Path) -> tuple[int, int, int]:
    """Identifies a folder, under any of its names, in this process."""
    found = os.stat(root)
    return (found.st_dev, found.st_ino, os.getpid())


@contextlib.contextmanager
def _lock_file(root: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(FileLock(root / WRITER).release)
        except BlockingIOError as error:
            raise ValueError(
                f"another process writes checkpoints into {root}: give each run its own folder, or stop the other (if "
                f"none is running, delete {root / WRITER})"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            # It is up to the user to have one writer at a time.
        _set_abandoned_aside(root)
        _sweep(root)
        yield


def begin(root: Path, step: int) -> None:
    """Makes the temporary folder of a save, and deletes that of an interrupted save of the same step."""
    unfinished = root / f"{step}{UNFINISHED}"
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / ARRAYS).mkdir(parents=True)


def commit(root: Path, step: int, manifest: str, keep: int | None) -> None:
    """Renames a complete temporary folder to a checkpoint, sets later ones aside, and deletes all but `keep`."""
    unfinished, folder = root / f"{step}{UNFINISHED}", root / str(step)
    _write(unfinished / MANIFEST, manifest)
    _write(unfinished / SUMS, _sum_files(unfinished))
    # Contents before the name: after a power cut, a checkpoint that is found must be whole.
    for path in (*unfinished.rglob("*"), unfinished):
        _sync(path)
    # Later checkpoints belong to a run that was rolled back to a step before them. From the rename on no reader takes
    # them, even if this process dies before it has set them aside: a journal lists them.
    if later := [other for other in steps(root) if other > step]:
        # The stamp ties the journal to this very checkpoint: it is void if the rename below never happens.
        _write(root / JOURNAL, json.dumps({"by": step, "stamp": digest(unfinished / SUMS), "steps": later}))
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
    """Deletes the temporary folder of a failed save."""
    shutil.rmtree(root / f"{step}{UNFINISHED}", ignore_errors=True)


def set_aside(root: Path, step: int, ending: str) -> None:
    """Renames a checkpoint so that it is no longer found, beside those that were set aside before."""
    names = (root / f"{step}{ending}{more}" for more in ("", *(f"-{number}" for number in range(2, 1000))))
    folder_of(root, step).rename(next(name for name in names if _mode(name) is None))


def _steps_to_abandon(root: Path) -> list[int]:
    """Reads the journal: the steps to set aside, if the checkpoint that abandons them was committed."""
    try:
        journal = json.loads((root / JOURNAL).read_text())
        folder = folder_of(root, journal["by"])
        return journal["steps"] if digest(folder / SUMS) == journal["stamp"] else []
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # No journal, half of one, or no commit.
        return []


def _set_abandoned_aside(root: Path) -> None:
    """Renames the checkpoints that the journal lists, and deletes it."""
    if _mode(root / JOURNAL) is None:
        return
    for step in _steps_to_abandon(root):
        if is_folder(folder_of(root, step)):
            set_aside(root, step, ABANDONED)
    (root / JOURNAL).unlink(missing_ok=True)
    _sync(root)


def stamp(folder: Path) -> bytes | None:
    """Returns bytes that identify a checkpoint, or None if it has been deleted."""
    try:
        return (folder / SUMS).read_bytes()
    except OSError:
        return None


def read_sums(folder: Path) -> list[tuple[str, str]]:
    """Returns the checksum and the name of every file that was written with a checkpoint."""
    if not _is_file(folder / SUMS):
        raise CheckpointDamagedError(folder / SUMS, int(folder.stem), GONE)
    try:
        *lines, last = (folder / SUMS).read_text().splitlines()
        found = [(line[:64], line[66:]) for line in lines]
        # Names must not lead out of the folder.
        inside = not any(Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name for _, name in found)
        whole = last == seal(lines) and inside
    except ValueError:
        # Empty, or not text.
        whole, found = False, []
    if not whole:
        raise CheckpointDamagedError(folder / SUMS, int(folder.stem), ALTERED)
    return found


def check(folder: Path, files: list[tuple[str, str]], part: int, parts: int) -> None:
    """Checks that files are unchanged since they were written: one in `parts`, from `part` on."""
    # Each file is read by one process: a shared disk is read once.
    for checksum, name in files[part::parts]:
        if not _is_file(folder / name):
            raise CheckpointDamagedError(folder / name, int(folder.stem), GONE)
        if digest(folder / name) != checksum:
            raise CheckpointDamagedError(folder / name, int(folder.stem), ALTERED)


def _sum_files(folder: Path) -> str:
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sum_lines([[digest(folder / name), name] for name in names])


def sum_lines(files: list[list[str]]) -> str:
    """Returns the text of the checksums of files, each given as its checksum and its name."""
    lines = [f"{checksum}  {name}" for checksum, name in sorted(files, key=lambda file: file[1])]
    return "\n".join([*lines, seal(lines)]) + "\n"


def seal(lines: list[str]) -> str:
    """The checksum of the list itself, as a line that `sha256sum` ignores as a comment."""
    return "# " + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sweep(root: Path) -> None:
    """Cleans up after killed writers."""
    for path in list(root.iterdir()):
        if not (path.stem.isdecimal() and path.suffix in (UNFINISHED, REPLACED, DELETED)):
            continue
        # Killed between two renames: the old checkpoint is the only one of its step.
        if path.suffix == REPLACED and _mode(root / path.stem) is None:
            path.rename(root / path.stem)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    """Deletes a folder as far as that is possible, or the link to one: a checkpoint may have been moved elsewhere."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def digest(file: Path) -> str:
    """Returns the checksum of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _drop(folder: Path, ending: str, then: Callable[[], object] = lambda: None) -> None:
    """Deletes a folder after a rename, so that readers never see half of it."""
    going = folder.with_name(folder.name + ending)
    _remove(going)
    # Between the renames neither name is complete: `folder_of` finds the old checkpoint under its second name.
    folder.rename(going)
    then()
    _remove(going)


def _write(file: Path, text: str) -> None:
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk: only then do they survive a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
