"""Islands over stores that are away, refuse, lose answers, damage bytes or lie."""

import contextlib
import json
import threading
import time

import optax
import pytest
from island_stores import PROBE_CALLS, failing, truncating, wrap, written_once
from islands_run import GOALS, H, begin, global_params, method, sgd, step_of, train, wait_for_threads
from problems import assert_close

from jaxdist import islands
from jaxdist.islands import run


@pytest.mark.usefixtures("clock")
def test_a_store_that_is_away_loses_nothing():
    store, away = islands.memory(), [False]

    def sometimes(function):
        def call(*arguments):
            if away[0]:
                raise ConnectionError("no route")
            return function(*arguments)

        return call

    tx, moved = method(inner=sgd(0.1)), None
    with islands.join(islands.SharedStore(*map(sometimes, store)), tx, name="a", round_timeout=0.1) as island:
        state = island.enter(begin(tx))
        away[0] = True
        for _ in range(3):
            state = step_of(tx)(state, GOALS[0])
            moved = state.params
            state, report = island.meet(state)
            assert report.offline
            assert report.wait_seconds < 1.1
            assert_close(state.params, moved, tolerance=0)
        away[0] = False
        state, report = island.meet(state)
        assert report.counted
        assert not report.offline


@pytest.mark.usefixtures("clock")
def test_a_disk_that_is_unmounted_for_a_meeting_costs_no_progress(tmp_path):
    tx = method(inner=sgd(0.1))
    with islands.join(tmp_path / "run", tx, name="a", round_timeout=0.1) as island:
        state, _ = island.meet(step_of(tx)(island.enter(begin(tx)), GOALS[0]))
        (tmp_path / "run").rename(tmp_path / "away")
        state = step_of(tx)(state, GOALS[0])
        moved = state.params
        state, report = island.meet(state)
        assert report.offline
        assert_close(state.params, moved, tolerance=0)
        (tmp_path / "away").rename(tmp_path / "run")
        island._options = island._options._replace(round_timeout=30)
        state, report = island.meet(state)
        assert report.counted


def test_a_listing_that_misses_a_session_is_no_other_process():
    """A listing may miss names of the last moments."""
    store, tx = islands.memory(), method(inner=sgd(0.1))
    forgetful = store._replace(list=lambda prefix: [] if prefix.startswith("names/") else store.list(prefix))
    with islands.join(store, tx, name="a") as island:
        state = island.enter(begin(tx))
        island._store.store = forgetful
        assert island.meet(state)[1].counted


@pytest.mark.usefixtures("clock")
def test_a_drift_that_is_damaged_is_not_counted_and_its_progress_is_kept():
    store, tx = islands.memory(), method(inner=sgd(0.1))
    spoiled = []

    def put(name, body):
        store.put(name, body[:-1] if spoiled == [] and name.startswith("bodies/") else body)
        spoiled.append(name)

    with islands.join(store, tx, name="good", round_timeout=0.2) as good:
        state = good.enter(begin(tx))
        with islands.join(store._replace(put=put), tx, name="bad", round_timeout=0.2) as bad:
            other = bad.enter(begin(tx))
            other = step_of(tx)(other, GOALS[0])
            bad._store.deadline = float("inf")
            other, report = bad.leave(other)
        state, report = good.meet(state)
        assert report.members == ("good",)
        commit = run.read_commit(good._store, 0)
        assert commit is not None
        assert commit.damaged == ("bad",)


def calls_of(use):
    """How many calls of the store this makes if nothing fails."""
    calls = []
    use(wrap(islands.memory(), lambda number, name, function, arguments: calls.append(name) or function(*arguments)))
    return len(calls)


def own_path(tx, step, rounds):
    """Where an island gets to alone: with an outer rate of 1, the global parameters of its rounds."""
    state = begin(tx)
    for _ in range(rounds * H):
        state = step(state, GOALS[0])
    return state.params


def outcomes(reports):
    return [(report.round, report.counted, report.offline) for report in reports]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["refused", "done, and the answer lost"])
def test_a_call_that_fails_once_costs_nothing(after):
    """Each call in turn: every round counts, and no drift is lost, taken twice or overwritten."""
    tx = method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0))
    options = {"step": step_of(tx), "keep_every": 1}
    path = own_path(tx, options["step"], 2)
    calls = calls_of(lambda store: train(store, tx, "a", 2, **options))
    assert calls > 30
    for moment in range(calls):
        state, reports = train(failing(written_once(), {moment}, after=after), tx, "a", 2, **options)
        assert [(report.round, report.counted, report.offline) for report in reports] == [
            (1, True, False),
            (2, True, False),
        ]
        assert_close(global_params(state), path, tolerance=1e-6)


def silent_from(store, moment, silent):
    """A store that does what it is asked, but from its call number `moment` on gives no answer while `silent[0]`."""

    def around(number, name, function, arguments):
        answer = function(*arguments)
        if number >= moment and silent[0]:
            raise TimeoutError("no answer")
        return answer

    return wrap(store, around)


@pytest.mark.usefixtures("clock")
@pytest.mark.sampled(13)
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_that_are_lost_for_the_rest_of_a_meeting_lose_and_double_no_progress(overlap):
    """From each call of it on: the store may have the drift, or even the commit, and the island does not know it."""
    tx = method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0))
    step, options = step_of(tx), {"name": "a", "round_timeout": 30, "overlap": overlap}
    entering = calls_of(lambda store: enter_and_leave(store, tx))
    path, offline = own_path(tx, step, 5), []
    for moment in range(entering - 1, entering + 12):
        silent = [False]
        with islands.join(silent_from(written_once(), moment, silent), tx, **options) as island:
            state = island.enter(begin(tx))
            for number in range(5):
                for _ in range(H):
                    state = step(state, GOALS[0])
                silent[0] = number == 0
                island._options = island._options._replace(round_timeout=0.05 if silent[0] else 30)
                state, report = island.meet(state)
                if number == 0:
                    offline.append(report.offline)
                silent[0] = False
                wait_for_threads(island)
        assert_close(state.params, path, tolerance=1e-5)
        assert report.counted
    assert any(offline)


def test_overlap_asks_for_no_body_in_a_meeting():
    """Neither its own nor those of the others: they cross the link in another thread, between the meetings."""
    tx, store, asked = method("4 bits with feedback"), islands.memory(), []

    def around(number, name, function, arguments):
        if arguments[0].startswith("bodies/"):
            asked.append((name, threading.current_thread() is threading.main_thread()))
        return function(*arguments)

    options = {"overlap": True, "keep_every": 100}
    with (
        islands.join(wrap(store, around), tx, name="a", **options) as a,
        islands.join(store, tx, name="b", **options) as b,
    ):
        states = {a: a.enter(begin(tx)), b: b.enter(begin(tx))}
        asked.clear()
        for _ in range(4):
            for number, island in enumerate(states):
                states[island], report = island.meet(step_of(tx)(states[island], GOALS[number]))
            for island in states:
                wait_for_threads(island)
        assert report.members == ("a", "b")
        assert report.round == 3
    assert sorted(asked) == [("get", False)] * 4 + [("put", False)] * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_store_is_asked_one_thing_at_a_time_but_for_an_upload(overlap):
    """Also while the island trains, cleans up, and ends with an error."""
    store, inside, together = islands.memory(), [], set()

    def around(number, name, function, arguments):
        # What a clean-up lists, to delete some of it.
        name = "list all" if name == "list" and arguments[0] in ("rounds/", "bodies/", "anchors/", "probe/") else name
        together.update((name, other) for other in inside)
        inside.append(name)
        # An upload lasts for several other requests.
        time.sleep(0.05 if name == "put" else 0.001)
        inside.remove(name)
        return function(*arguments)

    tx = method(inner=sgd(0.1))
    options = {"name": "a", "overlap": overlap, "keep_every": 1}
    with contextlib.suppress(KeyError), islands.join(wrap(store, around), tx, **options) as island:
        state = island.enter(begin(tx))
        for _ in range(5):
            state, _ = island.meet(step_of(tx)(state, GOALS[0]))
        raise KeyError
    assert together
    # Two at a time are of two kinds: an upload, what a clean-up lists and deletes, anything else.
    kinds = {"put": "upload", "list all": "clean-up", "delete": "clean-up", "delete_many": "clean-up"}
    assert all(kinds.get(one) != kinds.get(other) for one, other in together)


def test_a_transfer_that_fails_while_the_island_trains_is_made_up_for_in_the_next_meeting():
    tx, silent, reports = method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0)), [], []

    def around(number, name, function, arguments):
        if silent and name == "put":
            silent.append(name)
            raise ConnectionError("no route")
        return function(*arguments)

    step = step_of(tx)
    with islands.join(wrap(written_once(), around), tx, name="a", round_timeout=30, overlap=True) as island:
        state = island.enter(begin(tx))
        for number in range(3):
            for _ in range(H):
                state = step(state, GOALS[0])
            silent.extend(["from here on"] if number == 1 else [])
            state, report = island.meet(state)
            reports.append(report)
            while number == 1 and len(silent) < 3:
                time.sleep(0.01)
            silent.clear()
            wait_for_threads(island)
        assert (report.round, report.counted, report.offline) == (2, True, False)
        # The transfer may fail before the second meeting ends, or after that.
        assert sum(report.retries for report in reports[1:]) >= 1
        assert {report.problem for report in reports[1:]} >= {"ConnectionError: no route"}
    assert_close(state.params, own_path(tx, step, 3), tolerance=1e-6)


@pytest.mark.slow
def test_a_store_that_throttles_slows_a_run_down_and_no_more():
    tx = method("4 bits with feedback")
    throttled = failing(written_once(), {number for number in range(PROBE_CALLS, 10_000) if number % 3})
    _, reports = train(throttled, tx, "a", 3)
    assert [(report.round, report.counted, report.offline) for report in reports] == [
        (n, True, False) for n in (1, 2, 3)
    ]


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
def test_bytes_that_are_cut_on_their_way_are_read_again():
    """Each call in turn: a meeting goes on, and a drift that was not taken for that reason is kept."""
    tx = method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0))
    step = step_of(tx)
    entering = calls_of(lambda store: enter_and_leave(store, tx))
    calls = calls_of(lambda store: train(store, tx, "a", 2, step=step, keep_every=1))
    path = own_path(tx, step, 2)
    for moment in range(entering - 1, calls):
        cutting = truncating(islands.memory(), moment)
        state, reports = train(cutting, tx, "a", 2, step=step, keep_every=1, round_timeout=5)
        assert_close(state.params, path, tolerance=1e-6)
        assert [report.offline for report in reports] == [False, False]


def enter_and_leave(store, tx):
    with islands.join(store, tx, name="a") as island:
        island.enter(begin(tx))


@pytest.mark.usefixtures("clock")
def test_a_record_that_is_damaged_in_the_store_is_named():
    store, tx = islands.memory(), method()
    with islands.join(store, tx, name="a", round_timeout=0.1) as island:
        state = island.enter(begin(tx))
        store.put("rounds/00000000/commit", b"{}")
        with pytest.raises(islands.DamagedError, match="rounds/00000000/commit is not a record of Commit"):
            island.meet(state)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_description_is_named_by_all_that_read_it(body):
    store, tx = islands.memory(), method()
    store.put("run.json", body)
    for read in (
        lambda: islands.status(store),
        lambda: islands.read(store, tx, begin(tx)[0]),
        lambda: enter_and_leave(store, tx),
    ):
        with pytest.raises(islands.DamagedError, match=r"run\.json is no description of a run.* begin a new run"):
            read()


@pytest.mark.parametrize("part", ["record", "body", "missing body"])
def test_kept_parameters_that_are_damaged_follow_from_those_before(part):
    store, tx = islands.memory(), method(inner=sgd(0.1))
    state, reports = train(store, tx, "a", 3, keep_every=1)
    newest = json.loads(store.get(store.list("anchors/")[-1]))["body"]
    body = f"bodies/{newest}"
    if part == "record":
        name = store.list("anchors/")[-1]
        store.delete(name)
        assert store.create(name, b"{")
    elif part == "body":
        store.put(body, store.get(body)[:-1])
    else:
        store.delete(body)
    with islands.join(store, tx, name="b") as island:
        joined = island.enter(begin(tx, fill=9.0))
        assert island._replay.digest == reports[-1].digest
        assert_close(joined.params, global_params(state), tolerance=0)
        _, report = island.meet(step_of(tx)(joined, GOALS[1]))
        assert report.counted


def test_without_whole_kept_parameters_the_newest_are_named():
    store, tx = islands.memory(), method(inner=sgd(0.1))
    train(store, tx, "a", 3, keep_every=1)
    for name in store.list("bodies/"):
        store.delete(name)
    with (
        islands.join(store, tx, name="b") as island,
        pytest.raises(islands.DamagedError, match="which anchors/00000003 names"),
    ):
        island.enter(begin(tx))


def test_what_someone_has_put_beside_the_names_of_a_run_does_not_matter():
    """A bucket's console makes empty names for its folders, and file managers leave files of their own."""
    store, tx = islands.memory(), method(inner=sgd(0.1))
    strange = ["names/", "names/a/old", "anchors/", "anchors/notes.txt", "rounds/", "rounds/copy/commit", "rounds/x"]
    strange += ["rounds/00000001/", "bodies/", "bodies/Thumbs.db", "bodies/copy/1", "probe/", "methods/"]
    for name in strange:
        store.create(name, b"")
    _, reports = train(store, tx, "a", 12, keep_every=1)
    assert all(report.counted for report in reports)
    assert islands.status(store).round == islands.read(store, tx, begin(tx).params)[0] == 12
    assert islands.status(store).sessions == {"a": 1}
    # Old rounds are deleted as usual.
    assert not any(name.startswith("bodies/00000000/") for name in store.list("bodies/"))
    assert set(strange) - {"probe/"} <= set(store.list(""))


def test_a_store_that_overwrites_is_refused_at_join():
    store = islands.memory()
    lying = store._replace(create=lambda name, body: store.put(name, body) is None)
    with (
        pytest.raises(islands.StoreUnusableError, match="ignores 'create if absent'"),
        islands.join(lying, method(), name="a"),
    ):
        pass
    assert store.list("") == []
