"""A run in a store: the names of its islands, its kept global parameters, and its rounds.

The state of a run follows from the bytes in the store alone: kept global parameters, and the commits after them. So
every process that reads them (`Replay`) computes the same bits, whether it takes part or only evaluates.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np

from .._core.types import PyTree, State
from .._stores.base import hash_of
from ..compressors.compressor import DamagedCodeError
from ..local_sgd.state import LocalStepsState
from . import identity, protocol
from .base import DamagedError, RunMismatchError
from .bodies import Body, is_whole, unpack_found
from .cleanup import KEPT_ANCHORS, keep_anchor, last_forgotten
from .connection import Connection
from .exchange import (
    MessagePlan,
    RoundMethod,
    Shared,
    add_member,
    check_reducer,
    commit_counts,
    copy_shared_to_host,
    describe_shared,
    digest_of,
    let_go,
    mean_of,
    needs_rate,
    renew_reducer,
    restore_shared,
    select_shared,
    take_outer_step,
    with_shared,
)
from .fragments import Division, divide, schedule_of
from .owners import MeanPieces, PieceLayout, check_owners, read_piece
from .protocol import Anchor, Commit, Drift, most_rounds

logger = logging.getLogger("jaxdist.islands")

# Seconds between two looks for kept parameters that a listing does not show yet.
LOOK_PAUSE = 0.1
# The number of islands whose last drift the run remembers.
MOST_NAMES = 1000


def claim(store: Connection, name: str) -> int:
    """Takes a name; the process with the highest number has it, and older ones stop at their next meeting."""
    number = newest_session(store, name)
    while True:
        number += 1
        if store.create(f"names/{name}/{number:06d}", b"{}"):
            return number


def newest_session(store: Connection, name: str) -> int:
    """The number of the last session of an island, 0 before its first."""
    return max((int(found.rpartition("/")[2]) for found in store.list(f"names/{name}/")), default=0)


def has_begun(store: Connection) -> bool:
    """Whether global parameters are kept: the run's first island keeps its own.

    Raises:
      DamagedError: none are, though islands have met.
    """
    # By name too, since a listing may be late.
    begun = bool(store.list("anchors/")) or store.get(protocol.anchor_name(0)) is not None
    if not begun and (names := store.list("rounds/")):
        # Another island may have begun it since.
        if store.get(protocol.anchor_name(0)) is not None:
            return True
        number = int(names[-1].split("/")[1])
        raise DamagedError(
            f"run.json is there, and rounds up to {number}, but no anchors/...: the kept global parameters are gone; "
            "restore them from a copy, or begin a new run in an empty folder, from a checkpoint"
        )
    return begun


def is_forgotten(store: Connection, number: int, rounds: int) -> bool:
    """Whether the bodies of a round may have been deleted, and what islands said in it.

    This stays true, since the newest kept parameters only grow.
    """
    return last_forgotten(store.list("anchors/"), rounds) >= number


def read_commit(store: Connection, number: int) -> Commit | None:
    """The commit of a round, or `None` before it is decided."""
    name = protocol.round_name(number, "commit")
    body = store.get(name)
    return None if body is None else protocol.parse(Commit, name, body)


def open_round(store: Connection, number: int) -> int:
    """The first round, from this one on, that has no commit: one ends after another, so that few need be asked for."""

    def is_over(number: int) -> bool:
        return store.get(protocol.round_name(number, "commit")) is not None

    step = 1
    while is_over(number + step - 1):
        number, step = number + step, 2 * step
    end = number + step - 1
    while number < end:
        middle = (number + end) // 2
        number, end = (middle + 1, end) if is_over(middle) else (number, middle)
    return number


class _LeftBehindError(Exception):
    """The rounds that this process was reading are deleted: it goes on from the newest kept global parameters."""


class _Sum:
    """The sum of the first drifts of a round, which a later call goes on with: so no two bodies are in memory decoded.

    Attributes:
      round: of the drifts.
      added: their bodies and weights, in the order in which they were added.
      total: `Σ n_w D(C(Δ_w))`.
      reducer: the replicated leaves of the reducer's state after the round.
    """

    def __init__(self, number: int, total: Any, reducer: list[Any]):
        self.round, self.added, self.total, self.reducer = number, list[tuple[str, float]](), total, reducer


class Replay:
    """Reads the rounds of a run in order, and takes the outer step of each.

    Attributes:
      round: the open round.
      schedule: which fragment and which message a round is of.
      digests: of the global parameters before it, by fragment.
      received: the means of the messages before that of the open round.
      expected: the islands that the last commit expects in it.
      counted: the bodies that the last rounds took, by island and fragment.
      needs_rate: whether the outer step needs the learning rate of the inner ones.
      run: which run it is.
      kept: the round of the kept global parameters that it has started from.
      lasts: whether a drift may count in a later round than that in which it was encoded.
    """

    def __init__(self, store: Connection, config: Any, *, name: str = "", owner_seconds: float = 0.0):
        self.method = RoundMethod(config.reducer, config.outer, config.merge)
        self.schedule = schedule_of(config)
        self.round, self.digests = 0, [""] * self.schedule.number
        self.received: list[list[np.ndarray]] = []
        self.expected: tuple[str, ...] = ()
        self.counted: dict[tuple[str, int], str] = {}
        self.needs_rate = False
        self.run, self.kept = identity.NO_RUN, 0
        # Whether a round counts what was encoded in an earlier one.
        self.lasts = True
        # The end of the round before the open one, as this process has read it.
        self._last: Commit | None = None
        # The name of the kept parameters that are on their way.
        self._wanted: str | None = None
        self._store, self._config, self._reducer = store, config, config.reducer
        # What the messages of each fragment consist of.
        self.plans: list[MessagePlan] = []
        self._updates: list[Any] = []
        self._bodies: dict[str, list[Any]] = {}
        self._sum: _Sum | None = None
        # With owners: this island, "" where one only reads, and how long it waits for them; and the mean that it has
        # begun to read, of which round.
        self._name, self._owner_seconds = name, owner_seconds
        self._pieces: tuple[int, MeanPieces] | None = None
        self._last_pieces: dict[str, bytes] = {}
        # This island's own drift of each fragment as it is sent, or its pieces, which several rounds may read.
        self.own: dict[int, tuple[str, Any]] = {}

    @property
    def rounds(self) -> int:
        """For so many rounds a body can be counted."""
        return most_rounds(self.keep_every, self.schedule.messages * self.schedule.number)

    @property
    def keep_every(self) -> int:
        """The number of rounds between kept global parameters, which are those of no unfinished merge."""
        return self.run.keep_every * self.schedule.messages

    @property
    def fragment(self) -> int:
        """The fragment of the open round."""
        return self.schedule.fragment_in(self.round)

    @property
    def base(self) -> str:
        """The digest that drifts of the open round start from: that of its fragment, and of what was received."""
        return self.base_of(self.fragment)

    def base_of(self, fragment: int) -> str:
        """The digest that drifts of the next round of a fragment start from, as far as that is known."""
        digest = self.digests[fragment]
        if fragment != self.fragment or not self.received:
            return digest
        received = b"".join(x.tobytes() for arrays in self.received for x in arrays)
        return hash_of(digest.encode() + received)

    @property
    def digest(self) -> str:
        """The digest of all global parameters before the open round."""
        return self.digests[0] if len(self.digests) == 1 else hash_of("".join(self.digests).encode())

    def open(
        self,
        local: LocalStepsState,
        params: PyTree | None,
        *,
        place: str,
        keep_every: int = 1,
        owners: int = 0,
        begin: bool = False,
    ) -> Division:
        """Checks the model and the method against those of the run, which this opens if there is none and it may.

        Without `params`, as where one only reads, the dtypes of parameters are not compared.

        Returns:
          The fragments of the model.

        Raises:
          ValueError: islands cannot take the reducer, or not with owners, or a fragment has no leaves.
          RunMismatchError: the run has another model or method.
          RunMissingError: there is no run, and `begin` is false.
        """
        division = divide(self._config, local.anchor)
        parts = division.split(local, local.anchor if params is None else params)
        anchors = [part.local.anchor for part in parts]
        self.plans = [check_reducer(self._reducer, anchor) for anchor in anchors]
        if owners:
            check_owners(self.method, self.plans)
        self.schedule = self.schedule._replace(messages=len(self.plans[0].messages))
        self.lasts = all(plan.lasts for plan in self.plans)
        self._updates = [jax.eval_shape(lambda anchor: anchor, anchor) for anchor in anchors]
        self.needs_rate = needs_rate(self.method.outer, local.anchor)
        describe = partial(
            identity.describe,
            self.method,
            local,
            params,
            parts,
            self.plans,
            sync_period=self._config.sync_period,
            needs_rate=self.needs_rate,
            fragments=division.describe(self.schedule),
        )
        chosen = {"keep_every": keep_every, "owners": owners}
        self.run = identity.open_run(self._store, describe, place=place, begin=begin, **chosen)
        self._name_bits([part.local for part in parts])
        return division

    def go_to(self, anchor: protocol.Anchor, locals_: Sequence[LocalStepsState]) -> None:
        """Makes the round after kept global parameters, which these states have, the open one."""
        self.round, self.kept, self.received = anchor.round, anchor.round, []
        self.counted = {self._key(name, body): body for name, body in anchor.counted}
        self._name_bits(locals_)
        before = self._last = read_commit(self._store, anchor.round - 1) if anchor.round else None
        self.expected, self._bodies, self._sum = () if before is None else before.expected, {}, None

    def load_newest(
        self, locals_: Sequence[LocalStepsState], *, known: str | None = None
    ) -> tuple[protocol.Anchor, list[LocalStepsState]]:
        """Reads the newest kept global parameters that are whole into states of fragments; the open round stays.

        The rounds since the last ones but one are there, too: from those the same parameters follow. If the digest of
        the states is `known`, those that have the same bits are not read: the states are returned.

        Raises:
          DamagedError: there are none, or none are whole; it names the newest.
        """
        is_told = False
        while True:
            # A listing may come late; the parameters that a run begins with have a known name.
            names, damage = self._store.list("anchors/")[-KEPT_ANCHORS:] or [protocol.anchor_name(0)], None
            # Those that are on their way first: newer ones would never come over a link that is slower than the rounds.
            for name in sorted(names, key=lambda name: (name == self._wanted, name), reverse=True):
                self._wanted = name
                try:
                    found = self._load(name, locals_, known)
                except DamagedError as error:
                    damage = damage or error
                    continue
                if found is not None:
                    self._wanted = None
                    return found
            self._wanted = None
            # Otherwise the run has gone on so far since the listing that these names are forgotten.
            kept = self._store.list("anchors/")[-KEPT_ANCHORS:]
            if damage is not None and not (len(kept) == KEPT_ANCHORS and names[0] < kept[0]):
                raise damage
            if self._store.now() > self._store.deadline:
                raise damage or DamagedError(
                    f"the store lists no kept global parameters that are there ({', '.join(names)}), though the run "
                    f"has begun; {identity.RESTORE}"
                )
            if not is_told:
                logger.warning("waiting for kept global parameters: the store lists none that are there")
            is_told = True
            self._store.sleep(LOOK_PAUSE)

    def _load(
        self, name: str, locals_: Sequence[LocalStepsState], known: str | None
    ) -> tuple[protocol.Anchor, list[LocalStepsState]] | None:
        """Reads kept global parameters into states; returns `None` if their record is deleted."""
        record = self._store.get(name)
        if record is None:
            return None
        anchor = protocol.parse(Anchor, name, record)
        if anchor.digest == known and self._store.get_range(protocol.body_name(anchor.body), 0, 1):
            return anchor, [*locals_]
        found = self._store.get_body(anchor.body)
        if found is None and not anchor.round:
            # Only the record stays of the parameters that a run began with.
            return None
        if found is None:
            raise DamagedError(f"the store has no body {anchor.body}, which {name} names; {identity.RESTORE}")
        like = [select_shared(local) for local in locals_]
        shared = restore_shared(unpack_found(anchor.body, found, describe_shared(like)), like)
        return anchor, [commit_counts(with_shared(*pair)) for pair in zip(locals_, shared, strict=True)]

    def follow(self, locals_: Sequence[LocalStepsState]) -> list[LocalStepsState]:
        """Goes to the newest global parameters: the kept ones, and every round since."""
        while True:
            anchor, found = self.load_newest(locals_)
            self.go_to(anchor, found)
            with suppress(_LeftBehindError):
                while (commit := self.read_commit(self.round)) is not None:
                    fragment = self.fragment
                    found[fragment] = with_shared(found[fragment], self.advance(found[fragment], commit))
                return found

    def read_commit(self, number: int) -> Commit | None:
        """The end of a round, or `None` before it; there is one for ever.

        Raises:
          RunMismatchError: it is that of another run.
        """
        commit = read_commit(self._store, number)
        if commit is not None:
            identity.check_mark(commit.run, self.run, protocol.round_name(number, "commit"))
        return commit

    def check_same(self, *, last: bool = True) -> None:
        """Checks that the store still holds this run, and the end of the `last` round that this process has followed.

        Raises:
          RunMismatchError: it holds another run, or another end of that round.
          ConnectionError: it holds none, as a folder under which nothing is mounted or a copy of an earlier day.
        """
        identity.check_same(self._store, self.run)
        if self._last is None or not last:
            return
        name, found = protocol.round_name(self.round - 1, "commit"), self.read_commit(self.round - 1)
        cure = "start this island again, which goes on from where the run is now"
        if found is None:
            raise ConnectionError(
                f"{self.run.place} has no {name}, which this island has taken: it was set back to an earlier state; "
                f"restore the newer one, or {cure}"
            )
        if (found.base, found.members) != (self._last.base, self._last.members):
            raise RunMismatchError(
                f"{name} in {self.run.place} is another one than this island has taken: the store was set back to an "
                f"earlier state, and others have gone on from there; {cure}"
            )

    def check_not_forgotten(self, number: int) -> None:
        """Raises `_LeftBehindError` if the bodies of a round may be deleted."""
        if is_forgotten(self._store, number, self.rounds):
            raise _LeftBehindError

    def advance(self, local: LocalStepsState, commit: Commit) -> Shared:
        """Takes the outer step of the open round, of whose fragment this is the state; the next round is open then.

        A round of a message before the last has no outer step: its mean is received.
        """
        fragment, merges = self.fragment, self.schedule.merges_in(self.round)
        shared = self._end_round(select_shared(local), local.reducer[0], commit, self.round)
        self.round, self._bodies, self._sum, self._last_pieces = self.round + 1, {}, None, {}
        self._last = commit
        self.expected = commit.expected
        bodies = {(member.name, fragment): member.body for member in commit.members}
        if self.own.get(fragment, ("", None))[0] in bodies.values():
            # No other round counts it.
            del self.own[fragment]
        if not merges:
            return shared
        self.digests[fragment] = digest_of(shared)
        # The islands that sent most recently come last.
        counted = {key: body for key, body in self.counted.items() if key not in bodies} | bodies
        self.counted = dict(list(counted.items())[-MOST_NAMES * self.schedule.number :])
        return shared

    def rebuild(self, locals_: Sequence[LocalStepsState]) -> list[LocalStepsState]:
        """Computes the global parameters before the open round again, from the kept ones."""
        anchor, found = self.load_newest(locals_)
        if anchor.round > self.round:
            raise _LeftBehindError
        self.received, self._sum = [], None
        for number in range(anchor.round, self.round):
            commit, fragment = self.read_commit(number), self.schedule.fragment_in(number)
            assert commit is not None
            local = found[fragment]
            shared = self._end_round(select_shared(local), local.reducer[0], commit, number)
            found[fragment] = with_shared(local, shared)
        self._name_bits(found)
        return found

    def keep_first(self, locals_: Sequence[LocalStepsState]) -> None:
        """Keeps the global parameters that the run begins with."""
        arrays = copy_shared_to_host([select_shared(local) for local in locals_])
        keep_anchor(self._store, self.round, self.digest, self.counted_bodies(), arrays)

    def counted_bodies(self) -> list[tuple[str, str]]:
        """Islands and the bodies that the last rounds took of them, as the record of kept parameters has them."""
        return [(name, body) for (name, _), body in self.counted.items()]

    def has_counted(self, name: str, body: str) -> bool:
        """Whether this body is the last one of its fragment that a round took of an island."""
        return self.counted.get(self._key(name, body)) == body

    def _key(self, name: str, body: str) -> tuple[str, int]:
        # The round in the name of a body is one of its fragment.
        return name, self.schedule.fragment_in(protocol.round_of(body))

    def _name_bits(self, locals_: Sequence[LocalStepsState]) -> None:
        self.digests = [digest_of(select_shared(local)) for local in locals_]

    def body(self, place: str, number: int) -> list[Any]:
        """The arrays of a drift of a round, as decoders take them.

        Raises:
          DamagedError: the body is missing, or its bytes are not those that its hash names.
        """
        fragment = self.schedule.fragment_in(number)
        own, arrays = self.own.get(fragment, ("", []))
        if own == place:
            return arrays if self._reducer.forms.codec is None else self._decode_code(place, arrays, number)
        if place not in self._bodies:
            found = self._store.get_body(place)
            if not is_whole(found):
                # It goes with the round in which it was sent, which may be an earlier one; some of its pieces go first.
                self.check_not_forgotten(protocol.round_of(place))
            if found is None:
                raise DamagedError(f"the store has no body {place}, which a drift names")
            self._bodies[place] = self._decode(place, found, number)
        return self._bodies[place]

    def check_drifts(self, drifts: Mapping[str, Drift], number: int, local: LocalStepsState) -> set[str]:
        """Checks what a commit may count, and adds up the drifts that it counts if it is this island's.

        Args:
          drifts: the records of the round, by island in the order of a commit.
          number: the round.
          local: the state of its fragment.

        Returns:
          The islands whose bodies are missing, cut or damaged, or have other pieces; with owners as far as the last
          piece tells, which needs all of a body.
        """
        damaged, found, start = set[str](), None, (self.base, self.run.mark)
        if self._adds_up(number):
            likely = [(drift.body, drift.weight) for drift in drifts.values() if (drift.base, drift.run) == start]
            found = self._begin_sum(number, likely, select_shared(local))
        for name, drift in drifts.items():
            try:
                if self.run.owners:
                    self._check_pieces(drift, number)
                elif found is not None and (drift.base, drift.run) == start:
                    self._add(found, (drift.body, drift.weight), local.reducer[0])
                else:
                    self.body(drift.body, number)
            except DamagedError:
                damaged.add(name)
        return damaged

    def _check_pieces(self, drift: Drift, number: int) -> None:
        if len(drift.pieces) != self.run.owners:
            raise DamagedError(f"the record of {drift.body} has {len(drift.pieces)} pieces of {self.run.owners}")
        last = self.run.owners - 1
        if self._find_piece(self.schedule.fragment_in(number), drift.body, last) is None:
            layout = self._layout_in(number)
            found = read_piece(self._store, drift.body, drift.bytes, layout, last, drift.pieces[last])
            self._last_pieces[drift.body] = found

    def _find_piece(self, fragment: int, place: str, piece: int) -> bytes | None:
        """A piece of a body that this island has encoded, or has read before the commit."""
        own, rows = self.own.get(fragment, ("", None))
        if own == place:
            return rows[piece].tobytes()
        return self._last_pieces.get(place) if piece == self.run.owners - 1 else None

    def pack_body(self, tag: str, arrays: list[Any], number: int) -> tuple[Body, tuple[str, ...]]:
        """Returns the body with this island's drift of a round, and with owners the hashes of its pieces."""
        codec, fragment = self._reducer.forms.codec, self.schedule.fragment_in(number)
        if self.run.owners:
            rows = self._layout_in(number).cut(arrays)
            body = Body(number, tag, [rows])
            self.own[fragment] = (body.place, body.arrays[0])
            return body, tuple(hash_of(row.tobytes()) for row in rows)
        if codec is not None:
            # Decoded as all islands decode it, so that their bits are the same.
            arrays = [np.frombuffer(codec.encode(arrays, self._updates[fragment]), np.uint8)]
        body = Body(number, tag, arrays)
        self.own[fragment] = (body.place, body.arrays if codec is None else body.arrays[0])
        return body, ()

    def _decode(self, place: str, found: list[bytes], number: int) -> list[Any]:
        if self._reducer.forms.codec is None:
            return unpack_found(place, found, self._messages_in(number))
        (code,) = unpack_found(place, found, None)
        return self._decode_code(place, code, number)

    def _decode_code(self, place: str, code: np.ndarray, number: int) -> list[Any]:
        codec, fragment = self._reducer.forms.codec, self.schedule.fragment_in(number)
        assert codec is not None
        try:
            return codec.decode(code.tobytes(), self._updates[fragment])
        except DamagedCodeError as error:
            raise DamagedError(f"the body {place} is no code of {codec.name}: {error}") from error

    def _end_round(self, shared: Shared, reducer: State, commit: Commit, number: int) -> Shared:
        if not self.schedule.merges_in(number):
            self.received.append(self._mean_of(commit, number))
            return shared
        shared = self._take_step(shared, reducer, commit, number)
        self.received = []
        return shared

    def _messages_in(self, number: int) -> list[Any]:
        """Shapes and dtypes of what islands send in a round."""
        return self.plans[self.schedule.fragment_in(number)].messages[self.schedule.message_in(number)]

    def _layout_in(self, number: int) -> PieceLayout:
        return PieceLayout(self.run.owners, tuple(self._messages_in(number)))

    def _read_mean(self, commit: Commit, number: int) -> list[np.ndarray]:
        """The mean of a round with owners: of the pieces that they have created, or will."""
        # A meeting may end before all of them are there, and the next one goes on.
        if self._pieces is None or self._pieces[0] != number:
            pieces = MeanPieces(
                self._store,
                number,
                commit,
                self._layout_in(number),
                known=partial(self._find_piece, self.schedule.fragment_in(number)),
                name=self._name,
                seconds=self._owner_seconds,
                check=self.check_not_forgotten,
            )
            self._pieces = number, pieces
        mean = self._pieces[1].collect()
        self._pieces = None
        return mean

    def _mean_of(self, commit: Commit, number: int) -> list[np.ndarray]:
        if self.run.owners:
            return self._read_mean(commit, number)
        like = self._messages_in(number)
        bodies = [self.body(member.body, number) for member in commit.members]
        return mean_of(bodies, [member.weight for member in commit.members], like)

    def _adds_up(self, number: int) -> bool:
        """Whether a round adds up what drifts are decoded to, and nothing else that would need their bodies again."""
        plan = self.plans[self.schedule.fragment_in(number)]
        return not self.run.owners and not plan.renews and self.schedule.merges_in(number)

    def _begin_sum(self, number: int, members: list[tuple[str, float]], shared: Shared) -> _Sum:
        """The sum of the first of these members as far as there is one; one of other drifts is of no use."""
        found = self._sum
        if found is None or found.round != number or found.added != members[: len(found.added)]:
            found = self._sum = _Sum(number, self.method.begin_total(shared.anchor), shared.reducer)
        return found

    def _add(self, found: _Sum, member: tuple[str, float], reducer: State) -> None:
        """Adds a member to a sum, unless it has been, and drops its body."""
        if member in found.added:
            return
        let_go(found.total)
        self._add_arrays(found, self.body(member[0], found.round), member[1], reducer)
        found.added.append(member)
        self._bodies.pop(member[0], None)

    def _add_arrays(self, found: _Sum, arrays: list[Any], share: float, reducer: State) -> None:
        weight = np.float32(share)
        found.total, found.reducer = add_member(self.method, found.total, arrays, weight, reducer, self.received)

    def _sum_drifts(self, commit: Commit, number: int, shared: Shared, reducer: State) -> _Sum:
        """The sum of a round's drifts; with owners the mean, decoded, since `D` is linear where these are."""
        members = [(member.body, member.weight) for member in commit.members]
        if self._adds_up(number):
            found = self._begin_sum(number, members, shared)
            for member in members:
                self._add(found, member, reducer)
            return found
        means, added = self._mean_of(commit, number), ((self.body(body, number), share) for body, share in members)
        found = _Sum(number, self.method.begin_total(shared.anchor), shared.reducer)
        for arrays, share in [(means, 1.0)] if self.run.owners else added:
            self._add_arrays(found, arrays, share, reducer)
        if self.plans[self.schedule.fragment_in(number)].renews:
            found.reducer = renew_reducer(self.method, shared.anchor, means, reducer, self.received)
        return found

    def _take_step(self, shared: Shared, reducer: State, commit: Commit, number: int) -> Shared:
        # Δ = Σ n_w D(C(Δ_w)) / Σ n_w over the members of the commit, in its order: the same bits on every island
        weight = sum(member.weight for member in commit.members)
        if not weight:
            return shared
        rates = [member.rate for member in commit.members]
        rate = None if None in rates else np.float32(sum(rates) / len(rates))  # pyright: ignore
        found = self._sum_drifts(commit, number, shared, reducer)
        divisor = np.float32(1.0 if self.run.owners else weight)
        # A large model has little memory beside it.
        self._bodies, self._sum = {}, None
        return take_outer_step(self.method, shared, found.total, divisor, found.reducer, rate)
