"""A store on disk: a folder of files that hold a state, and the settings for their use.

The files are two slots, each with chunks and a manifest: a step is never written over the committed one. A step reads
slot `s` and writes slot `1 - s`; the manifest of a slot is removed before the first byte of it is overwritten, and
written (under another name, then renamed) after the last. A slot with a manifest is complete.

tensorstore allocates and copies each chunk: it wrote 1.4 and read 0.6 to 0.9 GB/s, plain reads and writes 2.5 GB/s.
`preadv` and `pwritev` use reusable pages and bypass the page cache (benchmarks/nvme.py).
"""

import base64
import contextlib
import errno
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..._core.checks import Portable
from ..._core.file_lock import FileLock
from ..._core.types import PyTree, State

FORMAT = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# 0 on systems without it, which go through the page cache.
DIRECT = getattr(os, "O_DIRECT", 0)
PAGE = 4096
RESUME = "or delete the folder and resume from a checkpoint"


class Store(NamedTuple):
    """The location of an optimizer's state on disk, and how it is read and written.

    Attributes:
      path: a folder, on a fast disk with space for twice the state. Each process has its own subfolder.
      chunk_bytes: the bytes that are read, computed and written at a time. Too small: requests slow the disk down.
        64 MiB had 0.75 to 0.94 of the speed of a plain copy (`benchmarks/reports/2026-11-zero`); others are untried.
      host_bytes: the host memory for chunks, by default three chunks. With one, reads, computation and writes take
        turns; with two they overlap in part; with three fully. More does not help.
      direct: bypass the page cache of the system, which is faster and saves host memory. By default where the file
        system supports it.
      durable: a committed step survives a power failure, not only the end of the process.
      wait: `apply` returns when the step is committed. False: its last writes continue during your next forward pass;
        their errors are raised by the next `apply` or `flush`, and by all others: your parameters are then a step ahead
        of the disk, and `init` goes back to its last step.
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


def check_store(store: Any) -> None:
    """Raises TypeError unless this is a `Store`, and ValueError unless its bytes are positive whole numbers."""
    if not isinstance(store, Store):
        raise TypeError(f'expected a store, such as offload.Store("/nvme/run-1"), got {store!r}')
    for name in ("chunk_bytes", "host_bytes"):
        value = getattr(store, name)
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise ValueError(f"{name} must be a positive whole number of bytes, got {value!r}")


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
    """An operation on the disk failed (`what`): on the file `path`, for `step`. The last committed step is intact."""

    def __init__(self, message: str, path: Path, step: int):
        super().__init__(f"{message} (file {path}, step {step})")
        self.what, self.path, self.step = message, path, step


class StoreFullError(StoreError):
    """No space left, or a quota or a limit of file sizes reached.

    After making room, `apply` can be called again; with `Store(wait=False)`, `init`.
    """


class StoreDamagedError(StoreError):
    """A file is missing, too short, or holds other bytes than were written: its checksum does not match."""


def checksum(data: np.ndarray) -> int:
    """Returns a CRC of the sums of all 4 KiB rows and of all columns of 64-bit words; `data` is a multiple of 4 KiB.

    Five times faster than a CRC of the bytes. It detects any single wrong word or page, and torn ends.
    """
    words = data.view(np.uint64).reshape(-1, PAGE // 8)
    rows, columns = np.add.reduce(words, axis=1), np.add.reduce(words, axis=0)
    return zlib.crc32(columns.tobytes(), zlib.crc32(rows.tobytes()))


def store_error(error: OSError, path: Path, step: int) -> StoreError:
    """The typed exception for an error of the operating system."""
    if error.errno in FULL:
        return StoreFullError(f"no space left: {error.strerror}. Free some space", path, step)
    return StoreError(f"{error.strerror or error}", path, step)


@contextlib.contextmanager
def raise_typed_errors(path: Path, step: int) -> Iterator[None]:
    """Raises the typed exception for an error of the operating system in the block."""
    try:
        yield
    except OSError as error:
        raise store_error(error, path, step) from error


def open_slot(path: Path, size: int, direct: bool, step: int, *, create: bool) -> int:
    """Opens the file of a slot; `create` allocates all of it."""
    flags = os.O_RDWR | (DIRECT if direct else 0) | (os.O_CREAT if create else 0)
    with raise_typed_errors(path, step):
        try:
            found = os.open(path, flags, 0o644)
        except FileNotFoundError as error:
            raise StoreDamagedError("the file is missing", path, step) from error
        try:
            # A full disk is noticed here, and not in the middle of a step.
            if create and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(found, 0, max(size, 1))
        except OSError:
            os.close(found)
            raise
    return found


def takes_direct(folder: Path) -> bool:
    """Returns True if the file system can bypass the page cache."""
    probe = folder / "probe"
    if not DIRECT:
        return False
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | DIRECT, 0o644))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def read_chunk(slot: int, data: np.ndarray, offset: int, path: Path, step: int, *, expected: int) -> None:
    """Fills `data`, and checks its checksum."""
    done = 0
    while done < data.nbytes:
        with raise_typed_errors(path, step):
            got = os.preadv(slot, [data[done:].data], offset + done)
        if not got:
            what = f"the file ends at byte {offset + done}, {data.nbytes - done} bytes too early: restore it"
            raise StoreDamagedError(f"{what} from a copy, {RESUME}", path, step)
        done += got
    if checksum(data) != expected:
        what = f"bytes {offset} to {offset + data.nbytes} are not those that were written: restore the file from a copy"
        raise StoreDamagedError(f"{what}, {RESUME}", path, step)


def write_chunk(slot: int, data: np.ndarray, offset: int, path: Path, step: int, *, sync: bool) -> int:
    """Writes all of `data`; returns its checksum."""
    done = 0
    with raise_typed_errors(path, step):
        while done < data.nbytes:
            done += os.pwritev(slot, [data[done:].data], offset + done)
        if sync:
            data_sync(slot)
    return checksum(data)


def data_sync(slot: int) -> None:
    """Waits until the bytes of a file are on the disk."""
    getattr(os, "fdatasync", os.fsync)(slot)


def forget(slot: int, data: np.ndarray, offset: int) -> None:
    """Drops the pages from the cache, which would otherwise take the host memory that the store is meant to save."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(slot, offset, data.nbytes, os.POSIX_FADV_DONTNEED)


def _manifest_path(folder: Path, slot: int) -> Path:
    return folder / f"manifest.{slot}.json"


def slot_path(folder: Path, slot: int) -> Path:
    """The path of a slot's file of chunks."""
    return folder / f"state.{slot}"


def write_manifest(folder: Path, slot: int, manifest: dict[str, Any], *, durable: bool) -> None:
    """Commits a slot, atomically."""
    path = _manifest_path(folder, slot)
    text = json.dumps({"format": FORMAT, **manifest})
    with raise_typed_errors(path, manifest["step"]):
        with open(path.with_suffix(".tmp"), "w") as file:
            file.write(json.dumps({"crc": zlib.crc32(text.encode()), "manifest": text}))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        # Atomic: a reader sees the old manifest or the new one.
        os.replace(path.with_suffix(".tmp"), path)
        if durable:
            _sync_folder(folder)


def drop_manifest(folder: Path, slot: int, step: int, *, durable: bool) -> None:
    """Removes a slot's manifest: from now on its file is invalid."""
    path = _manifest_path(folder, slot)
    with raise_typed_errors(path, step):
        path.unlink(missing_ok=True)
        if durable:
            _sync_folder(folder)


def read_manifests(folder: Path) -> dict[int, dict[str, Any]]:
    """The manifests of the committed slots, by slot."""
    found, damaged = {}, []
    for slot in (0, 1):
        path = _manifest_path(folder, slot)
        if path.exists():
            try:
                outer = json.loads(path.read_text())
                if zlib.crc32(outer["manifest"].encode()) != outer["crc"]:
                    raise ValueError("the checksum differs")
                manifest = json.loads(outer["manifest"])
                other_format = manifest["format"] != FORMAT
                if not other_format:
                    _check_fields(manifest)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                damaged.append(path)
                continue
            if other_format:
                raise ValueError(
                    f"{path} has format {manifest['format']}, this version reads {FORMAT}: continue with the version "
                    "that wrote it, or choose a new folder"
                )
            found[slot] = manifest
    for path in damaged:
        # Without its manifests a folder begins at step 0.
        advice = f"restore it from a copy, {RESUME}"
        if found:
            (other,) = found.values()
            advice = f"delete it to return to the other one, of step {other['step']}"
        raise StoreDamagedError(f"the manifest is damaged; {advice}", path, -1)
    return found


def _check_fields(manifest: dict[str, Any]) -> None:
    """Raises an error for fields of other types than `write_manifest` writes, whose checksum may yet be right."""
    hashes = manifest.get("hashes")
    lists = [manifest["checksums"], *([] if hashes is None else hashes)]
    counts = [manifest["step"], manifest["chunk_bytes"], *(number for numbers in lists for number in numbers)]
    # `bool` is a subclass of `int`.
    if any(type(x) is not int or x < 0 for x in counts) or not manifest["chunk_bytes"]:
        raise ValueError("steps, sizes, checksums and hashes are numbers from 0 on")
    if any(type(x) is not list for x in lists) or not isinstance(manifest["layout"], str):
        raise ValueError("a list or the layout is missing")
    for name, shape in manifest.get("order") or ():
        if not isinstance(name, str) or any(type(x) is not int for x in shape):
            raise ValueError("the order of the leaves is names and shapes")
    decode(manifest["numbers"])


def _sync_folder(folder: Path) -> None:
    """Makes renames and removals durable."""
    found = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(found)
    finally:
        os.close(found)


def folder_of_process(path: str | Path, process: int, count: int) -> Path:
    """Returns the folder of one of `count` processes in the folder of a store.

    Raises:
      ValueError: there is the state of another number of processes: a new one beside it would begin at step 0.
    """
    root = Path(path).expanduser().absolute()
    for other in sorted(root.glob("worker-*-of-*")):
        if not other.name.endswith(f"-of-{count:05d}") and read_manifests(other):
            raise ValueError(
                f"{root} holds the state of {int(other.name[-5:])} processes, and there are {count} now: start as "
                f"many, use another folder, {RESUME}"
            )
    return root / f"worker-{process:05d}-of-{count:05d}"


def lock_folder(folder: Path) -> FileLock:
    """Locks the folder of a process, until the lock is released or this process ends.

    Raises:
      ValueError: it is in use.
      StoreError: it cannot be locked.
    """
    path = folder / "lock"
    try:
        return FileLock(path)
    except BlockingIOError as error:
        what = f"{folder} is in use by another process or `nvme` instance: call its `close` first"
        raise ValueError(what) from error
    except OSError as error:
        raise store_error(error, path, -1) from error


def encode(values: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Writes numbers for the manifest, bit for bit."""
    return [
        {"dtype": x.dtype.name, "shape": x.shape, "data": base64.b64encode(x.tobytes()).decode()}
        for x in map(np.asarray, values)
    ]


def decode(values: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """The inverse of `encode`."""

    def decode_number(x: dict[str, Any]) -> np.ndarray:
        # NumPy does not know bfloat16 by its name.
        dtype = np.dtype(getattr(ml_dtypes, x["dtype"], x["dtype"]))
        return np.frombuffer(base64.b64decode(x["data"]), dtype).reshape(x["shape"])

    return [decode_number(x) for x in values]
