"""Stores: named bytes in a shared place.

The one thing that islands need of a store is "create if absent".
"""

import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .base import SharedStore, StoreUnusableError
from .bucket import bucket
from .folder import folder

# Seconds before a request of the probe is tried again: of one in five that fail, six in a row hardly do.
PROBE_PAUSES = (0.1, 0.2, 0.3, 0.4, 0.5)


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

    def list_names(prefix: str) -> list[str]:
        return sorted(name for name in list(names) if name.startswith(prefix))

    def delete(name: str) -> None:
        names.pop(name, None)

    def delete_many(several: Sequence[str]) -> None:
        for name in several:
            delete(name)

    return SharedStore(create, put, get, list_names, delete, delete_many)


def open_store(url: "str | os.PathLike[str] | SharedStore") -> SharedStore:
    """Opens a folder or, with the extra `jaxdist[islands]`, a bucket: `s3://`, `gs://`, `az://` or another URL.

    Raises:
      ValueError: the URL is mistyped.
    """
    if isinstance(url, SharedStore):
        return url
    scheme, separator, rest = str(url).partition("://")
    if separator and scheme != "file":
        return bucket(str(url))
    # A slash too few would be a folder of that name.
    if not separator and re.match(r"[a-z][a-z0-9]+:", str(url)) and not os.path.isdir(url):
        raise ValueError(f"{url} is no URL, which begins as s3:// does; for a folder of this name give ./{url}")
    return folder(rest if separator else url)


def check_usable(store: SharedStore) -> None:
    """Raises `StoreUnusableError` unless the store creates a name once, and reads, lists and deletes it."""
    # Each request is tried again by itself: a busy store refuses some of every few.
    name, created = _ask(partial(_create_probe, store))
    created_again = _ask(partial(store.create, name, b"second"))
    got, listed = _ask(partial(store.get, name)), _ask(partial(store.list, "probe/"))
    _ask(partial(store.delete, name))
    if not created or created_again or got != b"first":
        raise StoreUnusableError(
            f"the store created one name {created + created_again} times and then holds {got!r}: it ignores 'create if "
            "absent' (If-None-Match: *), which islands need; use another store, or a newer version of its server"
        )
    if name not in listed:
        raise StoreUnusableError(f"the store does not list {name!r}, which it has: it needs consistent listings")


def _create_probe(store: SharedStore) -> tuple[str, bool]:
    """Creates a new name: one whose answer was lost may be there, and is deleted by a clean-up of the run."""
    name = f"probe/{uuid.uuid4().hex}"
    return name, store.create(name, b"first")


def _ask(function: Callable[[], Any]) -> Any:
    for pause in (*PROBE_PAUSES, None):
        try:
            return function()
        # Any error of a library for stores may pass by itself, as that of a server which many islands ask at once.
        except Exception as error:
            if pause is None or isinstance(error, PermissionError):
                problem = (
                    f"the store cannot be used ({type(error).__name__}: {error}); check its address and your rights"
                )
                raise StoreUnusableError(problem) from error
        time.sleep(pause)
    raise AssertionError
