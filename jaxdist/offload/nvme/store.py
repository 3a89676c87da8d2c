"""The settings of a store on disk, its public functions, and its errors."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..._core.checks import Portable
from ..._core.types import PyTree, State


class Store(NamedTuple):
    """The location of an optimizer's state on disk, and how it is read and written.

    Attributes:
      path: a folder, on a fast disk with space for twice the state. Each process has its own subfolder.
      chunk_bytes: the bytes that are read, computed and written at a time. Too small: requests slow the disk down.
        Start with 64 MiB.
      host_bytes: the host memory for chunks, by default three chunks. With one, reads, computation and writes take
        turns; with two they overlap in part; with three fully. More does not help.
      direct: bypass the page cache of the system, which is faster and saves host memory. By default where the file
        system supports it.
      durable: a committed step survives a power failure, not only the end of the process.
      wait: `apply` returns when the step is committed. False: its last writes continue during your next forward pass;
        their errors are raised by the next `apply` or `flush`, and your parameters are a step ahead of the disk.
      progress: called with the number of chunks done and of all chunks.

    Examples:
      >>> from jaxdist import offload
      >>> offload.Store("/nvme/run-1", host_bytes=1 << 30).chunk_bytes
      67108864
    """

    path: str | Path
    chunk_bytes: int = 64 << 20
    host_bytes: int | None = None
    direct: bool | None = None
    durable: bool = True
    wait: bool = True
    progress: Callable[[int, int], None] | None = None


class StreamedStats(NamedTuple):
    """Counters of a store in this process: the last committed step, and bytes.

    `read_bytes` and `written_bytes` (without the manifests) are totals; `state_bytes` are those on disk for one step,
    twice as many are allocated; `buffer_bytes` those of the chunks in host memory, at most `host_bytes`.
    """

    step: int
    read_bytes: int
    written_bytes: int
    state_bytes: int
    buffer_bytes: int


class Streamed(NamedTuple):
    """An optimizer whose state is stored on disk.

    Attributes:
      init: `init(params) -> params`. Creates the state, or finds it in the folder. Returns the parameters to continue
        with: those on disk (`master_dtype`), or else the given ones, which must be bit for bit those that the last step
        on disk returned.
      apply: `apply(params, grads, *, donate=False, **extra_args) -> params`: one step. `donate`: numpy parameters,
        memory maps too, are overwritten; if the step fails they are inconsistent, and `init` restores them
        (`master_dtype`).
      flush: `flush() -> step`: waits until the last step is committed, and returns its number.
      state: `state() -> state`: the whole state in memory, as `optax` has it.
      stats: `stats() -> StreamedStats`, counters.
      close: releases the folder, so that another `nvme` may open it.
    """

    init: Callable[[PyTree], PyTree]
    apply: Callable[..., PyTree]
    flush: Callable[[], int]
    state: Callable[[], State]
    stats: Callable[[], StreamedStats]
    close: Callable[[], None]


class StoreError(Portable, Exception):
    """An operation on the disk failed: on the file `path`, for `step`. The last committed step is intact."""

    def __init__(self, message: str, path: Path, step: int):
        super().__init__(f"{message} (file {path}, step {step})")
        self.path, self.step = path, step


class StoreFullError(StoreError):
    """No space left, or a quota or a limit of file sizes reached. After making room, `apply` can be called again."""


class StoreDamagedError(StoreError):
    """A file is missing, too short, or holds other bytes than were written: its checksum does not match."""
