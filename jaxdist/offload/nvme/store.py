"""The settings of a store on disk, its public functions, and the pipeline of reads, computation and writes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

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
    """Counters of a store in this process.

    Attributes:
      step: the last committed step.
      read_bytes: total bytes read from disk.
      written_bytes: total bytes written to disk, without the manifests.
      state_bytes: bytes on disk for one step; twice as many are allocated.
      buffer_bytes: bytes of the chunks in host memory, at most `host_bytes`.
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
      stats: `stats() -> StreamedStats`.
      close: releases the folder, so that another `nvme` may open it.
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
    """Reads chunk `k` into buffer `k mod depth`, computes on it in place, and writes it from there.

    With `depth` buffers and `r`, `c` and `w` seconds for a chunk, a chunk takes `max(r, c, w, (r + c + w)/depth)`: with
    three or more buffers as long as the slowest of the three, with one the sum.

    Args:
      count: the number of chunks.
      buffers: the buffers.
      read: fills a buffer; `None` if there is nothing to read yet.
      compute: works on a buffer, in the thread of the caller.
      write: empties a buffer.
      reader: has one thread.
      writer: has one thread, so that chunks are written in order.

    Returns:
      The writes, the last of which may still be in progress.
    """
    depth = len(buffers)
    writes: list[Future] = []

    def fill(k):
        # The buffer is free once the chunk that was in it has been written.
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
                # Waits until no thread uses the buffers any more.
                future.exception()
        raise
    return writes
