"""Islands that come late, leave, die or differ, and what the others make of it."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from island_stores import wrap
from islands_run import (
    GOALS,
    H,
    begin,
    contribution,
    global_params,
    left_of,
    method,
    sgd,
    step_of,
    total,
    train,
    train_together,
    wait_for_threads,
)
from problems import assert_close

from jaxdist import islands
from jaxdist.islands import cleanup


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
def test_who_enters_later_has_the_same_parameters_at_once_and_counts_in_the_next_round():
    store, tx = islands.memory(), method("4 bits with feedback")
    first, reports = train(store, tx, "a", 3, keep_every=2)
    with islands.join(store, tx, name="b", round_timeout=0.05) as island:
        state = island.enter(begin(tx, fill=7.0))
        assert_close(global_params(state), global_params(first), tolerance=0)
        assert_close(state.params, jax.tree.map(lambda x: x.astype(jnp.float32), global_params(first)), tolerance=0)
        state, report = island.meet(state)
    assert (report.members, report.round) == (("b",), 4)
    assert [one.round for one in reports] == [1, 2, 3]


@pytest.mark.usefixtures("clock")
def test_who_enters_at_kept_parameters_waits_for_the_members_of_the_last_round():
    store, tx = islands.memory(), method()
    with (
        islands.join(store, tx, name="there", keep_every=1) as there,
        islands.join(store, tx, name="new", round_timeout=5) as new,
    ):
        there.meet(there.enter(begin(tx)))
        _, report = new.meet(new.enter(begin(tx)))
        assert report.counted
    assert islands.status(store).rounds[1].missing == ("there",)


@pytest.mark.usefixtures("clock")
def test_a_death_costs_one_timeout():
    store, tx = islands.memory(), method()
    with (
        islands.join(store, tx, name="dead", round_timeout=5) as dead,
        islands.join(store, tx, name="alive", round_timeout=30) as alive,
    ):
        gone, state = dead.enter(begin(tx)), alive.enter(begin(tx))
        _, own = dead.meet(gone)
        assert own.counted
        dead._entered = False  # killed: it says nothing
        reports = []
        for _ in range(3):
            state, report = alive.meet(state)
            reports.append(report)
    assert all(report.counted for report in reports)
    assert [report.missing for report in reports].count(("dead",)) == 1
    assert reports[-1].missing == ()


def test_leaving_costs_no_timeout_and_sends_the_progress():
    store, tx = islands.memory(), method()
    with (
        islands.join(store, tx, name="a", round_timeout=20) as a,
        islands.join(store, tx, name="b", round_timeout=20) as b,
    ):
        first, second = a.enter(begin(tx)), b.enter(begin(tx))
        result = a.leave(step_of(tx)(first, GOALS[0]))
        assert result is not None
        second, report = b.meet(second)
        assert report.members == ("a", "b")
        second, report = b.meet(second)
        assert report.members == ("b",)
        assert report.wait_seconds < 10
        with pytest.raises(ValueError, match="not meet after leave"):
            a.meet(first)


def test_an_error_in_the_block_of_an_island_costs_no_timeout():
    store, tx = islands.memory(), method()
    with islands.join(store, tx, name="b", round_timeout=100) as b:
        state = b.enter(begin(tx))
        with contextlib.suppress(RuntimeError), islands.join(store, tx, name="a") as a:
            a.enter(begin(tx))
            raise RuntimeError
        state, report = b.meet(state)
    assert report.members == ("b",)
    assert report.missing == ()
    assert report.wait_seconds < 50


def test_no_island_waits_for_another_that_compiles(monkeypatch):
    """Rounds go on meanwhile, and the new island then enters the one that is open."""
    store, tx = islands.memory(), method()
    step, others, waits = step_of(tx), [], []

    def compile_slowly(*arguments, **options):
        for _ in range(3):
            state, report = there.meet(step(others.pop(), GOALS[1]))
            others.append(state)
            waits.append(report.wait_seconds)

    options = {"round_timeout": 300, "keep_every": 1}
    with (
        islands.join(store, tx, name="there", **options) as there,
        islands.join(store, tx, name="new", **options) as new,
    ):
        others.append(there.enter(begin(tx)))
        monkeypatch.setattr(islands.island, "compile_programs", compile_slowly)
        state = new.enter(begin(tx))
        assert max(waits) < 100
        assert new._replay.round == there._replay.round == 3
        assert new._replay.digest == there._replay.digest
        assert_close(global_params(state), global_params(others[0]), tolerance=0)
        there.leave()
        state, report = new.meet(state)
        assert (report.counted, report.late, report.round) == (True, False, 4)


def test_no_island_waits_for_one_that_leaves_behind_the_open_round():
    store, tx = islands.memory(), method()
    with (
        islands.join(store, tx, name="behind", overlap=True) as behind,
        islands.join(store, tx, name="ahead", round_timeout=300) as ahead,
    ):
        state, other = ahead.enter(begin(tx)), behind.enter(begin(tx))
        behind.meet(other)
        state, report = ahead.meet(state)
        assert report.members == ("ahead", "behind")
        behind.leave()
        state, report = ahead.meet(state)
        assert report.members == ("ahead",)
        assert report.wait_seconds < 100


def test_the_older_process_of_a_name_stops():
    store, tx = islands.memory(), method()
    with islands.join(store, tx, name="a") as old, islands.join(store, tx, name="a") as new:
        first, second = old.enter(begin(tx)), new.enter(begin(tx))
        with pytest.raises(islands.NameTakenError, match="'a'"):
            old.meet(first)
        new.meet(second)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("leaving", [True, False])
def test_an_island_that_enters_again_takes_part_again(leaving):
    store, tx = islands.memory(), method(inner=sgd(0.1))
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        state, _ = island.meet(island.enter(begin(tx)))
        if leaving:
            state, _ = island.leave(step_of(tx)(state, GOALS[0]))
        state, report = island.meet(island.enter(state))
        assert report.counted
        assert report.round >= 2 + leaving


def test_the_probe_of_an_island_that_joins_slowly_stays(monkeypatch):
    """Without it the store would seem to create a name twice; those of processes that died go."""
    store, tx = islands.memory(), method()
    with islands.join(store, tx, name="a", keep_every=1) as island:
        state = island.enter(begin(tx))
        store.create("probe/slow", b"first")
        for seconds, expected in ((600.0, ["probe/slow"]), (0.0, [])):
            monkeypatch.setattr(cleanup, "PROBE_SECONDS", seconds)
            for _ in range(3):
                state, _ = island.meet(state)
                wait_for_threads(island)
            assert store.list("probe/") == expected


@pytest.mark.usefixtures("clock")
def test_old_rounds_go_and_a_straggler_jumps_over_them():
    store, tx = islands.memory(), method(inner=sgd(0.1))
    step = step_of(tx)
    with (
        islands.join(store, tx, name="slow", round_timeout=30, keep_every=2) as slow,
        islands.join(store, tx, name="fast", round_timeout=0.01, keep_every=2) as fast,
    ):
        state, other = step(slow.enter(begin(tx)), GOALS[0]), fast.enter(begin(tx))
        for _ in range(31):
            other, _ = fast.meet(step(other, GOALS[1]))
            wait_for_threads(fast)
        # The kept parameters are those before rounds 28 and 30; a round may count bodies of eight rounds.
        assert [int(name.split("/")[1]) for name in store.list("anchors/")] == [0, 28, 30]
        said = [name for name in store.list("rounds/") if not name.endswith("/commit")]
        for names in (said, store.list("bodies/")):
            assert min(int(name.split("/")[1]) for name in names) == 21
        # Commits stay: no second one of a round can be created.
        assert len(store.list("rounds/")) - len(said) == 31
        assert not store.list("probe/")
        fast.leave()
        state, report = slow.meet(state)
        assert report.late
        assert report.counted
        assert report.round == 32


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
def test_an_island_that_slept_for_107_rounds_is_in_step_after_one_meeting():
    """It reads the newest kept parameters and the rounds since, however many there were."""
    tx, calls = method("4 bits with feedback", inner=sgd(0.1)), []

    def count(number, name, function, arguments):
        calls.append(name)
        return function(*arguments)

    store = islands.memory()
    options = {"round_timeout": 0.001, "keep_every": 10}
    with (
        islands.join(wrap(store, count), tx, name="slept", round_timeout=60, keep_every=10) as slept,
        islands.join(store, tx, name="awake", **options) as awake,
    ):
        state, other = step_of(tx)(slept.enter(begin(tx)), GOALS[0]), awake.enter(begin(tx))
        moved = jax.tree.map(lambda a, p: a - p, total(state.opt.anchor), total(state.params))
        for _ in range(107):
            other, report = awake.meet(other)
        awake.leave()
        calls.clear()
        state, found = slept.meet(state)
        assert (found.counted, found.late, found.round) == (True, True, report.round + 1)
        # Of each round a commit, a drift's record and its body, and listings; of 107 rounds it would be 500.
        assert len(calls) <= 2 * 10 * 5 + 30
        assert len(slept._replay._bodies) <= 2
        taken = contribution(store, "slept", report.round, tx, state)
        assert_close(jax.tree.map(np.add, taken, left_of(state)), moved, tolerance=1e-5)
    assert {one.round: one.members for one in islands.status(store).rounds}[report.round] == ("slept",)


def test_an_island_may_have_the_name_of_a_record():
    store = islands.memory()
    train(store, method(), "commit", 2)
    found = islands.status(store)
    assert (found.round, [one.round for one in found.rounds]) == (2, [0, 1])


@pytest.mark.usefixtures("clock")
@pytest.mark.sampled(9)
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_checkpoint_from_before_the_last_drift_does_not_send_it_again(fragments):
    """The drift of the earlier process counts, and what the checkpoint holds of it is not added to it."""
    store = islands.memory()
    tx = method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0), fragments=fragments)
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        saved = step_of(tx)(island.enter(begin(tx)), GOALS[0])
        island.leave(saved)
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        state = island.enter(saved)
        for _ in range(2 * fragments):
            state, _ = island.meet(state)
    # Alone and with an outer rate of 1, the global parameters are those that this island sent, once.
    assert_close(global_params(state), saved.params, tolerance=1e-6)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("fragments", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_an_island_that_starts_again_between_two_rounds_has_all_bits_of_its_state(fragments):
    """The global parameters are computed anew, from the rounds since the kept ones."""
    store, tx = islands.memory(), method(inner=optax.adam(1.0), fragments=fragments)
    step = step_of(tx)
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        state = island.enter(begin(tx))
        for number in range(2 * H + 2):
            state = step(state, GOALS[number % 3])
            if island.due(number):
                state, report = island.meet(state)
                assert report.counted
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        entered = island.enter(state)
    assert np.abs(state.params["w"] - global_params(state)["w"]).max() > 1e-3
    # Of fragments whose round is not open the count is that of the run.
    assert_close(entered._replace(opt=entered.opt._replace(rounds=state.opt.rounds)), state, tolerance=0)


def round_differently(island, number, *, times):
    """Lets the last island take its next so many outer steps with another last bit, as other hardware might."""
    take_step, taken = island._replay._take_step, itertools.count()

    def take_other_step(*arguments):
        shared = take_step(*arguments)
        if next(taken) >= times:
            return shared
        return shared._replace(anchor=jax.tree.map(lambda x: jnp.nextafter(x, jnp.inf), shared.anchor))

    if number == 2:
        island._replay._take_step = take_other_step


@pytest.mark.slow
def test_an_island_with_another_bit_is_found_in_the_next_round_and_takes_the_parameters_of_the_run():
    store, names = islands.memory(), ["a", "b", "c"]
    prepare = lambda island, number: round_differently(island, number, times=1)  # noqa: E731
    found = train_together(store, method("4 bits with feedback"), names, 4, prepare=prepare, keep_every=100)
    digests = [{report.round: report.digest for report in found[name][1]} for name in names]
    assert digests[0] == digests[1]
    assert digests[2].pop(1) != digests[0][1]
    assert {number: digests[2].get(number, digest) for number, digest in digests[0].items()} == digests[0]
    members = {one.round: one.members for one in islands.status(store).rounds}
    assert (members[0], members[1], members[2]) == (("a", "b", "c"), ("a", "b"), ("a", "b", "c"))


def test_an_island_that_differs_again_and_again_stops_and_no_other():
    store, tx = islands.memory(), method()
    prepare = lambda island, number: round_differently(island, number, times=100)  # noqa: E731
    with pytest.raises(islands.AnchorDiffersError, match=r"'c' differ from those of the run for the 3rd time"):
        train_together(store, tx, ["a", "b", "c"], 6, prepare=prepare)
    members = {one.round: one.members for one in islands.status(store).rounds}
    assert members[0] == ("a", "b", "c")
    assert all(members[number] == ("a", "b") for number in range(1, 6))


def test_too_few_islands_are_an_error_after_the_patience(clock):
    tx = method()
    few = pytest.raises(islands.TooFewIslandsError, match="1 of begin_with=2 islands came within")
    with few, islands.join(islands.memory(), tx, name="a", begin_with=2, patience=0.1) as island:
        island.enter(begin(tx))
    with islands.join(islands.memory(), tx, name="a", quorum=2, patience=0.1, round_timeout=0.02) as island:
        state, report = island.meet(island.enter(begin(tx)))
        assert not report.counted
        clock.sleep(0.1)
        with pytest.raises(islands.TooFewIslandsError, match="a round needs quorum=2"):
            island.meet(state)


def test_an_island_recovers_from_gradients_that_are_not_finite():
    """Adam's moments would keep what the parameters have lost."""
    tx = method(inner=optax.adam(optax.linear_schedule(0.05, 0.01, 100)))
    step = step_of(tx)
    with islands.join(islands.memory(), tx, name="here") as island:
        state, reports = island.enter(begin(tx)), []
        for number in range(4 * H):
            state = step(state, GOALS[0] if number != H + 1 else GOALS[0] * np.nan)
            if island.due(number):
                state, report = island.meet(state)
                reports.append(report)
    assert [report.nonfinite for report in reports] == [False, True, False, False]
    assert [report.counted for report in reports] == [True, False, True, True]
    assert np.isfinite(state.params["w"]).all()
    # The schedule of the learning rate has not begun again.
    counts = [int(x) for x in jax.tree.leaves(state.opt.inner) if x.dtype == np.int32]
    assert max(counts) == 4 * H


@pytest.mark.sampled(9)
@pytest.mark.parametrize("reducer", ["exact", "low rank"])
def test_nobody_waits_for_an_island_that_left_with_a_drift_in_the_open_round(reducer):
    """As with `overlap`, which sends the drift of the next round before the steps that it covers."""
    store, tx = islands.memory(), method(reducer, inner=sgd(0.1))
    # Rounds must not end without one of them on a busy machine: each goes on by itself, and has time.
    step, options = step_of(tx), {"round_timeout": 100, "overlap": True, "begin_with": 2}
    has_met, has_left = threading.Event(), threading.Event()

    def come_and_go():
        try:
            with islands.join(store, tx, name="leaves", **options) as leaves:
                state = leaves.enter(begin(tx))
                for _ in range(6):
                    state, _ = leaves.meet(step(state, GOALS[0]))
                has_met.set()
        finally:
            has_met.set()
            has_left.set()

    with islands.join(store, tx, name="stays", **options) as stays, ThreadPoolExecutor() as pool:
        gone = pool.submit(come_and_go)
        state, alone = stays.enter(begin(tx)), 0
        while alone < 4:
            # The other one has left when this one next sees the round that both have a drift in.
            assert not has_met.is_set() or has_left.wait(60)
            state, report = stays.meet(step(state, GOALS[0]))
            assert report.missing == ()
            assert report.wait_seconds < 50
            alone += has_left.is_set() and report.members == ("stays",)
        gone.result()
    assert any("leaves" in one.members for one in islands.status(store).rounds)
