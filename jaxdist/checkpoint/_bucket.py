"""Objects of a bucket, over obstore or over the caller's own functions, with one policy for errors and retries."""

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from .errors import CheckpointStoreError

# Bytes of one request: a request may take 30 s, which includes its bytes.
PIECE = 8 * 2**20
# Parts of one file that are sent at once, and requests for different files.
PARTS = THREADS = 4
# A failing request is repeated for so long; those of obstore have been repeated by obstore before.
PATIENCE_SECONDS = 60.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
SHARED_STORE = ("create", "put", "get", "list", "delete")


class Objects(NamedTuple):
    """The requests that checkpoints need; names are relative paths with `/`.

    Attributes:
      url: the bucket and folder, for messages.
      create: `create(name, body) -> bool`: whether this call created the name, which must be absent.
      upload: `upload(name, file)`: writes the bytes of a local file.
      read: `read(name, start, end)`: these bytes, or all with `end=None`; None if the name is absent.
      sizes: `sizes(prefix)`: the names that begin with `prefix`, and their bytes, or None where only the name is known.
      delete: `delete(names)`: removes names that may be absent.
      threads: how many requests may be made at once.
    """

    url: str
    create: Callable[[str, bytes], bool]
    upload: Callable[[str, Path], None]
    read: Callable[[str, int, int | None], bytes | None]
    sizes: Callable[[str], dict[str, int | None]]
    delete: Callable[[Sequence[str]], None]
    threads: int


def is_bucket(path: Any) -> bool:
    """Returns whether a place for checkpoints is a URL or a store, and not a folder."""
    if isinstance(path, PurePath) and path.parts and path.parts[0] in ("s3:", "gs:", "az:", "memory:"):
        raise ValueError(f"pathlib makes {path} of a URL, with one slash: pass the URL as text")
    return not isinstance(path, str | os.PathLike) or ("://" in str(path) and not str(path).startswith("file://"))


def open_objects(place: Any) -> Objects:
    """Opens a URL, a store of obstore, or five functions such as those of `jaxdist.islands.SharedStore`."""
    if all(hasattr(place, name) for name in SHARED_STORE):
        return _patient("the store", _Functions(place), 1)
    try:
        import obstore
        from obstore.store import from_url
    except ImportError as error:
        raise ImportError(f"{place} is a bucket, which needs obstore: pip install 'jaxdist[islands]'") from error
    if not isinstance(place, str | os.PathLike):
        if not hasattr(place, "put_async"):
            raise ValueError(f"checkpoints need a folder, a URL, a store of obstore or of islands, got {place!r}")
        return _patient(_name_of(place), _Obstore(obstore, place, ""), THREADS)
    url = str(place).rstrip("/")
    if url.startswith("memory:"):
        return _patient(url, _Obstore(obstore, _memory(), url.removeprefix("memory:").strip("/")), THREADS)
    try:
        store = from_url(url)
    except Exception as error:
        # Obstore's errors have no common class with a documented name.
        raise ValueError(f"{url} is no URL of a bucket (s3://, gs://, az://): {_first_line(error)}") from error
    return _patient(url, _Obstore(obstore, store, ""), THREADS)


@functools.cache
def _memory() -> Any:
    """The objects of `memory:///`, which all calls of this process share."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _name_of(store: Any) -> str:
    """Returns the URL of a store of obstore, as far as it is known."""
    scheme = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}.get(type(store).__name__)
    if scheme is None:
        return type(store).__name__
    bucket = store.config.get("container_name" if scheme == "az" else "bucket", "")
    return "/".join([f"{scheme}://{bucket}", *([store.prefix.strip("/")] if store.prefix else [])])


class _Obstore:
    """The requests over a store of obstore, below a folder in it."""

    def __init__(self, obstore: Any, store: Any, folder: str):
        self._obstore, self._store = obstore, store
        self._inside = f"{folder}/" if folder else ""

    def create(self, name: str, body: bytes) -> bool:
        try:
            self._obstore.put(self._store, self._inside + name, body, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError as error:
            # S3 also refuses one of two that create a name at the same moment (409): then neither may have.
            if self.read(name, 0, None) is None:
                raise ConnectionError(f"{name} was neither created nor is it there") from error
            return False
        return True

    def upload(self, name: str, file: Path) -> None:
        self._obstore.put(self._store, self._inside + name, file, chunk_size=PIECE, max_concurrency=PARTS)

    def read(self, name: str, start: int, end: int | None) -> bytes | None:
        try:
            if end is None:
                return bytes(self._obstore.get(self._store, self._inside + name).bytes())
            # An empty file has no range.
            read = self._obstore.get_range
            return bytes(read(self._store, self._inside + name, start=start, end=end)) if end > start else b""
        except FileNotFoundError:
            return None

    def sizes(self, prefix: str) -> dict[str, int | None]:
        # Object stores list whole folders.
        chunks = self._obstore.list(self._store, (self._inside + prefix).rstrip("/") or None)
        return {entry["path"].removeprefix(self._inside): entry["size"] for chunk in chunks for entry in chunk}

    def delete(self, names: Sequence[str]) -> None:
        # One request of S3 deletes a thousand names; those that are absent count as deleted, except in memory.
        with suppress(FileNotFoundError):
            self._obstore.delete(self._store, [self._inside + name for name in names])


class _Functions:
    """The requests over functions that take and return whole bytes."""

    def __init__(self, store: Any):
        self._store = store
        self.create = store.create

    def upload(self, name: str, file: Path) -> None:
        self._store.put(name, file.read_bytes())

    def read(self, name: str, start: int, end: int | None) -> bytes | None:
        body = self._store.get(name)
        return None if body is None else body[start:end]

    def sizes(self, prefix: str) -> dict[str, int | None]:
        return dict.fromkeys(self._store.list(prefix))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.delete(name)


def _patient(url: str, store: _Obstore | _Functions, threads: int) -> Objects:
    """Repeats requests that fail, and raises `CheckpointStoreError` in the end."""
    repeat = functools.partial(functools.partial, _repeat, url)
    create, upload, read = repeat(store.create), repeat(store.upload), repeat(store.read)
    return Objects(url, create, upload, read, repeat(store.sizes), repeat(store.delete), threads)


def _repeat(url: str, request: Callable[..., Any], *arguments: Any) -> Any:
    until, pause = time.monotonic() + PATIENCE_SECONDS, SHORTEST_PAUSE
    while True:
        try:
            return request(*arguments)
        # Each library for stores has its own exceptions.
        except Exception as error:
            cure, final = _diagnose(error)
            if final or time.monotonic() + pause > until:
                raise CheckpointStoreError(url, _first_line(error), cure) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _diagnose(error: Exception) -> tuple[str, bool]:
    """Returns what the user can do about an error of a store, and whether a repetition is of no use."""
    text, kind = str(error), type(error).__name__
    # Obstore has no type of its own for a listing that is refused, nor for missing credentials.
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return "no credentials were found: set them in the environment, as for the tools of that cloud", True
    denied = isinstance(error, PermissionError) or kind in ("PermissionDeniedError", "UnauthenticatedError")
    if denied or "403 Forbidden" in text or "401 Unauthorized" in text:
        return "check the credentials, and that they may list, read, write and delete there", True
    if "NoSuchBucket" in text or "404 Not Found" in text or isinstance(error, FileNotFoundError):
        return "create the bucket, or correct its name", True
    if "builder error" in text:
        return "an endpoint without TLS needs AWS_ALLOW_HTTP=true, or client_options={'allow_http': True}", True
    if kind in ("InvalidPathError", "NotSupportedError") or isinstance(error, NotADirectoryError):
        return "use another place", True
    return "check the network and the endpoint, and start again", False


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return f"{type(error).__name__}: {text}"[:400]


def pieces(name: str, size: int | None) -> Iterable[tuple[str, int, int | None]]:
    """Returns the requests for the bytes of a name."""
    if size is None:
        return [(name, 0, None)]
    # An empty file has no range.
    return [(name, start, min(start + PIECE, size)) for start in range(0, max(size, 1), PIECE)]
