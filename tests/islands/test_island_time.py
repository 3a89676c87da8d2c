"""No call waits longer than its deadline, whatever a store does, and what is under way then is kept."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import optax
import pytest
from island_stores import archived, wrap
from islands_run import (
    GOALS,
    begin,
    commits_of,
    global_params,
    method,
    sgd,
    step_of,
    train_together,
    wait_for_threads,
    wait_for_upload,
)
from problems import assert_close

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import connection, island, protocol
from jaxdist.islands.connection import Connection

# Seconds after `round_timeout` in which every call ends.
SLACK = 1.0


pytestmark = pytest.mark.usefixtures("clock")


class Gate:
    """A store whose calls for which `holds(name, arguments)` is true wait until the gate is open."""

    def __init__(self, clock, store, holds):
        self._open, self._holds = clock.Event(), holds
        self.held = []
        self.base, self.store = store, wrap(store, self._around)

    def _around(self, number, name, function, arguments):
        if not self._open.is_set() and self._holds(name, arguments):
            self.held.append(name)
            self._open.wait()
        return function(*arguments)

    def open(self):
        self._open.set()


@contextlib.contextmanager
def release(event):
    """Sets it at the latest at the end, also after an error: an island waits then for its threads."""
    try:
        yield
    finally:
        event.set()


def is_body(name, arguments):
    return name == "put" and arguments[0].startswith("bodies/")


@functools.cache
def counting():
    """A transformation that takes sums of steps as they are, and a step of so many examples."""
    tx = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2, axis=None)

    @jax.jit
    def step(state, examples):
        updates, opt = tx.update(jnp.ones(()), state["opt"], state["params"], sync=(), examples=examples)
        return {"params": state["params"] + updates, "opt": opt}

    return tx, step, {"params": jnp.zeros(()), "opt": tx.init(jnp.zeros(()))}


def train_round(step, state, examples=3.0):
    for _ in range(2):
        state = step(state, jnp.float32(examples))
    return state


@pytest.mark.sampled(13)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_upload_of_three_rounds_loses_and_doubles_nothing(clock, overlap):
    """The island moves the run as far as one that sends each round, and its examples are those that it trained on."""
    tx, step, state = counting()
    gate = Gate(clock, islands.memory(), is_body)
    options = {"round_timeout": 0.2, "overlap": overlap, "patience": 60}
    with (
        islands.join(gate.store, tx, name="slow", **options) as slow,
        islands.join(gate.store, tx, name="fast", **options | {"overlap": False, "round_timeout": 0.01}) as fast,
    ):
        # The parameters that the run begins with need no gate.
        gate.open()
        mine, other = slow.enter(state), fast.enter(state)
        gate._open.clear()
        fast._store.store = slow_free(gate)
        trained = 0.0
        for _ in range(3):
            mine, trained = train_round(step, mine), trained + 6.0
            mine, report = slow.meet(mine)
            # With `overlap` the first one sends, and looks no more.
            assert report.uploading or (overlap and trained == 6.0)
            assert not report.offline
            assert not report.counted
            assert report.wait_seconds < 0.2 + SLACK
            for _ in range(2):
                other, _ = fast.meet(other)
        assert float(mine["opt"].examples.value[0]) == trained
        gate.open()
        wait_for_upload(slow)
        sums = []
        for _ in range(20):
            mine, report = slow.meet(mine)
            sums.append(report.examples)
            wait_for_upload(slow)
            other, _ = fast.meet(other)
            if sum(sums) == trained:
                break
        assert sum(sums) == trained
    found = [member for commit in commits_of(gate.store) for member in commit.members if member.name == "slow"]
    assert sum(member.examples for member in found) == trained
    # A sum of rounds has the weight of one.
    assert {member.weight for member in found if member.examples} == {6.0}


def slow_free(gate):
    """The store behind a gate, for an island that it does not hold."""
    return gate.store._replace(put=lambda name, body: gate.base.put(name, body))


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_slow_island_moves_a_run_as_far_as_one_that_sends_each_round(clock, rounds):
    """In the linear case, alone: six steps of a constant gradient, sent in two drifts or in six."""
    tx, step, state = counting()
    gate = Gate(clock, islands.memory(), is_body)
    gate.open()
    with islands.join(gate.store, tx, name="a", round_timeout=0.05) as island:
        state = island.enter(state)
        if rounds > 1:
            gate._open.clear()
        for number in range(6):
            if number == 3:
                gate.open()
                wait_for_threads(island)
            state, _ = island.meet(train_round(step, state))
        for _ in range(5):
            state, _ = island.meet(state)
    assert float(jd.local_sgd.global_params(state["opt"])) == pytest.approx(-0.5 * 12)
    assert sum(member.examples for commit in commits_of(gate.store) for member in commit.members) == 36


@contextlib.contextmanager
def entered(store, tx, state, **options):
    """An island that has met once."""
    with islands.join(store, tx, **{"name": "a", "round_timeout": 0.3, "patience": 60} | options) as island:
        state, report = island.meet(island.enter(state))
        assert report.counted
        wait_for_threads(island)
        yield island, state


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", islands.SharedStore._fields)
def test_a_request_that_never_ends_holds_no_meeting(clock, kind, monkeypatch):
    """As of a folder on a server that is gone; then it ends after all, and nothing is lost or doubled."""
    tx, step, state = counting()
    store, _, commits = archived(islands.memory())
    gate = Gate(clock, store, lambda name, arguments: name == kind)
    gate.open()
    with entered(gate.store, tx, state, keep_every=1) as (island, state):
        gate._open.clear()
        trained = 0.0
        with monkeypatch.context() as patch:
            # Each meeting waits so long after its deadline for a request that is under way.
            patch.setattr(connection, "GRACE", 0.05)
            for _ in range(4):
                state, trained = train_round(step, state), trained + 6.0
                started = clock.monotonic()
                state, report = island.meet(state)
                assert clock.monotonic() - started < 0.3 + SLACK
                # An island that is alone and in step reads and deletes nothing that it would wait for.
                assert (
                    report.uploading
                    or report.offline
                    or (report.counted and kind in ("get", "get_range", "delete", "delete_many"))
                )
        gate.open()
        for _ in range(10):
            state, report = island.meet(state)
            wait_for_threads(island)
    assert float(jd.local_sgd.global_params(state["opt"])) == -0.5 * 8
    assert sum(member.examples for commit in commits.values() for member in commit.members) == trained


@pytest.mark.parametrize(("kind", "begin"), [("create", True), ("list", True), ("delete", True), ("get", False)])
def test_a_store_that_is_silent_from_the_start_ends_join_after_the_patience(clock, kind, begin):
    tx, _, _ = counting()
    gate = Gate(clock, islands.memory(), lambda name, arguments: name == kind)
    with (
        pytest.raises(islands.StoreUnusableError, match=r"has not answered within patience=0\.2 s; check its address"),
        islands.join(gate.store, tx, name="a", patience=0.2, begin=begin),
    ):
        pass
    gate.open()


@pytest.mark.sampled(13)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_upload_that_does_not_end_is_an_error_after_the_patience(clock, overlap):
    """As over a dead connection: otherwise the island would train alone for ever. One after another is no such."""
    tx, step, state = counting()
    gate = Gate(clock, islands.memory(), is_body)
    gate.open()
    with entered(gate.store, tx, state, round_timeout=0.01) as (island, state):
        island._options = island._options._replace(overlap=overlap)
        gate._open.clear()
        for _ in range(3):
            state, report = island.meet(train_round(step, state))
        assert report.uploading
        began = island._outbox.uploading[1]
        gate.open()
        wait_for_threads(island)
        gate._open.clear()
        # One that follows another has its own time.
        state, report = island.meet(train_round(step, state))
        assert report.counted
        while not report.uploading:
            state, report = island.meet(train_round(step, state))
        assert island._outbox.uploading[1] > began
        island._options = island._options._replace(patience=0.1)
        clock.sleep(0.2)
        with pytest.raises(islands.OfflineError, match=r"upload of \d+ bytes by 'a' has not ended .*patience=0\.1"):
            island.meet(state)
        gate.open()


def test_progress_that_an_island_has_left_with_is_sent_no_more(clock):
    """Its upload ends after that; the state that `leave` returned has the progress, and may enter again."""
    tx, step, state = counting()
    gate = Gate(clock, islands.memory(), is_body)
    gate.open()
    with entered(gate.store, tx, state) as (island, state):
        gate._open.clear()
        state, report = island.leave(train_round(step, state))
        assert (report.counted, report.uploading) == (False, True)
        gate.open()
        wait_for_threads(island)
    assert not any("/drift/" in name for name in gate.base.list(protocol.round_name(1, "")))
    with islands.join(gate.store, tx, name="a", round_timeout=0.3) as island:
        _, report = island.meet(island.enter(state))
    assert report.examples == 6.0


@pytest.mark.sampled(13)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_problem_names_the_request_that_is_silent_and_not_one_that_waits_for_it(clock, overlap):
    """One thread asks: after a `create` that hangs all others wait, though the store would answer them."""
    tx, _, state = counting()
    gate = Gate(clock, islands.memory(), lambda name, arguments: name == "create")
    gate.open()
    with islands.join(gate.store, tx, name="a", round_timeout=0.05, patience=60, overlap=overlap) as island:
        state = island.enter(state)
        gate._open.clear()
        for _ in range(3):
            state, report = island.meet(state)
        assert report.offline
        assert "has not answered create('rounds/00000000/drift/a') within " in report.problem
        gate.open()


def test_an_island_whose_bodies_are_read_ahead_is_late_and_not_offline(clock):
    """A slow downlink, with `overlap`: what a meeting asks waits for a body that is on its way."""
    tx, _, state = counting()
    base = islands.memory()
    gate = Gate(clock, base, lambda name, arguments: name == "get" and arguments[0].startswith("bodies/"))
    gate.open()
    with (
        islands.join(base, tx, name="a", round_timeout=0.05, patience=60) as first,
        islands.join(gate.store, tx, name="b", round_timeout=0.2, patience=60, overlap=True) as second,
    ):
        mine, other = first.enter(state), second.enter(state)
        for _ in range(2):
            other, _ = second.meet(other)
            mine, _ = first.meet(mine)
        gate._open.clear()
        for _ in range(4):
            mine, _ = first.meet(mine)
            other, report = second.meet(other)
            assert not report.offline
            if report.late:
                break
        assert gate.held
        assert report.late
        gate.open()


def test_no_thread_asks_more_and_more_of_a_store_that_is_silent(clock, monkeypatch):
    tx, _, state = counting()
    gate = Gate(clock, islands.memory(), lambda name, arguments: name == "list")
    gate.open()
    with entered(gate.store, tx, state, round_timeout=0.02) as (island, state):
        gate._open.clear()
        monkeypatch.setattr(connection, "GRACE", 0.05)
        for _ in range(5):
            state, report = island.meet(state)
            assert report.offline
            assert "has not answered " in report.problem
        assert len(gate.held) == 1
        gate.open()


def test_islands_whose_uploads_all_take_longer_than_the_timeout_meet(clock):
    base, tx = islands.memory(), method(inner=sgd(0.1))

    def put(name, body):
        clock.sleep(0.5)
        base.put(name, body)

    options = {"thread": clock.Thread, "round_timeout": 0.3, "keep_every": 100}
    found = train_together(base._replace(put=put), tx, ["a", "b", "c"], 5, **options)
    assert all(one.wait_seconds < 0.3 + SLACK for _, reports in found.values() for one in reports)
    members = [len(commit.members) for commit in commits_of(base)]
    assert set(members) == {3}


def test_bodies_that_take_longer_than_a_meeting_are_not_asked_for_again(clock, caplog):
    """A slow downlink: the meeting ends, and the next one takes what has come meanwhile."""
    base, tx, asked = islands.memory(), method(inner=sgd(0.1)), []

    def get(name):
        if name.startswith("bodies/"):
            asked.append(name)
            clock.sleep(1.2)
        return base.get(name)

    with (
        islands.join(base, tx, name="fast", round_timeout=20) as fast,
        islands.join(base._replace(get=get), tx, name="slow", round_timeout=0.2) as slow,
    ):
        other = fast.enter(begin(tx))
        state = slow.enter(begin(tx))
        asked.clear()
        fast_thread = clock.Thread(target=fast.meet, args=(step_of(tx)(other, GOALS[1]),))
        fast_thread.start()
        reports = []
        for _ in range(20):
            state, report = slow.meet(step_of(tx)(state, GOALS[0]))
            reports.append(report)
            if report.counted:
                break
        fast_thread.join()
    assert report.counted
    assert not any(one.offline for one in reports)
    assert max(one.wait_seconds for one in reports) < 0.2 + SLACK
    assert len(asked) == len(set(asked))


def test_a_meeting_waits_for_no_clean_up(clock):
    """Of a store that deletes none of 200 names until all meetings are over."""
    base, tx, meetings_over = islands.memory(), method(inner=sgd(0.1)), clock.Event()
    asked = []

    def delete(name):
        if "old-" in name:
            asked.append(name)
            meetings_over.wait()
        base.delete(name)

    store = base._replace(delete=delete, delete_many=None)
    with islands.join(store, tx, name="a", round_timeout=60, keep_every=1) as island, release(meetings_over):
        state = island.enter(begin(tx))
        for number in range(200):
            base.create(f"rounds/{number % 2:08d}/drift/old-{number}", b"{}")
        for _ in range(15):
            state, report = island.meet(state)
            assert report.counted
            assert report.wait_seconds < 30
        assert asked
        assert len([name for name in base.list("rounds/") if "old-" in name]) == 200
        meetings_over.set()
        # What one clean-up leaves out, since another one goes on, the next does.
        for _ in range(2):
            wait_for_threads(island)
            state, _ = island.meet(state)
        wait_for_threads(island)
    assert not [name for name in base.list("rounds/") if "old-" in name]


@pytest.mark.slow
def test_a_meeting_waits_for_no_listing_of_all_rounds(clock):
    """Commits stay: after a month of them a clean-up lists them for many seconds."""
    base, tx = islands.memory(), method(inner=sgd(0.1))

    def list_names(prefix):
        if prefix == "rounds/":
            clock.sleep(1.0)
        return base.list(prefix)

    with islands.join(base._replace(list=list_names), tx, name="a", round_timeout=0.5, keep_every=1) as island:
        state = island.enter(begin(tx))
        for _ in range(40):
            state, report = island.meet(state)
            assert (report.counted, report.offline) == (True, False)
            clock.sleep(0.02)
    assert base.list("anchors/") != [f"anchors/{0:08d}"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("away", ["refuses", "is silent"])
@pytest.mark.parametrize("end", ["Ctrl-C", "leave", "leave with a state"])
def test_leaving_takes_no_longer_than_a_goodbye(clock, away, end, monkeypatch):
    monkeypatch.setattr(island, "GOODBYE", 0.8)
    tx, _, state = counting()
    gate = Gate(clock, islands.memory(), lambda name, arguments: True)
    gate.open()
    broken = []

    def around(number, name, function, arguments):
        if broken:
            raise ConnectionError("no route")
        return function(*arguments)

    store, timeout = wrap(gate.store, around), 30.0 if end == "Ctrl-C" else 0.5
    started = clock.monotonic()
    with contextlib.suppress(KeyboardInterrupt), islands.join(store, tx, name="a", round_timeout=timeout) as leaving:
        state, _ = leaving.meet(leaving.enter(state))
        if away == "refuses":
            broken.append(True)
        else:
            gate._open.clear()
        started = clock.monotonic()
        if end == "Ctrl-C":
            raise KeyboardInterrupt
        leaving.leave(*([state] if end == "leave with a state" else []))
    took = clock.monotonic() - started
    gate.open()
    assert took < (1.3 if end == "Ctrl-C" else 0.5 + SLACK + 0.2)


def test_an_island_enters_though_listings_are_late(clock):
    """Those of others' names; an island's own are there at once, so that the probe of `join` passes."""
    base, born, tx = islands.memory(), {}, method(inner=sgd(0.1))

    def view(own):
        def create(name, body):
            born.setdefault(name, (own, clock.monotonic()))
            return base.create(name, body)

        def put(name, body):
            born.setdefault(name, (own, clock.monotonic()))
            base.put(name, body)

        def list_names(prefix):
            now = clock.monotonic()
            return [name for name in base.list(prefix) if born[name][0] == own or now - born[name][1] > 2.0]

        return base._replace(create=create, put=put, list=list_names)

    with islands.join(view("one"), tx, name="one", round_timeout=0.2, keep_every=1) as first:
        state = first.enter(begin(tx))
        for _ in range(3):
            state, _ = first.meet(state)
            wait_for_threads(first)
        with islands.join(view("two"), tx, name="two", round_timeout=0.2, patience=60) as second:
            joined = second.enter(begin(tx, fill=5.0))
            assert_close(global_params(joined), global_params(state), tolerance=0)


def test_a_refusal_ends_entering_at_once_and_meetings_after_the_patience(clock, caplog):
    tx, _, state = counting()
    refused = []

    def around(number, name, function, arguments):
        if name in refused:
            raise PermissionError("the token has expired")
        return function(*arguments)

    store = wrap(islands.memory(), around)
    with islands.join(store, tx, name="a", round_timeout=20, patience=60) as island:
        refused.append("create")
        with pytest.raises(islands.StoreUnusableError, match="PermissionError: the token has expired"):
            island.enter(state)
        refused.clear()
        state, _ = island.meet(island.enter(state))
        refused.extend(["create", "put"])
        state, report = island.meet(state)
        assert report.offline
        assert "the token has expired" in report.problem
        assert report.wait_seconds < 10
        island._options = island._options._replace(patience=0.1)
        clock.sleep(0.2)
        with pytest.raises(islands.OfflineError, match=r"offline for .* longer than patience=0\.1: .*has expired"):
            island.meet(state)
        refused.clear()
    failed = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert any("create('" in record.getMessage() and "try 1" in record.getMessage() for record in failed)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_log_tells_of_a_store_that_is_away_and_does_not_fill_up(clock, caplog):
    """A hundred meetings in a moment: what has changed, and each kind of failure once a second."""
    tx, _, state = counting()
    caplog.set_level(logging.INFO, logger="jaxdist.islands")
    broken = []

    def around(number, name, function, arguments):
        if broken:
            raise PermissionError("the token has expired")
        return function(*arguments)

    with entered(wrap(islands.memory(), around), tx, state) as (island, state):
        broken.append(True)
        started = clock.monotonic()
        for _ in range(100):
            state, report = island.meet(state)
            assert report.offline
        seconds = clock.monotonic() - started
        broken.clear()
        while not report.counted:
            state, report = island.meet(state)
    told = warnings_of(caplog)
    assert sum("a is offline, and trains on for patience=60 s: " in one for one in told) == 1
    assert any(one.startswith("get('run.json') failed, try 1: PermissionError: the token has expired") for one in told)
    assert len(told) <= 1 + len(islands.SharedStore._fields) * (seconds + 1)
    assert "a is back, after " in caplog.text


def test_an_hour_without_a_store_is_not_an_hour_of_equal_lines(clock, caplog):
    broken = [True]

    def around(number, name, function, arguments):
        if broken:
            raise ConnectionError("no route")
        return function(*arguments)

    store = Connection(wrap(islands.memory(), around))
    store.deadline = store.now() + 3600
    with pytest.raises(ConnectionError, match="no route"):
        store.get("a")
    lines = warnings_of(caplog)
    assert lines[0] == "get('a') failed, try 1: ConnectionError: no route"
    assert 60 <= len(lines) <= 70
    # Once it was back, the next failure is news.
    broken.clear()
    store.deadline = store.now() + 10
    store.get("a")
    clock.sleep(1)
    broken.append(True)
    with pytest.raises(ConnectionError, match="no route"):
        store.get("a")
    assert warnings_of(caplog)[len(lines)] == lines[0]


def test_a_log_tells_what_an_island_waits_for(clock, caplog):
    tx, _, state = counting()
    options = {"round_timeout": 0.01, "patience": 0.2}
    with (
        islands.join(islands.memory(), tx, name="a", begin_with=2, **options) as island,
        pytest.raises(islands.TooFewIslandsError),
    ):
        island.enter(state)
    assert warnings_of(caplog) == ["waiting for begin_with=2 islands, a so far"]
    caplog.clear()
    with islands.join(islands.memory(), tx, name="a", quorum=2, **options) as island:
        state, fresh = island.enter(state), state
        state, _ = island.meet(state)
        clock.sleep(0.3)
        with pytest.raises(islands.TooFewIslandsError):
            island.meet(state)
    assert warnings_of(caplog) == ["round 0 waits for quorum=2 islands and has 1: an error after patience=0.2 s"]
    caplog.clear()
    with islands.join(islands.memory(), tx, name="a", **options) as island:
        island.enter(fresh)
        # As at the end of a meeting that a long upload has left no time.
        island._check_patience(1, 0.0)
    assert warnings_of(caplog) == []


def test_an_island_that_cannot_keep_up_is_told_how_far_it_has_come(clock):
    tx, _, state = counting()
    gate = Gate(clock, islands.memory(), lambda name, arguments: name == "get" and arguments[0].startswith("bodies/"))
    with entered(gate.base, tx, state), islands.join(gate.store, tx, name="b", patience=0.2) as late:
        with pytest.raises(
            islands.StoreUnusableError, match=r"'b' cannot enter \(it has come to round 0 of the run\): .*get"
        ):
            late.enter(state)
        gate.open()


def test_rounds_of_few_islands_are_told_once_with_what_mends_it(caplog):
    """Later ones have a record that warns nobody."""
    store, tx = islands.memory(), method(inner=sgd(0.1))
    with (
        islands.join(store, tx, name="gone", round_timeout=0.05) as gone,
        islands.join(store, tx, name="here", round_timeout=0.05) as here,
    ):
        gone.enter(begin(tx))
        state = here.enter(begin(tx))
        for _ in range(5):
            state, _ = here.meet(state)
        caplog.set_level(logging.DEBUG, logger="jaxdist.islands")
        for members, missing in ((1, 1), (3, 2), (2, 3)):
            counted = tuple(protocol.Member(f"in {i}", "", 1, None, 1, 1) for i in range(members))
            late = tuple(f"out {i}" for i in range(missing))
            here._warn_if_few(protocol.Commit("here", "", counted, late, (), (), ()), here._outbox)
    told = [record for record in caplog.records if "came too late" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING, logging.DEBUG, logging.WARNING]
    assert "has 1 of 2 members, here, and gone came too late for round_timeout=0.05 s" in told[0].getMessage()
    assert "has 2 of 5 members, in 0, in 1, and out 0, out 1, out 2 came" in told[2].getMessage()
    assert "join with quorum=3" in told[2].getMessage()


def test_a_drift_that_no_round_can_count_any_more_is_sent_again(clock):
    tx, step, state = counting()
    gate = Gate(clock, islands.memory(), is_body)
    gate.open()
    with (
        islands.join(gate.store, tx, name="slow", round_timeout=0.05, keep_every=2) as slow,
        islands.join(gate.base, tx, name="fast", round_timeout=0.01, keep_every=2) as fast,
    ):
        mine, other = slow.enter(state), fast.enter(state)
        gate._open.clear()
        mine, _ = slow.meet(train_round(step, mine))
        first = slow._outbox.flight.body
        for _ in range(protocol.FEWEST_ROUNDS + 4):
            other, _ = fast.meet(other)
        mine, _ = slow.meet(train_round(step, mine))
        gate.open()
        for _ in range(20):
            mine, report = slow.meet(mine)
            if report.counted:
                break
    assert report.examples == 12.0
    assert first not in [member.body for commit in commits_of(gate.base) for member in commit.members]


def test_a_reducer_that_decodes_by_the_round_sends_again_in_the_next_round():
    """Its memory, which all islands share, is another one then."""
    memory = jd.reducers.from_generator("memory", lambda like: jax.tree.map(jnp.zeros_like, like), remember)
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=4, reducer=memory, axis=None)
    store = islands.memory()
    with (
        islands.join(store, tx, name="slow", round_timeout=0.05) as slow,
        islands.join(store, tx, name="fast", round_timeout=0.01) as fast,
    ):
        state, other = slow.enter(begin(tx)), fast.enter(begin(tx))
        for _ in range(3):
            other, _ = fast.meet(other)
        for _ in range(20):
            state, report = slow.meet(state)
            if report.counted:
                break
        assert not slow._replay.lasts
    bodies = [(number, member.body) for number, commit in enumerate(commits_of(store)) for member in commit.members]
    assert all(int(body.partition("/")[0]) == number for number, body in bodies)


def remember(updates, state, comm, extras):
    leaves, tree = jax.tree.flatten(updates)
    received = yield jd.reducers.Messages(mean=leaves)
    old = jax.tree.leaves(state)
    means = [mean + 0.1 * x for mean, x in zip(received.mean, old, strict=True)]
    return jd.reducers.Reduced(tree.unflatten(means), updates), tree.unflatten([x + 1 for x in old])


def test_credentials_that_come_back_count_in_the_next_meeting():
    """What was refused a meeting ago is sent again before it is reported: the reason may have passed."""
    tx, step, state = counting()
    is_refused = False

    def around(number, name, function, arguments):
        if is_refused:
            raise PermissionError("the token has expired")
        return function(*arguments)

    with islands.join(wrap(islands.memory(), around), tx, name="a", round_timeout=20, patience=60) as island:
        state, _ = island.meet(train_round(step, island.enter(state)))
        for _ in range(2):
            is_refused = True
            for _ in range(2):
                state, report = island.meet(train_round(step, state))
                assert (report.offline, report.counted) == (True, False)
                assert "the token has expired" in report.problem
            is_refused = False
            state, report = island.meet(train_round(step, state))
            assert (report.offline, report.counted) == (False, True)


def test_a_listing_that_is_later_than_the_timeout_is_named(caplog):
    """Otherwise it looks as if no island were there, though this one has just sent its progress."""
    base, tx = islands.memory(), method()

    def list_late(prefix):
        return [name for name in base.list(prefix) if "/drift/" not in name]

    with islands.join(base._replace(list=list_late), tx, name="a", round_timeout=0.1, patience=0.5) as island:
        state, report = island.meet(island.enter(begin(tx)))
        assert not report.counted
        message = "does not list the progress of 'a' 0.1 s after it was sent"
        assert any(message in text for text in warnings_of(caplog))

        def meet_on(state):
            while True:
                state, _ = island.meet(state)

        with pytest.raises(islands.TooFewIslandsError, match=f"{message}.*acdirmax=1.*raise round_timeout"):
            meet_on(state)
