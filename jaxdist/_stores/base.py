"""What a store is: named bytes that several jobs share; and one inside this process."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# Names that one request deletes, so that it holds up a meeting of islands by no more than a moment.
DELETED_AT_ONCE = 200


class SharedStore(NamedTuple):
    """Named bytes that several jobs share; names are relative paths with `/`.

    Every function may raise `OSError` (or what the library beneath raises) when the store is out of reach; islands
    then try again. A store of your own needs the first five functions. Islands call them in threads of their own, one
    at a time, but that a `put`, and what a clean-up lists and deletes, may run beside another function: they must not
    hold up the rounds. Of what has more than 16 MiB, four pieces of 8 MiB are put, or got, at once.

    Attributes:
      create: `create(name, body) -> bool`: writes whole bytes under a name that is absent. Of several callers at once
        exactly one gets `True`; to the others the name is there, with other bytes.
      put: `put(name, body)`: writes whole bytes, over old ones; only used for names that are hashes of their bytes.
      get: `get(name) -> bytes`, or `None` if the name is absent.
      list: `list(prefix) -> names` that begin with `prefix`, sorted. It may miss names of the last moments.
      delete: removes a name, if it is there.
      delete_many: removes names, those that are there, in few requests; `None`: they are deleted one by one.
      get_range: `get_range(name, start, end) -> bytes` from `start` up to `end`, fewer where the name has fewer, or
        `None` if it is absent, in several threads at once; `None`: the whole is read, and cut.
    """

    create: Callable[[str, bytes], bool]
    put: Callable[[str, bytes], None]
    get: Callable[[str], bytes | None]
    list: Callable[[str], list[str]]
    delete: Callable[[str], None]
    delete_many: Callable[[Sequence[str]], None] | None = None
    get_range: Callable[[str, int, int], bytes | None] | None = None


def place_of(url: "str | os.PathLike[str] | SharedStore") -> str:
    """The name of a store in messages."""
    return "this store" if isinstance(url, SharedStore) else str(url)


def hash_of(body: bytes) -> str:
    """A hash of bytes, 32 hexadecimal digits, to name them by."""
    found = begin_hash()
    found.update(body)
    return found.hexdigest()


def begin_hash() -> Any:
    """The hash of `hash_of`, for bytes that come in pieces: `update(piece)`, then `hexdigest()`."""
    return hashlib.blake2b(digest_size=16)


def deletions(store: SharedStore, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The requests that delete names: each the field of the store to call, and its argument."""
    if store.delete_many is None:
        yield from (("delete", name) for name in names)
        return
    for start in range(0, len(names), DELETED_AT_ONCE):
        yield "delete_many", tuple(names[start : start + DELETED_AT_ONCE])


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

    def get_range(name: str, start: int, end: int) -> bytes | None:
        body = get(name)
        return None if body is None else body[start:end]

    def list_names(prefix: str) -> list[str]:
        return sorted(name for name in list(names) if name.startswith(prefix))

    def delete(name: str) -> None:
        names.pop(name, None)

    def delete_many(several: Sequence[str]) -> None:
        for name in several:
            delete(name)

    return SharedStore(create, put, get, list_names, delete, delete_many, get_range)
