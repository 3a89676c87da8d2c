"""The rounds of a run as one process reads them: kept global parameters, every round since, and the open one.

The state of a run follows from the bytes in the store alone: kept global parameters, and the commits after them. So
every process that reads them computes the same bits, whether it takes part or only evaluates.
"""

from contextlib import suppress
from typing import Any

import jax
import numpy as np

from .._core.types import State
from ..compressors.base import DamagedCodeError
from ..local_sgd.state import LocalStepsState
from . import records, run
from .checks import check_reducer
from .connection import Connection
from .errors import DamagedError
from .exchange import (
    RoundMethod,
    Shared,
    add_member,
    copy_shared_to_host,
    describe_shared,
    digest_of,
    restore_shared,
    select_shared,
    take_outer_step,
    with_shared,
    zeros_like,
)
from .records import Commit

# Of so many islands the run remembers which drift it took last.
MOST_NAMES = 1000


class _LeftBehindError(Exception):
    """The rounds that this process was reading are deleted: it goes on from the newest kept global parameters."""


class Replay:
    """Reads the rounds of a run in order, and takes the outer step of each.

    Attributes:
      round: the open round.
      digest: of the global parameters before it.
      expected: the islands that the last commit expects in it.
      counted: the bodies that the last rounds took, by island.
    """

    def __init__(self, store: Connection, config: Any):
        self.method = RoundMethod(config.reducer, config.outer)
        self.round, self.digest = 0, ""
        self.expected: tuple[str, ...] = ()
        self.counted: dict[str, str] = {}
        self._store, self._reducer = store, config.reducer
        self._payload: list[Any] = []
        self._updates: Any = None
        self._bodies: dict[str, list[Any]] = {}

    def open(self, local: LocalStepsState) -> None:
        """Checks the model and the method against those of the run, which this opens if there is none.

        Raises:
          ValueError: the reducer sends no message of its own or several.
          RunMismatchError: the run has another model or method.
        """
        self._payload = check_reducer(self._reducer, local.anchor)
        self._updates = jax.eval_shape(lambda anchor: anchor, local.anchor)
        run.check_or_open(self._store, run.describe(self.method, local, self._payload))
        self.digest = digest_of(select_shared(local))

    def go_to(self, anchor: records.Anchor) -> None:
        """Makes the round after kept global parameters the open one."""
        self.round, self.digest, self.counted = anchor.round, anchor.digest, dict(anchor.counted)
        # The round before is kept longer than these parameters are the newest.
        before = run.read_commit(self._store, anchor.round - 1) if anchor.round else None
        self.expected, self._bodies = () if before is None else before.expected, {}

    def load_newest(self, local: LocalStepsState) -> tuple[records.Anchor, LocalStepsState]:
        """Reads the newest kept global parameters into a state; the open round stays."""
        like = select_shared(local)
        while True:
            anchor = run.newest_anchor(self._store)
            assert anchor is not None
            body = self._store.get(records.body_name(anchor.body))
            if body is not None:
                break
            if not run.is_forgotten(self._store, anchor.round):
                name = records.anchor_name(anchor.round)
                raise DamagedError(f"the store has no body {anchor.body}, which {name} names")
        shared = restore_shared(records.unpack(anchor.body, body, describe_shared(like)), like)
        return anchor, with_shared(local, shared)

    def follow(self, local: LocalStepsState) -> LocalStepsState:
        """Goes to the newest global parameters: the kept ones, and every round since."""
        while True:
            anchor, local = self.load_newest(local)
            self.go_to(anchor)
            with suppress(_LeftBehindError):
                while (commit := self.read_commit(self.round)) is not None:
                    local = with_shared(local, self.advance(local, commit))
                return local

    def read_commit(self, number: int) -> Commit | None:
        """The end of a round, or `None` before it.

        Raises:
          _LeftBehindError: the round may be deleted. What is there may then be a second commit, by an island that made
            a long pause.
        """
        commit = run.read_commit(self._store, number)
        self.check_not_forgotten(number)
        return commit

    def check_not_forgotten(self, number: int) -> None:
        """Raises `_LeftBehindError` if a round may be deleted."""
        if run.is_forgotten(self._store, number):
            raise _LeftBehindError

    def advance(self, local: LocalStepsState, commit: Commit) -> Shared:
        """Takes the outer step of the open round, and makes the next one the open round."""
        shared = self._take_step(select_shared(local), local.reducer[0], commit, self.round)
        self.round, self._bodies = self.round + 1, {}
        self.digest, self.expected = digest_of(shared), commit.expected
        # The islands that sent most recently come last.
        bodies = {member.name: member.body for member in commit.members}
        counted = {name: body for name, body in self.counted.items() if name not in bodies} | bodies
        self.counted = dict(list(counted.items())[-MOST_NAMES:])
        return shared

    def rebuild(self, local: LocalStepsState) -> LocalStepsState:
        """Computes the global parameters before the open round again, from the kept ones."""
        anchor, local = self.load_newest(local)
        if anchor.round > self.round:
            raise _LeftBehindError
        for number in range(anchor.round, self.round):
            commit = self.read_commit(number)
            assert commit is not None
            local = with_shared(local, self._take_step(select_shared(local), local.reducer[0], commit, number))
        return local

    def keep(self, local: LocalStepsState) -> None:
        """Keeps the global parameters before the open round, and deletes rounds that are no longer needed."""
        run.keep_anchor(self._store, self.round, self.digest, self.counted, copy_shared_to_host(select_shared(local)))
        run.forget_rounds(self._store)

    def body(self, place: str, number: int) -> list[Any]:
        """The arrays of a drift of a round; read once for the commit and the outer step.

        Raises:
          DamagedError: the body is missing, or its bytes are not those that its hash names.
        """
        if place not in self._bodies:
            body = self._store.get(records.body_name(place))
            if body is None:
                self.check_not_forgotten(number)
                raise DamagedError(f"the store has no body {place}, which a drift names")
            self._bodies[place] = self._decode(place, body)
        return self._bodies[place]

    def pack_body(self, tag: str, arrays: list[Any]) -> tuple[str, bytes]:
        """Returns the hash and the bytes of the body with the arrays of this island's drift."""
        codec = self._reducer.forms.codec
        if codec is not None:
            arrays = [np.frombuffer(codec.encode(arrays, self._updates), np.uint8)]
        body = records.pack(tag, arrays)
        place = records.hash_of(body)
        # Decoded as all islands decode it, so that their bits are the same.
        self._bodies[place] = self._decode(place, body)
        return place, body

    def _decode(self, place: str, body: bytes) -> list[Any]:
        codec = self._reducer.forms.codec
        if codec is None:
            return records.unpack(place, body, self._payload)
        (code,) = records.unpack(place, body, None)
        try:
            return codec.decode(code.tobytes(), self._updates)
        except DamagedCodeError as error:
            raise DamagedError(f"the body {place} is no code of {codec.name}: {error}") from error

    def _take_step(self, shared: Shared, reducer: State, commit: Commit, number: int) -> Shared:
        # Δ = Σ n_w D(C(Δ_w)) / Σ n_w over the members of the commit, in its order: the same bits on every island
        weight = sum(member.weight for member in commit.members)
        if not weight:
            return shared
        rates = [member.rate for member in commit.members]
        rate = None if None in rates else np.float32(sum(rates) / len(rates))  # pyright: ignore
        total, replicated = zeros_like(shared.anchor), shared.reducer
        for member in commit.members:
            arrays = self.body(member.body, number)
            total, replicated = add_member(self.method, total, arrays, np.float32(member.weight), reducer, rate)
        return take_outer_step(self.method, shared, total, np.float32(weight), replicated, rate)
