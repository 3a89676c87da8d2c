"""What happens between any two calls of the store: a kill, a long pause, a round of another island."""

import collections
import itertools

import jax
import numpy as np
import pytest
from island_stores import PROBE_CALLS, KilledError, archived, interrupted, killing, written_once
from islands_run import (
    GOALS,
    begin,
    bodies_under_way,
    decoded,
    global_params,
    left_of,
    method,
    sgd,
    step_of,
    total,
    train,
    wait_for_threads,
)
from problems import assert_close

from jaxdist import islands
from jaxdist.islands import protocol

# By default every fourth call of the store, else each of them.
each_number = pytest.mark.parametrize("fragments", [1, 2])
each_stride = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])


def meet_until_counted(island, state):
    """Another island may have ended the round of a meeting without this one."""
    for _ in range(20):
        state, report = island.meet(state)
        if report.counted:
            break
    return state, report


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
@each_number
@each_stride
def test_a_kill_between_any_two_calls_of_the_store_stops_no_other_island(stride, fragments):
    """Neither one that is there, nor the next of that name, nor one that comes later."""
    tx = method(fragments=fragments)
    state = begin(tx)
    options = {"step": step_of(tx), "state": state, "round_timeout": 0.01, "keep_every": 1}
    finished = False
    for moment in itertools.count(PROBE_CALLS - 1, stride):
        store = written_once()
        with islands.join(store, tx, name="other", round_timeout=0.01, keep_every=1) as island:
            other = island.enter(state)
            try:
                train(killing(store, moment), tx, "mortal", 2, **options)
                finished = True
            except KilledError:
                pass
            for _ in range(2):
                other, report = meet_until_counted(island, options["step"](other, GOALS[1]))
                assert report.counted
        for name in ("mortal", "later"):
            found, again = train(store, tx, name, 2, **options)
            assert again[-1].counted
        number, params = islands.read(store, tx, state.params)
        assert number == again[-1].round
        assert_close(params, global_params(found), tolerance=0)
        if finished:
            break
    assert moment > 30


def first_round_with(store, name):
    """The number of the first round that has counted a drift of this island."""
    for number in itertools.count():
        commit = protocol.parse(protocol.Commit, "", store.get(protocol.round_name(number, "commit")))
        if name in {member.name for member in commit.members}:
            return number


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
@each_number
@each_stride
def test_a_new_island_counts_in_the_round_that_it_enters_or_the_next(stride, fragments):
    """Whatever the other does between any two of its calls of the store; and it has the same bits at once."""
    tx = method("4 bits with feedback", fragments=fragments)
    step, options = step_of(tx), {"round_timeout": 0.02, "keep_every": 2}
    for moment in itertools.count(PROBE_CALLS, stride):
        store, others, digests, interruptions = written_once(), [], {}, []

        def go_on(others=others, digests=digests, interruptions=interruptions):
            interruptions.append(True)
            state, report = there.meet(step(others.pop(), GOALS[1]))
            others.append(state)
            digests[report.round] = report.digest

        with (
            islands.join(store, tx, name="there", **options) as there,
            islands.join(interrupted(store, moment, go_on), tx, name="new", **options) as new,
        ):
            others.append(there.enter(begin(tx)))
            for _ in range(3):
                go_on()
            interruptions.clear()
            state = new.enter(begin(tx, fill=7.0))
            entered = new._replay.round
            assert new._replay.digest == digests[entered]
            _, report = meet_until_counted(new, step(state, GOALS[0]))
            # The other may be called by a thread of this one.
            wait_for_threads(new)
            assert report.counted
            # Not the round of the report: a meeting goes on to another one if a drift of an earlier one has counted.
            assert first_round_with(store, "new") in (entered, entered + 1)
        if not interruptions:
            break
    assert moment > 20


@pytest.mark.slow
@each_stride
@pytest.mark.parametrize(
    ("reducer", "overlap", "fragments"),
    [
        ("exact", False, 1),
        ("exact", True, 1),
        ("4 bits with feedback", False, 1),
        ("4 bits with feedback", False, 2),
        ("exact", True, 2),
    ],
)
def test_a_long_pause_before_any_call_of_the_store_loses_and_doubles_nothing(reducer, overlap, fragments, stride):
    """While one island pauses, the other goes on so far that what the one was reading is forgotten."""
    tx = method(reducer, inner=sgd(0.1), fragments=fragments)
    step, options = step_of(tx), {"keep_every": 2, "round_timeout": 0.004, "overlap": overlap}
    for moment in itertools.count(0, stride):
        store, bodies, commits = archived(islands.memory())
        digests, others, paused = collections.defaultdict(set), [], []

        def go_on(digests=digests, others=others, paused=paused):
            paused.append(True)
            for _ in range(7 * fragments if others else 0):
                state, report = fast.meet(step(others.pop(), GOALS[1]))
                others.append(state)
                digests[report.round].add(report.digest)

        with (
            islands.join(interrupted(store, moment, go_on), tx, name="slow", **options) as slow,
            islands.join(store, tx, name="fast", **options) as fast,
        ):
            others.append(fast.enter(begin(tx)))
            state = slow.enter(begin(tx))
            moved = jax.tree.map(np.zeros_like, total(state.params))
            for _ in range(3):
                before = total(state.params)
                state = step(state, GOALS[0])
                moved = jax.tree.map(lambda m, b, a: m + b - a, moved, before, total(state.params))
                state, report = slow.meet(state)
                digests[report.round].add(report.digest)
            # Another thread may be making its pause.
            slow._stop_threads()
            wait_for_threads(slow)
            ahead = bodies_under_way(slow)
        if not paused:
            break
        assert {number: found for number, found in digests.items() if len(found) > 1} == {}
        members = [member for commit in commits.values() for member in commit.members]
        drifts = [member.body for member in members if member.name == "slow" and member.body not in ahead]
        taken = [decoded(bodies[place], place, tx, state) for place in drifts]
        assert_close(jax.tree.map(lambda *terms: sum(terms), left_of(state), *taken), moved, tolerance=1e-5)
    assert moment > 30
