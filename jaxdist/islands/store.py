"""Stores: named bytes in a shared place.

The one thing that islands need of a store is "create if absent".
"""

import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .base import StoreUnusableError

# Seconds before the probe of a store that did not answer is tried again.
PROBE_PAUSES = (0.1, 1.0)
# Bytes of one request to a bucket.
PIECE = 8 * 2**20
# How the names of temporary files begin.
WRITING = ".writing-"
# No file takes so many seconds to write: older temporary files are those of processes that died.
ABANDONED_SECONDS = 86_400


class SharedStore(NamedTuple):
    """Named bytes that several jobs share; names are relative paths with `/`.

    Every function may raise `OSError` (or what the library beneath raises) when the store is out of reach; islands
    then try again. A store of your own needs the first five functions. Islands call them in threads of their own, one
    at a time, but that `put` may run beside one other function: a slow upload must not hold up the rounds.

    Attributes:
      create: `create(name, body) -> bool`: writes whole bytes under a name that is absent. Of several callers at once
        exactly one gets `True`; to the others the name is there, with other bytes.
      put: `put(name, body)`: writes whole bytes, over old ones; only used for names that are hashes of their bytes.
      get: `get(name) -> bytes`, or `None` if the name is absent.
      list: `list(prefix) -> names` that begin with `prefix`, sorted. It may miss names of the last moments.
      delete: removes a name, if it is there.
      delete_many: `delete_many(names)`: removes these names, of which some may be missing, in few requests. `None`:
        islands delete one after another.
    """

    create: Callable[[str, bytes], bool]
    put: Callable[[str, bytes], None]
    get: Callable[[str], bytes | None]
    list: Callable[[str], list[str]]
    delete: Callable[[str], None]
    delete_many: Callable[[Sequence[str]], None] | None = None


def folder(path: str | os.PathLike[str]) -> SharedStore:
    """A store in a folder that all islands see: a disk, NFS, Lustre. Needs the standard library alone.

    Whole bytes are written to a temporary file, and are on disk before a hard link or a new name makes them visible:
    links are atomic and fail if the name is there, on NFS too. The death of a process leaves at most a temporary file
    behind, which another process removes a day later. A folder that was there and is gone, as of a disk that is not
    mounted any more, is a `ConnectionError`, and is not created again.

    Args:
      path: the folder; it is created if it is absent.

    Examples:
      >>> import tempfile
      >>> from jaxdist.islands import folder
      >>> store = folder(tempfile.mkdtemp())
      >>> store.create("a/b", b"first"), store.create("a/b", b"second"), store.get("a/b")
      (True, False, b'first')
      >>> store.list("a/")
      ['a/b']
    """
    place = _Folder(Path(path).expanduser().absolute())
    return SharedStore(place.create, place.put, place.get, place.list, place.delete, place.delete_many)


class _Folder:
    """The functions of a `SharedStore` for a folder."""

    def __init__(self, root: Path):
        self._root = root
        self._was_there = False

    def create(self, name: str, body: bytes) -> bool:
        self._check_root()
        if (self._root / name).exists():
            return False
        temporary = self._write(name, body)
        try:
            os.link(temporary, self._root / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def put(self, name: str, body: bytes) -> None:
        self._check_root()
        temporary = self._write(name, body)
        try:
            os.replace(temporary, self._root / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def get(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            self._check_root()
            return None

    def list(self, prefix: str) -> list[str]:
        self._check_root()
        base = self._root / prefix if prefix.endswith("/") or not prefix else (self._root / prefix).parent
        found = []
        for place, _, files in os.walk(base, onerror=_raise_unless_missing):
            inside = Path(place).relative_to(self._root)
            found += [(inside / file).as_posix() for file in files if not file.startswith(".")]
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        place = (self._root / name).parent
        (self._root / name).unlink(missing_ok=True)
        with suppress(OSError):
            _remove_abandoned(place)
            # The last name of a folder takes the folder with it; one that is in use stays.
            place.rmdir()

    def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def _check_root(self) -> None:
        """Raises `ConnectionError` if the folder is gone: what is missing in it would look like an empty run."""
        # Read first: another thread may create it after this one has looked.
        was_there = self._was_there
        if self._root.is_dir():
            self._was_there = True
        elif was_there:
            raise ConnectionError(f"the folder {self._root} is gone; mount its disk again")

    def _write(self, name: str, body: bytes) -> Path:
        """Writes a temporary file beside the place of a name, and waits until it is on disk."""
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._was_there = True
        temporary = target.parent / f"{WRITING}{uuid.uuid4().hex}"
        try:
            with open(temporary, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            # A full disk: another try must not need more of it.
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _remove_abandoned(place: Path) -> None:
    """Removes old temporary files of a folder in which a file has just been removed."""
    # The time of that is by the clock of the disk, as the files' are.
    now = place.stat().st_mtime
    for file in place.glob(f"{WRITING}*"):
        if now - file.stat().st_mtime > ABANDONED_SECONDS:
            file.unlink()


def _raise_unless_missing(error: OSError) -> None:
    """What `os.walk` does with an error; a folder may be removed by another island while it is read."""
    if not isinstance(error, FileNotFoundError):
        raise error


def memory() -> SharedStore:
    """A store inside this process, for tests and for simulations of several islands.

    Examples:
      >>> from jaxdist.islands import memory
      >>> store = memory()
      >>> store.create("name", b"1"), store.create("name", b"2"), store.list("")
      (True, False, ['name'])
    """
    names: dict[str, list[bytes]] = {}

    def create(name: str, body: bytes) -> bool:
        # `setdefault` is atomic among threads; a list of our own tells whether it was this call that set it.
        box = [body]
        return names.setdefault(name, box) is box

    def put(name: str, body: bytes) -> None:
        names[name] = [body]

    def get(name: str) -> bytes | None:
        box = names.get(name)
        return None if box is None else box[0]

    def delete(name: str) -> None:
        names.pop(name, None)

    def list_names(prefix: str) -> list[str]:
        return sorted(name for name in list(names) if name.startswith(prefix))

    def delete_many(gone: Sequence[str]) -> None:
        for name in gone:
            delete(name)

    return SharedStore(create, put, get, list_names, delete, delete_many)


def open_store(url: "str | os.PathLike[str] | SharedStore") -> SharedStore:
    """Opens a folder or, with the extra `jaxdist[islands]`, a bucket: `s3://`, `gs://`, `az://` or another URL."""
    if isinstance(url, SharedStore):
        return url
    scheme, separator, rest = str(url).partition("://")
    if not separator or scheme == "file":
        return folder(rest if separator else str(url))
    return bucket(str(url))


def check_usable(store: SharedStore) -> None:
    """Raises `StoreUnusableError` unless the store creates a name once, and reads, lists and deletes it."""
    for pause in (*PROBE_PAUSES, None):
        name = f"probe/{uuid.uuid4().hex}"
        try:
            return _probe(store, name)
        except StoreUnusableError:
            raise
        # Any error of a library for stores may pass by itself, as that of a server which many islands ask at once.
        except Exception as error:
            with suppress(Exception):
                store.delete(name)
            if pause is None or isinstance(error, PermissionError):
                problem = (
                    f"the store cannot be used ({type(error).__name__}: {error}); check its address and your rights"
                )
                raise StoreUnusableError(problem) from error
            time.sleep(pause)


def _probe(store: SharedStore, name: str) -> None:
    created = [store.create(name, body) for body in (b"first", b"second")]
    got, listed = store.get(name), store.list("probe/")
    store.delete(name)
    if created != [True, False] or got != b"first":
        raise StoreUnusableError(
            f"the store created one name {sum(created)} times and then holds {got!r}: it ignores 'create if absent' "
            "(If-None-Match: *), which islands need; use another store, or a newer version of its server"
        )
    if name not in listed:
        raise StoreUnusableError(f"the store does not list {name!r}, which it has: it needs consistent listings")


def bucket(url: str, **options: Any) -> SharedStore:
    """A store in a bucket, over outgoing HTTPS alone. Needs the extra `jaxdist[islands]` (obstore).

    S3, Google Cloud Storage, Azure, R2 and newer MinIO create names conditionally; a server that ignores the condition
    is found by a probe when an island joins. Credentials come from the environment, as in their own tools.

    A request may take 30 s, and 5 s to connect, so that a meeting with a server that is silent ends at most so much
    after its `round_timeout`; bytes go in pieces of 8 MiB, which need 9 Mbit/s up and 2.2 down. Requests that fail are
    repeated by the island, until its `round_timeout`, and not by obstore, which would go on for three minutes.

    Args:
      url: such as `s3://bucket/folder`, `gs://...`, `az://...`.
      **options: passed on to `obstore.store.from_url`: `region=`, `endpoint=`, `config=`,
        `client_options={"timeout": "120s"}` for slower links, `retry_config=`.

    Raises:
      ImportError: obstore is not installed.

    Examples:
      >>> from jaxdist.islands import bucket
      >>> bucket("memory:///").list("")
      []
    """
    try:
        import obstore
        from obstore.store import from_url
    except ImportError as error:
        raise ImportError(f"{url} is a bucket, which needs obstore: pip install 'jaxdist[islands]'") from error
    if url.partition("://")[0] not in ("memory", "file"):
        options = {"retry_config": {"max_retries": 0}} | options
    place = _Bucket(obstore, from_url(url, **options))
    return SharedStore(place.create, place.put, place.get, place.list, place.delete, place.delete_many)


class _Bucket:
    """The functions of a `SharedStore` for one of obstore."""

    def __init__(self, obstore: Any, place: Any):
        self._obstore, self._place = obstore, place

    def create(self, name: str, body: bytes) -> bool:
        try:
            self._obstore.put(self._place, name, body, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError as error:
            # S3 also refuses one of two that create a name at the same moment (409): then none of them may have.
            if self.get(name) is None:
                raise ConnectionError(f"{name} was neither created nor is it there") from error
            return False
        return True

    def put(self, name: str, body: bytes) -> None:
        self._obstore.put(self._place, name, body, chunk_size=PIECE, max_concurrency=4)

    def get(self, name: str) -> bytes | None:
        try:
            found = self._obstore.get(self._place, name)
            size = found.meta["size"]
            if size <= PIECE:
                return bytes(found.bytes())
            # The time limit of a request includes its bytes, so that a large body needs several requests.
            pieces = [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
            read = self._obstore.get_range
            return b"".join(bytes(read(self._place, name, start=start, end=end)) for start, end in pieces)
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> list[str]:
        # Object stores list whole folders: the rest of the prefix is for us to compare.
        inside = prefix.rpartition("/")[0]
        found = [entry["path"] for chunk in self._obstore.list(self._place, inside or None) for entry in chunk]
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._obstore.delete(self._place, name)

    def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)
