"""Where the checkpoints of a run are: in a folder, or in a bucket. Both have the same functions."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._stores.opening import is_bucket
from . import _files
from ._bucket_run import BucketRun
from ._together import LONGEST_PAUSE, Share, Together

# A folder, a URL, a store of obstore or of `jaxdist.islands`.
Location = str | os.PathLike[str] | Any
VISIBLE_SECONDS = 60.0  # NFS may show a new folder that much later


def open_run(path: Any) -> "FolderRun | BucketRun":
    """Opens the place that a user names: a folder, a URL or a store."""
    return BucketRun(path) if is_bucket(path) else FolderRun(_files.root_of(path))


class FolderRun(NamedTuple):
    """The checkpoints in a folder. What a function finds is JSON, for the other processes: here a step."""

    place: Path

    def look(self) -> tuple[list[list[Any]], list[int]]:
        """Returns the complete checkpoints, oldest first, and the steps that were set aside as damaged."""
        return [[step] for step in _files.steps(self.place)], _files.list_damaged_steps(self.place)

    def find(self, step: int) -> list[Any] | None:
        """Returns the checkpoint of a step, complete or damaged."""
        return [step] if _files.is_folder(_files.folder_of(self.place, step)) else None

    def source(self, found: list[Any]) -> "FolderSource":
        """Returns what reads a checkpoint."""
        folder = _files.folder_of(self.place, found[0])
        return FolderSource(folder, _files.stamp(folder))

    def set_aside(self, steps: Sequence[int]) -> None:
        """Sets damaged checkpoints aside."""
        with _files.lock_unless_held(self.place):
            for step in steps:
                _files.set_aside(self.place, step, _files.DAMAGED)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Excludes other writers."""
        return _files.lock(self.place)

    def begin(self, step: int) -> None:
        """Prepares a save, in process 0."""
        _files.begin(self.place, step)

    def target(self, step: int, begun: None) -> "FolderTarget":
        """Returns what writes a checkpoint."""
        del begun
        return FolderTarget(self.place, step)


class FolderSource(NamedTuple):
    """A checkpoint to read; `stamp` identifies it."""

    folder: Path
    stamp: bytes | None

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return int(self.folder.stem)

    @contextlib.contextmanager
    def open(self, together: Together) -> Iterator[Path]:
        """Yields the folder with its files, once all processes have called `fetch`."""
        del together
        yield self.folder

    def share(self, folder: Path, together: Together) -> Share:
        """Returns which files this process fetches and checks: a shared disk is read once."""
        del together
        return Share(folder, jax.process_index(), jax.process_count())

    def fetch(self, folder: Path, share: Share) -> None:
        """Makes this process's part of the files available in the folder."""

    def name(self, file: str) -> Path:
        """Names a file in messages."""
        return self.folder / file

    def is_unchanged(self) -> bool:
        """Returns whether the checkpoint is still the same. Several processes never start over: not all may notice."""
        if jax.process_count() > 1:
            return True
        # Files of a checkpoint under its second name may be being deleted, once a successor has the first.
        current = _files.folder_of(self.folder.parent, self.step)
        return current == self.folder and _files.is_folder(self.folder) and _files.stamp(self.folder) == self.stamp

    # A checkpoint of the same step may have replaced this one while it was read.
    is_read = is_unchanged


class FolderTarget(NamedTuple):
    """A checkpoint to write."""

    root: Path
    step: int

    @property
    def arrays(self) -> Path:
        """Where orbax writes."""
        return self.root / f"{self.step}{_files.UNFINISHED}" / _files.ARRAYS

    @property
    def name(self) -> Path:
        """The checkpoint, for the user."""
        return self.root / str(self.step)

    def prepare(self) -> None:
        """Waits until the folder that process 0 has made is visible to this process."""
        until = time.monotonic() + VISIBLE_SECONDS
        while not _files.is_folder(self.arrays):
            if time.monotonic() > until:
                raise ValueError(
                    f"process {jax.process_index()} does not see {self.arrays}, which process 0 has made: checkpoints "
                    "need a file system that all processes share, or a bucket"
                )
            time.sleep(LONGEST_PAUSE)

    def send(self) -> None:
        """Returns what process 0 must know of the files that this process wrote."""

    def join(self, sent: list[None]) -> None:
        """Makes the parts of the other processes available to process 0."""

    def commit(self, sent: list[None], manifest: str, keep: int | None) -> None:
        """Completes the checkpoint, in process 0."""
        _files.commit(self.root, self.step, manifest, keep)

    def discard(self) -> None:
        """Deletes what was written for a failed save, in process 0."""
        _files.discard(self.root, self.step)

    def close(self) -> None:
        """Ends the use of resources of this process."""
