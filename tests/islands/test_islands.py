"""Rounds of islands over a store: their arithmetic, bytes and laws, and what they refuse."""

import contextlib
import functools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from island_stores import archived, wrap
from islands_run import (
    GOALS,
    REDUCERS,
    H,
    State,
    assert_within_ulps,
    begin,
    compiled_programs,
    decoded,
    global_params,
    left_of,
    make_method,
    method,
    on_a_mesh,
    outer,
    sgd,
    step_of,
    total,
    train,
    train_together,
    wait_for_threads,
)
from problems import assert_close

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import protocol
from jaxdist.islands.connection import Connection
from jaxdist.islands.island import LATE_IS_SLOW
from jaxdist.islands.run import Replay
from jaxdist.local_sgd.local_steps import method_of

each_reducer = pytest.mark.parametrize("reducer", REDUCERS)


@pytest.mark.sampled(13)
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


def number_as_on_a_mesh(island, number):
    """Makes the draws of an island those of a worker: they depend on a number, of an island a hash of its name."""
    island._index = np.int32(number)


@pytest.mark.sampled(13)
@each_reducer
def test_one_round_on_given_drifts_is_that_of_local_steps_on_a_mesh(reducer):
    """In every bit, but for two where the compiler fuses a product and a sum, as it does with `--slow`."""
    inner = sgd(0.1)
    tx = method(reducer, inner=inner, sync_period=1)
    found = train_together(islands.memory(), tx, ["a", "b", "c"], 1, prepare=number_as_on_a_mesh)
    tx = jd.local_steps(inner, outer(), sync_period=1, reducer=REDUCERS[reducer]())
    assert_within_ulps(global_params(found["a"][0]), on_a_mesh(tx, 1), 2)


def test_what_the_forward_pass_sees_is_as_on_a_mesh():
    """The reducer compares a drift with the parameters from which it began."""
    inner, options = sgd(0.005), {"sync_period": 2}
    reducer = jd.error_feedback(jd.reducers.compute_visible(jd.exact(), dtype=jnp.float8_e4m3fn))
    tx = jd.local_steps(inner, outer(), reducer=reducer, axis=None, **options)
    found = train_together(islands.memory(), tx, ["a", "b", "c"], 4)
    assert len({report.digest for _, reports in found.values() for report in reports}) == 4
    meshed = jd.local_steps(inner, outer(), reducer=reducer, **options)
    assert_within_ulps(global_params(found["a"][0]), on_a_mesh(meshed, 8), 2)
    # Some of what has changed, and not all, was not seen.
    waiting = jax.tree.leaves(found["a"][0].opt.reducer[0].residual)
    assert 3 <= sum(np.count_nonzero(x) for x in waiting) < 60


EVEN = pytest.param(None, marks=pytest.mark.slow, id="even")


@pytest.mark.parametrize("examples", [EVEN, pytest.param({"a": 3, "b": 1, "c": 4}, id="weighted")])
def test_directions_and_lengths_are_merged_as_on_a_mesh(examples):
    """In every bit of each island; up to two units in the last place of the largest entry of a mesh."""
    inner = sgd(0.1)
    numbers = None if examples is None else [float(n) for n in examples.values()]
    tx = method(inner=inner, sync_period=1, merge="rda")
    found = train_together(islands.memory(), tx, ["a", "b", "c"], 2, examples=examples)
    assert len({report.digest for _, reports in found.values() for report in reports[1:]}) == 1
    assert_close(global_params(found["b"][0]), global_params(found["a"][0]), tolerance=0)
    meshed = on_a_mesh(jd.local_steps(inner, outer(), sync_period=1, merge="rda"), 2, examples=numbers)
    assert_within_ulps(global_params(found["a"][0]), meshed, 2)
    plain = on_a_mesh(jd.local_steps(inner, outer(), sync_period=1), 2, examples=numbers)
    assert not np.allclose(meshed["w"], plain["w"], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["exact", "4 bits with feedback"])
def test_five_rounds_of_fixed_members_are_those_of_local_steps_on_a_mesh(reducer):
    """Up to 4 units in the last place of the largest entry, since `vmap` compiles the steps of a mesh otherwise."""
    inner = sgd(0.1)
    tx = method(reducer, inner=inner, sync_period=20)
    found = train_together(islands.memory(), tx, ["a", "b", "c"], 5, prepare=number_as_on_a_mesh)
    tx = jd.local_steps(inner, outer(), sync_period=20, reducer=REDUCERS[reducer]())
    assert_within_ulps(global_params(found["a"][0]), on_a_mesh(tx, 100), 4)


@pytest.mark.slow
def test_a_folder_and_a_dict_give_the_same_bits(tmp_path):
    tx, names = method("4 bits with feedback"), ["a", "b"]
    found = [train_together(store, tx, names, 3) for store in (islands.folder(tmp_path), islands.memory())]
    one, other = ([report.digest for report in run["a"][1]] for run in found)
    assert one == other


@pytest.mark.sampled(9)
@pytest.mark.parametrize("reducer", ["exact", "4 bits with feedback"])
def test_bytes_are_those_of_the_formula(reducer):
    store, names = islands.memory(), ["a", "b", "c"]
    found = train_together(store, method(reducer), names, 3, keep_every=100)
    sizes = [60, 3]
    payload = sum(4 * n if reducer == "exact" else -(-n // 2) + 4 * -(-n // 512) for n in sizes)
    for name in names:
        for report in found[name][1]:
            assert 0 < report.sent_bytes - payload <= 1024
            assert 0 < report.received_bytes - 2 * payload <= 3 * 1024


@pytest.mark.sampled(10)
@each_reducer
def test_nothing_is_lost_when_rounds_end_without_a_drift(reducer):
    """Every drift is the sum of what was taken of it, the residual, and what is still ahead of the anchor."""
    (store, bodies, commits), tx = archived(islands.memory()), method(reducer, inner=sgd(0.1))
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
        left, under_way = left_of(states["slow"]), slow._outbox.flight and slow._outbox.flight.body
    for commit in commits.values():
        for member in commit.members:
            if member.name == "slow" and member.body != under_way:
                found = decoded(bodies[member.body], member.body, tx, states["slow"])
                taken = jax.tree.map(np.add, taken, found)
    assert late > 1
    tolerance = 0.3 if reducer == "rounded" else 1e-5
    assert_close(jax.tree.map(np.add, taken, left), moved, tolerance=tolerance)


def test_a_meeting_ends_though_the_others_finish_rounds_faster_than_it_takes_them(monkeypatch):
    store, tx = islands.memory(), method(inner=sgd(0.1))
    step, states, clock, ended = step_of(tx), {}, [0.0], []
    with contextlib.ExitStack() as stack:
        join = lambda name: stack.enter_context(islands.join(store, tx, name=name, round_timeout=0.05))  # noqa: E731
        slow, fast = join("slow"), join("fast")
        states = {"slow": slow.enter(begin(tx)), "fast": fast.enter(begin(tx))}

        def finish_a_round():
            states["fast"] = step(states["fast"], GOALS[1])
            # A busy machine may not get a round over in time.
            for _ in range(100):
                states["fast"], report = fast.meet(states["fast"])
                if report.counted:
                    return ended.append(report.round)

        read_commit = slow._replay.read_commit

        def read_slowly(number):
            commit = read_commit(number)
            if commit is not None and len(ended) < 50:
                clock[0] += 0.02
                finish_a_round()
            return commit

        finish_a_round()
        before = total(states["slow"].params)
        states["slow"] = step(states["slow"], GOALS[0])
        moved = jax.tree.map(np.subtract, before, total(states["slow"].params))
        with monkeypatch.context() as patch:
            patch.setattr(slow._replay, "read_commit", read_slowly)
            patch.setattr(slow._store, "now", lambda: clock[0])
            states["slow"], report = slow.meet(states["slow"])
        assert (report.late, report.counted) == (True, False)
        assert report.round <= 4
        assert_close(left_of(states["slow"]), moved, tolerance=1e-5)
        # The next meetings go on where this one ended, and send what is left.
        for _ in range(50):
            states["slow"], report = slow.meet(states["slow"])
            if report.counted:
                break
        # What an earlier meeting had sent on a loaded machine counts in a round of its own.
        assert ended[-1] < report.round <= ended[-1] + 2


def test_a_state_of_numpy_arrays_meets_as_one_of_jax():
    """As a file of the user's own may give it, before the first meeting and before any other."""

    def of_numpy(state):
        return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), state)

    tx, found = method(), []
    step = step_of(tx)
    for given in (lambda state: state, of_numpy):
        with islands.join(islands.memory(), tx, name="a") as island:
            state = island.enter(given(begin(tx)))
            for _ in range(2):
                state, report = island.meet(given(step(state, GOALS[0])))
                assert report.counted
            found.append((report.digest, global_params(state)))
    assert found[0][0] == found[1][0]
    assert_close(found[1][1], found[0][1], tolerance=0)


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
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


@pytest.mark.slow
def test_a_code_shortens_bodies_and_changes_no_bit():
    goal, found = np.random.default_rng(0).standard_normal(4000).astype(np.float32), {}

    def join_with(code, store, rounds):
        reducer = jd.error_feedback(jd.compressed(jd.qsgd(4, code=code)))
        tx = jd.local_steps(optax.sgd(0.1), outer(), sync_period=H, reducer=reducer, axis=None)

        def step(state, _):
            updates, opt = tx.update(state.params - goal, state.opt, state.params, sync=())
            return State(optax.apply_updates(state.params, updates), opt)

        params = jnp.zeros(4000)
        return train(store, tx, "a", rounds, step=jax.jit(step), state=State(params, tx.init(params)))[1]

    for code in (None, "entropy"):
        store = islands.memory()
        found[code] = join_with(code, store, 2)
    assert [report.digest for report in found["entropy"]] == [report.digest for report in found[None]]
    for report, plain in zip(found["entropy"], found[None], strict=True):
        assert report.counted
        # 3.3 of 4.1 bits an entry; beside them there are records.
        assert plain.sent_bytes - 600 < report.sent_bytes < plain.sent_bytes - 300
    with pytest.raises(islands.RunMismatchError, match=r"reducer: .*entropy.* in the run, .*elias.* here"):
        join_with("elias", store, 1)


def test_a_body_that_is_no_code_is_damaged():
    reducer, body = jd.compressed(jd.qsgd(4, code="entropy")), protocol.pack("x", [np.zeros(9, np.uint8)])
    tx = jd.local_steps(optax.sgd(0.1), outer(), sync_period=H, reducer=reducer, axis=None)
    replay = Replay(Connection(islands.memory()), method_of(tx))
    replay._updates = [jnp.zeros(40)]
    with pytest.raises(islands.DamagedError, match="is no code of entropy 4 512: "):
        replay._decode(protocol.hash_of(body), [body], 0)


@pytest.mark.usefixtures("clock")
def test_overlap_takes_the_round_at_the_next_meeting_and_keeps_what_came_since():
    store, tx = islands.memory(), method(inner=sgd(0.1), outer=lambda: optax.sgd(1.0))
    with islands.join(store, tx, name="a", overlap=True, round_timeout=5) as island:
        state, step = island.enter(begin(tx)), step_of(tx)
        moved = []
        for _ in range(4):
            for _ in range(H):
                state = step(state, GOALS[0])
            moved.append(state.params)
            state, report = island.meet(state)
            wait_for_threads(island)
        assert (report.round, report.counted) == (3, True)
    # Alone and with an outer rate of 1, the island's own path does not change.
    alone = begin(tx)
    for _ in range(4 * H):
        alone = step(alone, GOALS[0])
    assert_close(state.params, alone.params, tolerance=1e-5)


def test_an_island_that_was_late_and_is_in_time_again_is_waited_for():
    tx = method(inner=sgd(0.1))
    with islands.join(islands.memory(), tx, name="a", overlap=True) as island:
        state = island.enter(begin(tx))
        state, _ = island.meet(state)
        wait_for_threads(island)  # on a busy machine the upload may last until the next meeting
        island._late = LATE_IS_SLOW
        state, report = island.meet(state)
        assert report.counted
        assert island._late == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("examples", [float("nan"), float("inf"), -1.0, 1e39])
def test_a_weight_that_would_spoil_the_mean_of_all_is_refused(examples):
    tx = method(inner=sgd(0.1))
    with islands.join(islands.memory(), tx, name="a") as island:
        state = island.enter(begin(tx))
        for end in (island.meet, island.leave):
            with pytest.raises(
                ValueError, match=rf"examples must be in \[0, 3\.4\d*e\+38\), got {re.escape(str(examples))}"
            ):
                end(state, examples=examples)
        assert island.meet(state, examples=3)[1].counted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a/b"}, "name of an island"),
        ({"name": "..", "round_timeout": 1}, "name of an island .* not '.' first"),
        ({"round_timeout": 0}, "round_timeout must be positive"),
        ({"begin_with": 0}, "begin_with must be at least 1"),
        ({"keep_every": 0}, "keep_every must be at least 1"),
        ({"keep_every": 2**31}, "keep_every must be less than"),
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


def local_steps_with(reducer):
    return jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=4, reducer=reducer, axis=None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("reducer", "reason"),
    [
        (
            lambda: jd.power_sgd(1, own="paper", min_compression_rate=0),
            "takes of a drift follows from those of the oth",
        ),
        (lambda: jd.reducers.ef21(jd.compressed(jd.top_k(0.1))), "fixed members"),
        (lambda: jd.two_shot(jd.qsgd(4)), "several directions"),
        (lambda: gathering_twice(), "gathers in a message before its last"),
        (lambda: jd.error_feedback(jd.power_sgd(1, one_sided=True)), "no generator form"),
        (lambda: jd.reducers.alq(3), "each island would fit one by itself"),
        (lambda: jd.error_feedback(jd.reducers.alq(3)), "each island would fit one by itself"),
        (lambda: jd.reducers.amq(3), "each island would fit one by itself"),
        (lambda: jd.compressed(jd.qsgd(4), divide_by_inflation=True), "takes of a drift follows from those of the oth"),
        (lambda: moved_by_params(), "this island's own drift"),
        (lambda: with_memory(lambda mean, own, old: (mean, own)), "each island would fit one by itself"),
        (lambda: with_memory(lambda mean, own, old: (mean + 0.1 * own, old)), "this island's own drift"),
    ],
)
def test_other_reducers_are_refused_by_name_before_anything_is_written(reducer, reason):
    tx, store = local_steps_with(reducer()), islands.memory()
    with (
        pytest.raises(ValueError, match=rf"{reason}.*islands take exact\(\), "),
        islands.join(store, tx, name="a") as island,
    ):
        island.enter(begin(tx))
    assert store.list("") == []


def with_memory(rule):
    """A reducer of means that keeps a tree: `rule(mean, own, old) -> (mean, new)`, leaf by leaf."""

    def messages(updates, state, comm, extras):
        leaves, tree = jax.tree.flatten(updates)
        received = yield jd.reducers.Messages(mean=leaves)
        means, memory = zip(*map(rule, received.mean, leaves, jax.tree.leaves(state)), strict=True)
        return jd.reducers.Reduced(tree.unflatten(means), updates), tree.unflatten(memory)

    return jd.reducers.from_generator("with_memory", lambda like: jax.tree.map(jnp.zeros_like, like), messages)


def moved_by_params():
    """A reducer whose mean depends on parameters, which an island that decodes has not."""

    def messages(updates, state, comm, extras):
        leaves, tree = jax.tree.flatten(updates)
        received = yield jd.reducers.Messages(mean=leaves)
        mean = jax.tree.map(jnp.add, tree.unflatten(received.mean), extras.params)
        return jd.reducers.Reduced(mean, updates), state

    return jd.reducers.from_generator("moved_by_params", lambda like: (), messages)


def gathering_twice():
    def messages(updates, state, comm, extras):
        leaves, tree = jax.tree.flatten(updates)
        received = yield jd.reducers.Messages(gather=leaves)
        received = yield jd.reducers.Messages(mean=[x.mean(0) for x in received.gather])
        return jd.reducers.Reduced(tree.unflatten(received.mean), updates), state

    return jd.reducers.from_generator("gathering_twice", lambda like: (), messages)


def test_a_memory_of_the_means_of_all_members_is_that_of_a_mesh():
    """Not that of the member which is decoded last."""
    reducer = with_memory(lambda mean, own, old: (mean + 0.1 * old, mean))
    options = {"sync_period": 2, "reducer": reducer}
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), axis=None, **options)
    found = train_together(islands.memory(), tx, ["a", "b", "c"], 3)
    assert len({reports[-1].digest for _, reports in found.values()}) == 1
    meshed = on_a_mesh(jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), **options), 6)
    assert_within_ulps(global_params(found["a"][0]), meshed, 4)


def test_a_reducer_whose_memory_all_islands_share_is_taken():
    tx = local_steps_with(with_memory(lambda mean, own, old: (mean + old, old + 1)))
    with islands.join(islands.memory(), tx, name="a") as island:
        state, report = island.meet(island.enter(begin(tx)))
    assert report.counted
    assert {float(x.max()) for x in jax.tree.leaves(state.opt.reducer)} == {1.0}


def test_averages_of_parameters_in_the_state_are_refused():
    tx = method()
    state = begin(tx)
    with islands.join(islands.memory(), tx, name="a") as island, pytest.raises(ValueError, match="one tree like its"):
        island.enter((state, state.params))


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
def test_no_change_of_membership_compiles_anything():
    store, tx = islands.memory(), make_method("4 bits with feedback")
    step = step_of(tx)
    with islands.join(store, tx, name="a", round_timeout=0.05, keep_every=2) as island:
        state = step(island.enter(begin(tx)), GOALS[0])
        # Programs of the test itself.
        train(store, tx, "b", 1, step=step, round_timeout=0.05)
        with compiled_programs() as compiled:
            for _ in range(3):
                state, _ = island.meet(step(state, GOALS[0]))
        assert compiled == []


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
def test_a_step_that_was_compiled_ahead_of_time_leaves_nothing_to_compile_to_the_first_meeting():
    tx = make_method("4 bits with feedback")
    step = step_of(tx).lower(begin(tx), GOALS[0]).compile()
    with islands.join(islands.memory(), tx, name="a", round_timeout=0.05) as island:
        state = step(island.enter(begin(tx)), GOALS[0])
        with compiled_programs() as compiled:
            island.meet(state)
        assert compiled == []


def test_an_island_without_examples_keeps_its_residual():
    """As a worker of `local_steps`: what is sent with the weight 0 reaches no model."""
    feedback = jd.error_feedback(jd.compressed(jd.top_k(0.25)))
    tx = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=1, axis=None, reducer=feedback)
    store, residuals = islands.memory(), []
    alone = jnp.array([4.0, 3.0, 2.0, 1.0])
    with islands.join(store, tx, name="a", begin_with=1, round_timeout=30) as island:
        state = island.enter({"params": jnp.zeros(4), "opt": tx.init(jnp.zeros(4))})
        for examples in (1.0, 0.0, 1.0):
            if examples:
                updates, opt = tx.update(state["params"] - alone, state["opt"], state["params"], sync=())
                state = {"params": state["params"] + updates, "opt": opt}
            state, _ = island.meet(state, examples=examples)
            residuals.append(np.asarray(state["opt"].reducer[0].residual.value))
    np.testing.assert_array_equal(residuals[0], [0.0, -1.5, -1.0, -0.5])
    np.testing.assert_array_equal(residuals[1], residuals[0])
    assert residuals[2][1] == 0


def counting(examples, *, goal=10.0, **options):
    """A transformation, and a step that passes so many examples of this island to the update."""
    tx = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2, axis=None, **options)

    @jax.jit
    def step(state):
        gradient = jnp.where(examples > 0, state["params"] - goal, jnp.nan)
        updates, opt = tx.update(gradient, state["opt"], state["params"], sync=(), examples=examples)
        return {"params": state["params"] + updates, "opt": opt}

    return tx, step, {"params": jnp.zeros(()), "opt": tx.init(jnp.zeros(()))}


def test_examples_of_the_steps_weigh_the_drift_as_on_a_mesh():
    counts, store, found = {"a": 1, "b": 9, "c": 0}, islands.memory(), {}

    def run(name):
        tx, step, state = counting(jnp.float32(counts[name]), goal={"a": 0.0, "b": 10.0, "c": 99.0}[name])
        with islands.join(store, tx, name=name, begin_with=3, round_timeout=60) as island:
            state = island.enter(state)
            for _ in range(2):
                for _ in range(2):
                    state = step(state)
                state, _ = island.meet(state)
            found[name] = float(jd.local_sgd.global_params(state["opt"]))

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, counts))
    # x += 0.75 (goal - x) in each round, of which b counts nine parts in ten and c none
    assert found == pytest.approx(dict.fromkeys(counts, 0.9 * 7.5 + 0.9 * (10 - 6.75) * 0.75 - 0.1 * 6.75 * 0.75))


def test_what_meet_is_passed_replaces_what_the_steps_counted_and_a_tree_is_refused():
    tx, step, state = counting(jnp.float32(5))
    store = islands.memory()
    with islands.join(store, tx, name="a") as island:
        state = island.enter(state)
        state, _ = island.meet(step(step(state)), examples=0.0)
        assert float(state["opt"].anchor) == 0
        # The next round counts anew.
        state, report = island.meet(step(step(state)))
        assert report.counted
        assert float(state["opt"].anchor) == 7.5
        uneven = state["opt"].examples.value
        assert uneven.tolist() == [-1]
    local = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2, axis=None)
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    with islands.join(islands.memory(), local, name="a") as island:
        state = island.enter({"params": params, "opt": local.init(params)})
        _, opt = local.update(params, state["opt"], params, sync=(), examples={"a": 1, "b": 2})
        with pytest.raises(ValueError, match="passed a tree as examples=, and counted 1 to 2"):
            island.meet({"params": params, "opt": opt})


@pytest.mark.parametrize("fragments", [None, 2])
def test_rounds_that_steps_end_by_themselves_are_refused(fragments):
    """Without `sync=()` steps take outer steps of their island alone, and no round of the run would have them."""
    tx = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2, axis=None, fragments=fragments)
    params, store = {"a": jnp.zeros(3), "b": jnp.zeros(3)}, islands.memory()

    @functools.partial(jax.jit, static_argnames="options")
    def step(state, *, options=()):
        updates, opt = tx.update(params, state["opt"], state["params"], **dict(options))
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    with islands.join(store, tx, name="a") as island:
        state = island.enter({"params": params, "opt": tx.init(params)})
        for _ in range(4):
            state, report = island.meet(step(step(state, options=(("sync", ()),)), options=(("sync", ()),)))
            assert report.counted
        state, sent = step(step(state)), len(store.list("rounds/"))
        with pytest.raises(ValueError, match=r"have ended rounds by themselves \(1\).*Pass sync=\(\) to the update"):
            island.meet(state)
        with pytest.raises(ValueError, match=r"partial\(tx\.update, sync=\(\)\)"):
            island.leave(state)
        assert len(store.list("rounds/")) == sent


@pytest.mark.parametrize(("passed", "named"), [(np.nan, "nan"), (np.inf, "inf"), (-1.5, "-1.5")])
def test_examples_of_the_steps_that_would_spoil_the_mean_of_all_are_refused(passed, named):
    """Such as the mean of a mask without entries: one island must not make the parameters of all NaN."""
    tx, step, state = counting(jnp.float32(passed))
    store = islands.memory()
    with islands.join(store, tx, name="a") as island:
        state = step(step(island.enter(state)))
        with pytest.raises(ValueError, match=f"have counted {named} examples since the last round"):
            island.meet(state)
        assert not any("/drift/" in name for name in store.list("rounds/"))


def test_progress_of_an_earlier_round_keeps_its_weight():
    tx, _, state = counting(jnp.float32(5))
    with islands.join(islands.memory(), tx, name="a") as island:
        local = island.enter(state)["opt"]
        drift = jnp.ones(())

        def weight(seen, since, drift=drift):
            counted = local._replace(examples=jd.PerWorker(jnp.array([seen])), since=jnp.array([since]))
            return island._weight_of(islands.fragments.FragmentModel(counted, local.anchor - drift))

        assert weight(-1.0, 2) == 1
        assert weight(6.0, 2) == 6
        assert weight(12.0, 4) == 6  # two rounds, of which the store was away in the first
        assert weight(0.0, 2) == 6
        assert weight(0.0, 2, jnp.zeros(())) == 0


def slowmo(**options):
    return jd.local_sgd.slowmo(optax.sgd(0.1), sync_period=H, momentum=0.5, buffers="maintain", **options)


def test_the_outer_step_of_slowmo_is_that_of_a_mesh():
    """It divides by the learning rate of the round, which the islands tell each other."""
    rate = optax.linear_schedule(0.1, 0.05, 3 * H)
    found = train_together(islands.memory(), slowmo(learning_rate=rate, axis=None), ["a", "b", "c"], 3)
    expected = on_a_mesh(slowmo(learning_rate=rate), 3 * H)
    assert_within_ulps(global_params(found["b"][0]), expected, 4)


def steps_at(tx, rates):
    """A step at each rate; `None` passes none."""

    @functools.partial(jax.jit, static_argnames="rate")
    def step(state, *, rate):
        gradient = {"w": state.params["w"] - 1, "b": state.params["b"]}
        extras = {} if rate is None else {"learning_rate": rate}
        updates, opt = tx.update(gradient, state.opt, state.params, sync=(), **extras)
        return State(optax.apply_updates(state.params, updates), opt)

    return lambda state: functools.reduce(lambda state, rate: step(state, rate=rate), rates, state)


def test_a_learning_rate_that_the_outer_step_needs_and_no_step_passes():
    tx = jd.local_steps(optax.sgd(0.1), jd.local_sgd.slow_momentum(), sync_period=H, axis=None)
    store = islands.memory()
    with islands.join(store, tx, name="a") as island:
        state = steps_at(tx, [None])(island.enter(begin(tx)))
        with pytest.raises(ValueError, match=r"needs the learning rate.*pass learning_rate="):
            island.meet(state)
    assert not [name for name in store.list("rounds/") if "drift" in name]


@pytest.mark.usefixtures("clock")
def test_progress_that_was_offline_counts_at_the_last_rate():
    """Later there may be no step to take a rate from, or one at the rate 0, and the drift is to be divided by one."""
    tx = jd.local_steps(optax.sgd(0.1), jd.local_sgd.slow_momentum(momentum=0.0), sync_period=H, axis=None)
    store, is_away = islands.memory(), False

    def call(number, function_name, function, arguments):
        if is_away:
            raise ConnectionError("no route")
        return function(*arguments)

    with islands.join(wrap(store, call), tx, name="a", round_timeout=0.5) as island:
        state, _ = island.meet(steps_at(tx, [0.1])(island.enter(begin(tx))))
        is_away = True
        state, report = island.meet(steps_at(tx, [0.1])(state))
        assert report.offline
        is_away = False
        ahead = total(state.params)
        state, report = island.meet(state)
        assert report.counted
        assert_close(global_params(state), ahead, tolerance=1e-6)
        # Nothing moved, and at the rate 0 nothing moves.
        state, report = island.meet(state)
        assert report.counted
        assert_close(global_params(state), ahead, tolerance=1e-6)
