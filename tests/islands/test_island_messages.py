"""Reducers of several messages in islands: each message has a round, and the last one takes what it takes."""

import jax
import numpy as np
import pytest
from island_stores import archived
from islands_run import (
    GOALS,
    REDUCERS_OF_TWO_MESSAGES,
    assert_within_ulps,
    begin,
    commits_of,
    global_params,
    left_of,
    method,
    on_a_mesh,
    outer,
    sgd,
    step_of,
    total,
    train_together,
    wait_for_threads,
)
from problems import assert_close

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands.fragments import RoundOrder

NAMES = ["a", "b", "c"]
each_reducer = pytest.mark.parametrize("reducer", REDUCERS_OF_TWO_MESSAGES)


def test_a_round_is_of_one_message_and_the_last_one_merges():
    order = RoundOrder(order=(1, 0), firsts=(2, 4), sync_period=4, messages=3)
    rounds = range(12)
    assert [order.fragment_in(number) for number in rounds] == [1, 1, 1, 0, 0, 0] * 2
    assert [order.message_in(number) for number in rounds] == [0, 1, 2] * 4
    assert [number for number in rounds if order.merges_in(number)] == [2, 5, 8, 11]
    assert [order.next_round(1, number) for number in range(9)] == [2, 2, 2, 8, 8, 8, 8, 8, 8]
    assert [order.steps_before(number) for number in range(10)] == [0, 0, 0, 2, 2, 2, 4, 4, 4, 6]


@pytest.mark.sampled(9)
@each_reducer
def test_fixed_members_are_those_of_local_steps_on_a_mesh(reducer):
    """To rounding: the mean of products is the product of the mean."""
    options = {"inner": sgd(0.1), "sync_period": 2}
    found = train_together(islands.memory(), method(reducer, **options), NAMES, 3)
    last = {name: reports[-1] for name, (_, reports) in found.items()}
    assert len({report.digest for report in last.values()}) == 1
    assert {(report.round, report.members) for report in last.values()} == {(6, ("a", "b", "c"))}
    made = REDUCERS_OF_TWO_MESSAGES[reducer]()
    meshed = on_a_mesh(jd.local_steps(options["inner"], outer(), sync_period=2, reducer=made), 6)
    assert_within_ulps(global_params(found["a"][0]), meshed, 64)


@pytest.mark.slow
@each_reducer
def test_islands_that_overlap_are_equal_after_equal_rounds(reducer):
    """A meeting may find the next message's round over or not, so that they end at different rounds."""
    tx = method(reducer, inner=sgd(0.1), sync_period=2)
    found = train_together(islands.memory(), tx, NAMES, 8, overlap=True)
    digests = {(report.round, report.digest) for _, reports in found.values() for report in reports}
    assert len(digests) == len({number for number, _ in digests}) > 2
    assert all(any(report.counted for report in reports) for _, reports in found.values())


@pytest.mark.slow
def test_fragments_are_those_of_local_steps_on_a_mesh():
    """One of them has no matrix, and so an empty first message."""
    options = {"sync_period": 2, "fragments": 2}
    inner, made = sgd(0.1), REDUCERS_OF_TWO_MESSAGES["low rank with feedback"]
    tx = method("low rank with feedback", inner=inner, **options)
    found = train_together(islands.memory(), tx, NAMES, 6)
    meshed = on_a_mesh(jd.local_steps(inner, outer(), reducer=made(), **options), 6)
    assert_within_ulps(global_params(found["a"][0]), meshed, 64)


@pytest.mark.usefixtures("clock")
def test_an_island_that_is_in_the_first_commit_alone_keeps_its_progress():
    """And one that is in the second alone counts: it projects onto the subspace that the others have chosen."""
    tx, (store, _, _) = method("low rank", inner=sgd(0.1)), archived(islands.memory())
    step, options = step_of(tx), {"round_timeout": 5, "grace": 0.0}
    with (
        islands.join(store, tx, name="first", **options) as first,
        islands.join(store, tx, name="second", **options) as second,
    ):
        mine, other = step(first.enter(begin(tx)), GOALS[0]), step(second.enter(begin(tx)), GOALS[1])
        moved = jax.tree.map(np.subtract, total(mine.opt.anchor), total(mine.params))
        send_message(first, mine)
        assert [[member.name for member in one.members] for one in commits_of(store)] == [["first"]]
        other, report = second.meet(other)
        assert (report.counted, report.members, report.round) == (True, ("second",), 2)
        # The other one goes on with a round that has ended without it.
        assert_close(left_of(mine), moved, tolerance=0)
        mine, report = first.meet(mine)
        assert report.counted
        assert [[member.name for member in one.members] for one in commits_of(store)] == [
            ["first"],
            ["second"],
            ["first"],
            ["first"],
        ]


def send_message(island, state):
    """Takes part in the first round of a meeting, and dies then as far as the others see."""
    model = island._division.split(state.opt, state.params)
    island._store.deadline = island._store.now() + 5
    assert island._encode(model, 0, is_told=False, leaving=False)
    assert island._deliver(0, wait=True)
    assert island._await_commit(model) is not None


@pytest.mark.usefixtures("clock")
@pytest.mark.sampled(9)
@each_reducer
def test_an_island_that_enters_between_two_messages_has_the_mean_of_the_first(reducer):
    tx, store = method(reducer, inner=sgd(0.1)), islands.memory()
    step = step_of(tx)
    with islands.join(store, tx, name="there", grace=0.0, keep_every=1) as there:
        state = there.enter(begin(tx))
        for _ in range(3):
            state, _ = there.meet(step(state, GOALS[0]))
            wait_for_threads(there)
        assert [int(name.rpartition("/")[2]) for name in store.list("anchors/")] == [0, 4, 6]
        state = step(state, GOALS[0])
        model = there._division.split(state.opt, state.params)
        there._store.deadline = there._store.now() + 5
        assert there._encode(model, 6, is_told=False, leaving=False)
        assert there._deliver(6, wait=True)
        there._apply(model, there._await_commit(model))
        with islands.join(store, tx, name="new", grace=0.0, round_timeout=0.2) as new:
            joined = new.enter(begin(tx, fill=5.0))
            assert new.round == 7
            assert new._replay.base == there._replay.base
            assert_close(global_params(joined), global_params(state), tolerance=0)
            joined, report = new.meet(step(joined, GOALS[1]))
            assert (report.counted, report.round) == (True, 8)


@pytest.mark.usefixtures("clock")
def test_leaving_sends_the_progress_after_the_first_commit():
    tx, store = method("low rank with feedback", inner=sgd(0.1)), islands.memory()
    with (
        islands.join(store, tx, name="a", grace=0.0, round_timeout=5) as a,
        islands.join(store, tx, name="b", grace=0.0, round_timeout=5) as b,
    ):
        first, second = a.enter(begin(tx)), b.enter(begin(tx))
        a.leave(step_of(tx)(first, GOALS[0]))
        second, report = b.meet(second)
    assert report.members == ("a", "b")
