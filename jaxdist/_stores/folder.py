"""A store in a folder that several machines mount."""

import errno
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .base import SharedStore

# How the names of temporary files begin.
WRITING = ".writing-"
# No file takes so many seconds to write: older temporary files are those of processes that died.
ABANDONED_SECONDS = 86_400
# What full disks answer; of one user or group, where there are quotas.
FULL = (errno.ENOSPC, errno.EDQUOT)
# What file systems without hard links answer: s3fs, gcsfuse and other buckets that are mounted, exFAT.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def folder(path: str | os.PathLike[str]) -> SharedStore:
    """A store in a folder that all islands see: a disk, NFS, Lustre. Needs the standard library alone.

    Whole bytes are written to a temporary file, and are on disk before a hard link or a new name makes them visible:
    links are atomic and fail if the name is there, on NFS too. The death of a process leaves at most a temporary file
    behind, which another process removes a day later. A folder that was there and is gone, as of a disk that is not
    mounted any more, is a `ConnectionError`, and is not created again.

    Files and folders get the rights that the umask leaves: islands of several users need a common group and a umask of
    002. A bucket that is mounted as a folder (s3fs, gcsfuse) has no hard links, and is refused: give its own URL.

    Args:
      path: the folder; it is created if it is absent.

    Examples:
      >>> import tempfile
      >>> from jaxdist.islands import folder
      >>> store = folder(tempfile.mkdtemp())
      >>> store.create("a/b", b"first"), store.create("a/b", b"second"), store.get("a/b")
      (True, False, b'first')
      >>> store.list("a/")
      ['a/b']
    """
    place = _Folder(Path(path).expanduser().absolute())
    return SharedStore(place.create, place.put, place.get, place.list, place.delete, place.delete_many, place.get_range)


class _Folder:
    """The functions of a `SharedStore` for a folder."""

    def __init__(self, root: Path):
        self._root = root
        self._was_there = False

    def create(self, name: str, body: bytes) -> bool:
        self._check_root()
        if (self._root / name).exists():
            return False
        with _naming_full_disk(self._root):
            temporary = self._write(name, body)
            try:
                os.link(temporary, self._root / name)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                raise PermissionError(
                    f"the folder {self._root} is in a file system without hard links ({error.strerror}), by which a "
                    "name is created once: if it is a bucket that is mounted (s3fs, gcsfuse), take the URL of that "
                    "(s3://..., gs://...); otherwise use a folder on a disk, NFS or Lustre"
                ) from error
            finally:
                temporary.unlink()
        return True

    def put(self, name: str, body: bytes) -> None:
        self._check_root()
        with _naming_full_disk(self._root):
            temporary = self._write(name, body)
            try:
                os.replace(temporary, self._root / name)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def get(self, name: str) -> bytes | None:
        return self._read(name, 0, None)

    def get_range(self, name: str, start: int, end: int) -> bytes | None:
        return self._read(name, start, end - start)

    def _read(self, name: str, start: int, count: int | None) -> bytes | None:
        try:
            with _naming_umask(self._root / name), open(self._root / name, "rb") as file:
                file.seek(start)
                return file.read(count)
        except FileNotFoundError:
            self._check_root()
            return None

    def list(self, prefix: str) -> list[str]:
        self._check_root()
        base = self._root / prefix if prefix.endswith("/") or not prefix else (self._root / prefix).parent
        found = []
        for place, _, files in os.walk(base, onerror=_raise_unless_missing):
            inside = Path(place).relative_to(self._root)
            found += [(inside / file).as_posix() for file in files if not file.startswith(".")]
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        place = (self._root / name).parent
        with _naming_umask(self._root / name):
            (self._root / name).unlink(missing_ok=True)
        with suppress(OSError):
            _remove_abandoned(place)
            # The last name of a folder takes the folder with it; one that is in use stays.
            place.rmdir()

    def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def _check_root(self) -> None:
        """Raises `ConnectionError` if the folder is gone: what is missing in it would look like an empty run."""
        # Read first: another thread may create it after this one has looked.
        was_there = self._was_there
        if self._root.is_dir():
            self._was_there = True
        elif was_there:
            raise ConnectionError(f"the folder {self._root} is gone; mount its disk again")

    def _write(self, name: str, body: bytes) -> Path:
        """Writes a temporary file beside the place of a name, and waits until it is on disk."""
        target = self._root / name
        temporary = target.parent / f"{WRITING}{uuid.uuid4().hex}"
        with _naming_umask(temporary):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._was_there = True
            try:
                # Not by `tempfile`, whose files are their user's alone: others are to read and delete this one.
                with open(temporary, "wb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                # A full disk: another try must not need more of it.
                with suppress(PermissionError):
                    temporary.unlink(missing_ok=True)
                raise
        return temporary


@contextmanager
def _naming_full_disk(root: Path) -> Iterator[None]:
    """Says which disk is full, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise OSError(
                error.errno, f"{error.strerror} for {root}; free some of that disk, or raise the quota"
            ) from error
        raise


@contextmanager
def _naming_umask(path: Path) -> Iterator[None]:
    """Says, of a file or folder that another user has made, whose it is and which umask gives the group its rights."""
    try:
        yield
    except PermissionError as error:
        place = next((place for place in (path, *path.parents) if place.exists()), path)
        found = place.stat()
        raise PermissionError(
            error.errno,
            f"{error.strerror}: {place} belongs to user {found.st_uid} and group {found.st_gid} with "
            f"{stat.filemode(found.st_mode)}; islands of several users need a common group, a umask of 002 before they "
            "start, and the group of the folder kept (chmod g+ws)",
        ) from error


def _remove_abandoned(place: Path) -> None:
    """Removes old temporary files of a folder in which a file has just been removed."""
    # The time of that is by the clock of the disk, as the files' are.
    now = place.stat().st_mtime
    for file in place.glob(f"{WRITING}*"):
        if now - file.stat().st_mtime > ABANDONED_SECONDS:
            file.unlink()


def _raise_unless_missing(error: OSError) -> None:
    """What `os.walk` does with an error; a folder may be removed by another island while it is read."""
    if not isinstance(error, FileNotFoundError):
        raise error
