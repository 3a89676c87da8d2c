"""The state of one process on disk: opened, passed through once a step, committed."""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from . import files
from .layout import Layout
from .store import stream

# Works in a chunk: its number, and its bytes.
Visit = Callable[[int, np.ndarray], None]


class Disk:
    """Two slots in a folder; `step` and `numbers` are those of the committed one.

    `gave`: sums of the bits of the parameters that belong to it, for each shard of each leaf, where they are not on
    disk themselves.
    """

    def __init__(self, folder: Path, *, direct: bool | None, durable: bool, wait: bool, progress: Any):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.durable, self.wait, self.progress = folder, durable, wait, progress
        # Also when nobody has called `close` and all of it is forgotten.
        self.unlock = weakref.finalize(self, files.Lock(folder).release)
        self.direct = files.takes_direct(folder) if direct is None else direct
        if self.direct and not files.takes_direct(folder):
            self.unlock()
            raise ValueError(f"direct=True, but the file system of {folder} cannot bypass the page cache: leave it out")
        self.manifests = files.read_manifests(folder)
        self.slot, self.step = 0, -1
        self.numbers: list[np.ndarray] = []
        self.sums: list[int] = []
        self.gave: list[list[int]] | None = None
        self.pending: Future | None = None
        self.read_bytes = self.written_bytes = self.buffer_bytes = 0

    def chunk_bytes(self) -> int | None:
        """Those with which the store was made."""
        return next((manifest["chunk_bytes"] for manifest in self.manifests.values()), None)

    def attach(self, layout: Layout, chunk_bytes: int, host_bytes: int) -> bool:
        """Takes the buffers, and the last step that all processes have; whether there is one."""
        self.layout, self.size = layout, chunk_bytes
        largest = max((chunk.nbytes for chunk in layout.chunks), default=0)
        depth = min(host_bytes // max(largest, 1), max(len(layout.chunks), 1), 3)
        if not depth:
            raise ValueError(f"host_bytes={host_bytes} holds no chunk of {largest} bytes: make chunk_bytes smaller")
        # Of whole pages, as direct access wants them, and touched only once.
        room = [mmap.mmap(-1, max(largest, files.PAGE)) for _ in range(depth)]
        self.buffers = [np.frombuffer(one, np.uint8) for one in room]
        self.buffer_bytes = depth * largest
        steps = np.array([self.manifests.get(slot, {"step": -1})["step"] for slot in (0, 1)])
        step = int(_common(steps))
        if step < 0:
            return False
        self.slot = int(np.flatnonzero(steps == step)[0])
        manifest = self.manifests[self.slot]
        if manifest["layout"] != layout.signature:
            raise ValueError(
                f"{self.folder} holds the state of another model, optimizer, master_dtype or number of workers: "
                "take another folder, or delete this one"
            )
        self.step, self.sums = step, manifest["checksums"]
        self.numbers = files.decode(manifest["numbers"])
        self.gave = manifest.get("gave")  # not in stores of before
        return True

    def flush(self) -> None:
        """Waits for the step that is under way; raises what went wrong in it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def advance(self, visit: Visit, numbers: Sequence[np.ndarray], gives: Callable[[], list[list[int]] | None]) -> None:
        """Passes all chunks through `visit`, into the other slot, and commits it with these numbers.

        `gives` tells, when all is computed, the sums of the parameters that belong to the step.
        """
        self.flush()
        first, step, target = self.step < 0, self.step + 1, 1 - self.slot if self.step >= 0 else 0
        path, chunks, sums = files.slot_path(self.folder, target), self.layout.chunks, [0] * len(self.layout.chunks)
        files.drop_manifest(self.folder, target, step, durable=self.durable)
        into = files.open_slot(path, self.layout.nbytes, self.direct, step, create=True)
        done = [lambda: os.close(into)]
        reader, writer = ThreadPoolExecutor(1, "nvme-read"), ThreadPoolExecutor(1, "nvme-write")
        try:
            read = None
            if first:  # room for the first step, so that a full disk shows now
                other = files.slot_path(self.folder, 1)
                os.close(files.open_slot(other, self.layout.nbytes, self.direct, step, create=True))
            else:
                read, close = self._reading()
                done.append(close)

            def write(k, buffer):
                data = buffer[: chunks[k].nbytes]
                sync = self.durable and not self.direct
                sums[k] = files.write_chunk(into, data, chunks[k].offset, path, step, sync=sync)
                if not self.direct:
                    files.forget(into, data, chunks[k].offset)
                self.written_bytes += data.nbytes

            def compute(k, buffer):
                visit(k, buffer[: chunks[k].nbytes])
                if self.progress is not None:
                    self.progress(k + 1, len(chunks))

            count, buffers = len(chunks), self.buffers
            writes = stream(count, buffers, read=read, compute=compute, write=write, reader=reader, writer=writer)
        except BaseException:
            reader.shutdown()
            writer.shutdown()
            for close in done:
                close()
            raise

        def commit():
            try:
                for one in writes:
                    one.result()
                if self.durable and self.direct:
                    _sync(into, path, step)
                gave = gives()
                manifest = {
                    "step": step,
                    "gave": gave,
                    "layout": self.layout.signature,
                    "chunk_bytes": self.size,
                    "checksums": sums,
                    "numbers": files.encode(numbers),
                }
                files.write_manifest(self.folder, target, manifest, durable=self.durable)
            finally:
                for close in done:
                    close()
            self.slot, self.step, self.sums, self.numbers, self.gave = target, step, sums, list(numbers), gave

        reader.shutdown()
        self.pending = writer.submit(commit)
        writer.shutdown(wait=False)
        if self.wait:
            self.flush()

    def scan(self, visit: Visit) -> None:
        """Shows all chunks of the committed step."""
        self.flush()
        read, close = self._reading()
        try:
            for k, chunk in enumerate(self.layout.chunks):
                read(k, self.buffers[0])
                visit(k, self.buffers[0][: chunk.nbytes])
        finally:
            close()

    def _reading(self) -> tuple[Visit, Callable[[], None]]:
        path, step, sums = files.slot_path(self.folder, self.slot), self.step, self.sums
        slot = files.open_slot(path, self.layout.nbytes, self.direct, step, create=False)

        def read(k, buffer):
            chunk = self.layout.chunks[k]
            data = buffer[: chunk.nbytes]
            files.read_chunk(slot, data, chunk.offset, path, step, expected=sums[k])
            if not self.direct:
                files.forget(slot, data, chunk.offset)
            self.read_bytes += data.nbytes

        return read, lambda: os.close(slot)


def _common(steps: np.ndarray) -> int:
    """The last step that every process has: one that was killed may be a step behind the others."""
    if jax.process_count() == 1:
        return int(steps.max())
    words = multihost_utils.process_allgather(steps.astype(np.int64).view(np.int32))  # JAX has no 64 bits
    everyone = np.ascontiguousarray(words).view(np.int64)
    for step in sorted({int(x) for x in everyone.ravel()}, reverse=True):
        if all(step in row for row in everyone):
            return step
    raise ValueError(f"the processes have no step in common: {everyone.tolist()}; begin again in another folder")


def _sync(slot: int, path: Path, step: int) -> None:
    try:
        files.data_sync(slot)
    except OSError as error:
        raise files.refused(error, path, step) from error
