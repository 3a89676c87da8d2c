"""Fragments in islands: rounds of a part of the model, in turn, which are those of `local_steps(fragments=P)`."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from island_stores import archived, wrap
from islands_run import (
    GOALS,
    REDUCERS,
    H,
    begin,
    bodies_under_way,
    compiled_programs,
    decoded,
    global_params,
    left_of,
    make_method,
    method,
    sgd,
    step_of,
    total,
    train,
    train_together,
    wait_for_threads,
    wait_for_upload,
)
from problems import assert_close

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import protocol
from jaxdist.islands.fragments import divide, schedule_of
from jaxdist.local_sgd import due_fragments
from jaxdist.local_sgd.local_steps import method_of


class State(NamedTuple):
    params: Any
    opt: Any


# The calendar of rounds


@settings(max_examples=20)
@given(st.integers(1, 12), st.data())
def test_rounds_are_where_those_of_local_steps_are(period, data):
    number = data.draw(st.integers(1, period))
    offset = data.draw(st.integers(0, period - 1))
    options = {"sync_period": period, "offset": offset}
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), fragments=number, axis=None, **options)
    schedule = schedule_of(method_of(tx))
    dues = [(step, due_fragments(step, fragments=number, **options)) for step in range(3 * period)]
    dues = [(step, *due) for step, due in dues if due]
    for round_number, (step, fragment) in enumerate(dues):
        assert schedule.fragment_in(round_number) == fragment
        assert schedule.steps_before(round_number + 1) == step + 1
        later = schedule.next_round(fragment, round_number + 1)
        assert (later, schedule.next_round(fragment, round_number)) == (round_number + number, round_number)
    with islands.join(islands.memory(), tx, name="a") as island:
        assert [step for step in range(3 * period) if island.due(step)] == [step for step, _ in dues]


# Arithmetic without rounding: numbers of a few bits, and signs, by which each fragment depends on all others.


PARTS = {"a": (4,), "b": (3,), "c": (2, 2)}


def coarse_method(**options):
    outer = optax.sgd(1.0, momentum=0.5)
    return jd.local_steps(optax.sgd(0.125), outer, **{"sync_period": 4, "fragments": 3, **options})


def coarse_step(tx, *, sync=None):
    def step(state, goal):
        everything = sum(x.sum() for x in jax.tree.leaves(state.params))
        gradient = jax.tree.map(
            lambda x, y: jnp.where(x + 0.25 * everything > y[: x.size].reshape(x.shape), 1.0, -1.0),
            state.params,
            {name: goal for name in PARTS},
        )
        updates, opt = tx.update(gradient, state.opt, state.params, sync=sync)
        return State(optax.apply_updates(state.params, updates), opt)

    return step


COARSE_GOALS = np.array([[1.0, -0.5, 0.25, 2.0], [-1.0, 0.75, 0.5, -2.0]], np.float32)


def coarse_params():
    return {name: jnp.full(shape, 0.5) for name, shape in PARTS.items()}


def coarse_islands(tx, meetings, **options):
    """The parameters of two islands, which train on goals of their own, the global ones, and the reports of one."""
    store, step, params = islands.memory(), jax.jit(coarse_step(tx, sync=())), coarse_params()

    def train_island(name, number):
        state, reports = State(params, tx.init(params)), []
        with islands.join(store, tx, name=name, begin_with=2, round_timeout=60, **options) as island:
            state = island.enter(state)
            for i in itertools.count():
                state = step(state, COARSE_GOALS[number])
                if island.due(i):
                    state, report = island.meet(state)
                    # Steps of a moment leave no time for it.
                    wait_for_upload(island)
                    reports.append(report)
                if len(reports) == meetings:
                    return state, reports

    found = in_threads(train_island)
    (state, reports), (other, _) = found["a"], found["b"]
    return [state.params, other.params], global_params(state), reports


def coarse_mesh(tx, steps):
    """The parameters of both workers, and the global ones, on a mesh."""
    params = coarse_params()
    state = jd.place(State(jd.PerWorker(params), tx.init(params)), 2)
    step = coarse_step(tx)
    run = jd.simulate(lambda state, goal: (step(state, goal[0]), {}), workers=2)
    for _ in range(steps):
        state, _ = run(state, COARSE_GOALS)
    return state.params.value, global_params(state)


def test_trajectories_of_fixed_members_are_those_of_local_steps_bit_for_bit():
    meetings = 11
    tx = coarse_method(axis=None)
    models, shared, reports = coarse_islands(tx, meetings)
    assert [report.members for report in reports] == [("a", "b")] * meetings
    assert [report.fragment for report in reports] == [*(1, 2, 0) * 3, 1, 2]
    meshed, expected = coarse_mesh(coarse_method(), schedule_of(method_of(tx)).steps_before(meetings))
    jax.tree.map(np.testing.assert_array_equal, shared, expected)
    for i, model in enumerate(models):
        jax.tree.map(np.testing.assert_array_equal, model, jax.tree.map(lambda x, i=i: x[i], meshed))
    assert np.abs(models[0]["a"] - models[1]["a"]).max() > 0


def test_overlap_merges_a_fragment_at_the_next_meeting_as_local_steps_does_after_a_delay():
    """Bit for bit, with what an island has done since its drift was sent."""
    meetings, options = 9, {"sync_period": 6}
    tx = coarse_method(axis=None, **options)
    models, _, reports = coarse_islands(tx, meetings, overlap=True)
    assert [report.members for report in reports] == [(), *[("a", "b")] * (meetings - 1)]
    assert [report.fragment for report in reports] == [None, *(1, 2, 0) * 2, 1, 2]
    late = coarse_method(delay=2, overlap_correction=True, **options)
    meshed, _ = coarse_mesh(late, schedule_of(method_of(tx)).steps_before(meetings))
    for i, model in enumerate(models):
        jax.tree.map(np.testing.assert_array_equal, model, jax.tree.map(lambda x, i=i: x[i], meshed))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reducer", REDUCERS)
def test_islands_agree_in_every_bit_of_every_fragment(reducer):
    names = ["a", "b", "c"]
    found = train_together(islands.memory(), method(reducer, fragments=2), names, 6, keep_every=100)
    for number in range(6):
        reports = [found[name][1][number] for name in names]
        assert {(report.round, report.members) for report in reports} == {(number + 1, ("a", "b", "c"))}
        assert {report.fragment for report in reports} == {1 - number % 2}
        assert len({report.digest for report in reports}) == 1
        assert all(report.counted and not report.late for report in reports)
    for name in names[1:]:
        assert_close(global_params(found[name][0]), global_params(found["a"][0]), tolerance=0)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("reducer", ["exact", "4 bits with feedback"])
def test_a_round_sends_the_bytes_of_its_fragment_alone(reducer):
    found = train_together(islands.memory(), method(reducer, fragments=2), ["a", "b", "c"], 4, keep_every=100)
    sizes = {0: 60, 1: 3}
    for name in found:
        for report in found[name][1]:
            n = sizes[report.fragment]
            payload = 4 * n if reducer == "exact" else -(-n // 2) + 4 * -(-n // 512)
            assert 0 < report.sent_bytes - payload <= 1024
            assert 0 < report.received_bytes - 2 * payload <= 3 * 1024


def test_examples_weigh_each_fragment_by_those_since_its_own_last_round():
    """As `local_steps` does on a mesh: an island's count goes on over the rounds of the other fragments."""
    tx = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2, fragments=2, axis=None)
    meshed = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2, fragments=2)
    counts = np.array([[1, 3, 2, 5, 1, 1], [4, 1, 6, 1, 2, 3]], np.float32)
    goals, params = np.array([0.0, 8.0], np.float32), {"a": jnp.zeros(2), "b": jnp.zeros(1)}

    def step_of(tx, **sync):
        def step(state, goal, examples):
            gradient = jax.tree.map(lambda x: x - goal, state.params)
            updates, opt = tx.update(gradient, state.opt, state.params, examples=examples, **sync)
            return State(optax.apply_updates(state.params, updates), opt)

        return step

    def train_island(name, number, store, told):
        step, state = jax.jit(step_of(tx, sync=())), State(params, tx.init(params))
        with islands.join(store, tx, name=name, begin_with=2, round_timeout=60) as island:
            state = island.enter(state)
            for i in range(6):
                state = step(state, goals[number], counts[number, i])
                state, report = island.meet(state, examples=float(counts[number, i]) if told else None)
                assert report.members == ("a", "b")
        return state

    state = jd.place(State(jd.PerWorker(params), meshed.init(params)), 2)
    step = step_of(meshed)
    run = jd.simulate(lambda state, batch: (step(state, batch[0][0], batch[1][0]), {}), workers=2)
    for i in range(6):
        state, _ = run(state, (goals, counts[:, i]))
    for told in (False, True):
        store = islands.memory()
        found = in_threads(lambda name, number, told=told, store=store: train_island(name, number, store, told))
        assert_close(global_params(found["a"]), global_params(state), tolerance=1e-6)


def in_threads(train_island):
    """What both islands return, by name."""
    with ThreadPoolExecutor() as pool:
        return dict(zip("ab", pool.map(train_island, "ab", range(2)), strict=True))


# Members that come, leave, and are late


@pytest.mark.usefixtures("clock")
def test_who_enters_later_takes_the_global_parameters_of_all_fragments():
    store, tx = islands.memory(), method("4 bits with feedback", fragments=2)
    first, reports = train(store, tx, "a", 5, keep_every=2)
    number, params = islands.read(store, tx, begin(tx).params)
    assert number == 5
    assert_close(params, global_params(first), tolerance=0)
    with islands.join(store, tx, name="b", round_timeout=0.05) as island:
        state = island.enter(begin(tx, fill=7.0))
        assert island._replay.digest == reports[-1].digest
        assert_close(global_params(state), global_params(first), tolerance=0)
        assert_close(state.params, global_params(first), tolerance=0)
        # The step of the run, whose rounds are half a period apart.
        assert int(state.opt.count) == 5 * H // 2
        state, report = island.meet(step_of(tx)(state, GOALS[1]))
    assert (report.members, report.round, report.fragment) == (("b",), 6, 1 - 5 % 2)


def test_an_island_that_leaves_sends_the_drifts_of_all_fragments():
    """Into the rounds to come, in which no other waits for it; its progress counts in each of them."""
    tx = method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0), fragments=2)
    store, bodies, commits = archived(islands.memory())
    options = {"round_timeout": 300, "keep_every": 100}
    with islands.join(store, tx, name="a", **options) as a, islands.join(store, tx, name="b", **options) as b:
        first, second = a.enter(begin(tx)), b.enter(begin(tx))
        moved = step_of(tx)(first, GOALS[0])
        gone, report = a.leave(moved)
        assert not report.uploading
        for fragment in (1, 0):
            second, report = b.meet(second)
            assert (report.members, report.fragment, report.missing) == (("a", "b"), fragment, ())
        second, report = b.meet(second)
        assert report.members == ("b",)
        assert report.wait_seconds < 100
    places = [member.body for commit in commits.values() for member in commit.members if member.name == "a"]
    taken = [decoded(bodies[place], place, tx, gone) for place in places]
    ahead = jax.tree.map(lambda a, p: a - p, total(first.opt.anchor), total(moved.params))
    assert_close(jax.tree.map(lambda *xs: sum(xs), *taken), ahead, tolerance=1e-6)


def test_a_fragment_whose_upload_was_late_counts_in_its_next_round(clock):
    """Meanwhile the other fragments meet, and the island that is late loses nothing."""
    tx, held = method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0), fragments=2), []
    store, bodies, commits = archived(islands.memory())

    def around(number, kind, function, arguments):
        if kind == "put" and arguments[0].startswith("bodies/00000000/") and "slow" in arguments[1].decode("latin-1"):
            held.append(arguments[0])
            event.wait()
        return function(*arguments)

    event = clock.Event()
    options = {"round_timeout": 0.2, "keep_every": 100}
    with (
        islands.join(wrap(store, around), tx, name="slow", **options) as slow,
        islands.join(store, tx, name="fast", **options) as fast,
    ):
        states = {"slow": slow.enter(begin(tx)), "fast": fast.enter(begin(tx))}
        moved = step_of(tx)(states["slow"], GOALS[0])
        states["slow"], report = slow.meet(moved)
        assert (report.uploading, report.counted) == (True, False)
        states["fast"], report = fast.meet(states["fast"])
        assert (report.members, report.fragment) == (("fast",), 1)
        event.set()
        wait_for_threads(slow)
        for _ in range(4):
            states["slow"], report = slow.meet(states["slow"])
        left, under_way = left_of(states["slow"]), bodies_under_way(slow)
    assert held
    rounds = {name: members_of(commit) for name, commit in commits.items()}
    body = held[0].removeprefix("bodies/")
    # Round 0 was of the fragment that round 2 is of.
    assert [name for name, members in rounds.items() if body in members.values()] == ["rounds/00000002/commit"]
    places = [members["slow"] for members in rounds.values() if "slow" in members]
    taken = [decoded(bodies[place], place, tx, states["slow"]) for place in places if place not in under_way]
    ahead = jax.tree.map(lambda a, p: a - p, total(moved.opt.anchor), total(moved.params))
    assert_close(jax.tree.map(lambda *xs: sum(xs), left, *taken), ahead, tolerance=1e-6)


def members_of(commit):
    return {member.name: member.body for member in commit.members}


@pytest.mark.usefixtures("clock")
def test_a_death_costs_one_timeout_and_not_one_for_each_fragment():
    store, tx = islands.memory(), method(fragments=2)
    with (
        islands.join(store, tx, name="dead", round_timeout=5) as dead,
        islands.join(store, tx, name="alive", round_timeout=30) as alive,
    ):
        gone, state = dead.enter(begin(tx)), alive.enter(begin(tx))
        dead.meet(gone)
        reports = []
        for _ in range(4):
            state, report = alive.meet(state)
            reports.append(report)
            dead._entered = False  # killed: it says nothing
    assert [report.missing for report in reports].count(("dead",)) == 1
    assert reports[-1].missing == ()


@pytest.mark.usefixtures("clock")
def test_what_is_not_finite_is_never_sent_and_all_fragments_take_the_global_parameters():
    tx = method("4 bits with feedback", fragments=2)
    with islands.join(islands.memory(), tx, name="a", round_timeout=0.05) as island:
        state = island.enter(begin(tx))
        state, _ = island.meet(step_of(tx)(state, GOALS[0]))
        broken = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))
        fixed, report = island.meet(broken)
        assert (report.nonfinite, report.counted) == (True, False)
        assert_close(fixed.params, global_params(state), tolerance=0)
        for _ in range(2):
            fixed, report = island.meet(step_of(tx)(fixed, GOALS[0]))
            assert report.counted


def test_a_meeting_of_any_fragment_compiles_nothing():
    tx = make_method("4 bits with feedback", inner=sgd(0.1), fragments=2)
    step = step_of(tx)
    with islands.join(islands.memory(), tx, name="a", overlap=True, eager=True) as island:
        state = step(island.enter(begin(tx)), GOALS[0])
        with compiled_programs() as compiled:
            for _ in range(4):
                state, _ = island.meet(step(state, GOALS[0]))
                wait_for_threads(island)
        assert not compiled


# What a run is


def enter(store, tx, name="b", state=None):
    with islands.join(store, tx, name=name) as island:
        return island.enter(begin(tx) if state is None else state)


def test_another_division_is_refused_by_name_before_anything_is_written():
    turned = jd.local_sgd.Fragments(2, lambda params: {"w": 1, "b": 0})
    store = islands.memory()
    enter(store, method(fragments=2), "a")
    names = store.list("")
    for tx, message in (
        (method(), r"order of fragments: \[1, 0\] in the run, None here"),
        (method(fragments=turned), "fragments 'b': 1 in the run, 0 here"),
        (method(fragments=2, offset=2), r"order of fragments: \[1, 0\] in the run, \[0, 1\] here"),
        (method(fragments=2, outer=lambda: optax.sgd(0.5, momentum=0.9, nesterov=True)), "outer optimizer: equal sh"),
        (method("rounded", fragments=2), r"reducer: exact\(\) in the run, compressed\(.*\) here"),
    ):
        with pytest.raises(islands.RunMismatchError, match=message):
            enter(store, tx)
        with pytest.raises(islands.RunMismatchError, match=message):
            islands.read(store, tx, begin(tx).params)
    assert store.list("") == names
    whole = islands.memory()
    enter(whole, method(), "a")
    with pytest.raises(islands.RunMismatchError, match=r"order of fragments: None in the run, \[1, 0\] here"):
        enter(whole, method(fragments=2))
    enter(whole, method())


def test_a_fragment_without_leaves_is_refused_before_anything_is_written():
    store, tx = islands.memory(), method(fragments=4)
    with pytest.raises(ValueError, match=r"fragments \[2, 3\] of 4 have no leaves.*has 2 leaves; use fewer fragments"):
        enter(store, tx)
    assert store.list("") == []


def test_a_division_splits_and_joins_every_count():
    tx = coarse_method(axis=None)
    local = tx.init(coarse_params())
    local = local._replace(
        since=jnp.array([3, 1, 4]),
        rates=jnp.array([1.0, 5.0, 9.0]),
        examples=jd.PerWorker(jnp.array([2.0, 6.0, 5.0])),
    )
    division = divide(method_of(tx), local.anchor)
    parts = division.split(local, coarse_params())
    assert [jax.tree.leaves(part.local.anchor)[0].shape for part in parts] == [(4,), (2, 2), (3,)]
    assert [part.local.examples.value.tolist() for part in parts] == [[2.0], [5.0], [6.0]]
    assert [part.local.since.tolist() for part in parts] == [[3], [1], [4]]
    joined, params = division.join(parts)
    jax.tree.map(np.testing.assert_array_equal, (joined, params), (local, coarse_params()))


@pytest.mark.slow
def test_bodies_are_kept_for_eight_rounds_of_each_fragment():
    assert [protocol.most_rounds(2, number) for number in (1, 3)] == [8, 24]
    assert protocol.most_rounds(20, 2) == 20
