"""Errors of the disk, which name the file and the fix. The last committed step is intact."""

from pathlib import Path

from ..._core.errors import Portable


class StoreError(Portable, Exception):
    """An operation on the disk failed; the last committed step is intact.

    Attributes:
      path: the file.
      step: the step that could not be written or read.
    """

    def __init__(self, message: str, path: Path, step: int):
        super().__init__(f"{message} (file {path}, step {step})")
        self.path, self.step = path, step


class StoreFullError(StoreError):
    """No space left, or a quota or a limit of file sizes reached. After making room, `apply` can be called again."""


class StoreDamagedError(StoreError):
    """A file is missing, too short, or holds other bytes than were written: its checksum does not match."""
