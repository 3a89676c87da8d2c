"""What can go wrong on a disk, as exceptions that say where and what to do. The last committed step is intact."""

from pathlib import Path

from ..._core.errors import Portable


class StoreError(Portable, Exception):
    """The disk refused something; the last committed step is as it was.

    Attributes:
      path: the file.
      step: the step that could not be done, or read.
    """

    def __init__(self, message: str, path: Path, step: int):
        super().__init__(f"{message} (file {path}, step {step})")
        self.path, self.step = path, step


class StoreFullError(StoreError):
    """No space left, or a quota or a limit of file sizes reached. After making room, `apply` can be called again."""


class StoreDamagedError(StoreError):
    """A file is missing, too short, or holds other bytes than were written: its checksum does not match."""
