"""The store of a run: the one thing that islands need of it is "create if absent"."""

import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from .._stores import opening
from .._stores.base import SharedStore
from .._stores.folder import FULL
from .base import StoreUnusableError

# Seconds before a request of the probe is tried again: of one in five that fail, six in a row hardly do.
PROBE_PAUSES = (0.1, 0.2, 0.3, 0.4, 0.5)


def open_store(url: "str | os.PathLike[str] | SharedStore") -> SharedStore:
    """As `opening.open_store`; with `StoreUnusableError` for an endpoint without TLS that has not been allowed."""
    try:
        return opening.open_store(url)
    except PermissionError as error:
        raise StoreUnusableError(str(error)) from error


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
                problem = f"the store cannot be used ({type(error).__name__}: {error})"
                # That of a full disk says already what to do.
                is_full = isinstance(error, OSError) and error.errno in FULL
                cure = "" if is_full else "; check its address and your rights"
                raise StoreUnusableError(problem + cure) from error
        time.sleep(pause)
    raise AssertionError
