"""What a disk may have done to a checkpoint, as an exception that names the file."""

from pathlib import Path


class CheckpointDamagedError(ValueError):
    """A file of a checkpoint is missing, too short, or holds other bytes than were written.

    The cure is an older checkpoint: `resume(..., skip_damaged=True)` takes the newest whole one by itself.

    Attributes:
      file: which one.
      step: of which checkpoint.
    """

    def __init__(self, file: Path, step: int):
        what = "holds other bytes than were written" if file.is_file() else "is missing"
        super().__init__(
            f"checkpoint {step} is damaged: {file} {what}; restore an older step, or resume with skip_damaged=True"
        )
        self.file, self.step = file, step
