"""The chain of published states as a reader follows it: one state in host memory, moved on by patches."""

import time

import numpy as np

from .._stores.base import begin_hash, hash_of
from . import protocol
from .base import PublishDamagedError, PublishMismatchError
from .layout import ShardLayout, lay_out_whole, read_layout
from .patches import apply_patch
from .protocol import Publication, PublicationPart, number_in
from .requests import Requests, logger
from .words import PublishedLeaf, digest_of

# After so many looks in vain a reader asks whether the chain goes on elsewhere.
LOOKS = 30


class Chain:
    """A state of the chain in host memory.

    Attributes:
      leaves: what is published; empty before that is known.
      words: the bits of the state, of each part; `None` while there is none that is whole.
      layout: which part has what; undefined without words.
      newest: the publication that the words are of, or were of when they were lost.
      hash: that of its record.
      anchored: the number of the last anchor.
      problem: why the words were lost, and `problem_at` the time of that; `None` while all is well.
    """

    def __init__(self, requests: Requests, place: str):
        self._requests, self._place, self._identity = requests, place, ""
        self.leaves: list[PublishedLeaf] = []
        self.words: list[list[np.ndarray]] | None = None
        self.layout = ShardLayout("", ())
        self.newest: Publication | None = None
        self.hash, self.anchored = "", 0
        self.problem: str | None = None
        self.problem_at = 0.0
        self._damaged: set[int] = set()
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
        """Moves on by one state, if there is one; without words, to the newest later anchor or the oldest one."""
        if self.words is None:
            return self._read_later_anchor(from_oldest)
        name = protocol.commit_name(self.number + 1)
        body = self._requests.get(name)
        if body is None:
            body = self._look_ahead(name)
            if body is None:
                return self.words is None and self._read_later_anchor(from_oldest)
        self._misses = 0
        try:
            publication = protocol.read_publication(name, body)
            if publication.previous != self.hash:
                raise PublishDamagedError(f"{name} does not follow the record before it that was read here")
            self._apply(publication)
        except PublishDamagedError as error:
            self._lose(str(error))
            return self._read_later_anchor(from_oldest)
        self._arrive(publication, body)
        return True

    def _look_ahead(self, name: str) -> bytes | None:
        """Finds out, now and then, whether a record that is not there will never be."""
        self._misses += 1
        if self._misses % LOOKS != 1:
            return None
        self._check_identity()
        later = [other for other in self._requests.list("commits/") if other > name]
        # It may have been created since.
        body = self._requests.get(name) if later else None
        if later and body is None:
            self._lose(f"{name} is gone, and {later[-1]} is there: it was cleaned up before it was read here")
        return body

    def _check_identity(self) -> None:
        description = self._requests.get(protocol.DESCRIPTION)
        if description is not None and protocol.read_description(description, self._place)[0] != self._identity:
            raise PublishMismatchError(f"{self._place} was replaced by other weights; follow it anew")

    def _apply(self, publication: Publication) -> None:
        """Moves the words on; they are undefined after an error."""
        assert self.words is not None
        is_same = publication.layout == self.layout.name
        layout = self.layout if is_same else self._read_layout(publication)
        parts = self._parts_of(publication, layout)
        has_patch = [is_same and part.patch != "" for part in parts]
        bodies = self._requests.get_several(
            [(part.patch, part.patch_bytes) for part, has in zip(parts, has_patch, strict=True) if has]
        )
        words = []
        for number, (part, has) in enumerate(zip(parts, has_patch, strict=True)):
            leaves = layout.leaves_of(number, self.leaves)
            problem = self._apply_patch(part, next(bodies), self.words[number], leaves) if has else ""
            if has and not problem:
                words.append(self.words[number])
                continue
            if not part.anchor:
                raise PublishDamagedError(problem or f"{protocol.commit_name(publication.number)} names no bytes")
            if problem:
                logger.warning("reading the anchor instead of a damaged patch: %s", problem)
            words.append(self._read_anchor(part, leaves))
        self.words, self.layout = words, layout

    def _apply_patch(
        self, part: PublicationPart, body: bytes | None, words: list[np.ndarray], leaves: list[PublishedLeaf]
    ) -> str:
        """Changes the words of a part; returns what is wrong with the patch, if anything is."""
        name = part.patch
        try:
            if body is None:
                raise PublishDamagedError(f"{name} is missing")
            self._check_body(name, len(body), hash_of(body))
            apply_patch(body, words, leaves)
            self._check_state(name, part, digest_of(words))
        # A whole patch that cannot be read is one of another state.
        except (PublishDamagedError, ValueError, IndexError, OverflowError) as error:
            return str(error)
        return ""

    def _read_layout(self, publication: Publication) -> ShardLayout:
        if not publication.layout:
            return lay_out_whole(self.leaves)
        body = self._requests.get(publication.layout)
        if body is None:
            raise PublishDamagedError(f"{publication.layout} is missing")
        return read_layout(publication.layout, body, self.leaves)

    def _parts_of(self, publication: Publication, layout: ShardLayout) -> tuple[PublicationPart, ...]:
        parts = protocol.parts_of(publication)
        if len(parts) != len(layout.parts):
            raise PublishDamagedError(f"{protocol.commit_name(publication.number)} has not the parts of its layout")
        return parts

    def _read_later_anchor(self, from_oldest: bool) -> bool:
        names = set(self._requests.list("anchors/"))
        numbers = sorted({number_in(name) for name in names} - self._damaged, reverse=not from_oldest)
        for number in numbers:
            if number <= self.number:
                continue
            commit = protocol.commit_name(number)
            body = self._requests.get(commit)
            try:
                # Bytes that no record names were never published.
                publication = None if body is None else protocol.read_publication(commit, body)
                if publication is None or body is None or names.isdisjoint(protocol.anchors_of(publication)):
                    continue
                layout = self._read_layout(publication)
                self.words = [
                    self._read_anchor(part, layout.leaves_of(which, self.leaves))
                    for which, part in enumerate(self._parts_of(publication, layout))
                ]
                self.layout = layout
            except PublishDamagedError as error:
                self._damaged.add(number)
                self._lose(str(error))
                continue
            # An anchor has no record before it that would tell it from one of another trainer.
            self._check_identity()
            self._arrive(publication, body)
            return True
        return False

    def _read_anchor(self, part: PublicationPart, leaves: list[PublishedLeaf]) -> list[np.ndarray]:
        """Reads an anchor piece by piece, and hashes one while the next ones arrive."""
        name, whole, state = part.anchor, begin_hash(), begin_hash()
        body = bytearray()
        for piece in self._requests.get_pieces(name, part.anchor_bytes):
            if piece is None:
                raise PublishDamagedError(f"{name} is missing")
            whole.update(piece)
            state.update(memoryview(piece)[max(len(protocol.ANCHOR_MAGIC) - len(body), 0) :])
            body += piece
        self._check_body(name, len(body), whole.hexdigest())
        self._check_state(name, part, state.hexdigest())
        return protocol.read_anchor(name, body, leaves)

    def _check_body(self, name: str, size: int, found: str) -> None:
        if found != protocol.hash_in(name):
            raise PublishDamagedError(f"{name} has other bytes than its hash says: {size} were cut or altered")

    def _check_state(self, name: str, part: PublicationPart, found: str) -> None:
        if found != part.digest:
            raise PublishDamagedError(f"{name} leads to another state ({found}) than its record ({part.digest})")

    def _arrive(self, publication: Publication, body: bytes) -> None:
        self.newest, self.hash, self.problem = publication, hash_of(body), None
        if protocol.anchors_of(publication):
            self.anchored = publication.number

    def _lose(self, problem: str) -> None:
        """Gives up the state: the next one is that of an anchor."""
        logger.warning("%s: waiting for the next anchor after state %d: %s", self._place, self.number, problem)
        if self.problem is None:
            self.problem_at = time.monotonic()
        self.problem, self.words = problem, None
