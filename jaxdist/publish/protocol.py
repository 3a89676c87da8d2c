"""The names and records of published weights. All of it is pure: it needs no store and no devices.

publish.json                 the format, a random number, and the names, shapes and dtypes of the leaves
publishers/00000003          the third process that published here; only the last one may
commits/00000042             the record of the 42nd state, created once: its step, and the names of its bytes
patches/00000042-HASH        what turns the 41st state into the 42nd, under its own hash
anchors/00000042-HASH        all bits of the 42nd state

A state is there once its record is. A record has the hash of the record before it and the hash of all bits of its
state. It names a patch, an anchor or both: each `anchor_every`-th has both, so that a follower of the chain
never reads an anchor, and one that comes later begins with it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._stores.base import hash_of
from .base import PublishDamagedError, PublishMismatchError
from .words import PublishedLeaf

FORMAT = 2
DESCRIPTION = "publish.json"
ANCHOR_MAGIC = b"jdanchor"
_NAME = re.compile(r"(commits|publishers)/[0-9]+|(patches|anchors)/[0-9]+-[0-9a-f]{32}")


class Publication(NamedTuple):
    """A state that was published.

    Attributes:
      number: counts the states, from 1.
      step: the number that the trainer gave it.
      session: of the publisher, which counts the processes that published here.
      time: seconds since 1970, by the clock of the publisher.
      previous: the hash of the record before this one; empty for the first, or where that is gone.
      digest: the hash of all bits of the state.
      patch: the name of its patch, or empty.
      patch_bytes: the size of that.
      anchor: the name of its anchor, or empty.
      anchor_bytes: the size of that.
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
    """The hash in the name of bytes."""
    return name.rpartition("-")[2]


def write_publication(publication: Publication) -> bytes:
    """A record as JSON."""
    return json.dumps(publication._asdict(), sort_keys=True, separators=(",", ":")).encode()


def read_publication(name: str, body: bytes) -> Publication:
    """A record from its JSON. Raises `PublishDamagedError` for anything else."""
    try:
        fields = json.loads(body)
        kinds = Publication.__annotations__
        found = Publication(**{key: kinds[key](value) for key, value in fields.items()})
        if found.number != number_in(name) or any(fields[key] != getattr(found, key) for key in kinds):
            raise ValueError(f"it is {fields}")
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PublishDamagedError(f"{name} is no record of a state: {type(error).__name__}: {error}") from error


def write_description(identity: str, leaves: Sequence[PublishedLeaf]) -> bytes:
    """What is published, as JSON."""
    return json.dumps({"format": FORMAT, "id": identity, "leaves": leaves}, separators=(",", ":")).encode()


def read_description(body: bytes, place: str) -> tuple[str, list[PublishedLeaf]]:
    """The random number of a place, and its leaves.

    Raises:
      PublishDamagedError: the bytes are no description.
      PublishMismatchError: it has another format.
    """
    try:
        found = json.loads(body)
        number, identity = found["format"], str(found["id"])
        leaves = [
            PublishedLeaf(str(name), tuple(map(int, shape)), str(dtype)) for name, shape, dtype in found["leaves"]
        ]
        assert all(leaf.size >= 0 for leaf in leaves)
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        problem = f"{DESCRIPTION} in {place} is damaged ({type(error).__name__}: {error}); restore it from a copy, or "
        raise PublishDamagedError(f"{problem}publish to an empty place") from error
    if number != FORMAT:
        problem = f"{place} has format {number}, this version of jaxdist has {FORMAT}; use the one that publishes there"
        raise PublishMismatchError(problem)
    return identity, leaves


def shapes_of(leaves: Sequence[PublishedLeaf]) -> dict[str, Any]:
    """Names, shapes and dtypes, to be compared."""
    return {leaf.name: f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves}


def write_anchor(words: Sequence[np.ndarray]) -> bytes:
    """All bits of a state."""
    return b"".join([ANCHOR_MAGIC, *(x.tobytes() for x in words)])


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
