"""An island as a machine: `enter` takes the run as it is, `meet` ends a round with the others, `leave` says so.

A meeting follows the rounds that have ended, encodes what is ahead of the global parameters, brings it into the open
round, waits for the commit, and applies it. Each part ends at the deadline, and the next meeting goes on there. Where
the reducer sends several messages, a meeting does so for each of them.

With fragments, all of this is about the one that the open round is of. Each has its own drift under way.

`examples/from_scratch/islands.py` is the protocol in 100 lines of plain JAX.
"""

import logging
import math
import zlib
from collections import defaultdict, deque
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
from .base import (
    AnchorDiffersError,
    DamagedError,
    JoinOptions,
    NameTakenError,
    OfflineError,
    Report,
    StoreUnusableError,
    TooFewIslandsError,
)
from .cleanup import Cleaner
from .connection import GRACE, LONGEST_PAUSE, Connection, _UnansweredError
from .exchange import (
    UNCOUNTED,
    catch_up,
    compile_programs,
    copy_shared_to_host,
    encode_drift,
    measure_drift,
    measure_share,
    move_counts,
    rebase,
    rebase_after,
    restart_buffers,
    restart_counts,
    restart_from,
    select_shared,
    strengthen,
    subtract,
    subtract_counts,
    to_host,
    with_examples,
    with_shared,
    zeros_like,
)
from .fragments import Division, FragmentModel, RoundOrder
from .identity import log_entered
from .looks import REMEMBERED_WAITS, Looks
from .model import automatic_mesh, find_model, replace_model
from .outbox import InFlight, Outbox
from .owners import OWNERS_SHARE
from .protocol import Commit, Drift, Next, round_name
from .run import Replay, _LeftBehindError

logger = logging.getLogger("jaxdist.islands")

# An island that is late so often is not waited for.
LATE_IS_SLOW = 3
DIFFERING_IS_FATAL = 3
# Seconds that a goodbye may take.
GOODBYE = 2.0
# What float32 can count.
MOST_EXAMPLES = float(np.finfo(np.float32).max)
# The shortest pause between two looks at a round.
SHORTEST_LOOK = 0.002


def _examples_of(local: LocalStepsState) -> float:
    """How many examples the steps have counted that are ahead of the global parameters."""
    counted = to_host(local.examples.value)
    return max(float(counted[0]), 0.0) if counted.size else 0.0


def _check_examples(local: LocalStepsState) -> None:
    """Checks that all leaves have counted as many examples, since a drift has one weight, and that it is a weight."""
    counted = to_host(local.examples.value)
    is_weight = np.isfinite(counted) & ((counted >= 0) | (counted == UNCOUNTED))
    if not is_weight.all():
        raise ValueError(
            f"the steps have counted {counted[~is_weight][0]:g} examples since the last round, which would spoil the "
            "mean of all islands: pass examples= that are finite and not negative to the update"
        )
    if counted.size and (counted != counted[0]).any():
        raise ValueError(
            f"the steps passed a tree as examples=, and counted {counted.min():g} to {counted.max():g} for single "
            "leaves: an island's drift has one weight; pass one number to the update"
        )


def _rounds_of(local: LocalStepsState) -> int:
    """How many rounds the state counts, of which meetings alone may end any."""
    return int(to_host(local.rounds)[0])


def _check_rounds(local: LocalStepsState, before: int) -> None:
    """Checks that the steps have ended no round, of this island alone: its progress would be in none of the run's."""
    ended = _rounds_of(local) - before
    if ended > 0:
        raise ValueError(
            f"the steps since the last meeting have ended rounds by themselves ({ended}), without the other islands: "
            "no round of the run would have this progress. Pass sync=() to the update, tx.update(gradients, opt_state, "
            "params, sync=()); where others call it, as TrainState.apply_gradients of flax does, give them "
            "optax.GradientTransformationExtraArgs(tx.init, functools.partial(tx.update, sync=()))"
        )


class Island:
    """One training job of a run. Made by `join`."""

    def __init__(self, store: Connection, config: Any, options: JoinOptions):
        self._store, self._config, self._options = store, config, options
        seconds = OWNERS_SHARE * options.round_timeout
        self._replay = Replay(store, config, name=options.name, owner_seconds=seconds)
        self._index = np.int32(zlib.crc32(options.name.encode()) % 2**31)
        self._session = 0
        # How the model is divided into fragments: known once it is.
        self._division: Division | None = None
        self._outboxes, self._cleaner = self._new_outboxes(), Cleaner(store)
        self._entered = False
        # Whether this island took the last round, so that no other can have ended since by more than a moment.
        self._in_step = False
        # Whether rounds have ended that this island had no time to take.
        self._behind = False
        # Whether the state that entered had progress which no round has.
        self._keeps_progress = True
        self._late = self._differing = 0
        self._last_rate: float | None = None
        self._last_weight = 1.0
        # Examples of what is ahead of the global parameters of each fragment, as the last meeting left them.
        self._examples_before: list[float] = []
        # The rounds of each fragment that the state counted then.
        self._rounds_before: list[int] = []
        # The rounds in which this process has said that it is here.
        self._said_here: set[int] = set()
        # Whether the rounds before the kept parameters are gone, which this island has to take.
        self._left_behind = False
        # Of the meeting that goes on.
        self._report = Report(0)
        self._too_few_since: float | None = None
        self._offline_since: float | None = None
        self._few_meet = False
        # For how long it waited in the last rounds, where it was its turn to commit and where not: the island that is
        # last waits for no drift, but for the commit of one that looks now and then. Each message has waits of its own.
        self._waits = defaultdict[tuple[int, bool], deque[float]](lambda: deque(maxlen=REMEMBERED_WAITS))

    @property
    def run(self) -> str:
        """The number of the run, 32 hexadecimal digits, drawn when it was opened; "" before `enter`."""
        return self._replay.run.id

    @property
    def round(self) -> int:
        """The open round of the run, as far as this island has followed it."""
        return self._replay.round

    @property
    def _schedule(self) -> RoundOrder:
        return self._replay.schedule

    @property
    def _outbox(self) -> Outbox:
        """That of the fragment of the open round."""
        return self._outboxes[self._replay.fragment]

    def _new_outboxes(self) -> list[Outbox]:
        return [Outbox(self._store) for _ in range(self._schedule.number)]

    def due(self, number: int) -> bool:
        """Whether to meet after step `number`, counted from 0: every `sync_period` steps; with fragments, for each.

        Examples:
          >>> import optax, jaxdist as jd
          >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=3, axis=None)
          >>> with jd.islands.join(jd.islands.memory(), tx, name="here") as island:
          ...     [number for number in range(7) if island.due(number)]
          [2, 5]
        """
        schedule = self._schedule
        return any(
            number + 1 >= first and (number + 1 - first) % schedule.sync_period == 0 for first in schedule.firsts
        )

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
        if self._session:
            # What an earlier stay had under way is not this one's.
            self._stop_threads()
            self._outboxes, self._cleaner = self._new_outboxes(), Cleaner(self._store)
        try:
            return self._enter(state)
        except ConnectionError as error:
            # A run that goes on faster than this island reads is reached by no patience.
            where = f" (it has come to round {self.round} of the run)" if self.run else ""
            raise StoreUnusableError(f"{self._options.name!r} cannot enter{where}: {error}") from error

    def _enter(self, state: PyTree) -> PyTree:
        local, params = find_model(state)
        options = self._options
        self._division = division = self._replay.open(
            local,
            params,
            place=options.place,
            keep_every=options.keep_every,
            owners=options.owners,
            begin=options.begin,
        )
        model = division.split(local, params)
        self._session = run.claim(self._store, self._options.name)
        if not run.has_begun(self._store):
            self._replay.keep_first([part.local for part in model])
        self._take_run(model)
        local, params = division.join(model)
        if options.moments == "fresh":
            local = restart_buffers(self._config.inner, local, params)
        state = self._with_model(state, *self._begin_counts(local, params))
        model = division.split(*find_model(state))
        # A program that compiles in a meeting would make the others wait.
        for part, plan in zip(model, self._replay.plans, strict=True):
            compile_programs(
                self._replay.method,
                self._index,
                part.local,
                part.params,
                plan=plan,
                needs_rate=self._replay.needs_rate,
                eager=options.eager,
            )
        self._store.deadline = self._store.now() + self._options.patience
        # Rounds may have ended meanwhile: this island announces itself in the one that is open.
        self._go_on(self._follow, model)
        self._late = 0
        state = self._with_model(state, *self._begin_counts(*division.join(model)))
        self._entered = True
        log_entered(self._replay.run, self._replay.round, self._replay.kept, options)
        self._say_here(self._replay.round)
        self._await_first()
        # A report tells of meetings.
        self._store.take_traffic()
        return state

    def _with_model(self, state: PyTree, local: LocalStepsState, params: PyTree) -> PyTree:
        """The state with another model, of whose steps the next meeting knows what they had counted before it."""
        assert self._division is not None
        parts = self._division.split_locals(local)
        self._examples_before = [_examples_of(part) for part in parts]
        self._rounds_before = [_rounds_of(part) for part in parts]
        return replace_model(state, local, params)

    def meet(self, state: PyTree, *, examples: float | int | None = None) -> tuple[PyTree, Report]:
        """Exchanges this island's progress with the others'; returns within `round_timeout` and a second.

        The progress is put into the store by another thread. If that takes longer the report says `uploading`: go on
        training, and the progress counts in a later round, together with its `examples`.

        Args:
          state: the training state; it contains the state of `local_steps` and the parameters.
          examples: the weight of this island's drift, such as the number of its examples since the last meeting; not
            negative. With fragments a drift has the sum of those since its own last round. `None`: the sum of the
            `examples=` that the steps passed to the update, as on a mesh, or 1 if they passed none. Progress that an
            earlier round did not take keeps the weight of one round.

        Returns:
          The state, with the global parameters after the round and what of its own progress no round has taken, and a
          `Report`. If the store is out of reach the report says so, and the progress stays: go on training.

        Raises:
          ValueError: `examples` is negative or not finite; the steps passed a tree of numbers, and a drift has one
            weight, or ended rounds by themselves, without `sync=()`; or this island has not entered.
          NameTakenError: a newer process has this name.
          AnchorDiffersError: the global parameters differ from those of the run again and again.
          TooFewIslandsError: fewer than `quorum` islands for `patience` seconds.
          OfflineError: the store was out of reach, refused requests or did not end an upload, for `patience` seconds.
          DamagedError: a commit, or a body that it counts, is missing or not whole until the end of the meeting.
        """
        if not self._entered:
            raise ValueError("call enter(state) before meet, and not meet after leave")
        return self._meet(state, examples, leaving=False)

    def leave(
        self, state: PyTree | None = None, *, examples: float | int | None = None
    ) -> tuple[PyTree, Report] | None:
        """Leaves the run, so that no island waits for this one; with a state, its progress is sent first.

        It waits for no other island, and for the upload at most `round_timeout`: with its goodbye it returns within
        `round_timeout` and a second, which should be less than the notice that a cloud gives. A drift whose upload has
        not ended by then does not count (`report.uploading`), and the state that is returned has its progress. With
        fragments the drifts of all of them are sent, and count in the rounds to come.

        `join` calls it without a state at the end of its `with` block. With one it raises what `meet` raises.
        """
        if not self._entered:
            return None
        store, end = self._store, self._store.now() + self._options.round_timeout + GRACE
        if state is not None:
            result = self._meet(state, examples, leaving=True)
            is_there = not result[1].offline
        else:
            result, store.deadline = None, end - GRACE
            is_there = self._finish_flight()
        self._stop_threads()
        if is_there:
            self._say_left(store, end)
        self._entered = False
        logger.info("%s has left the run", self._options.name)
        return result

    def abandon(self) -> None:
        """Leaves the run after an error, which the other processes of this island may not have: none waits for them."""
        self._stop_threads()
        if self._entered and jax.process_index() == 0:
            store = self._store.in_background(urgent=True)
            self._say_left(store, store.now() + GOODBYE)
        self._entered = False

    def _finish_flight(self) -> bool:
        """Waits for a drift that is under way, which then counts; returns whether the store can be reached."""
        try:
            if self._outbox.flight is not None:
                self._deliver(self._replay.round, wait=True)
        except (ConnectionError, DamagedError, NameTakenError):
            return False
        return True

    def _stop_threads(self) -> None:
        self._cleaner.stop()
        for outbox in self._outboxes:
            outbox.abandon()

    def _say_left(self, store: Connection, end: float) -> None:
        store.deadline = min(end, store.now() + GOODBYE) - GRACE
        # Otherwise the others wait for this island once, for `round_timeout`: in the open round, or in the one after it
        # if its own drift is in the open one.
        with suppress(ConnectionError, DamagedError):
            number = run.open_round(store, self._replay.round)
            for each in (number, number + 1):
                store.create(round_name(each, "left", self._options.name), b"{}")

    # A meeting

    @automatic_mesh()
    def _meet(self, state: PyTree, examples: float | int | None, *, leaving: bool) -> tuple[PyTree, Report]:
        if examples is not None:
            check_range("examples", examples, 0, MOST_EXAMPLES, hint="it weights this island's drift")
        store, started = self._store, self._store.now()
        store.deadline = started + self._options.round_timeout
        assert self._division is not None
        model, problem = self._division.split(*find_model(state)), None
        for part, before, rounds in zip(model, self._examples_before, self._rounds_before, strict=True):
            _check_rounds(part.local, rounds)
            _check_examples(part.local)
            if examples is not None:
                part.local = with_examples(part.local, np.float32(before + examples))
        self._report = Report(self._replay.round, expected=self._replay.expected)
        try:
            self._go_on(partial(self._exchange, is_told=examples is not None, leaving=leaving), model)
        except ConnectionError as error:
            # Bytes that take longer than a meeting are under way; anything else that is silent is out of reach.
            is_slow = isinstance(error, _UnansweredError) and error.name.startswith("bodies/")
            self._note(**({"late": True} if is_slow else {"offline": True}))
            problem = str(error)
        finally:
            # What is under way changes no more, and the steps change what is ahead.
            self._keep_drifts(model)
        report = self._report
        self._in_step = report.counted and not report.offline and not self._behind
        self._check_offline(problem if report.offline else None)
        self._check_uploading(is_uploading=report.uploading)
        traffic = store.take_traffic()
        report = report._replace(
            round=self._replay.round,
            wait_seconds=store.now() - started,
            sent_bytes=traffic.sent,
            received_bytes=traffic.received,
            requests=traffic.requests,
            retries=traffic.retries,
            problem=problem or traffic.problem,
            digest=self._replay.digest,
            fragment=self._schedule.fragment_in(self._replay.round - 1) if self._replay.round else None,
        )
        if leaving:
            self._take_back(model)
        if report.late and not report.counted:
            self._late += 1
        if report.late:
            logger.warning("%s is late: round %d is open now", self._options.name, report.round)
        return self._with_model(state, *self._division.join(model)), report

    def _check_offline(self, problem: str | None) -> None:
        """Raises OfflineError where the store has been away for the patience."""
        now, patience = self._store.now(), self._options.patience
        if problem is None:
            if self._offline_since is not None:
                seconds = now - self._offline_since
                logger.info("%s is back, after %.0f s without the store", self._options.name, seconds)
            self._offline_since = None
            return
        if self._offline_since is None:
            self._offline_since = now
            logger.warning("%s is offline, and trains on for patience=%g s: %s", self._options.name, patience, problem)
        seconds = now - self._offline_since
        if seconds > patience:
            raise OfflineError(
                f"{self._options.name!r} has been offline for {seconds:.0f} s, longer than patience="
                f"{patience:g}: {problem}; mend the store or its rights, and start this island again"
            )

    def _check_uploading(self, *, is_uploading: bool) -> None:
        """Raises OfflineError where an upload has lasted for the patience, as one over a connection that is dead."""
        now, outbox = self._store.now(), self._outbox
        flight = outbox.flight
        if not is_uploading or flight is None:
            outbox.uploading = None
            return
        if outbox.uploading is None or outbox.uploading[0] != flight.body:
            outbox.uploading = flight.body, now
        seconds = now - outbox.uploading[1]
        if seconds > self._options.patience:
            raise OfflineError(
                f"the upload of {flight.record.bytes} bytes by {self._options.name!r} has not ended for {seconds:.0f} "
                f"s, longer than patience={self._options.patience:g}, and no round counts what this island does: mend "
                "the link, send less (a reducer of fewer bits), or raise patience, and start this island again"
            )

    def _note(self, **changes: Any) -> None:
        self._report = self._report._replace(**changes)

    def _go_on(self, act: Callable[[list[FragmentModel]], None], model: list[FragmentModel]) -> None:
        """Calls `act`, which changes `model` by whole rounds, again if rounds are gone or bytes were cut on the way."""
        while True:
            try:
                if self._left_behind:
                    self._note(late=True)
                    self._jump(model)
                    self._left_behind = False
                return act(model)
            except _LeftBehindError:
                self._left_behind = True
            except DamagedError:
                if self._store.now() >= self._store.deadline:
                    raise
                self._store.sleep(min(LONGEST_PAUSE, self._options.round_timeout / 50))

    def _exchange(self, model: list[FragmentModel], *, is_told: bool, leaving: bool) -> None:
        """Brings what is ahead of the global parameters into a round, again until one takes it or time is up."""
        self._come_back(model)
        # A meeting takes a round of one fragment; with `overlap` it sends the drift of the next one, too.
        takes_one = self._schedule.number > 1 and not self._options.overlap and not leaving
        is_again, is_new = False, self._outbox.flight is None
        while not self._behind:
            if not self._schedule.message_in(self._replay.round):
                is_new = self._outbox.flight is None
            if not self._send(model, is_told=is_told, leaving=leaving, is_again=is_again):
                break
            commit = self._await_commit(model)
            if commit is None:
                return
            is_again, is_counted = True, self._apply(model, commit)
            if not is_counted:
                self._follow(model)
            # A drift of an earlier meeting has counted, or a round ended without this one: at once for the next round.
            has_merged = is_counted and not self._schedule.message_in(self._replay.round)
            if (has_merged and (is_new or takes_one)) or self._store.now() >= self._store.deadline:
                return
        # What comes after a first message is not known before its round has ended.
        if leaving and not self._behind and self._schedule.messages == 1:
            self._send_to_later_rounds(model, is_told=is_told)

    def _come_back(self, model: list[FragmentModel]) -> None:
        """After a while, follows the rounds that others have ended, unless a newer process has this name."""
        # Then, and on a disk at any time, it may be another store. On a disk the questions cost nothing.
        if not self._in_step or self._options.on_disk:
            self._replay.check_same()
        if not self._in_step:
            self._check_name()
            self._follow(model)

    def _send(self, model: list[FragmentModel], *, is_told: bool, leaving: bool, is_again: bool) -> bool:
        """Brings the drift into the open round; returns whether this meeting waits for the round's commit.

        `is_again` says that it has already come to the end of another round.
        """
        number = self._replay.round
        # With `overlap` a first message is under way during the steps, and the others follow at once.
        waits = leaving or not self._options.overlap or self._schedule.message_in(number) > 0
        if self._outbox.flight is None:
            if not self._encode(model, number, is_told=is_told, leaving=leaving):
                self._note(nonfinite=True)
                return False
            if not waits:
                return False
        if not self._deliver(number, wait=waits):
            self._note(uploading=True)
            return False
        flight = self._outbox.flight
        is_last = flight is not None and flight.record.leaving
        return not is_last and (waits or not is_again)

    def _send_to_later_rounds(self, model: list[FragmentModel], *, is_told: bool) -> None:
        """Brings the drifts of the other fragments into their next rounds, of which this island waits for none.

        Until then their global parameters are those of now.
        """
        first = self._outbox.flight
        if first is None or first.round != self._replay.round:
            return
        for number in range(self._replay.round + 1, self._replay.round + self._schedule.number):
            fragment = self._schedule.fragment_in(number)
            # One that no round has counted is in none that is open: it is sent with all that came since.
            self._give_up(model[fragment], self._outboxes[fragment])
            if not self._encode(model, number, is_told=is_told, leaving=True):
                self._note(nonfinite=True)
                return
            if not self._deliver(number, wait=True):
                self._note(uploading=True)
                return

    def _follow(self, model: list[FragmentModel]) -> None:
        """Applies the rounds that have ended; no more after the deadline, since others may be faster than this is."""
        self._behind, has_applied = False, False
        while (commit := self._replay.read_commit(self._replay.round)) is not None:
            if has_applied and self._store.now() >= self._store.deadline:
                self._behind = True
                return
            has_applied = True
            self._apply(model, commit)

    def _encode(self, model: list[FragmentModel], number: int, *, is_told: bool, leaving: bool) -> bool:
        """Begins to send what is ahead of the global parameters of a round's fragment.

        Returns false if it is not finite: then the anchor is taken, and the inner optimizer restarts.
        """
        fragment, merges = self._schedule.fragment_in(number), self._schedule.merges_in(number)
        part, outbox = model[fragment], self._outboxes[fragment]
        local = part.local
        weight = self._weight_of(part, is_told=is_told)
        arrays, after, finite, moved = encode_drift(
            self._replay.method,
            self._index,
            local.anchor,
            part.params,
            local.reducer[0],
            np.float32(weight),
            self._replay.received,
        )
        if not bool(to_host(finite)):
            self._take_anchors(model)
            return False
        rate = self._rate_of(local, bool(to_host(moved)))
        # Equal drifts of two processes of this name have two bodies.
        tag = f"{round_name(number, 'drift', self._options.name)}/{self._session}"
        body, pieces = self._replay.pack_body(tag, [to_host(x) for x in arrays], number)
        base = self._replay.base_of(fragment)
        record = Drift(
            session=self._session,
            body=body.place,
            bytes=body.size,
            base=base,
            weight=weight,
            examples=_examples_of(local),
            steps=int(to_host(local.since)[0]),
            rate=rate,
            waited=self._late < LATE_IS_SLOW,
            leaving=leaving and merges,
            run=self._replay.run.mark,
            pieces=pieces,
        )
        drift = ahead = None
        if self._options.eager and merges and not leaving:
            drift = measure_drift(local.anchor, part.params)
            ahead = self._take_share(part, drift, None if rate is None else np.float32(rate))
        flight = InFlight(body.place, drift, ahead, after, record, float(to_host(local.rates)[0]))
        # With owners no island reads whole bodies.
        reads_ahead = self._options.overlap and not leaving and not self._replay.run.owners
        others = self._replay.expected if reads_ahead else ()
        outbox.send(flight, body, number, base, self._options.name, others)
        return True

    def _keep_drifts(self, model: list[FragmentModel]) -> None:
        """Keeps the drifts that are under way, where they are all that is ahead of the global parameters so far.

        Until what is ahead changes they need no memory.
        """
        for part, outbox in zip(model, self._outboxes, strict=True):
            if outbox.flight is not None and outbox.flight.drift is None:
                drift = measure_drift(part.local.anchor, part.params)
                outbox.flight = outbox.flight._replace(drift=drift, ahead=drift)

    def _take_anchors(self, model: list[FragmentModel]) -> None:
        """Takes the global parameters of all fragments, after steps that were not finite."""
        for part, outbox in zip(model, self._outboxes, strict=True):
            # What no open round has would be a step back, once it counted.
            outbox.clear()
            part.params = rebase(part.local.anchor, part.params, zeros_like(part.local.anchor))
        # Moments that are not finite would make the next steps so, too.
        assert self._division is not None
        inner = restart_buffers(self._config.inner, *self._division.join(model)).inner
        for part in model:
            part.local = restart_counts(part.local._replace(inner=inner), np.int32(self._replay.round))
        self._store.create(self._name("left"), b"{}")

    def _take_share(self, part: FragmentModel, drift: PyTree, rate: np.float32 | None) -> PyTree:
        """Takes the outer step along this island's share; returns what that is ahead of the global parameters."""
        replay, options = self._replay, self._options
        members = max(len({*replay.expected, options.name}), 1 if replay.round else options.begin_with)
        shared = select_shared(part.local)
        share = measure_share(replay.method, shared, drift, np.float32(members), rate)
        part.params = rebase(shared.anchor, part.params, share)
        # As parameters of half precision have it.
        return measure_drift(shared.anchor, part.params)

    def _take_back(self, model: list[FragmentModel]) -> None:
        """Puts whole drifts that are under way into the model again, of which it has this island's shares."""
        for part, outbox in zip(model, self._outboxes, strict=True):
            self._take_back_one(part, outbox)

    def _take_back_one(self, part: FragmentModel, outbox: Outbox) -> None:
        ahead = self._with_drift(measure_drift(part.local.anchor, part.params), outbox.flight)
        part.params = rebase(part.local.anchor, part.params, ahead)

    def _give_up(self, part: FragmentModel, outbox: Outbox) -> None:
        """Gives up a drift that is under way, which no round will count: it is ahead again."""
        if outbox.flight is not None:
            self._take_back_one(part, outbox)
            outbox.clear()

    def _with_drift(self, ahead: PyTree, flight: InFlight | None) -> PyTree:
        """What is ahead of the global parameters, with the whole drift in place of a share."""
        if flight is None or flight.ahead is flight.drift:
            return ahead
        return subtract(ahead, subtract(flight.ahead, flight.drift))

    def _deliver(self, number: int, *, wait: bool) -> bool:
        """Brings the record of the drift into a round; returns false while its body is on the way."""
        fragment = self._schedule.fragment_in(number)
        base = self._replay.base_of(fragment)
        state = self._outboxes[fragment].record_in(number, base, self._options.name, wait=wait)
        if state == "taken":
            # By an older process, which learns in the next round that there is this one; or by a newer one.
            self._check_name()
            self._say_here(number + 1)
        return state != "uploading"

    def _await_commit(self, model: list[FragmentModel]) -> Commit | None:
        """Returns the commit of the open round, which this island may create; `None` if the deadline comes first."""
        store, options, number, flight = self._store, self._options, self._replay.round, self._outbox.flight
        assert flight is not None
        at_least = options.begin_with if number == 0 else 1
        prefix, expected = round_name(number, ""), self._replay.expected
        message = self._schedule.message_in(number)
        is_first = protocol.is_first_to_commit(options.name, expected, number)
        looks = Looks(
            self._waits[message, is_first] or self._waits[message, True],
            started=store.now(),
            sent_at=flight.sent_at,
            request=max(store.request_seconds(), SHORTEST_LOOK),
            members=len(expected),
            enough=max(at_least, options.quorum),
            grace=options.grace,
            is_first=is_first,
            longest=min(LONGEST_PAUSE, options.round_timeout / 50),
        )
        store.sleep(min(looks.pause, max(store.deadline - store.now(), 0.0)))
        was_due = False
        while True:
            # One commits, and the others look for the commit alone: it is what they read next.
            commit = None if is_first else self._replay.read_commit(number)
            now, count = store.now(), None
            if commit is None and (now >= store.deadline or looks.is_for_all(now)):
                seen = protocol.see(name.removeprefix(prefix) for name in store.list(prefix))
                if options.name not in seen.drifts:
                    self._replay.check_not_forgotten(number)
                if options.name in seen.here and number not in self._said_here:
                    self._check_name()
                    self._said_here.add(number)
                now, count = store.now(), len(seen.drifts)
                looks.listed(now, count)
                action = protocol.decide(
                    seen,
                    expected,
                    elapsed=now - flight.sent_at,
                    since_few=now - looks.few_at,
                    round_timeout=options.round_timeout,
                    grace=options.grace,
                    at_least=at_least,
                    quorum=options.quorum,
                    is_over=now >= store.deadline,
                )
                if action is Next.READ:
                    commit = self._replay.read_commit(number)
                elif action is Next.COMMIT and (is_first or was_due or now >= store.deadline):
                    commit = self._commit(seen, model[self._replay.fragment].local)
                was_due = action is Next.COMMIT
                looks.decided(now, is_due=was_due)
            if commit is not None:
                if not commit.missing:
                    self._waits[message, is_first].append(looks.seconds_for_others(now))
                return commit
            if count is not None and now >= store.deadline:
                self._check_patience(count, now)
                return None
            store.sleep(min(looks.next_pause(now), max(store.deadline - now, 0.0)))

    def _commit(self, seen: protocol.Seen, local: LocalStepsState) -> Commit | None:
        """Ends the round: checks every drift, then creates the commit, unless another island is faster."""
        drifts, damaged, number = {}, set(), self._replay.round
        own, flight = self._options.name, self._outbox.flight
        for name in sorted(seen.drifts):
            place = round_name(number, "drift", name)
            try:
                if name == own and flight is not None and flight.round == number:
                    drifts[name] = flight.record._replace(base=self._replay.base)
                else:
                    drifts[name] = protocol.parse(Drift, place, self._store.get(place) or b"")
                if protocol.is_too_old(drifts[name].body, number, self._replay.rounds):
                    raise DamagedError(f"{place} names a body that is too old")
            except DamagedError:
                damaged.add(name)
        sound = {name: drift for name, drift in drifts.items() if name not in damaged}
        damaged |= self._replay.check_drifts(sound, number, local)
        # Where another disk is mounted by now, the round is not this run's to end.
        # A request more, so only before this island keeps what follows from the rounds that it has taken.
        keeps = (number + 1) % self._replay.keep_every == 0
        self._replay.check_same(last=keeps)
        expected, base = self._replay.expected, self._replay.base
        commit = protocol.make_commit(seen, expected, drifts, damaged, base, own, self._replay.run.mark)
        if self._store.create(round_name(number, "commit"), protocol.to_json(commit)):
            logger.info("%s has committed round %d of %s", own, number, ", ".join(sorted(drifts)))
            return commit
        return self._replay.read_commit(number)

    def _apply(self, model: list[FragmentModel], commit: Commit) -> bool:
        """Takes the outer step of a round; progress that it did not take stays ahead of the new anchor.

        A round of a message before the last takes no progress.

        Returns whether the round took this island's drift.
        """
        replay, name = self._replay, self._options.name
        part, outbox, fragment = model[replay.fragment], self._outbox, replay.fragment
        bodies, before = {member.name: member.body for member in commit.members}, part.local.anchor
        is_counted = outbox.flight is not None and bodies.get(name) == outbox.flight.body
        differs, merges = commit.base != replay.base, self._schedule.merges_in(replay.round)
        if differs or not is_counted:
            self._keep_drifts(model)
        if differs:
            self._take_kept_anchors(model)
        local, flight = part.local, outbox.flight
        self._too_few_since = None
        expected = tuple(sorted({*replay.expected, *bodies, *commit.missing}))
        shared = replay.advance(local, commit)
        # Nothing for longer than needed: a large model has little memory beside it.
        if not merges:
            outbox.clear()
            self._note(late=not is_counted or self._report.late)
            local = move_counts(local, np.int32(replay.round))
            if differs:
                part.params = rebase(shared.anchor, part.params, measure_drift(before, part.params))
        elif flight is not None and is_counted:
            local = self._take_counted(local, outbox)
            if flight.ahead is None:
                part.params = restart_from(shared.anchor, part.params)
            else:
                part.params = rebase_after(shared.anchor, part.params, before, flight.ahead)
            # One that decodes alike in its own round alone was encoded again.
            is_slow = self._report.late or protocol.is_too_old(flight.body, replay.round - 1, 1)
            self._late = self._late + 1 if is_slow else 0
            self._note(counted=True, examples=self._report.examples + flight.record.examples)
            flight = None
        else:
            outbox.next_round()
            is_late = name not in commit.differing and name not in commit.damaged
            self._note(counted=False, late=is_late or self._report.late)
            ahead = self._drop_old(measure_drift(before, part.params), fragment)
            part.params = rebase(shared.anchor, part.params, ahead)
            local = move_counts(local, np.int32(replay.round))
        part.local = with_shared(local, shared)
        self._store.forget_answers()
        self._note(members=tuple(bodies), missing=commit.missing, expected=expected)
        self._warn_if_few(commit, outbox)
        if commit.by == name and replay.round % replay.keep_every == 0 and self._entered:
            arrays = copy_shared_to_host([select_shared(part.local) for part in model])
            if jax.process_index() == 0:
                self._cleaner.start(replay.round, replay.digest, replay.counted_bodies(), arrays, replay.rounds)
        return is_counted

    def _take_counted(self, local: LocalStepsState, outbox: Outbox) -> LocalStepsState:
        """The state without the drift that is under way, which a round has taken."""
        flight = outbox.flight
        assert flight is not None
        outbox.clear()
        record = flight.record
        return subtract_counts(
            local._replace(reducer=(flight.reducer,)),
            np.int32(self._replay.round),
            np.float32(record.examples),
            np.int32(record.steps),
            np.float32(flight.rates),
        )

    def _drop_old(self, ahead: PyTree, fragment: int) -> PyTree:
        """Gives up a drift that no later round can count: it is encoded again, with all that came since.

        Returns what is then ahead of the global parameters.
        """
        outbox, replay = self._outboxes[fragment], self._replay
        flight, number = outbox.flight, self._schedule.next_round(fragment, replay.round)
        if flight is not None and (not replay.lasts or protocol.is_too_old(flight.body, number, replay.rounds)):
            outbox.clear()
            return self._with_drift(ahead, flight)
        return ahead

    def _warn_if_few(self, commit: Commit, outbox: Outbox) -> None:
        """Of a round that half of the islands or more have missed: an outer step from few drifts may move too far."""
        few = len(commit.members) <= len(commit.missing)
        if few:
            seconds = outbox.upload_seconds
            limit = "grace" if self._options.grace < math.inf else "round_timeout"
            total = len(commit.members) + len(commit.missing)
            logger.log(
                logging.DEBUG if self._few_meet else logging.WARNING,
                "round %d has %d of %d members, %s, and %s came too late for %s=%g s%s: raise %s above the time "
                "between two meetings, join with quorum=%d, or send less (a reducer of fewer bits, a longer "
                "sync_period)",
                self._replay.round - 1,
                len(commit.members),
                total,
                ", ".join(member.name for member in commit.members),
                ", ".join(commit.missing),
                limit,
                getattr(self._options, limit),
                "" if seconds is None else f" (the last upload took {seconds:.2g} s)",
                limit,
                (total + 1) // 2,
            )
        if few or len(commit.members) > 1:
            self._few_meet = few

    # Catching up

    def _take_run(self, model: list[FragmentModel]) -> None:
        """Enters the run where it is; a state that is just as far keeps its progress."""
        replay, locals_ = self._replay, [part.local for part in model]
        own_round, own_digest = max(int(to_host(local.rounds)[0]) for local in locals_), replay.digest
        own = [(part.local, part.params) for part in model]
        while True:
            anchor, locals_ = replay.load_newest(locals_, known=replay.digest)
            replay.go_to(anchor, locals_)
            commit = replay.read_commit(replay.round)
            for part, local in zip(model, locals_, strict=True):
                part.local = local
                if commit is not None or replay.digest != own_digest:
                    part.params = rebase(local.anchor, part.params, zeros_like(local.anchor))
            with suppress(_LeftBehindError):
                while commit is not None:
                    self._apply(model, commit)
                    commit = replay.read_commit(replay.round)
                break
            locals_ = [part.local for part in model]
        merges_before = self._schedule.merges_before
        is_here = (merges_before(own_round), own_digest) == (merges_before(replay.round), replay.digest)
        self._keeps_progress = False
        for fragment, part in enumerate(model):
            # The drift of an earlier process of this name will count in an open round: it must not be sent again.
            number = self._schedule.next_round(fragment, replay.round)
            is_sent = self._store.get(round_name(number, "drift", self._options.name)) is not None
            local, params = own[fragment]
            if is_here and not is_sent:
                self._keeps_progress = True
                # Equal digests are equal bits: `a - (a - p)` would round `p`.
                part.params = strengthen(params)
            else:
                part.params = rebase(part.local.anchor, params, zeros_like(part.local.anchor))
                part.local = self._with_fresh_reducer(part.local, local.reducer[0], fragment)

    def _with_fresh_reducer(self, local: LocalStepsState, like: PyTree, fragment: int) -> LocalStepsState:
        """The state without what its reducer has kept, which may have been sent since, and without counts."""
        fresh = bind(self._config.init_reducer(fragment, local.anchor, self._config.reducer), None)
        fresh = jax.tree.map(lambda x, y: place_leaf(x, y.sharding), fresh, like)
        local = with_shared(local._replace(reducer=(fresh,)), select_shared(local))
        return restart_counts(local, np.int32(self._replay.round))

    def _jump(self, model: list[FragmentModel]) -> None:
        """Goes on from kept parameters, where the rounds before them are gone. What none of them took is kept."""
        self._replay.check_same()
        self._keep_drifts(model)
        aheads = [measure_drift(part.local.anchor, part.params) for part in model]
        anchor, locals_ = self._replay.load_newest([part.local for part in model])
        self._replay.go_to(anchor, locals_)
        for fragment, (part, local, ahead) in enumerate(zip(model, locals_, aheads, strict=True)):
            outbox = self._outboxes[fragment]
            flight = outbox.flight
            outbox.next_round()
            if flight is not None and self._replay.has_counted(self._options.name, flight.body):
                ahead = subtract(ahead, flight.ahead)
                local = with_shared(self._take_counted(local, outbox), select_shared(local))
                self._note(counted=True, examples=self._report.examples + flight.record.examples)
            ahead = self._drop_old(ahead, fragment)
            part.params = rebase(local.anchor, part.params, ahead)
            part.local = local

    def _take_kept_anchors(self, model: list[FragmentModel]) -> None:
        """Takes the kept global parameters and the rounds since, where this island has others than the run."""
        self._differing += 1
        if self._differing >= DIFFERING_IS_FATAL:
            raise AnchorDiffersError(
                f"the global parameters of {self._options.name!r} differ from those of the run for the "
                f"{self._differing}rd time: this hardware or version rounds in another way; use that of the others"
            )
        locals_ = self._replay.rebuild([part.local for part in model])
        for fragment, (part, local) in enumerate(zip(model, locals_, strict=True)):
            if fragment != self._replay.fragment:
                ahead = measure_drift(part.local.anchor, part.params)
                part.params = rebase(local.anchor, part.params, ahead)
            part.local = local

    # Small parts

    def _weight_of(self, part: FragmentModel, *, is_told: bool = False) -> float:
        """The number of examples of one round, which the steps counted or `meet` was told; 1 if there was none."""
        local = part.local
        counted, since = to_host(local.examples.value), int(to_host(local.since)[0])
        if counted[0] == UNCOUNTED:
            return 1.0
        # A drift of several rounds is their sum already: with their weight it would count so many times over.
        weight = float(counted[0]) * min(1.0, self._config.sync_period / max(since, 1))
        if weight:
            self._last_weight = weight
        elif not is_told:
            drift = measure_drift(local.anchor, part.params)
            if any(bool(to_host(x).any()) for x in jax.tree.leaves(drift)):
                # Progress that an earlier round did not take.
                return self._last_weight
        return weight

    def _catch_up(self, local: LocalStepsState) -> LocalStepsState:
        """The state at the step of the run; ahead of it are only the steps of progress that is kept."""
        steps, count = self._schedule.steps_before(self._replay.round), int(to_host(local.count))
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

    def _begin_counts(self, local: LocalStepsState, params: PyTree) -> tuple[LocalStepsState, PyTree]:
        """The model of an island that enters, at the step of the run, and its counts.

        These are of the progress that it has kept, and otherwise none.
        """
        assert self._division is not None
        model, number = self._division.split(self._catch_up(local), params), np.int32(self._replay.round)
        for part in model:
            begin = move_counts if int(to_host(part.local.since)[0]) else restart_counts
            part.local = begin(part.local, number)
        return self._division.join(model)

    def _check_name(self) -> None:
        if run.newest_session(self._store, self._options.name) > self._session:
            raise NameTakenError(f"another process has joined as {self._options.name!r}: this one must stop")

    def _say_here(self, number: int) -> None:
        self._said_here.add(number)
        self._store.create(round_name(number, "here", self._options.name), b"{}")

    def _await_first(self) -> None:
        """Waits for `begin_with` islands before the first round, so that none of them begins alone."""
        told: frozenset[str] = frozenset()
        while self._replay.round == 0 and self._options.begin_with > 1:
            names = self._store.list(round_name(0, ""))
            seen = protocol.see(name.removeprefix(round_name(0, "")) for name in names)
            enough = len(seen.here | seen.drifts) >= self._options.begin_with
            if enough or seen.committed or run.is_forgotten(self._store, 0, self._replay.rounds):
                return
            if seen.here != told:
                told, least = seen.here, self._options.begin_with
                logger.warning("waiting for begin_with=%d islands, %s so far", least, ", ".join(sorted(told)))
            if self._store.now() > self._store.deadline:
                raise TooFewIslandsError(
                    f"{len(seen.here)} of begin_with={self._options.begin_with} islands came within "
                    f"{self._options.patience} s: {', '.join(sorted(seen.here))}; start the others, or lower begin_with"
                )
            self._store.sleep(0.05)

    def _check_patience(self, count: int, now: float) -> None:
        options = self._options
        if self._too_few_since is None:
            self._too_few_since = now
        late = ""
        if not count:
            # That of this island is there.
            late = (
                f"the store does not list the progress of {options.name!r} {options.round_timeout:g} s after it was "
                "sent: mount NFS with acdirmax=1, or raise round_timeout"
            )
        if now == self._too_few_since and count < options.quorum:
            text = "round %d waits for quorum=%d islands and has %d: an error after patience=%g s%s"
            more = late and f"; {late}"
            logger.warning(text, self._replay.round, options.quorum, count, options.patience, more)
        if now - self._too_few_since > options.patience:
            raise TooFewIslandsError(
                late
                or f"only {count} islands for {options.patience} s, and a round needs quorum={options.quorum}: start "
                "others, or join with a lower quorum"
            )
