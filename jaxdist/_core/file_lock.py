"""A lock on a file that ends with its process, and only then."""

import os
from pathlib import Path


class FileLock:
    """An exclusive lock on a file, which is made if it is missing, until it is released or this process ends.

    A forked child (a data loader, say) inherits the file descriptor, and would keep the lock when its parent is killed:
    it closes its copy at once, which leaves the parent's lock in place. Locks of `lockf` are not inherited, but end as
    soon as the process closes the file anywhere, for example after copying the folder.

    Raises:
      BlockingIOError: another process has the lock, or this process through another `FileLock`.
      OSError: the file cannot be opened, or its file system has no locks.
    """

    def __init__(self, path: Path):
        import fcntl  # not available on every system that the rest of the library supports

        found = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(found)
            raise
        self._descriptor: int | None = found
        _locks.add(self)

    def release(self) -> None:
        """Releases the lock; later calls do nothing."""
        found, self._descriptor = self._descriptor, None
        _locks.discard(self)
        if found is not None:
            os.close(found)


_locks: set[FileLock] = set()


def _release_all() -> None:
    for lock in tuple(_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)
