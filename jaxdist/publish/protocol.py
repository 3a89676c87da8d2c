"""The names and records of published weights. All of it is pure: it needs no store and no devices.

publish.json                 the format, a random number, and the names, shapes and dtypes of the leaves
publishers/00000003          the third job that published here; only the last one may
commits/00000042             the record of the 42nd state, created once: its step, and the names of its bytes
patches/00000042-HASH        what turns a part of the 41st state into that of the 42nd, under its own hash
anchors/00000042-HASH        all bits of a part of the 42nd state
layouts/HASH                 which boxes of which leaves each part has, where there are several

A state is there once its record is. A record has the hash of the record before it and the hash of all bits of its
state. It names a patch, an anchor or both: each `anchor_every`-th has both, so that a follower of the chain
never reads an anchor, and one that comes later begins with it.

A job of several processes publishes parts: each process those shards that it alone has, and a share of those that
several have. Its record names the layout, and of each part the patch, the anchor and the hash of its bits. Process 0
creates it when all parts are in the store, so that a follower sees all of a state or nothing of it. A patch is one of a
state with the same layout; a job begins with an anchor of each part.

Each process drops states by itself while it is busy, so process 0 chooses what is sent, over JAX's coordination service
(`group`). It asks all others whether they hold its newest state. One that has not put it yet keeps it when it comes,
and answers then; one that has dropped it says how far it is. Then process 0 asks for the newest that any has put, and
where that is dropped, too, for one after it, each time twice as far ahead, until all hold one. Where puts end, as while
a process flushes, that is the last one. Then all encode the state, send it when process 0 has seen that no newer job
publishes, and answer with names and hashes; process 0 creates the record and tells the others. No collective is run, a
put waits for no process, and a process that is slow or gone holds up what is published and nothing else. The error of
one process ends the publisher of each.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._stores.base import hash_of
from .base import PublishDamagedError, PublishMismatchError
from .words import PublishedLeaf

# Of a place that a job of one process began, and of several. Both kinds may go on with either.
FORMAT, FORMAT_OF_PARTS = 2, 3
DESCRIPTION = "publish.json"
ANCHOR_MAGIC = b"jdanchor"
# Numbers are sorted as text, and have no shorter form.
_NAME = re.compile(r"(commits|publishers)/[0-9]{8,}|(patches|anchors)/[0-9]{8,}-[0-9a-f]{32}|layouts/[0-9a-f]{32}")


class PublicationPart(NamedTuple):
    """What one process has published of a state.

    Attributes:
      digest: the hash of all bits of the part.
      patch: the name of its patch, or empty.
      patch_bytes: the size of that.
      anchor: the name of its anchor, or empty.
      anchor_bytes: the size of that.
    """

    digest: str
    patch: str
    patch_bytes: int
    anchor: str
    anchor_bytes: int


class Publication(NamedTuple):
    """A state that was published.

    Attributes:
      number: counts the states, from 1.
      step: the number that the trainer gave it.
      session: of the publisher, which counts the processes that published here.
      time: seconds since 1970, by the clock of the publisher.
      previous: the hash of the record before this one; empty for the first, or where that is gone.
      digest: the hash of all bits of the state; empty where each part has its own.
      patch: the name of its patch; empty if it has none, or one for each part.
      patch_bytes: the size of its patches.
      anchor: the name of its anchor; empty if it has none, or one for each part.
      anchor_bytes: the size of its anchors.
      layout: the name of what says which part has what; empty where one process has published all.
      parts: what each process has published; empty where one has published all.
    """

    number: int
    step: int
    session: int
    time: float
    previous: str
    digest: str
    patch: str
    patch_bytes: int
    anchor: str
    anchor_bytes: int
    layout: str = ""
    parts: tuple[PublicationPart, ...] = ()


def publication_of(
    parts: Sequence[PublicationPart], layout: str, *, number: int, step: int, session: int, time: float, previous: str
) -> Publication:
    """The record of parts, or of a whole, which has no layout."""
    some = tuple(parts) if layout else ()
    whole = parts[0]
    if layout:
        sizes = [sum(part.patch_bytes for part in parts), sum(part.anchor_bytes for part in parts)]
        whole = PublicationPart("", "", sizes[0], "", sizes[1])
    return Publication(number, step, session, time, previous, *whole, layout, some)


def parts_of(publication: Publication) -> tuple[PublicationPart, ...]:
    """The parts of a state, one where it has no layout."""
    return publication.parts or (PublicationPart(*publication[5:10]),)


def anchors_of(publication: Publication) -> list[str]:
    """The anchors of a state with which a newcomer can begin; empty if one of its parts has none."""
    names = [part.anchor for part in parts_of(publication)]
    return names if all(names) else []


def bodies_of(publication: Publication) -> dict[str, int]:
    """The names that a record has: the bytes of its state, with their sizes, and its layout, whose size it has not."""
    sizes = {publication.layout: 0}
    for part in parts_of(publication):
        sizes |= {part.patch: part.patch_bytes, part.anchor: part.anchor_bytes}
    return {name: size for name, size in sizes.items() if name}


def commit_name(number: int) -> str:
    """The name of the record of a state."""
    return f"commits/{number:08d}"


def publisher_name(session: int) -> str:
    """The name that a publisher creates before it publishes."""
    return f"publishers/{session:08d}"


def body_name(kind: str, number: int, body: bytes) -> str:
    """The name of the bytes of a state, in the folder `patches` or `anchors`."""
    return f"{kind}/{number:08d}-{hash_of(body)}"


def number_in(name: str) -> int:
    """The number in a name."""
    return int(name.partition("/")[2].partition("-")[0])


def is_of_protocol(name: str) -> bool:
    """Whether a name is one of the protocol, and no foreign file."""
    return name == DESCRIPTION or _NAME.fullmatch(name) is not None


def hash_in(name: str) -> str:
    """The hash in the name of bytes, or of a layout."""
    return re.split("[-/]", name)[-1]


def write_publication(publication: Publication) -> bytes:
    """A record as JSON, with a hash of itself, so that another step is damage; that of a whole has no parts."""
    fields = {key: value for key, value in publication._asdict().items() if key in _WHOLE or publication.layout}
    return _write_json(fields | {"check": hash_of(_write_json(fields))})


def read_publication(name: str, body: bytes) -> Publication:
    """A record from its JSON. Raises `PublishDamagedError` for anything else."""
    try:
        fields = json.loads(body)
        found = Publication(**{key: _KINDS[key](value) for key, value in fields.items() if key != "check"})
        own = json.loads(write_publication(found))
        # Early ones have no hash of themselves.
        if found.number != number_in(name) or own != {"check": own["check"]} | fields:
            raise ValueError(f"it is {fields}")
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PublishDamagedError(f"{name} is no record of a state: {type(error).__name__}: {error}") from error


def read_part(fields: Sequence[Any]) -> PublicationPart:
    """A part from the JSON of a record or an answer. Raises `ValueError` and `TypeError` for anything else."""
    digest, patch, patch_bytes, anchor, anchor_bytes = fields
    return PublicationPart(str(digest), str(patch), int(patch_bytes), str(anchor), int(anchor_bytes))


_WHOLE = Publication._fields[:-2]
_KINDS: dict[str, Any] = Publication.__annotations__ | {"parts": lambda some: tuple(map(read_part, some))}


def _write_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def write_description(identity: str, leaves: Sequence[PublishedLeaf], has_parts: bool) -> bytes:
    """What is published, as JSON."""
    number = FORMAT_OF_PARTS if has_parts else FORMAT
    return json.dumps({"format": number, "id": identity, "leaves": leaves}, separators=(",", ":")).encode()


def read_description(body: bytes, place: str) -> tuple[str, list[PublishedLeaf]]:
    """The random number of a place, and its leaves.

    Raises:
      PublishDamagedError: the bytes are no description.
      PublishMismatchError: it has another format.
    """
    try:
        found = json.loads(body)
        number = found["format"]
        # Another one may say everything else in another way.
        if isinstance(number, int) and number not in (FORMAT, FORMAT_OF_PARTS):
            raise PublishMismatchError(
                f"{place} has format {number}, this version of jaxdist has {FORMAT} and {FORMAT_OF_PARTS}; use the one "
                "that publishes there, or publish to an empty place"
            )
        leaves = [
            PublishedLeaf(str(name), tuple(map(int, shape)), str(dtype)) for name, shape, dtype in found["leaves"]
        ]
        if not isinstance(number, int) or any(size < 0 for leaf in leaves for size in (*leaf.shape, leaf.size)):
            raise ValueError(f"it is {found}")
        return str(found["id"]), leaves
    except PublishMismatchError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"{DESCRIPTION} in {place} is damaged ({type(error).__name__}: {error}); restore it from a copy, or "
        raise PublishDamagedError(f"{problem}publish to an empty place") from error


def shapes_of(leaves: Sequence[PublishedLeaf]) -> dict[str, Any]:
    """Names, shapes and dtypes, to be compared."""
    return {leaf.name: f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves}


def write_anchor(words: Sequence[np.ndarray]) -> bytes:
    """All bits of a state."""
    return b"".join([ANCHOR_MAGIC, *(x.data for x in words)])


def read_anchor(name: str, body: bytes | bytearray, leaves: Sequence[PublishedLeaf]) -> list[np.ndarray]:
    """The words of a state, which may be changed. Raises `PublishDamagedError` if they are not of these leaves."""
    sizes = [leaf.size * leaf.bits.itemsize for leaf in leaves]
    if body[: len(ANCHOR_MAGIC)] != ANCHOR_MAGIC or len(body) != len(ANCHOR_MAGIC) + sum(sizes):
        raise PublishDamagedError(f"{name} is no anchor of {sum(sizes)} bytes, it has {len(body)}")
    starts = np.cumsum([len(ANCHOR_MAGIC), *sizes])
    return [
        np.frombuffer(body, leaf.bits, leaf.size, int(start)).copy()
        for leaf, start in zip(leaves, starts, strict=False)
    ]
