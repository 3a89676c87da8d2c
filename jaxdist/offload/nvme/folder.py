"""The open folder behind the functions of `nvme` and of `nvme_layers`."""

from typing import Generic, Protocol, TypeVar, runtime_checkable

from .disk import Disk
from .files import StreamedStats


@runtime_checkable
class HasDisk(Protocol):
    """What a stream knows of its folder while it is open, which includes the disk."""

    @property
    def disk(self) -> Disk:
        """The files, and the threads that read and write them."""
        ...


Opened = TypeVar("Opened", bound=HasDisk)


class StreamedFolder(Generic[Opened]):
    """A folder that `init` opens; `opened` is `None` before and after."""

    # The call that opens it, for the message of the others.
    OPEN = "init()"

    def __init__(self):
        self.opened: Opened | None = None

    def flush(self) -> int:
        """Waits until the last step is committed, and returns its number."""
        disk = self.require_open().disk
        disk.flush()
        return disk.step

    def stats(self) -> StreamedStats:
        """The counters."""
        return self.require_open().disk.stats()

    def close(self) -> None:
        """Releases the folder, if it is open."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.disk.close()

    def require_open(self) -> Opened:
        """Returns what is open, or raises."""
        if self.opened is None:
            raise ValueError(f"the store is not open: call {self.OPEN} first")
        return self.opened
