"""What is published in a place, as its store shows it; and its clean-up."""

import itertools
import os
from typing import NamedTuple

from .._core.checks import check_count, check_range
from .._core.types import Number
from .._stores.base import SharedStore, begin_hash, hash_of, place_of
from .._stores.opening import open_store
from . import protocol
from .base import NothingPublishedError, PublishDamagedError
from .cleaning import forget
from .protocol import Publication
from .requests import Requests

# Seconds for which a request that fails is tried again.
PATIENCE = 10.0


class PublishStatus(NamedTuple):
    """What is published in a place.

    Attributes:
      publications: the last states, oldest first.
      states: how many are kept.
      publishers: how many processes have published here.
      leaves: of the tree, as `name` and text such as `bfloat16[64, 128]`.
      whole_bytes: of all words of a state.
      problems: files that are damaged, missing or foreign, each in a line.
    """

    publications: tuple[Publication, ...]
    states: int
    publishers: int
    leaves: dict[str, str]
    whole_bytes: int
    problems: tuple[str, ...]


def status(url: "str | os.PathLike[str] | SharedStore", *, last: int = 10, verify: bool = False) -> PublishStatus:
    """Reads what is published, and finds names that are foreign, missing or damaged. Writes nothing.

    Of all states it finds records that are missing. Of the last ones it reads the records, and finds bytes that are
    missing, cut or too long, by a request of two bytes each; that bytes were altered, `verify` finds.

    Args:
      url: as in `jaxdist.publish.open`.
      last: how many states to read, at most.
      verify: whether to read the bytes of these states, too, and to compare them with their hashes: whole copies, where
        an anchor is among them.

    Raises:
      NothingPublishedError: nothing was published there.
      ValueError: `last` is negative.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> store = jd.islands.memory()
      >>> with jd.publish.open(store) as out:
      ...     out.put({"w": jnp.zeros(2)}, step=7)
      >>> found = jd.publish.status(store)
      >>> [one.step for one in found.publications], found.leaves, found.problems
      ([7], {'w': 'float32[2]'}, ())
    """
    check_count("last", last, 0)
    requests, place = _open(url)
    body = requests.get(protocol.DESCRIPTION)
    _, leaves = protocol.read_description(body or b"", place)
    names = requests.list_all()
    problems = [f"{name} is foreign" for name in names if not protocol.is_of_protocol(name)]
    commits = [name for name in names if name.startswith("commits/") and protocol.is_of_protocol(name)]
    problems += _find_gaps(commits)
    found: list[Publication] = []
    before, bodies = "", dict[str, int]()
    for name in commits[len(commits) - min(last, len(commits)) :]:
        record = requests.get(name)
        if record is None:
            # A clean-up has been here since the names were listed.
            continue
        try:
            publication = protocol.read_publication(name, record)
        except PublishDamagedError as error:
            problems.append(str(error))
        else:
            follows = not found or found[-1].number + 1 != publication.number or publication.previous == before
            if not follows:
                problems.append(f"{name} does not follow the record before it: one of the two was altered")
            found.append(publication)
            bodies |= protocol.bodies_of(publication)
        before = hash_of(record)
    problems += [problem for body in bodies.items() if (problem := _find_problem(requests, names, *body, verify))]
    sessions = [protocol.number_in(name) for name in names if name.startswith("publishers/")]
    whole = sum(leaf.size * leaf.bits.itemsize for leaf in leaves)
    shapes = protocol.shapes_of(leaves)
    return PublishStatus(tuple(found), len(commits), max(sessions, default=0), shapes, whole, tuple(problems))


def _find_gaps(commits: list[str]) -> list[str]:
    """The records that are missing between those that are there."""
    found = []
    for before, after in itertools.pairwise(map(protocol.number_in, commits)):
        first, last = protocol.commit_name(before + 1), protocol.commit_name(after - 1)
        if before + 1 < after:
            found.append(f"{first} is missing" if first == last else f"{first} to {last} are missing")
    return found


def _find_problem(requests: Requests, names: list[str], name: str, size: int, verify: bool) -> str:
    """What is wrong with bytes that a record names, if anything is; a layout has no size there, and is always read."""
    if name not in names:
        return f"{name} is missing"
    if size and not requests.ends_at(name, size):
        return f"{name} is cut or too long: its record says {size} bytes"
    if not verify and size:
        return ""
    total = begin_hash()
    for piece in requests.get_pieces(name, size):
        total.update(piece or b"")
    return "" if total.hexdigest() == protocol.hash_in(name) else f"{name} has other bytes than its hash says"


def clean_up(url: "str | os.PathLike[str] | SharedStore", *, keep: int = 100, older: Number = 0.0) -> int:
    """Deletes old states, beside a running trainer too, and returns the number of names that it deleted.

    A follower that is behind what is left goes on with an anchor that is left.

    Args:
      url: as in `jaxdist.publish.open`.
      keep: how many states to keep at least, and the anchor before them.
      older: seconds; states that are younger by the clock of the publisher are kept, too.

    Raises:
      NothingPublishedError: nothing was published there.
      ValueError: an argument is out of range.
    """
    check_count("keep", keep, 1)
    check_range("older", older, 0)
    requests, _ = _open(url)
    return forget(requests, keep, float(older))


def _open(url: "str | os.PathLike[str] | SharedStore") -> tuple[Requests, str]:
    place, requests = place_of(url), Requests(open_store(url), PATIENCE)
    # Asked first: a mistyped URL must not be cleaned.
    if requests.get(protocol.DESCRIPTION) is None:
        raise NothingPublishedError(f"nothing is published in {place}: it has no {protocol.DESCRIPTION}; check the URL")
    return requests, place
