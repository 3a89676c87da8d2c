"""What is published in a place, as its store shows it; and its clean-up."""

import os
from typing import NamedTuple

from .._core.checks import check_count, check_range
from .._core.types import Number
from .._stores.base import SharedStore, place_of
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


def status(url: "str | os.PathLike[str] | SharedStore", *, last: int = 10) -> PublishStatus:
    """Reads what is published, without its bytes. Writes nothing.

    Args:
      url: as in `jaxdist.publish.open`.
      last: how many states to read, at most.

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
    found = []
    for name in commits[len(commits) - min(last, len(commits)) :]:
        try:
            publication = protocol.read_publication(name, requests.get(name) or b"")
        except PublishDamagedError as error:
            problems.append(str(error))
            continue
        found.append(publication)
        problems += [f"{body} is missing" for body in protocol.bodies_of(publication) if body not in names]
    sessions = [protocol.number_in(name) for name in names if name.startswith("publishers/")]
    whole = sum(leaf.size * leaf.bits.itemsize for leaf in leaves)
    shapes = protocol.shapes_of(leaves)
    return PublishStatus(tuple(found), len(commits), max(sessions, default=0), shapes, whole, tuple(problems))


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
