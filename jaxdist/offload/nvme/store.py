"""Where state lies on disk, and what can be done with it there."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

from ..._core.types import PyTree, State


class Store(NamedTuple):
    """Where an optimizer's state lies on disk, and how it gets there.

    Attributes:
      path: a folder, on a disk that is fast and has room for twice the state. Each process has its own part in it.
      chunk_bytes: how much is read, computed and written at a time. Too small: the disk is busy with requests instead
        of bytes. Start with 64 MiB.
      host_bytes: how much host memory the chunks may take, by default three chunks. One: read, compute and write take
        turns; two: they overlap in part; three: fully. More is of no use.
      direct: past the page cache of the system, which is faster and leaves host memory alone. By default where the file
        system can.
      durable: a committed step survives the loss of power, not only the end of the process.
      wait: `apply` returns when the step is committed. False: its last writes go on during your next forward pass; what
        goes wrong then is raised by the next `apply` or `flush`, and your parameters are a step ahead of the disk.
      progress: called with the number of chunks done and of all chunks.

    Example:
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
    """What a store has done in this process.

    Attributes:
      step: the last committed step.
      read_bytes: from disk, in all.
      written_bytes: to disk, in all, without the manifests.
      state_bytes: on disk for one step; twice that much is taken.
      buffer_bytes: the chunks in host memory, at most `host_bytes`.
    """

    step: int
    read_bytes: int
    written_bytes: int
    state_bytes: int
    buffer_bytes: int


class Streamed(NamedTuple):
    """An optimizer whose state lies on disk.

    Attributes:
      init: `init(params) -> params`. Makes the state, or finds it in the folder. Returns the parameters to go on with:
        those on disk if they are there (`master_dtype`), else the ones given, which must be those that the last step
        on disk gave, in every bit.
      apply: `apply(params, grads, *, donate=False, **extra_args) -> params`: one step. `donate`: numpy parameters,
        memory maps too, are overwritten; if the step fails they are torn, and `init` restores them (`master_dtype`).
      flush: `flush() -> step`: waits until the last step is committed; which one that is.
      state: `state() -> state`: all of it in memory, as `optax` has it.
      stats: `stats() -> StreamedStats`.
      close: ends the use of the folder, so that another `nvme` may open it.
    """

    init: Callable[[PyTree], PyTree]
    apply: Callable[..., PyTree]
    flush: Callable[[], int]
    state: Callable[[], State]
    stats: Callable[[], StreamedStats]
    close: Callable[[], None]


def stream(
    count: int,
    buffers: Sequence[Any],
    *,
    read: Callable[[int, Any], None] | None,
    compute: Callable[[int, Any], None],
    write: Callable[[int, Any], None],
    reader: Executor,
    writer: Executor,
) -> list[Future]:
    """Chunk `k` is read into buffer `k mod depth`, computed there in place, and written from it.

    With `depth` buffers, `r`, `c` and `w` seconds for a chunk, a chunk takes `max(r, c, w, (r + c + w)/depth)`: from
    three buffers on as long as the slowest of the three, with one the sum.

    Args:
      count: how many chunks.
      buffers: the buffers.
      read: fills a buffer; `None`: there is nothing to read yet.
      compute: works in a buffer, in the thread of the caller.
      write: empties a buffer.
      reader: has one thread.
      writer: has one thread, so that chunks are written in order.

    Returns:
      The writes, the last of which may still be under way.
    """
    depth = len(buffers)
    writes: list[Future] = []

    def fill(k):
        if k >= depth:
            writes[k - depth].result()
        if read is not None:
            read(k, buffers[k % depth])

    reads = [reader.submit(fill, k) for k in range(min(depth, count))]
    try:
        for k in range(count):
            reads[k].result()
            compute(k, buffers[k % depth])
            writes.append(writer.submit(write, k, buffers[k % depth]))
            if k + depth < count:
                reads.append(reader.submit(fill, k + depth))
    except BaseException:
        for future in (*reads, *writes):
            future.cancel()
        for future in (*reads, *writes):
            if not future.cancelled():
                future.exception()  # waits: nobody may touch the buffers later
        raise
    return writes
