"""Exceptions of checkpoints, which name the file or the process."""

import errno
import os
import re
from pathlib import Path

from .._core.checks import Portable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Tensorstore raises ValueError for errors of the system, with their number in the text.
_NUMBER = re.compile(r"os_error_code='(\d+)'|\[OS error (\d+)")


class CheckpointDamagedError(Portable, ValueError):
    """A checkpoint has changed since it was written: a file is missing or altered, or the folder is a copy of another.

    Use an older checkpoint: `resume(..., skip_damaged=True)` takes the newest undamaged one. `file` is the damaged file
    of the checkpoint of `step` (a path, or text in a bucket), and `what` the damage, as the end of a sentence about it.
    """

    def __init__(self, file: Path | str, step: int, what: str):
        super().__init__(
            f"checkpoint {step} is damaged: {file} {what}; restore an older step, or resume with skip_damaged=True"
        )
        self.file, self.step, self.what = file, step, what


class NoCheckpointLeftError(CheckpointDamagedError):
    """All checkpoints of a run are damaged; `resume(..., allow_fresh_start=True)` would start it over.

    `file`, `step` and `what` are those of the newest one.
    """

    def __init__(self, file: Path | str, step: int, what: str):
        ValueError.__init__(
            self,
            f"all checkpoints of the run are damaged, the newest of step {step}: {file} {what}; restore one from a "
            "copy, or start over with resume(..., allow_fresh_start=True)",
        )
        self.file, self.step, self.what = file, step, what


class CheckpointUnreadableError(Portable, OSError):
    """A file cannot be read: no permission, a failing disk, a file server that is gone. It may be undamaged.

    `resume` never skips such a checkpoint, that of `step`. Fix the cause, of which `errno` is the system's number for
    `file`, and start again.
    """

    def __init__(self, file: Path, step: int, number: int):
        super().__init__(
            number, f"{os.strerror(number)}: checkpoint {step} cannot be read, {file}; make it readable and start again"
        )
        self.file, self.step = file, step


class CheckpointFullError(Portable, OSError):
    """No space for checkpoint `step` in `path`: a full disk, a quota or a limit (`errno`). Earlier ones are intact."""

    def __init__(self, path: Path | str, step: int, number: int):
        super().__init__(
            number, f"{os.strerror(number)}: no space for checkpoint {step} in {path}; free some, or keep fewer (keep=)"
        )
        self.path, self.step = path, step


class CheckpointStoreError(Portable, OSError):
    """A bucket of checkpoints does not answer, or refuses: credentials, rights, a wrong name, the network.

    Nothing is known about the checkpoints in it, so that `resume` skips none and starts no run over. A save that ends
    so is not committed, unless the answer to the commit itself was lost; `latest` tells. `url` is the bucket.
    """

    def __init__(self, url: str, problem: str, cure: str):
        super().__init__(f"{url} cannot be used for checkpoints: {problem}; {cure}")
        self.url, self.problem, self.cure = url, problem, cure


class CheckpointPeerError(Portable, RuntimeError):
    """Another process of the job, number `process`, failed, so that nothing was saved or read."""

    def __init__(self, message: str, process: int):
        super().__init__(message)
        self.process = process


def number_of(error: BaseException) -> int | None:
    """Returns the system's number of an error, also from tensorstore's text; None for errors of other kinds."""
    if isinstance(error, OSError):
        return error.errno
    found = _NUMBER.search(str(error)) if isinstance(error, ValueError) else None
    return int(found[1] or found[2]) if found else None
