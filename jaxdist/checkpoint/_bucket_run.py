"""The checkpoints of a run in a bucket.

Objects cannot be renamed. The files of a save go under a name that nothing else has, and the creation of one object,
`commits/<number>`, makes it a checkpoint: that object lists all checkpoints of the run, so that a replacement, a
roll-back and the removal of old ones take effect with it, at once. Of several writers that create the same number one
succeeds. What the newest list does not name is deleted afterwards.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._core.file_lock import FileLock
from .._stores.bucket import pieces
from .._stores.opening import Objects
from . import _files
from ._bucket import open_patiently
from ._together import Share, Together
from .errors import CheckpointDamagedError, CheckpointStoreError

COMMITS = "commits/"
# In the folder of a save by several processes: what process 0 needs to join their parts.
JOINING = "joining/"
FORMAT = 1
# `<step>-<number of the commit>-<random>`: the files of one save.
_FOLDER = re.compile(r"(?:0|[1-9]\d*)-(\d+)-[0-9a-f]{8}")
# How often a list is looked for again after a writer has deleted the one that was found.
_TRIES = 10
# The beginning of the names of temporary folders, and the lock in each.
STAGED, LOCK = "jaxdist-checkpoint-", ".lock"

# Containers that share a host name may have equal process numbers.
_TOKEN = uuid.uuid4().hex[:8]
# The runs that this process writes, as those of `_files`.
_written: set[tuple[str, int]] = set()
_guard = threading.Lock()


class Listed(NamedTuple):
    """One checkpoint: its step, its folder, and the checksum of its `SHA256SUMS`."""

    step: int
    folder: str
    sums: str


class Listing(NamedTuple):
    """The checkpoints of a run after so many commits, oldest first, and those that were set aside.

    The last save was commit `saved`, by the process `by`; later commits have only set damaged checkpoints aside.
    """

    number: int = 0
    saved: int = 0
    by: str = ""
    checkpoints: tuple[Listed, ...] = ()
    damaged: tuple[Listed, ...] = ()
    abandoned: tuple[Listed, ...] = ()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}, {_TOKEN}"


def _dump(commit: Listing) -> bytes:
    text = json.dumps({"format": FORMAT, **commit._asdict()})
    return f"{text}\n{_files.seal([text])}\n".encode()


def _parse(place: str, name: str, number: int, body: bytes) -> Listing:
    try:
        text, seal = body.decode().splitlines()
        found = json.loads(text)
        if seal != _files.seal([text]) or found["number"] != number:
            raise ValueError("its bytes are not those that were written")
        version = found.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{name} is not a list of checkpoints that jaxdist wrote ({error})"
        cure = "restore that object from an earlier version of it, or delete it to return to the list before"
        raise CheckpointStoreError(place, problem, cure) from error
    if version != FORMAT:
        raise ValueError(
            f"{place} has format {version}, but this version of jaxdist reads {FORMAT}: use another version"
        )
    lists = ("checkpoints", "damaged", "abandoned")
    return Listing(**found | {field: tuple(Listed(*entry) for entry in found[field]) for field in lists})


class BucketRun:
    """The checkpoints in a bucket. What a function finds is JSON, for the other processes: here an `Listed`."""

    def __init__(self, place: Any):
        self.objects: Objects = open_patiently(place)
        self.place = self.objects.url
        is_url = isinstance(place, str | os.PathLike)
        self._identity = (self.place if is_url else f"store {id(place)}", os.getpid())
        # The list when this writer locked, until its first save, and the last save that it knows of.
        self._locked: Listing | None = None
        self._known = 0
        # The list to which a save adds its checkpoint.
        self._head = Listing()

    def head(self, least: int = 0) -> Listing:
        """Reads the newest list of checkpoints; an empty one if there is none. That of number `least` is known."""
        name = COMMITS
        for _ in range(_TRIES):
            number = max(self._numbers(self.objects.sizes(COMMITS)), default=0)
            # A listing may be older than the name that another has just created.
            number = max(number, least)
            if number == 0:
                return Listing()
            name = f"{COMMITS}{number}"
            if (body := self.objects.get(name)) is not None:
                return _parse(self.place, name, number, body)
            # A writer has deleted it since, and has created later ones.
        raise CheckpointStoreError(
            self.place, f"{name} is listed and cannot be read", "use a store with consistent listings"
        )

    @staticmethod
    def _numbers(names: Any) -> list[int]:
        """Returns the numbers of the commits among these names."""
        found = (name.removeprefix(COMMITS) for name in names if name.startswith(COMMITS))
        return [int(number) for number in found if number.isascii() and number.isdecimal() and number[0] != "0"]

    def look(self) -> tuple[list[list[Any]], list[int]]:
        """Returns the checkpoints, oldest first, and the steps that were set aside as damaged."""
        head = self.head()
        return [list(entry) for entry in head.checkpoints], sorted({entry.step for entry in head.damaged})

    def find(self, step: int) -> list[Any] | None:
        """Returns the checkpoint of a step."""
        return next((found for found in self.look()[0] if found[0] == step), None)

    def source(self, found: list[Any]) -> "BucketSource":
        """Returns what reads a checkpoint."""
        return BucketSource(self, Listed(*found))

    def set_aside(self, steps: Sequence[int]) -> None:
        """Sets damaged checkpoints aside: a new list does not count them, and nothing is deleted."""
        base = self.head()
        while True:
            going = tuple(entry for entry in base.checkpoints if entry.step in steps)
            left = tuple(entry for entry in base.checkpoints if entry not in going)
            damaged = base.damaged + going
            if not going or self._create(base._replace(number=base.number + 1, checkpoints=left, damaged=damaged)):
                return
            base = self.head(base.number + 1)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Excludes other writers of this process; those of others are found when they commit."""
        with _guard:
            if self._identity in _written:
                raise ValueError(
                    f"this process writes checkpoints into {self.place} already: use the writer of `writing`, and "
                    "finish one save before starting another"
                )
            _written.add(self._identity)
        try:
            self._locked = self.head()
            self._known = self._locked.saved
            yield
        finally:
            _written.discard(self._identity)

    def begin(self, step: int) -> list[Any]:
        """Chooses the folder of a save, in process 0."""
        # Only to find another writer before everything is sent: what counts is that one of them creates a list.
        self._head, self._locked = self._locked or self.head(), None
        self._check_alone(self._head)
        return [f"{step}-{self._head.number + 1}-{uuid.uuid4().hex[:8]}"]

    def target(self, step: int, begun: list[Any]) -> "BucketTarget":
        """Returns what writes a checkpoint."""
        return BucketTarget(self, step, *begun)

    def commit(self, entry: Listed, keep: int | None) -> Listing:
        """Creates the list that contains a new checkpoint."""
        while True:
            head, number = self._head, self._head.number + 1
            # Later checkpoints belong to a run that was rolled back to a step before them.
            earlier = [old for old in head.checkpoints if old.step < entry.step]
            later = tuple(old for old in head.checkpoints if old.step > entry.step)
            kept = (*earlier, entry)[-keep if keep is not None else 0 :]
            changed = Listing(number, number, _this_process(), kept, head.damaged, head.abandoned + later)
            if self._create(changed):
                return changed
            # A reader may have set a damaged checkpoint aside meanwhile.
            self._head = self.head(number)
            self._check_alone(self._head)

    def _check_alone(self, head: Listing) -> None:
        """Raises if another process has saved since this one began."""
        if head.saved != self._known and head.by != _this_process():
            raise ValueError(
                f"another process writes checkpoints into {self.place} ({head.by}): give each run its own folder, or "
                "stop the other"
            )

    def _create(self, commit: Listing) -> bool:
        """Creates a list; returns False if another has its number."""
        name, body = f"{COMMITS}{commit.number}", _dump(commit)
        # The answer to an earlier try may have been lost.
        return self.objects.create(name, body) or self.objects.get(name) == body

    def sweep(self, commit: Listing, entry: Listed) -> None:
        """Deletes what the newest list does not name: old checkpoints, old lists, and parts of saves that failed."""
        names = self.objects.sizes("")
        newest = commit if max(self._numbers(names), default=0) <= commit.number else self.head()
        if entry not in (*newest.checkpoints, *newest.damaged, *newest.abandoned):
            # The number had been used by another writer, and deleted, before: the list of this one is not the newest.
            self._check_alone(newest)
        self._known = newest.saved
        kept = {one.folder for one in (*newest.checkpoints, *newest.damaged, *newest.abandoned)}
        going = []
        for name in names:
            folder = _FOLDER.fullmatch(name.partition("/")[0])
            # Saves that began at this commit or later may be under way. Those before it can no longer be committed.
            is_old = folder and int(folder[1]) <= newest.number and folder[0] not in kept
            # The list before this one is for readers that have just found it, and in case that this one is damaged.
            is_old_list = any(number < newest.number - 1 for number in self._numbers([name]))
            if is_old or is_old_list or name.startswith(f"{entry.folder}/{JOINING}"):
                going.append(name)
        # A checkpoint first loses its files, then a list its name: readers then look for a new list.
        if going:
            self.objects.delete(sorted(going, key=lambda name: name.startswith(COMMITS)))

    def upload(self, folder: str, root: Path, names: Sequence[str]) -> None:
        """Uploads files, several at once if the store can."""
        with ThreadPoolExecutor(self.objects.threads, thread_name_prefix="checkpoint-upload") as pool:
            list(pool.map(lambda name: self.objects.put(f"{folder}/{name}", root / name), names))


class BucketSource(NamedTuple):
    """A checkpoint to read."""

    run: BucketRun
    entry: Listed

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.entry.step

    @contextlib.contextmanager
    def open(self, together: Together) -> Iterator[Path]:
        """Yields a folder of this process for the files; it is deleted afterwards."""
        with _stage() as root:
            folder = root / str(self.step)
            folder.mkdir()
            try:
                with together, self._naming(folder):
                    yield folder
            except Exception:
                # Others of this machine may still read what is here.
                together.settle()
                raise

    @contextlib.contextmanager
    def _naming(self, folder: Path) -> Iterator[None]:
        """Names damaged files as they are in the bucket."""
        try:
            yield
        except CheckpointDamagedError as error:
            if not isinstance(error.file, Path):
                raise
            name = self.name(os.path.relpath(error.file, folder))
            raise type(error)(name, error.step, error.what) from error

    def share(self, folder: Path, together: Together) -> Share:
        """Returns what this process downloads, and where: processes of one machine download one copy together."""
        folders = [Path(other) for other in together.all(str(folder))]
        first = next(number for number, other in enumerate(folders) if _sees(other))
        near = [number for number, other in enumerate(together.all(first)) if other == first]
        return Share(folders[first], near.index(jax.process_index()), len(near))

    def fetch(self, folder: Path, share: Share) -> None:
        """Downloads this process's part of the files, which are then checked as those of any checkpoint."""
        objects, inside = self.run.objects, f"{self.entry.folder}/"
        if (sums := objects.get(inside + _files.SUMS)) is None:
            raise CheckpointDamagedError(folder / _files.SUMS, self.step, _files.GONE)
        if hashlib.sha256(sums).hexdigest() != self.entry.sums:
            raise CheckpointDamagedError(folder / _files.SUMS, self.step, _files.ALTERED)
        (folder / _files.SUMS).write_bytes(sums)
        wanted = sorted(name for _, name in _files.read_sums(folder))
        for name in wanted:
            (share.folder / name).parent.mkdir(parents=True, exist_ok=True)
        if share.folder != folder:
            for top in {Path(name).parts[0] for name in wanted}:
                (folder / top).symlink_to(share.folder / top)
        found = objects.sizes(inside)
        # In pieces, so that each process of a machine gets as many bytes.
        requests = [piece for name in wanted if inside + name in found for piece in pieces(name, found[inside + name])]

        def download(request: tuple[str, int, int | None]) -> None:
            name, start, end = request
            # A file that goes meanwhile, and bytes that are too few, are found by its checksum.
            body = objects.get(inside + name) if end is None else objects.read(inside + name, start, end)
            if body is not None:
                _write_at(share.folder / name, start, body)

        with ThreadPoolExecutor(objects.threads, thread_name_prefix="checkpoint-download") as pool:
            list(pool.map(download, requests[share.part :: share.parts]))

    def name(self, file: str) -> str:
        """Names a file in messages."""
        return f"{self.run.place}/{self.entry.folder}/{file}".rstrip("/")

    def is_unchanged(self) -> bool:
        """Returns whether the checkpoint still counts; several processes never start over."""
        return jax.process_count() > 1 or list(self.entry) in self.run.look()[0]

    def is_read(self) -> bool:
        """Returns whether what was read is whole: it has been checked, wherever the objects are now."""
        return True


class BucketTarget:
    """A checkpoint to write: orbax writes into a folder of this process, whose files are uploaded."""

    def __init__(self, run: BucketRun, step: int, folder: str):
        self._run, self._step, self._folder = run, step, folder
        self._staging = contextlib.ExitStack()
        # The folder of this process, whose disk may be full.
        self.root = self._staging.enter_context(_stage())
        self._sent: set[str] = set()
        # Whether the answer to the commit is unknown: then its files must stay.
        self._is_committing = False

    @property
    def arrays(self) -> Path:
        """Where orbax writes."""
        return self.root / _files.ARRAYS

    @property
    def name(self) -> str:
        """The checkpoint, for the user."""
        return f"{self._run.place}/{self._folder}"

    def prepare(self) -> None:
        """Makes the folder for orbax."""
        # Orbax waits in other processes until process 0 has made this folder on a disk that it takes for shared.
        (self.arrays / "array_metadatas").mkdir(parents=True)

    def send(self) -> list[list[str]]:
        """Uploads the files of this process; returns their checksums and names."""
        names = sorted(set(_names(self.root)) - self._sent)
        self._run.upload(self._folder, self.root, names)
        self._sent |= set(names)
        if jax.process_index() > 0:
            # Process 0 joins the parts: for that it needs the index of each, not the values.
            body = json.dumps(_index_of(self.root)).encode()
            if not self._run.objects.create(self._index(jax.process_index()), body):
                raise ValueError(f"{self.name} is being written by another job: give each run its own folder")
        return [[_files.digest(self.root / name), name] for name in names]

    def _index(self, process: int) -> str:
        return f"{self._folder}/{JOINING}{process}"

    def join(self, sent: list[Any]) -> None:
        """Gets, in process 0, what it needs of the files of the others."""
        for process in range(1, len(sent)):
            body = self._run.objects.get(self._index(process))
            if body is None:
                raise CheckpointStoreError(self.name, f"the part of process {process} is gone", "save again")
            for name, (size, parts) in json.loads(body).items():
                file = self.root / name
                file.parent.mkdir(parents=True, exist_ok=True)
                if not file.exists():
                    file.touch()
                    os.truncate(file, size)
                    for start, text in parts:
                        _write_at(file, start, base64.b64decode(text))
                self._sent.add(name)

    def commit(self, sent: list[Any], manifest: str, keep: int | None) -> None:
        """Uploads the rest, and creates the list of checkpoints that contains this one."""
        (self.root / _files.MANIFEST).write_text(manifest)
        others = [entry for part in sent for entry in part]
        sums = _files.sum_lines([*others, *self.send()])
        (self.root / _files.SUMS).write_text(sums)
        self.send()
        entry = Listed(self._step, self._folder, hashlib.sha256(sums.encode()).hexdigest())
        self._is_committing = True
        try:
            commit = self._run.commit(entry, keep)
            with self._warning():
                self._run.sweep(commit, entry)
        except ValueError:
            # Another writer was first.
            self._is_committing = False
            raise

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Warns of an error after the commit: the checkpoint is there, and the next save deletes what remains."""
        try:
            yield
        except CheckpointStoreError as error:
            warnings.warn(f"checkpoint {self._step} is saved, but older ones remain: {error}", stacklevel=2)

    def discard(self) -> None:
        """Deletes what was uploaded for a failed save."""
        if not self._is_committing:
            # What remains is deleted by the next save.
            with contextlib.suppress(CheckpointStoreError):
                self._run.objects.delete(list(self._run.objects.sizes(f"{self._folder}/")))

    def close(self) -> None:
        """Deletes the folder of this process."""
        self._staging.close()


@contextlib.contextmanager
def _stage() -> Iterator[Path]:
    """Makes a folder in the temporary folder of the system (`TMPDIR`), and deletes it afterwards.

    A process that is killed leaves a copy of its state there: others of the machine delete it, as its lock is free.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{STAGED}*"):
        # Of another user, or of a process that is at work.
        with contextlib.suppress(OSError):
            if (left / LOCK).exists():
                lock = FileLock(left / LOCK)
                shutil.rmtree(left, ignore_errors=True)
                lock.release()
    made = Path(tempfile.mkdtemp(prefix=f".{STAGED}"))
    root = made.with_name(made.name[1:])
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, root, ignore_errors=True)
        # Where there are no locks, there is no such cleaning.
        with contextlib.suppress(OSError):
            held.callback(FileLock(made / LOCK).release)
        # It has its name, under which others look at its lock, once that is taken.
        made.rename(root)
        (root / "files").mkdir()
        yield root / "files"


def _sees(folder: Path) -> bool:
    """Returns whether this process sees the temporary folder of another one, whose name is random."""
    return os.path.isdir(folder)


def _names(root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]


def _write_at(file: Path, start: int, body: bytes) -> None:
    number = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(number, "wb", closefd=True) as opened:
        opened.seek(start)
        opened.write(body)


def _index_of(root: Path) -> dict[str, tuple[int, list[tuple[int, str]]]]:
    """Returns what orbax needs of files to join them: sizes, small files, and the nodes of trees in large ones."""
    found: dict[str, tuple[int, list[tuple[int, str]]]] = {}
    for name in _names(root):
        # Tensorstore's values, with the nodes of its trees among them, are in folders `d`.
        whole = (root / name).read_bytes() if Path(name).parent.name != "d" else None
        parts = [] if whole is None else [(0, base64.b64encode(whole).decode())]
        found[name] = ((root / name).stat().st_size, parts)
    for tree in {Path(name).parent for name in found if Path(name).name == "manifest.ocdbt"}:
        for place, start, length in _nodes(root / tree):
            name = (tree / place).as_posix()
            with (root / name).open("rb") as opened:
                opened.seek(start)
                found[name][1].append((start, base64.b64encode(opened.read(length)).decode()))
    return found


def _nodes(folder: Path) -> list[tuple[str, int, int]]:
    """Returns the files, starts and lengths of the nodes of the newest tree of tensorstore in a folder."""
    import tensorstore  # comes with orbax

    base = tensorstore.KvStore.open(f"file://{folder}/").result()
    dump: Callable[..., Any] = tensorstore.ocdbt.dump
    found: list[tuple[str, int, int]] = []

    def walk(location: str) -> None:
        _, _, rest = location.partition("::")
        place, start, length = rest.rsplit(":", 2)
        found.append((place, int(start), int(length)))
        for entry in dump(base, node=location).result().get("entries", []):
            if "location" in entry:
                walk(entry["location"])

    for version in dump(base).result()["versions"][-1:]:
        walk(version["root"]["location"])
    return found
