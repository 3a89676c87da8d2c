"""Read, compute and write at the same time, on a few buffers that go round."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any


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
