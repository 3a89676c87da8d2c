"""Islands over a store: rounds, latecomers, deaths, stores that fail, runs that do not fit."""

import collections
import contextlib
import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from islands_run import GOALS, REDUCERS, H, State, begin, method, outer, step_of, train, train_together
from problems import assert_close

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import records, run

each_reducer = pytest.mark.parametrize("reducer", REDUCERS)


def global_params(state):
    return jd.local_sgd.global_params(state.opt)


def total(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@each_reducer
def test_islands_agree_in_every_bit_and_take_every_drift(reducer):
    names = ["a", "b", "c"]
    found = train_together(islands.memory(), method(reducer), names, 5)
    for number in range(5):
        reports = [found[name][1][number] for name in names]
        assert {report.round for report in reports} == {number + 1}
        assert {report.members for report in reports} == {("a", "b", "c")}
        assert len({report.digest for report in reports}) == 1
        assert all(report.counted and not report.late and not report.missing for report in reports)
    for name in names[1:]:
        assert_close(global_params(found[name][0]), global_params(found["a"][0]), tolerance=0)


@each_reducer
def test_a_run_is_the_run_of_local_steps_on_a_mesh(reducer):
    """Up to the draws, which differ by island: those of 4 bits are compared with their mean alone."""
    names, rounds = ["a", "b", "c"], 3
    found = train_together(islands.memory(), method(reducer), names, rounds)
    tx = jd.local_steps(optax.adam(0.05), outer(), sync_period=H, reducer=REDUCERS[reducer]())

    def step(state, goal):
        gradient = {"w": state.params["w"] - goal[0], "b": state.params["b"]}
        updates, opt = tx.update(gradient, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), {}

    params = begin(tx).params
    state = jd.place(State(jd.PerWorker(params), tx.init(params)), 3)
    run_step = jd.simulate(step, workers=3)
    for _ in range(rounds * H):
        state, _ = run_step(state, GOALS[:3])
    tolerance = 0.1 if "4 bits" in reducer else 4e-7 * 4
    assert_close(global_params(found["a"][0]), global_params(state), tolerance=tolerance)


@each_reducer
def test_nothing_is_lost_when_rounds_end_without_a_drift(reducer):
    """Every drift is the sum of what was taken of it, the residual, and what is still ahead of the anchor."""
    store, tx = islands.memory(), method(reducer, inner=optax.sgd(0.1))
    step = step_of(tx)
    with contextlib.ExitStack() as stack:
        join = lambda name: stack.enter_context(islands.join(store, tx, name=name, round_timeout=0.05))  # noqa: E731
        slow, fast = join("slow"), join("fast")
        states = {"slow": slow.enter(begin(tx)), "fast": fast.enter(begin(tx))}
        moved = jax.tree.map(np.zeros_like, total(states["slow"].params))
        taken, late = moved, 0
        for meeting in range(6):
            for _ in range(H):
                before = total(states["slow"].params)
                states["slow"] = step(states["slow"], GOALS[0])
                moved = jax.tree.map(lambda m, b, a: m + b - a, moved, before, total(states["slow"].params))
                states["fast"] = step(states["fast"], GOALS[1])
            for _ in range(1 + meeting % 3):
                states["fast"], _ = fast.meet(states["fast"])
            states["slow"], report = slow.meet(states["slow"])
            late += report.late
            if report.counted:
                taken = jax.tree.map(np.add, taken, contribution(store, "slow", report.round - 1, tx, states["slow"]))
        left = left_of(states["slow"])
    assert late > 1
    tolerance = 0.3 if reducer == "rounded" else 1e-5
    assert_close(jax.tree.map(np.add, taken, left), moved, tolerance=tolerance)


def contribution(store, name, number, tx, state):
    """What a round took of an island's drift, decoded from the bytes in the store."""
    commit = records.parse(records.Commit, "", store.get(records.round_name(number, "commit")))
    body = next(member.body for member in commit.members if member.name == name)
    return decoded(store.get(records.body_name(body)), body, tx, state)


def decoded(body, place, tx, state):
    payload, decode = decoder(tx)
    arrays = [jnp.asarray(x) for x in records.unpack(place, body, payload)]
    return total(decode(state.opt.anchor, arrays, state.opt.reducer[0])[0])


@cache
def decoder(tx):
    """The shapes of what an island sends, and what decodes it, compiled once."""
    reducer = jd.local_sgd.base.config_of(tx).reducer
    return islands.exchange.check_reducer(reducer, begin(tx).opt.anchor), jax.jit(
        partial(islands.exchange.decode, reducer)
    )


def left_of(state):
    """What no round has taken: progress ahead of the anchor, and the residual."""
    local = state.opt
    ahead = jax.tree.map(lambda a, p: a - p, total(local.anchor), total(state.params))
    residual = getattr(local.reducer[0], "residual", None)
    return ahead if residual is None else jax.tree.map(np.add, ahead, total(residual.value))


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


def test_a_death_costs_one_timeout():
    store, tx = islands.memory(), method()
    with (
        islands.join(store, tx, name="dead", round_timeout=0.05) as dead,
        islands.join(store, tx, name="alive", round_timeout=0.3) as alive,
    ):
        gone, state = dead.enter(begin(tx)), alive.enter(begin(tx))
        gone, _ = dead.meet(gone)
        state, first = alive.meet(state)
        dead._entered = False  # killed: it says nothing
        state, second = alive.meet(state)
        state, third = alive.meet(state)
    assert [report.missing for report in (first, second, third)].count(("dead",)) == 1
    assert third.missing == ()


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


def test_what_is_not_finite_is_never_sent():
    store, tx = islands.memory(), method("4 bits with feedback")
    with islands.join(store, tx, name="a", round_timeout=0.05) as island:
        state = island.enter(begin(tx))
        state, _ = island.meet(step_of(tx)(state, GOALS[0]))
        broken = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))
        fixed, report = island.meet(broken)
        assert report.nonfinite
        assert not report.counted
        assert_close(fixed.params, global_params(state), tolerance=0)
        fixed, report = island.meet(step_of(tx)(fixed, GOALS[0]))
        assert report.counted


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


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: method("4 bits with feedback"), "other payload|other reducer"),
        (lambda: method(outer=lambda: optax.sgd(0.7)), "other outer optimizer"),
        (lambda: method(outer=lambda: optax.sgd(0.6, momentum=0.9, nesterov=True)), "other outer step"),
    ],
)
def test_another_method_is_refused_before_anything_is_written(other, message):
    store, tx = islands.memory(), method()
    train(store, tx, "a", 1)
    names = store.list("")
    with pytest.raises(islands.RunMismatchError, match=message), islands.join(store, other(), name="b") as island:
        island.enter(begin(other()))
    assert store.list("") == names


def test_another_model_is_refused_by_the_name_of_the_leaf():
    store, tx = islands.memory(), method()
    train(store, tx, "a", 1)
    params = {"w": jnp.zeros((12, 6)), "b": jnp.ones(3)}
    with (
        pytest.raises(islands.RunMismatchError, match=r"parameters .*w.*12, 5.*12, 6"),
        islands.join(store, tx, name="b") as island,
    ):
        island.enter(State(params, tx.init(params)))


def test_the_older_process_of_a_name_stops():
    store, tx = islands.memory(), method()
    with islands.join(store, tx, name="a") as old, islands.join(store, tx, name="a") as new:
        first, second = old.enter(begin(tx)), new.enter(begin(tx))
        with pytest.raises(islands.NameTakenError, match="'a'"):
            old.meet(first)
        new.meet(second)


def test_overlap_takes_the_round_at_the_next_meeting_and_keeps_what_came_since():
    store, tx = islands.memory(), method(inner=optax.sgd(0.1), outer=lambda: optax.sgd(1.0))
    with islands.join(store, tx, name="a", overlap=True, round_timeout=5) as island:
        state, step = island.enter(begin(tx)), step_of(tx)
        moved = []
        for _ in range(4):
            for _ in range(H):
                state = step(state, GOALS[0])
            moved.append(state.params)
            state, report = island.meet(state)
        assert (report.round, report.counted) == (3, True)
    # Alone and with an outer rate of 1, the island's own path does not change.
    alone = begin(tx)
    for _ in range(4 * H):
        alone = step(alone, GOALS[0])
    assert_close(state.params, alone.params, tolerance=1e-5)


def test_old_rounds_go_and_a_straggler_jumps_over_them():
    store, tx = islands.memory(), method(inner=optax.sgd(0.1))
    with islands.join(store, tx, name="slow", round_timeout=0.05) as slow:
        state = slow.enter(begin(tx))
        state = step_of(tx)(state, GOALS[0])
        ahead = jax.tree.map(lambda a, p: a - p, state.opt.anchor, state.params)
        train(store, tx, "fast", 12, keep_every=2, round_timeout=0.05)
        rounds = {int(name.split("/")[1]) for name in store.list("rounds/")}
        assert min(rounds) >= 10
        bodies = {name for name in store.list("bodies/")}
        assert len(bodies) <= 2 + 2 * 3
        state, report = slow.meet(state)
        assert report.late
        assert report.counted
        assert report.round == 13
    assert jax.tree.leaves(ahead)


class KilledError(BaseException):
    """As by SIGKILL: nothing after it runs."""


def killing(store, moment):
    """A store whose user dies before its call number `moment`."""
    calls = itertools.count()

    def dying(function):
        def call(*arguments):
            if next(calls) >= moment:
                raise KilledError
            return function(*arguments)

        return call

    return islands.SharedStore(*map(dying, store))


def test_a_kill_between_any_two_calls_of_the_store_stops_nobody_else():
    tx, state = method(), begin(method())
    step = step_of(tx)
    for moment in range(4, 60):
        store = islands.memory()
        mortal = killing(store, moment)
        finished = False
        try:
            train(mortal, tx, "mortal", 2, step=step, state=state, round_timeout=0.01, keep_every=1)
            finished = True
        except KilledError:
            pass
        _, reports = train(store, tx, "other", 2, step=step, state=state, round_timeout=0.01, keep_every=1)
        assert reports[-1].counted
        _, again = train(store, tx, "mortal", 2, step=step, state=state, round_timeout=0.01, keep_every=1)
        assert again[-1].counted
        if finished:
            break
    assert finished


def interrupted(store, moment, pause):
    """A store one of whose users makes a long pause before its call number `moment`."""
    calls = itertools.count()

    def waiting(function):
        def call(*arguments):
            if next(calls) == moment:
                pause()
            return function(*arguments)

        return call

    return islands.SharedStore(*map(waiting, store))


def archived(store):
    """A store, and every body and every first commit of a round that it ever had."""
    bodies, commits = {}, {}

    def put(name, body):
        bodies[name.partition("/")[2]] = body
        store.put(name, body)

    def create(name, body):
        created = store.create(name, body)
        if created and name.endswith("/commit"):
            commits.setdefault(name, records.parse(records.Commit, name, body))
        return created

    return store._replace(put=put, create=create), bodies, commits


@pytest.mark.parametrize(("reducer", "overlap"), [("exact", False), ("exact", True), ("4 bits with feedback", False)])
def test_a_long_pause_before_any_call_of_the_store_loses_and_doubles_nothing(reducer, overlap):
    """While one island pauses, the other goes on so far that what the one was reading is forgotten."""
    tx = method(reducer, inner=optax.sgd(0.1))
    step, options = step_of(tx), {"keep_every": 2, "round_timeout": 0.004, "overlap": overlap}
    for moment in itertools.count():
        store, bodies, commits = archived(islands.memory())
        digests, others, paused = collections.defaultdict(set), [], []

        def go_on(digests=digests, others=others, paused=paused):
            paused.append(True)
            for _ in range(7 if others else 0):
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
            # A drift that is under way is still ahead of this island's anchor.
            ahead = slow._in_flight.body if slow._in_flight else None
        if not paused:
            break
        assert {number: found for number, found in digests.items() if len(found) > 1} == {}
        members = [member for commit in commits.values() for member in commit.members]
        drifts = [member.body for member in members if member.name == "slow" and member.body != ahead]
        taken = [decoded(bodies[place], place, tx, state) for place in drifts]
        assert_close(jax.tree.map(lambda *terms: sum(terms), left_of(state), *taken), moved, tolerance=1e-5)
    assert moment > 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a/b"}, "name of an island"),
        ({"round_timeout": 0}, "round_timeout must be a positive number"),
        ({"begin_with": 0}, "begin_with must be at least 1"),
        ({"keep_every": 0}, "keep_every must be at least 1"),
    ],
)
def test_arguments_are_checked(changes, message):
    with pytest.raises(ValueError, match=message), islands.join(islands.memory(), method(), **{"name": "a", **changes}):
        pass


def test_other_forms_of_local_steps_are_refused_by_name():
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=4, delay=2)
    with (
        pytest.raises(ValueError, match=r"islands need local_steps with axis=None, delay=0"),
        islands.join(islands.memory(), tx, name="a"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="was not made by local_steps"),
        islands.join(islands.memory(), optax.sgd(0.1), name="a"),
    ):
        pass


@pytest.mark.parametrize(
    ("reducer", "reason"),
    [
        (lambda: jd.power_sgd(2), "more than one message|several directions"),
        (lambda: jd.reducers.ef21(jd.compressed(jd.top_k(0.1))), "fixed members"),
        (lambda: jd.two_shot(jd.qsgd(4)), "several directions|more than one message"),
    ],
)
def test_other_reducers_are_refused_by_name(reducer, reason):
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=4, reducer=reducer(), axis=None)
    with (
        pytest.raises(ValueError, match=rf"({reason}).*islands take a reducer of one message"),
        islands.join(islands.memory(), tx, name="a") as island,
    ):
        island.enter(begin(tx))


def test_averages_of_parameters_in_the_state_are_refused():
    tx = method()
    state = begin(tx)
    with islands.join(islands.memory(), tx, name="a") as island, pytest.raises(ValueError, match="one tree like its"):
        island.enter((state, state.params))


@contextlib.contextmanager
def compiled_programs():
    """Collects the events of programs that are compiled inside the block."""
    compiled = []

    def listen(name, seconds, **more):
        if "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_no_change_of_membership_compiles_anything():
    store, tx = islands.memory(), method("4 bits with feedback")
    step = step_of(tx)
    with islands.join(store, tx, name="a", round_timeout=0.05, keep_every=2) as island:
        state = step(island.enter(begin(tx)), GOALS[0])
        # Programs of the test itself.
        train(store, tx, "b", 1, step=step, round_timeout=0.05)
        with compiled_programs() as compiled:
            for _ in range(3):
                state, _ = island.meet(step(state, GOALS[0]))
        assert compiled == []


def test_a_step_that_was_compiled_ahead_of_time_leaves_nothing_to_compile_to_the_first_meeting():
    tx = method("4 bits with feedback")
    step = step_of(tx).lower(begin(tx), GOALS[0]).compile()
    with islands.join(islands.memory(), tx, name="a", round_timeout=0.05) as island:
        state = step(island.enter(begin(tx)), GOALS[0])
        with compiled_programs() as compiled:
            island.meet(state)
        assert compiled == []


def test_a_checkpoint_from_before_the_last_drift_does_not_send_it_again():
    """The drift of the earlier process counts, and what the checkpoint holds of it is not added to it."""
    store, tx = islands.memory(), method(inner=optax.sgd(0.1), outer=lambda: optax.sgd(1.0))
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        saved = step_of(tx)(island.enter(begin(tx)), GOALS[0])
        island.leave(saved)
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        state = island.enter(saved)
        for _ in range(2):
            state, _ = island.meet(state)
    # Alone and with an outer rate of 1, the global parameters are those that this island sent, once.
    assert_close(global_params(state), saved.params, tolerance=1e-6)
