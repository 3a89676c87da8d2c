"""Deletes states that no follower needs any more."""

import time
from contextlib import suppress

from . import protocol
from .base import PublishDamagedError
from .protocol import number_in
from .requests import Requests


def forget(requests: Requests, keep: int, older: float = 0.0) -> int:
    """Deletes states before the last `keep` and older than `older` seconds; returns how many names that was.

    The anchor that the oldest kept state begins from is kept, too. Records go first, so that a follower never finds one
    whose bytes are deleted, but for the moment in between.
    """
    commits = requests.list("commits/")
    first = _first_kept(requests, number_in(commits[-1]) - keep + 1 if commits else 0)
    old = [name for name in commits if number_in(name) < first]
    if older:
        young = next((name for name in old if not _is_older(requests, name, older)), None)
        first = first if young is None else _first_kept(requests, number_in(young))
        old = [name for name in old if number_in(name) < first]
    requests.delete(old)
    bodies = [name for kind in ("patches/", "anchors/") for name in requests.list(kind) if number_in(name) < first]
    requests.delete(bodies)
    return len(old) + len(bodies)


def _first_kept(requests: Requests, number: int) -> int:
    """The number of the last anchor up to a state that a record names; 0 if there is none."""
    names = set(requests.list("anchors/"))
    for found in sorted({number_in(name) for name in names}, reverse=True):
        if found > number:
            continue
        commit = protocol.commit_name(found)
        body = requests.get(commit)
        with suppress(PublishDamagedError):
            anchors = [] if body is None else protocol.anchors_of(protocol.read_publication(commit, body))
            if anchors and names.issuperset(anchors):
                return found
    return 0


def _is_older(requests: Requests, name: str, seconds: float) -> bool:
    body = requests.get(name)
    try:
        return body is None or protocol.read_publication(name, body).time < time.time() - seconds
    except PublishDamagedError:
        return True
