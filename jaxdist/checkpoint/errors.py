"""What may keep a checkpoint from being written or read, as exceptions that name the file, or the process."""

import errno
import os
import re
from pathlib import Path

from .._core.errors import Portable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How tensorstore tells the number of a system's error, in the text of a ValueError.
_NUMBER = re.compile(r"os_error_code='(\d+)'|\[OS error (\d+)")


class CheckpointDamagedError(Portable, ValueError):
    """A checkpoint is not what was written: a file is missing, too short or altered, or the folder is another's copy.

    The cure is an older checkpoint: `resume(..., skip_damaged=True)` takes the newest whole one by itself.

    Attributes:
      file: which one.
      step: of which checkpoint.
      what: is wrong with the file.
    """

    def __init__(self, file: Path, step: int, what: str):
        super().__init__(
            f"checkpoint {step} is damaged: {file} {what}; restore an older step, or resume with skip_damaged=True"
        )
        self.file, self.step, self.what = file, step, what


class NoCheckpointLeftError(CheckpointDamagedError):
    """All checkpoints of a run are damaged; `resume(..., allow_fresh_start=True)` would begin it anew.

    Attributes:
      file: what is damaged in the newest.
      step: of the newest.
      what: is wrong with the file.
    """

    def __init__(self, file: Path, step: int, what: str):
        ValueError.__init__(
            self,
            f"no checkpoint of the run is whole, the newest of step {step}: {file} {what}; restore one from a copy, or "
            "begin anew by resume(..., allow_fresh_start=True)",
        )
        self.file, self.step, self.what = file, step, what


class CheckpointUnreadableError(Portable, OSError):
    """The system does not let a file be read: no permission, a failing disk, a server that is gone. It may be whole.

    `resume` raises it whatever it was told to skip. Mend the cause and start again.

    Attributes:
      errno: the system's number of the error.
      file: which file.
      step: of which checkpoint.
    """

    def __init__(self, file: Path, step: int, number: int):
        super().__init__(
            number, f"{os.strerror(number)}: checkpoint {step} cannot be read, {file}; let it be read and start again"
        )
        self.file, self.step = file, step


class CheckpointFullError(Portable, OSError):
    """No room for a checkpoint: the disk, a quota or a limit of file sizes is full. Those before it are intact.

    Attributes:
      errno: the system's number of the error.
      path: the folder of the checkpoints.
      step: of the checkpoint that could not be written.
    """

    def __init__(self, path: Path, step: int, number: int):
        super().__init__(
            number, f"{os.strerror(number)}: no room for checkpoint {step} in {path}; make room, or keep fewer (keep=)"
        )
        self.path, self.step = path, step


class CheckpointPeerError(Portable, RuntimeError):
    """Another process of the job could not do its part, so that nothing was saved or read.

    Attributes:
      process: its number.
    """

    def __init__(self, message: str, process: int):
        super().__init__(message)
        self.process = process


def number_of(error: BaseException) -> int | None:
    """The system's number of an error, also where tensorstore tells it; None for errors of other kinds."""
    if isinstance(error, OSError):
        return error.errno
    found = _NUMBER.search(str(error)) if isinstance(error, ValueError) else None
    return int(found[1] or found[2]) if found else None
