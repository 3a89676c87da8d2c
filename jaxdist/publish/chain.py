"""The chain of published states as a reader follows it: one state in host memory, moved on by patches."""

import time

import numpy as np

from .._stores.base import begin_hash, hash_of
from . import protocol
from .base import PublishDamagedError, PublishMismatchError
from .patches import apply_patch
from .protocol import Publication, number_in
from .requests import Requests, logger
from .words import PublishedLeaf, digest_of

# After so many looks in vain a reader asks whether the chain goes on elsewhere.
LOOKS = 30


class Chain:
    """A state of the chain in host memory.

    Attributes:
      leaves: what is published; empty before that is known.
      words: the bits of the state; `None` while there is none that is whole.
      newest: the publication that the words are of, or were of when they were lost.
      hash: that of its record.
      anchored: the number of the last anchor.
      problem: why the words were lost, and `problem_at` the time of that; `None` while all is well.
    """

    def __init__(self, requests: Requests, place: str):
        self._requests, self._place, self._identity = requests, place, ""
        self.leaves: list[PublishedLeaf] = []
        self.words: list[np.ndarray] | None = None
        self.newest: Publication | None = None
        self.hash, self.anchored = "", 0
        self.problem: str | None = None
        self.problem_at = 0.0
        self._damaged: set[str] = set()
        self._misses = 0

    @property
    def number(self) -> int:
        """Of the newest publication that was read, 0 before the first."""
        return 0 if self.newest is None else self.newest.number

    def open(self) -> bool:
        """Reads what is published, unless that is known; returns whether it is."""
        if not self._identity:
            body = self._requests.get(protocol.DESCRIPTION)
            if body is not None:
                self._identity, self.leaves = protocol.read_description(body, self._place)
        return bool(self._identity)

    def advance(self, *, from_oldest: bool = False) -> bool:
        """Moves on by one state, if there is one; without words, to the newest anchor or the oldest one."""
        if self.words is None:
            return self._read_newest_anchor(from_oldest)
        name = protocol.commit_name(self.number + 1)
        body = self._requests.get(name)
        if body is None:
            body = self._look_ahead(name)
            if body is None:
                return self.words is None and self._read_newest_anchor(False)
        self._misses = 0
        try:
            publication = protocol.read_publication(name, body)
            if publication.previous != self.hash:
                raise PublishDamagedError(f"{name} does not follow the record before it that was read here")
            self._apply(publication)
        except PublishDamagedError as error:
            self._lose(str(error))
            return self._read_newest_anchor(False)
        self._arrive(publication, body)
        return True

    def _look_ahead(self, name: str) -> bytes | None:
        """Finds out, now and then, whether a record that is not there will never be."""
        self._misses += 1
        if self._misses % LOOKS != 1:
            return None
        description = self._requests.get(protocol.DESCRIPTION)
        if description is not None and protocol.read_description(description, self._place)[0] != self._identity:
            raise PublishMismatchError(f"{self._place} was replaced by other weights; follow it anew")
        later = [other for other in self._requests.list("commits/") if other > name]
        # It may have been created since.
        body = self._requests.get(name) if later else None
        if later and body is None:
            self._lose(f"{name} is gone, and {later[-1]} is there: it was cleaned up before it was read here")
        return body

    def _apply(self, publication: Publication) -> None:
        assert self.words is not None
        problem = ""
        if publication.patch:
            try:
                apply_patch(self._read_body(publication.patch), self.words, self.leaves)
                self._check_state(publication.patch, publication, digest_of(self.words))
                return
            # A whole patch that cannot be read is one of another state.
            except (PublishDamagedError, ValueError, IndexError, OverflowError) as error:
                problem = str(error)
        if not publication.anchor:
            raise PublishDamagedError(problem or f"{protocol.commit_name(publication.number)} names no bytes")
        if problem:
            logger.warning("reading the anchor instead of a damaged patch: %s", problem)
        self.words = self._read_anchor(publication)

    def _read_newest_anchor(self, from_oldest: bool) -> bool:
        names = [name for name in self._requests.list("anchors/") if number_in(name) > self.number]
        for name in names if from_oldest else names[::-1]:
            if name in self._damaged:
                continue
            commit = protocol.commit_name(number_in(name))
            body = self._requests.get(commit)
            try:
                # Bytes that no record names were never published.
                publication = None if body is None else protocol.read_publication(commit, body)
                if publication is None or body is None or publication.anchor != name:
                    continue
                self.words = self._read_anchor(publication)
            except PublishDamagedError as error:
                self._damaged.add(name)
                self._lose(str(error))
                continue
            self._arrive(publication, body)
            return True
        return False

    def _read_anchor(self, publication: Publication) -> list[np.ndarray]:
        """Reads an anchor piece by piece, and hashes one while the next ones arrive."""
        name, whole, state = publication.anchor, begin_hash(), begin_hash()
        body = bytearray()
        for piece in self._requests.get_pieces(name, publication.anchor_bytes):
            if piece is None:
                raise PublishDamagedError(f"{name} is missing")
            whole.update(piece)
            state.update(memoryview(piece)[max(len(protocol.ANCHOR_MAGIC) - len(body), 0) :])
            body += piece
        self._check_body(name, len(body), whole.hexdigest())
        self._check_state(name, publication, state.hexdigest())
        return protocol.read_anchor(name, body, self.leaves)

    def _read_body(self, name: str) -> bytes:
        body = self._requests.get(name)
        if body is None:
            raise PublishDamagedError(f"{name} is missing")
        self._check_body(name, len(body), hash_of(body))
        return body

    def _check_body(self, name: str, size: int, found: str) -> None:
        if found != protocol.hash_in(name):
            raise PublishDamagedError(f"{name} has other bytes than its hash says: {size} were cut or altered")

    def _check_state(self, name: str, publication: Publication, found: str) -> None:
        if found != publication.digest:
            raise PublishDamagedError(f"{name} leads to another state ({found}) than its record ({publication.digest})")

    def _arrive(self, publication: Publication, body: bytes) -> None:
        self.newest, self.hash, self.problem = publication, hash_of(body), None
        if publication.anchor:
            self.anchored = publication.number

    def _lose(self, problem: str) -> None:
        """Gives up the state: the next one is that of an anchor."""
        logger.warning("%s: waiting for the next anchor after state %d: %s", self._place, self.number, problem)
        if self.problem is None:
            self.problem_at = time.monotonic()
        self.problem, self.words = problem, None
