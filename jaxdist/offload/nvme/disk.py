"""The state of one process on disk: attached, streamed through once a step, and committed."""

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...state.marks import read_order, show_orders
from . import files
from .chunks import Layout
from .files import StoreError, StreamedStats

# Works on a buffer: the number of its access, and its bytes.
Visit = Callable[[int, np.ndarray], None]


class Access(NamedTuple):
    """One use of a buffer in a step. Byte 0 of the buffer is byte `start` of the file.

    `reads` are chunks of the committed step, `rereads` chunks that an earlier access of this step has written: at least
    as many accesses earlier as there are buffers. `writes` are chunks of the new step.
    """

    start: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    rereads: tuple[int, ...] = ()


class _NewStep(NamedTuple):
    """The step that is being written; `checksums` are filled in chunk by chunk."""

    slot: int
    step: int
    path: Path
    checksums: list[int]
    numbers: list[np.ndarray]
    gives: Callable[[], list[list[int]] | None]


class Disk:
    """Two slots in a folder; `step` and `numbers` belong to the committed one.

    `gave`: hashes of the parameters that belong to it, for each shard of each leaf, unless these are on disk too.
    """

    def __init__(self, folder: Path, *, direct: bool | None, durable: bool, wait: bool, progress: Any):
        with files.raise_typed_errors(folder, -1):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.durable, self.wait, self.progress = folder, durable, wait, progress
        # Released even if `close` is never called and this object is garbage-collected.
        self.unlock = weakref.finalize(self, files.lock_folder(folder).release)
        try:
            self.direct = files.takes_direct(folder) if direct is None else direct
            if self.direct and not files.takes_direct(folder):
                raise ValueError(
                    f"direct=True, but the file system of {folder} cannot bypass the page cache: leave direct out"
                )
            self.manifests = files.read_manifests(folder)
        except BaseException:
            # The traceback refers to this object: the lock would last as long as that.
            self.unlock()
            raise
        self.slot, self.step = 0, -1
        self.numbers: list[np.ndarray] = []
        self.sums: list[int] = []
        self.gave: list[list[int]] | None = None
        self.pending: Future | None = None
        # Of a step that was not committed, but whose parameters the caller has.
        self.failed: BaseException | None = None
        self.read_bytes = self.written_bytes = self.buffer_bytes = 0

    def chunk_bytes(self) -> int | None:
        """The chunk size that the store was created with, if it exists."""
        return next((manifest["chunk_bytes"] for manifest in self.manifests.values()), None)

    def attach(self, layout: Layout, chunk_bytes: int, host_bytes: int) -> bool:
        """Allocates buffers and finds the last step that all processes have; returns False if there is none."""
        largest = max((chunk.nbytes for chunk in layout.chunks), default=0)
        depth = min(host_bytes // max(largest, 1), max(len(layout.chunks), 1), 3)
        if not depth:
            raise ValueError(
                f"host_bytes={host_bytes} is less than a chunk of {largest} bytes: make chunk_bytes smaller"
            )
        return self.attach_buffers(layout, chunk_bytes, largest, depth)

    def attach_buffers(self, layout: Layout, chunk_bytes: int, largest: int, depth: int) -> bool:
        """`attach` with `depth` buffers of `largest` bytes."""
        self.layout, self.size = layout, chunk_bytes
        # Whole pages, as direct access requires.
        memory = [mmap.mmap(-1, max(largest, files.PAGE)) for _ in range(depth)]
        self.buffers = [np.frombuffer(pages, np.uint8) for pages in memory]
        self.buffer_bytes = depth * largest
        # -1 for a slot that is empty or was being overwritten.
        steps = np.array([self.manifests.get(slot, {"step": -1})["step"] for slot in (0, 1)])
        step = int(_common(steps))
        if step < 0:
            return False
        self.slot = int(np.flatnonzero(steps == step)[0])
        manifest = self.manifests[self.slot]
        self._check_order(manifest.get("order"))
        if manifest["layout"] != layout.signature:
            raise self._mismatch()
        if len(manifest["checksums"]) != len(layout.chunks):
            what = f"the manifest has {len(manifest['checksums'])} checksums for {len(layout.chunks)} chunks"
            raise files.StoreDamagedError(f"{what}; restore it from a copy, {files.RESUME}", self.folder, step)
        self.step, self.sums = step, manifest["checksums"]
        self.numbers = files.decode(manifest["numbers"])
        # Manifests of earlier versions do not have it, or had other hashes under another name.
        self.gave = manifest.get("hashes")
        return True

    def check_numbers(self, likes: Sequence[Any]) -> None:
        """Checks that the stored numbers are those of this optimizer: its arrays may have the dtypes of another's."""
        stored, expected = [[(x.shape, np.dtype(x.dtype)) for x in each] for each in (self.numbers, likes)]
        if stored != expected:
            raise self._mismatch()

    def _check_order(self, found: Any) -> None:
        """Checks that arrays on disk are those of the same leaves: others may have the same sizes and dtypes."""
        # Manifests of earlier versions do not say it.
        order = self.layout.order if found is None else read_order(found)
        if order != self.layout.order:
            stored, wanted = show_orders(order, self.layout.order)
            raise self._mismatch(f" (its arrays are those of {stored}, one after another, and here of {wanted})")

    def _mismatch(self, difference: str = "") -> ValueError:
        return ValueError(
            f"{self.folder} holds the state of another model, optimizer, master_dtype, clip_norm or number of workers"
            f"{difference}: use another folder, or delete this one"
        )

    def flush(self) -> None:
        """Waits for the step that is being written, and raises its error if it failed.

        The next step needs the state of that step: where the caller has gone on without waiting, the error is raised
        again until the folder is opened anew.
        """
        error = None if self.pending is None else self.pending.exception()
        # Only then: after a Ctrl-C in the wait the step is still being written, and others must not begin another.
        self.pending = None
        if error is not None and self.wait:
            raise error
        if isinstance(error, StoreError):
            ahead = f"the state is still that of step {self.step}, and what the last call returned a step ahead"
            error = type(error)(f"{error.what}; {ahead}: open the store again by `init`", error.path, error.step)
        self.failed = error or self.failed
        if self.failed is not None:
            raise self.failed

    def stats(self) -> StreamedStats:
        """The counters of this process."""
        return StreamedStats(self.step, self.read_bytes, self.written_bytes, self.layout.nbytes, self.buffer_bytes)

    def close(self) -> None:
        """Waits for the step that is being written, and lets others use the folder, whatever its end is."""
        try:
            if self.pending is not None:
                self.flush()
        finally:
            self.unlock()

    def advance(
        self,
        visit: Visit,
        numbers: Sequence[np.ndarray],
        gives: Callable[[], list[list[int]] | None],
        *,
        accesses: Sequence[Access] | None = None,
        prepare: Visit | None = None,
    ) -> None:
        """Streams chunks through `visit` into the other slot, and commits it with these numbers.

        Args:
          gives: returns, when everything is computed, the hashes of the parameters that belong to the step.
          accesses: what is read and written, in this order; by default every chunk once. All chunks that a later step
            reads must be written.
          prepare: called in the reading thread when an access has been read.
        """
        accesses = self._each_chunk() if accesses is None else accesses
        self.flush()
        # Never over the committed step.
        slot = 1 - self.slot if self.step >= 0 else 0
        path = files.slot_path(self.folder, slot)
        new = _NewStep(slot, self.step + 1, path, [0] * len(self.layout.chunks), list(numbers), gives)
        files.drop_manifest(self.folder, slot, new.step, durable=self.durable)
        with contextlib.ExitStack() as stack:
            file = self._open(stack, path, new.step, create=True)
            reader, writer = ThreadPoolExecutor(1, "nvme-read"), ThreadPoolExecutor(1, "nvme-write")
            try:
                if self.step < 0:
                    # Allocates the second slot now, so that a full disk is noticed at the first step.
                    self._open(stack, files.slot_path(self.folder, 1), new.step, create=True)
                again = partial(self._read, file, path, new.step, new.checksums)
                read = None
                if self.step >= 0:
                    read = partial(self._fill, accesses, self._open_committed(stack), again, prepare)
                compute, write = partial(self._compute, visit, accesses), partial(self._drain, accesses, file, new)
                count = len(accesses)
                writes = stream(
                    count, self.buffers, read=read, compute=compute, write=write, reader=reader, writer=writer
                )
            except BaseException:
                reader.shutdown()
                writer.shutdown()
                raise
            reader.shutdown()
            # The files stay open until the last writes, which may continue after this call.
            self.pending = writer.submit(self._commit, file, new, writes, stack.pop_all())
            writer.shutdown(wait=False)
        if self.wait:
            self.flush()

    def _each_chunk(self) -> list[Access]:
        return [Access(chunk.offset, (k,), (k,)) for k, chunk in enumerate(self.layout.chunks)]

    def _trim(self, access: Access, buffer: np.ndarray) -> np.ndarray:
        """The bytes of a buffer that belong to the chunks of an access."""
        chunks = [self.layout.chunks[c] for c in (*access.reads, *access.rereads, *access.writes)]
        return buffer[: max((chunk.offset + chunk.nbytes for chunk in chunks), default=access.start) - access.start]

    def _compute(self, visit: Visit, accesses: Sequence[Access], k: int, buffer: np.ndarray) -> None:
        visit(k, self._trim(accesses[k], buffer))
        if self.progress is not None:
            self.progress(k + 1, len(accesses))

    def _fill(
        self, accesses: Sequence[Access], old: Visit, new: Visit, prepare: Visit | None, k: int, buffer: np.ndarray
    ) -> None:
        """Reads the chunks of an access: those of the committed step by `old`, those of this step by `new`."""
        access = accesses[k]
        for read, chunks in ((old, access.reads), (new, access.rereads)):
            for c in chunks:
                read(c, buffer[self.layout.chunks[c].offset - access.start :])
        if prepare is not None:
            prepare(k, buffer)

    def _drain(self, accesses: Sequence[Access], file: int, new: _NewStep, k: int, buffer: np.ndarray) -> None:
        for c in accesses[k].writes:
            self._write(file, new, c, buffer[self.layout.chunks[c].offset - accesses[k].start :])

    def _write(self, file: int, new: _NewStep, k: int, buffer: np.ndarray) -> None:
        chunk = self.layout.chunks[k]
        data = buffer[: chunk.nbytes]
        sync = self.durable and not self.direct
        new.checksums[k] = files.write_chunk(file, data, chunk.offset, new.path, new.step, sync=sync)
        if not self.direct:
            files.forget(file, data, chunk.offset)
        self.written_bytes += data.nbytes

    def _commit(self, file: int, new: _NewStep, writes: Sequence[Future], stack: contextlib.ExitStack) -> None:
        """Waits for all writes, and then makes the slot the committed one by writing its manifest."""
        with stack:
            for write in writes:
                write.result()
            if self.durable and self.direct:
                with files.raise_typed_errors(new.path, new.step):
                    files.data_sync(file)
            gave = new.gives()
            manifest = {
                "step": new.step,
                "hashes": gave,
                "layout": self.layout.signature,
                "order": self.layout.order,
                "chunk_bytes": self.size,
                "checksums": new.checksums,
                "numbers": files.encode(new.numbers),
            }
            files.write_manifest(self.folder, new.slot, manifest, durable=self.durable)
        # From here on the new step is the committed one, in this process too.
        self.slot, self.step, self.sums = new.slot, new.step, new.checksums
        self.numbers, self.gave = new.numbers, gave

    def scan(self, visit: Visit, accesses: Sequence[Access] | None = None) -> None:
        """Calls `visit` with every chunk of the committed step, or with those that these accesses read."""
        self.flush()
        accesses = self._each_chunk() if accesses is None else accesses
        with contextlib.ExitStack() as stack:
            read = self._open_committed(stack)
            for k in range(len(accesses)):
                self._fill(accesses, read, read, None, k, self.buffers[0])
                visit(k, self._trim(accesses[k], self.buffers[0]))

    def _open(self, stack: contextlib.ExitStack, path: Path, step: int, *, create: bool) -> int:
        file = files.open_slot(path, self.layout.nbytes, self.direct, step, create=create)
        stack.callback(os.close, file)
        return file

    def _open_committed(self, stack: contextlib.ExitStack) -> Visit:
        """Opens the committed slot; returns the function that reads a chunk of it."""
        path = files.slot_path(self.folder, self.slot)
        return partial(self._read, self._open(stack, path, self.step, create=False), path, self.step, self.sums)

    def _read(self, file: int, path: Path, step: int, checksums: Sequence[int], k: int, buffer: np.ndarray) -> None:
        chunk = self.layout.chunks[k]
        data = buffer[: chunk.nbytes]
        files.read_chunk(file, data, chunk.offset, path, step, expected=checksums[k])
        if not self.direct:
            files.forget(file, data, chunk.offset)
        self.read_bytes += data.nbytes


def _common(steps: np.ndarray) -> int:
    """The last step that every process has: a process that was killed may be a step behind the others."""
    if jax.process_count() == 1:
        return int(steps.max())
    # As pairs of 32-bit words: JAX has no 64-bit integers by default.
    words = multihost_utils.process_allgather(steps.astype(np.int64).view(np.int32))
    by_process = np.ascontiguousarray(words).view(np.int64)
    for step in sorted({int(x) for x in by_process.ravel()}, reverse=True):
        if all(step in row for row in by_process):
            return step
    raise ValueError(f"the processes have no step in common: {by_process.tolist()}; start again in another folder")


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

    `read` fills a buffer, `None` if there is nothing to read yet; `compute` works on it in the thread of the caller.
    `reader` and `writer` have one thread each, so that chunks are written in order.

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
