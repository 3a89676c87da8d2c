"""Islands over stores that are away, refuse, lose answers, damage bytes or lie."""

import optax
import pytest
from island_stores import PROBE_CALLS, failing, truncating, wrap, written_once
from islands_run import GOALS, H, begin, global_params, method, step_of, train
from problems import assert_close

from jaxdist import islands
from jaxdist.islands import run


def test_a_store_that_is_away_loses_nothing():
    store, away = islands.memory(), [False]

    def sometimes(function):
        def call(*arguments):
            if away[0]:
                raise ConnectionError("no route")
            return function(*arguments)

        return call

    tx, moved = method(inner=optax.sgd(0.1)), None
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


def test_a_drift_that_is_damaged_is_not_counted_and_its_progress_is_kept():
    store, tx = islands.memory(), method(inner=optax.sgd(0.1))
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
    tx = method(inner=optax.sgd(0.1), outer=lambda: optax.sgd(1.0))
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


@pytest.mark.slow
def test_a_store_that_throttles_slows_a_run_down_and_no_more():
    tx = method("4 bits with feedback")
    throttled = failing(written_once(), {number for number in range(PROBE_CALLS, 10_000) if number % 3})
    _, reports = train(throttled, tx, "a", 3)
    assert [(report.round, report.counted, report.offline) for report in reports] == [
        (n, True, False) for n in (1, 2, 3)
    ]


@pytest.mark.slow
def test_bytes_that_are_cut_on_their_way_are_read_again():
    """Each call in turn: a meeting goes on, and a drift that was not taken for that reason is kept."""
    tx = method(inner=optax.sgd(0.1), outer=lambda: optax.sgd(1.0))
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


def test_a_record_that_is_damaged_in_the_store_is_named():
    store, tx = islands.memory(), method()
    with islands.join(store, tx, name="a", round_timeout=0.1) as island:
        state = island.enter(begin(tx))
        store.put("rounds/00000000/commit", b"{}")
        with pytest.raises(islands.DamagedError, match="rounds/00000000/commit is not a record of Commit"):
            island.meet(state)


def test_a_store_that_overwrites_is_refused_at_join():
    store = islands.memory()
    lying = store._replace(create=lambda name, body: store.put(name, body) is None)
    with (
        pytest.raises(islands.StoreUnusableError, match="ignores 'create if absent'"),
        islands.join(lying, method(), name="a"),
    ):
        pass
    assert store.list("") == []
