"""Opens what a user names: as a store, or as objects with files, parts and sizes."""

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from .base import SharedStore
from .bucket import _Bucket, bucket, import_obstore, open_bucket
from .folder import folder

# Requests for different names that are made at once.
THREADS = 4
SHARED_STORE = ("create", "put", "get", "list", "delete")


class Objects(NamedTuple):
    """The requests for objects, which raise what the library or the caller's functions raise.

    Attributes:
      url: the bucket and folder, for messages.
      create: `create(name, body) -> bool`: whether this call created the name, which must be absent.
      put: `put(name, body)`: writes bytes, or those of a local file.
      get: `get(name)`: all bytes, or None if the name is absent.
      read: `read(name, start, end)`: these bytes, or None if the name is absent.
      sizes: `sizes(prefix)`: the names that begin with `prefix`, and their bytes, or None where only the name is known.
      delete: `delete(names)`: removes names that may be absent.
      threads: how many requests may be made at once.
    """

    url: str
    create: Callable[[str, bytes], bool]
    put: Callable[[str, bytes | Path], None]
    get: Callable[[str], bytes | None]
    read: Callable[[str, int, int], bytes | None]
    sizes: Callable[[str], Mapping[str, int | None]]
    delete: Callable[[Sequence[str]], None]
    threads: int


def open_store(url: "str | os.PathLike[str] | SharedStore") -> SharedStore:
    """Opens a folder or, with the extra `jaxdist[islands]`, a bucket: `s3://`, `gs://`, `az://` or another URL.

    Raises:
      ValueError: the URL is mistyped.
    """
    if isinstance(url, SharedStore):
        return url
    if is_bucket(url):
        return bucket(str(url))
    # A slash too few would be a folder of that name.
    if re.match(r"[a-z][a-z0-9]+:(?!//)", str(url)) and not os.path.isdir(url):
        raise ValueError(f"{url} is no URL, which begins as s3:// does; for a folder of this name give ./{url}")
    return folder(str(url).removeprefix("file://"))


def is_bucket(path: Any) -> bool:
    """Returns whether a place is a URL or a store, and not a folder."""
    if isinstance(path, PurePath) and path.parts and path.parts[0] in ("s3:", "gs:", "az:", "memory:"):
        raise ValueError(f"pathlib makes {path} of a URL, with one slash: pass the URL as text")
    return not isinstance(path, str | os.PathLike) or ("://" in str(path) and not str(path).startswith("file://"))


def open_objects(place: Any) -> Objects:
    """Opens a URL, a store of obstore, or five functions such as those of `SharedStore`.

    Raises:
      ImportError, PermissionError: as for `bucket`.
      ValueError: the URL is mistyped, or the place is none of these.
    """
    if all(hasattr(place, name) for name in SHARED_STORE):
        return _objects("the store", _Whole(place), 1)
    if isinstance(place, str | os.PathLike):
        url = str(place).rstrip("/")
        is_memory = url.startswith("memory:")
        return _objects(url, _memory(url) if is_memory else open_bucket(url, {}, repeat=True), THREADS)
    import_obstore(place)
    if not hasattr(place, "put_async"):
        raise ValueError(f"a folder, a URL, a store of obstore or of islands is needed, got {place!r}")
    return _objects(_name_of(place), _Bucket(place), THREADS)


def _objects(url: str, store: "_Bucket | _Whole", threads: int) -> Objects:
    return Objects(url, store.create, store.put, store.get, store.read, store.sizes, store.delete_many, threads)


@functools.cache
def _memory(url: str) -> _Bucket:
    """The objects of `memory:///name`, which all calls of this process share."""
    return open_bucket("memory:///", {})


def _name_of(store: Any) -> str:
    """Returns the URL of a store of obstore, as far as it is known."""
    scheme = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}.get(type(store).__name__)
    if scheme is None:
        return type(store).__name__
    name = store.config.get("container_name" if scheme == "az" else "bucket", "")
    return "/".join([f"{scheme}://{name}", *([store.prefix.strip("/")] if store.prefix else [])])


class _Whole:
    """The requests over functions that take and return whole bytes."""

    def __init__(self, store: Any):
        self._store, self.create, self.get = store, store.create, store.get

    def put(self, name: str, body: bytes | Path) -> None:
        self._store.put(name, body.read_bytes() if isinstance(body, Path) else body)

    def read(self, name: str, start: int, end: int) -> bytes | None:
        body = self._store.get(name)
        return None if body is None else body[start:end]

    def sizes(self, prefix: str) -> dict[str, int | None]:
        return dict.fromkeys(self._store.list(prefix))

    def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.delete(name)
