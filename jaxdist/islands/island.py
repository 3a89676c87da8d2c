"""An island as a machine: `enter` takes the run as it is, `meet` ends a round with the others, `leave` says so."""

import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np

from .._core.checks import check_range
from .._core.types import PyTree
from ..local_sgd.state import LocalStepsState
from ..state.marks import bind
from ..state.placement import place_leaf
from . import protocol, run
from .base import AnchorDiffersError, DamagedError, JoinOptions, NameTakenError, Report, TooFewIslandsError
from .connection import LONGEST_PAUSE, Connection
from .exchange import (
    UNCOUNTED,
    catch_up,
    compile_programs,
    encode_drift,
    measure_drift,
    rebase,
    restart_buffers,
    restart_counts,
    select_shared,
    subtract,
    to_host,
    with_shared,
    zeros_like,
)
from .identity import check_same, log_entered
from .model import MeetingState, automatic_mesh, find_model, replace_model
from .outbox import DriftMessage, InFlight, Outbox
from .protocol import Commit, Drift, Next, round_name
from .run import Replay, _LeftBehindError

# An island that is late so often is not waited for.
LATE_IS_SLOW = 3
DIFFERING_IS_FATAL = 3


def _check_examples(local: LocalStepsState) -> None:
    """Checks that all leaves have counted as many examples, since a drift has one weight."""
    counted = to_host(local.examples.value)
    if counted.size and (counted != counted[0]).any():
        raise ValueError(
            f"the steps passed a tree as examples=, and counted {counted.min():g} to {counted.max():g} for single "
            "leaves: an island's drift has one weight; pass one number to the update"
        )


class Island:
    """One training job of a run. Made by `join`."""

    def __init__(self, store: Connection, config: Any, options: JoinOptions):
        self._store, self._config, self._options = store, config, options
        self._replay = Replay(store, config)
        self._index = np.int32(zlib.crc32(options.name.encode()) % 2**31)
        self._session = 0
        self._outbox = Outbox(store, options.round_timeout)
        self._entered = self._was_offline = False
        # Whether rounds have ended that this island had no time to take.
        self._behind = False
        # Whether the state that entered had progress which no round has.
        self._keeps_progress = True
        self._late = self._differing = 0
        self._last_rate: float | None = None
        self._last_weight = 1.0
        self._too_few_since: float | None = None

    @property
    def run(self) -> str:
        """The number of the run, 32 hexadecimal digits, drawn when it was opened; "" before `enter`."""
        return self._replay.run.id

    @property
    def round(self) -> int:
        """The open round of the run, as far as this island has followed it."""
        return self._replay.round

    def due(self, number: int) -> bool:
        """Whether to meet after step `number`, counted from 0: every `sync_period` steps.

        Examples:
          >>> import optax, jaxdist as jd
          >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=3, axis=None)
          >>> with jd.islands.join(jd.islands.memory(), tx, name="here") as island:
          ...     [number for number in range(7) if island.due(number)]
          [2, 5]
        """
        return (number + 1) % self._config.sync_period == 0

    @automatic_mesh()
    def enter(self, state: PyTree) -> PyTree:
        """Opens the run with this state, or takes the global parameters of the run that is there.

        Compiles what meetings need before it announces itself, so that others never wait for a compilation. The state
        takes over the step of the run, `sync_period` times its rounds: `LocalStepsState.count` and the schedules of the
        inner optimizer (fields `count` without moments beside them) go on there. Moments, with the counts of their bias
        correction, are the state's own: zero in a fresh one, from a checkpoint as they were saved (see `moments` of
        `join`). Its residual and its progress since its last round are kept if the run has not gone on since and this
        progress was not sent.

        The logger `jaxdist.islands` says which run it is (`run`), whether this island has opened it, and at which round
        it is (`round`).

        Raises:
          RunMismatchError: the run has another model, reducer, outer optimizer or format; nothing was written.
          RunMissingError: there is none, and `begin=False`; or there are rounds of one without its `run.json`.
          DamagedError: kept global parameters are missing or not whole.
          TooFewIslandsError: fewer than `begin_with` islands came within `patience`.
        """
        self._store.deadline = self._store.now() + self._options.patience
        local, params = find_model(state)
        options = self._options
        self._replay.open(local, params, place=options.place, keep_every=options.keep_every, begin=options.begin)
        self._options = options._replace(keep_every=self._replay.run.keep_every)
        self._session = run.claim(self._store, self._options.name)
        if not run.has_begun(self._store):
            self._replay.keep(local)
        local, params = self._take_run(local, params)
        if options.moments == "fresh":
            local = restart_buffers(self._config.inner, local, params)
        state = replace_model(state, self._restart_counts(self._catch_up(local)), params)
        model = MeetingState(*find_model(state))
        # A program that compiles in a meeting would make the others wait.
        compile_programs(
            self._replay.method, self._index, model.local, model.params, needs_rate=self._replay.needs_rate
        )
        # Rounds may have ended meanwhile: this island announces itself in the one that is open.
        self._follow_jumps(self._settle, model, Report(self._replay.round))
        self._late = 0
        state = replace_model(state, self._restart_counts(self._catch_up(model.local)), model.params)
        self._entered = True
        log_entered(self._replay.run, self._replay.round, self._replay.kept, options)
        self._store.create(self._name("here"), b"{}")
        self._await_first()
        return state

    def meet(self, state: PyTree, *, examples: float | int | None = None) -> tuple[PyTree, Report]:
        """Exchanges this island's progress with the others'; returns within `round_timeout` and the transfer.

        Args:
          state: the training state; it contains the state of `local_steps` and the parameters.
          examples: the weight of this island's drift, such as the number of its examples in the round; not negative.
            `None`: the sum of the `examples=` that the steps of the round passed to the update, as on a mesh, or 1 if
            they passed none. Progress that an earlier round did not take keeps the weight of one round.

        Returns:
          The state, with the global parameters after the round and what of its own progress no round has taken, and a
          `Report`. If the store is out of reach the report says so, and the progress stays: go on training.

        Raises:
          ValueError: `examples` is negative or not finite; the steps passed a tree of numbers, and a drift has one
            weight; or this island has not entered.
          NameTakenError: a newer process has this name.
          AnchorDiffersError: the global parameters differ from those of the run again and again.
          TooFewIslandsError: fewer than `quorum` islands for `patience` seconds.
        """
        if not self._entered:
            raise ValueError("call enter(state) before meet, and not meet after leave")
        return self._meet(state, examples, leaving=False)

    def leave(
        self, state: PyTree | None = None, *, examples: float | int | None = None
    ) -> tuple[PyTree, Report] | None:
        """Leaves the run, so that no island waits for this one; with a state, its progress is sent first.

        It waits for no other island. `join` calls it without a state at the end of its `with` block.
        """
        if not self._entered:
            return None
        result = None if state is None else self._meet(state, examples, leaving=True)
        self._store.deadline = self._store.now() + self._options.round_timeout
        # What is under way counts, if the store can be reached.
        with suppress(ConnectionError, DamagedError):
            self._outbox.finish_transfer()
            self._outbox.deliver()
        self._say_left(self._store)
        return result

    def abandon(self) -> None:
        """Leaves the run after an error, which the other processes of this island may not have: none waits for them."""
        # A store is asked by one thread at a time.
        is_idle = self._outbox.abandon()
        if self._entered and is_idle and jax.process_index() == 0:
            self._say_left(Connection(self._store.store, together=False))

    def _say_left(self, store: Connection) -> None:
        self._entered = False
        store.deadline = store.now() + self._options.round_timeout
        # Otherwise the others wait for this island once, for `round_timeout`.
        with suppress(ConnectionError, DamagedError):
            number = run.open_round(store, self._replay.round)
            store.create(round_name(number, "left", self._options.name), b"{}")

    # A meeting

    @automatic_mesh()
    def _meet(self, state: PyTree, examples: float | int | None, *, leaving: bool) -> tuple[PyTree, Report]:
        if examples is not None:
            check_range("examples", examples, 0, hint="it weights this island's drift")
        store, started = self._store, self._store.now()
        store.sent = store.received = 0
        store.deadline = started + self._options.round_timeout
        local, params = find_model(state)
        _check_examples(local)
        report = Report(self._replay.round)
        model = MeetingState(local, params)
        try:
            exchange = partial(self._exchange, examples=examples, leaving=leaving)
            report = self._follow_jumps(exchange, model, report)
        except ConnectionError:
            report, self._was_offline = report._replace(offline=True), True
        report = report._replace(
            round=self._replay.round,
            wait_seconds=store.now() - started,
            sent_bytes=store.sent,
            received_bytes=store.received,
            digest=self._replay.digest,
        )
        return replace_model(state, self._restart_counts(model.local), model.params), report

    def _follow_jumps(
        self, act: Callable[[MeetingState, Report], Report], model: MeetingState, report: Report
    ) -> Report:
        """Calls `act`, which changes `model` by whole rounds, again if rounds are gone or bytes were cut on the way."""
        while True:
            try:
                return act(model, report)
            except _LeftBehindError:
                self._jump(model)
                report = report._replace(late=True)
            except DamagedError:
                if self._store.now() >= self._store.deadline:
                    raise
                self._store.sleep(min(LONGEST_PAUSE, self._options.round_timeout / 50))

    def _exchange(self, model: MeetingState, report: Report, *, examples: float | None, leaving: bool) -> Report:
        """Settles what is under way, then sends this island's drift until a round takes it or time is up."""
        # First, since a store is asked by one thread at a time.
        self._outbox.finish_transfer()
        newest = run.newest_session(self._store, self._options.name)
        if self._was_offline or newest != self._session:
            # Back, a store may be another one; and so may one that does not list this process.
            check_same(self._store, self._replay.run)
            self._was_offline = False
        if newest > self._session:
            raise NameTakenError(f"another process has joined as {self._options.name!r}: this one must stop")
        report = self._settle(model, report)
        # A drift sent to a round that has ended would count in none.
        while not self._behind and (not leaving or self._outbox.flight is None):
            if self._outbox.flight is None:
                if not self._send(model, examples, leaving=leaving):
                    return report._replace(nonfinite=True)
                if leaving or self._options.overlap:
                    break
            commit = self._await_commit()
            if commit is None:
                break
            report = self._apply(model, commit, report)
            if report.counted:
                self._late = 0
                break
            # A round that ended without this drift: it is sent again, for the next round, at once.
            report = self._settle(model, report)
        return report

    def _settle(self, model: MeetingState, report: Report) -> Report:
        """Applies the rounds that have ended, and with `overlap` waits for that of the drift that is under way.

        Those that had ended when this island found the first of them are applied in any case, so that it gets ahead.
        After them the deadline ends it, since others may finish rounds faster than this island takes them.
        """
        self._behind = False
        if self._outbox.flight is not None:
            commit = self._await_commit()
            if commit is None:
                return report
            report = self._apply(model, commit, report)
        last = None
        while (commit := self._replay.read_commit(self._replay.round)) is not None:
            if last is None:
                # A listing may miss a round of the last moments.
                last = max([self._replay.round, *run.ended_rounds(self._store)])
            if self._replay.round > last and self._store.now() >= self._store.deadline:
                self._behind = True
                break
            report = self._apply(model, commit, report)._replace(late=True)
        if report.late:
            self._late += 1
        elif report.counted:
            self._late = 0
        return report

    def _send(self, model: MeetingState, examples: float | None, *, leaving: bool) -> bool:
        """Puts this island's drift into the store.

        Returns false if it is not finite: then the anchor is taken, and the inner optimizer restarts.
        """
        local = model.local
        drift = measure_drift(local.anchor, model.params)
        weight = self._weight_of(local, drift) if examples is None else float(examples)
        arrays, after, finite, moved = encode_drift(
            self._replay.method, self._index, drift, local.reducer[0], np.float32(weight)
        )
        if not bool(to_host(finite)):
            model.params = rebase(local.anchor, model.params, zeros_like(drift))
            # Moments that are not finite would make the next steps so, too.
            model.local = restart_buffers(self._config.inner, local, model.params)
            self._store.create(self._name("left"), b"{}")
            return False
        rate = self._rate_of(local, bool(to_host(moved)))
        name = self._name("drift")
        place, body = self._replay.pack_body(name, [to_host(x) for x in arrays])
        waited = self._late < LATE_IS_SLOW
        own = self._replay.digest
        record = Drift(self._session, place, own, weight, rate, waited, leaving, len(body), self._replay.run.mark)
        message = DriftMessage(self._replay.round, name, protocol.to_json(record), place, body)
        flight = InFlight(self._replay.round, place, drift, after, self._store.now(), message, self._session)
        self._outbox.send(flight, self._replay.expected, in_background=self._options.overlap and not leaving)
        return True

    def _await_commit(self) -> Commit | None:
        """Returns the commit of the open round, which this island may create; `None` if the deadline comes first."""
        store, pause = self._store, 0.002
        at_least = self._options.begin_with if self._replay.round == 0 else 1
        prefix = round_name(self._replay.round, "")
        while True:
            seen = protocol.see(name.removeprefix(prefix) for name in store.list(prefix))
            if self._options.name not in seen.drifts:
                self._replay.check_not_forgotten(self._replay.round)
            if not seen.committed and self._outbox.deliver():
                # The store was out of reach when it was sent.
                continue
            assert self._outbox.flight is not None
            now = store.now()
            # The deadline of this meeting ends the wait too: a drift of an earlier meeting has waited long enough.
            elapsed = float("inf") if now >= store.deadline else now - self._outbox.flight.sent_at
            action = protocol.decide(
                seen,
                self._replay.expected,
                elapsed=elapsed,
                round_timeout=self._options.round_timeout,
                at_least=at_least,
                quorum=self._options.quorum,
            )
            if action is Next.COMMIT:
                self._commit(seen)
            if action is not Next.WAIT:
                commit = self._replay.read_commit(self._replay.round)
                if commit is not None:
                    self._too_few_since = None
                    return commit
            if now >= store.deadline:
                self._check_patience(len(seen.drifts), now)
                return None
            time_left = store.deadline - now
            store.sleep(min(pause, max(time_left, 0.0)))
            pause = min(1.5 * pause, LONGEST_PAUSE, self._options.round_timeout / 50)

    def _commit(self, seen: protocol.Seen) -> None:
        """Ends the round: reads and checks every drift, then creates the commit, unless another island is faster."""
        drifts, damaged = {}, set()
        for name in sorted(seen.drifts):
            place = round_name(self._replay.round, "drift", name)
            try:
                drifts[name] = protocol.parse(Drift, place, self._store.get(place) or b"")
                self._replay.body(drifts[name].body, self._replay.round)
            except DamagedError:
                damaged.add(name)
        # Where another disk is mounted by now, the round is not this run's to end.
        check_same(self._store, self._replay.run)
        expected, own = self._replay.expected, self._replay.digest
        commit = protocol.make_commit(seen, expected, drifts, damaged, own, self._replay.run.mark)
        self._store.create(round_name(self._replay.round, "commit"), protocol.to_json(commit))

    def _apply(self, model: MeetingState, commit: Commit, report: Report) -> Report:
        """Takes the outer step of a round; progress that it did not take stays ahead of the new anchor."""
        local, flight = model.local, self._outbox.flight
        ahead = measure_drift(local.anchor, model.params)
        if commit.base != self._replay.digest:
            local = self._take_kept_anchor(local)
        bodies = {member.name: member.body for member in commit.members}
        counted = (
            flight is not None and flight.round == self._replay.round and bodies.get(self._options.name) == flight.body
        )
        shared = self._replay.advance(local, commit)
        if flight is not None and counted:
            ahead = subtract(ahead, flight.drift)
            local = local._replace(reducer=(flight.reducer,))
        model.local = with_shared(local, shared)
        model.params = rebase(shared.anchor, model.params, ahead)
        self._outbox.clear()
        if self._replay.round % self._options.keep_every == 0:
            with suppress(DamagedError):  # what cannot be read now is deleted another time
                self._replay.keep(model.local)
        return report._replace(members=tuple(bodies), missing=commit.missing, counted=counted)

    # Catching up

    def _take_run(self, local: LocalStepsState, params: PyTree) -> tuple[LocalStepsState, PyTree]:
        """Enters the run where it is; a state that is just as far keeps its progress."""
        own_round, own_digest, model = int(to_host(local.rounds)[0]), self._replay.digest, MeetingState(local, params)
        ahead, kept = measure_drift(local.anchor, params), local.reducer[0]
        while True:
            anchor, model.local = self._replay.load_newest(model.local)
            model.params = rebase(model.local.anchor, params, zeros_like(ahead))
            self._replay.go_to(anchor)
            with suppress(_LeftBehindError):
                while (commit := self._replay.read_commit(self._replay.round)) is not None:
                    self._apply(model, commit, Report(0))
                break
        # The drift of an earlier process of this name will count in the open round: it must not be sent again.
        is_sent = self._store.get(self._name("drift")) is not None
        here = (self._replay.round, self._replay.digest)
        self._keeps_progress = (own_round, own_digest) == here and not is_sent
        if self._keeps_progress:
            model.params = rebase(model.local.anchor, params, ahead)
        else:
            # What this residual holds may have been sent since.
            fresh = self._config.reducer.init(model.local.anchor)
            kept = jax.tree.map(lambda x, y: place_leaf(x, y.sharding), bind(fresh, None), kept)
            model.local = with_shared(model.local._replace(reducer=(kept,)), select_shared(model.local))
        return model.local, model.params

    def _jump(self, model: MeetingState) -> None:
        """Goes on from kept parameters, where the rounds before them are gone. What none of them took is kept."""
        check_same(self._store, self._replay.run)
        flight, ahead = self._outbox.flight, measure_drift(model.local.anchor, model.params)
        anchor, local = self._replay.load_newest(model.local)
        if flight is not None and (self._options.name, flight.body) in anchor.counted:
            ahead = subtract(ahead, flight.drift)
            local = with_shared(local._replace(reducer=(flight.reducer,)), select_shared(local))
        model.local, model.params = local, rebase(local.anchor, model.params, ahead)
        self._outbox.clear()
        self._replay.go_to(anchor)

    def _take_kept_anchor(self, local: LocalStepsState) -> LocalStepsState:
        """Takes the kept global parameters and the rounds since, where this island has others than the run."""
        self._differing += 1
        if self._differing >= DIFFERING_IS_FATAL:
            raise AnchorDiffersError(
                f"the global parameters of {self._options.name!r} differ from those of the run for the "
                f"{self._differing}rd time: this hardware or version rounds in another way; use that of the others"
            )
        return self._replay.rebuild(local)

    # Small parts

    def _weight_of(self, local: LocalStepsState, drift: PyTree) -> float:
        """The number of examples that the steps of the round counted; 1 if they counted none."""
        counted, since = to_host(local.examples.value), int(to_host(local.since)[0])
        if counted[0] == UNCOUNTED:
            return 1.0
        # Offline, steps go on: a drift of several rounds is their sum already, and has the weight of one.
        weight = float(counted[0]) * min(1.0, self._config.sync_period / max(since, 1))
        if weight:
            self._last_weight = weight
        elif any(bool(to_host(x).any()) for x in jax.tree.leaves(drift)):
            # Progress that an earlier round did not take.
            return self._last_weight
        return weight

    def _catch_up(self, local: LocalStepsState) -> LocalStepsState:
        """The state at the step of the run; ahead of it are only the steps of progress that is kept."""
        steps, count = self._replay.round * self._config.sync_period, int(to_host(local.count))
        if count == steps or (count > steps and self._keeps_progress):
            return local
        return catch_up(self._config.inner, local, np.int32(min(steps, np.iinfo(np.int32).max)), count > steps)

    def _rate_of(self, local: LocalStepsState, moved: bool) -> float | None:
        """The mean learning rate since the last round; `None` if the steps pass none and the outer step needs none.

        Raises:
          ValueError: the outer step needs one for this drift, and there never was one.
        """
        total, since = float(to_host(local.rates)[0]), int(to_host(local.since)[0])
        if total:
            self._last_rate = total / since
            return self._last_rate
        if not self._replay.needs_rate:
            return None
        if not moved:
            return 0.0
        # Progress that an earlier round did not take.
        if self._last_rate is None:
            raise ValueError(
                "the outer optimizer needs the learning rate of the inner steps, and none was passed: pass "
                "learning_rate= to the update of local_steps, or use slowmo(..., learning_rate=)"
            )
        return self._last_rate

    def _name(self, kind: str) -> str:
        return round_name(self._replay.round, kind, self._options.name)

    def _restart_counts(self, local: LocalStepsState) -> LocalStepsState:
        """The counts at the start of a round; in flight or offline, they go on."""
        if int(to_host(local.rounds)[0]) == self._replay.round and int(to_host(local.since)[0]):
            return local
        return restart_counts(local, np.int32(self._replay.round))

    def _await_first(self) -> None:
        """Waits for `begin_with` islands before the first round, so that none of them begins alone."""
        while self._replay.round == 0 and self._options.begin_with > 1:
            names = self._store.list(round_name(0, ""))
            seen = protocol.see(name.removeprefix(round_name(0, "")) for name in names)
            enough = len(seen.here | seen.drifts) >= self._options.begin_with
            if enough or seen.committed or run.is_forgotten(self._store, 0):
                return
            if self._store.now() > self._store.deadline:
                raise TooFewIslandsError(
                    f"{len(seen.here)} of begin_with={self._options.begin_with} islands came within "
                    f"{self._options.patience} s: {', '.join(sorted(seen.here))}; start the others, or lower begin_with"
                )
            self._store.sleep(0.05)

    def _check_patience(self, count: int, now: float) -> None:
        if self._too_few_since is None:
            self._too_few_since = now
        if now - self._too_few_since > self._options.patience:
            raise TooFewIslandsError(
                f"only {count} islands for {self._options.patience} s, and a round needs quorum="
                f"{self._options.quorum}: start others, or join with a lower quorum"
            )
