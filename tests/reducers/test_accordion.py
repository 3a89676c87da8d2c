"""Accordion: its verdicts, when they fall, what they change, and what they cost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import accordion as reference
from register_run import State
from workers import trajectory

import jaxdist as jd
from jaxdist.comm import over
from jaxdist.reducers import accordion_batch, critical_regime

EPOCH, INTERVAL = 2, 20  # ten epochs of two steps


def verdicts(detector, gradients, rates=None):
    """Whether each step is critical, and the last state."""

    def step(state, given):
        gradient, rate = given
        state = detector.before(state, rate)
        return detector.after(state, gradient), state.critical

    first = detector.init(jax.tree.map(lambda x: x[0], gradients))
    last, found = jax.jit(lambda *given: jax.lax.scan(step, first, given))(gradients, rates)
    return np.asarray(found), last


def of_norms(norms):
    """Gradients of a step whose sums over epochs of two steps have these norms."""
    return np.repeat(np.asarray(norms, np.float32)[:, None] * np.array([0.6, 0.8], np.float32) / 2, EPOCH, axis=0)


@pytest.mark.parametrize(
    ("before", "after", "critical"),
    [
        (10, 4, True),
        (10, 6, False),
        (10, 5, True),
        (4, 6, True),
        (10, 14.9, False),
        (0, 3, True),
        (0, 0, True),
        (3, 0, True),
        (np.nan, 3, True),
        (3, np.nan, True),
    ],
)
def test_what_is_critical(before, after, critical):
    _, state = verdicts(critical_regime(epoch_steps=1, interval_steps=1), np.array([[before], [after]], np.float32))
    assert bool(state.critical) == critical


def test_verdicts_fall_at_the_end_of_an_epoch_in_every_interval():
    norms = np.full(32, 100.0)  # of epochs that are not looked at
    norms[[0, 10, 20, 30]] = 8, 3, 2.4, 2.2
    found, state = verdicts(critical_regime(epoch_steps=EPOCH, interval_steps=INTERVAL), of_norms(norms))
    epochs = found.reshape(-1, EPOCH)
    assert (epochs == epochs[:, :1]).all()
    assert epochs[:21].all()
    assert not epochs[21:].any()
    np.testing.assert_allclose(state.norm * EPOCH, 2.2, rtol=1e-6)


@pytest.mark.parametrize(("drop", "low"), [(26, range(26, 31)), (21, range(21, 31)), (30, range(30, 31))])
def test_a_falling_rate_is_critical_until_the_next_verdict(drop, low):
    """One of the drops comes with a verdict to the contrary, and wins."""
    norms = np.full(40, 3.0)
    rates = np.where(np.arange(40) < drop, 0.1, 0.01).astype(np.float32)
    found, _ = verdicts(
        critical_regime(epoch_steps=EPOCH, interval_steps=INTERVAL), of_norms(norms), np.repeat(rates, EPOCH)
    )
    epochs = found.reshape(-1, EPOCH)
    assert epochs[:11].all()
    assert np.flatnonzero(epochs.all(1))[11:].tolist() == list(low)
    assert not np.delete(epochs, [*range(11), *low], axis=0).any()


def test_a_rising_rate_is_not_critical():
    rates = np.linspace(0.01, 0.1, 40).astype(np.float32)
    found, _ = verdicts(critical_regime(epoch_steps=1, interval_steps=2), np.ones((40, 1), np.float32), rates)
    assert not found[3:].any()


def test_rates_from_a_schedule():
    given = critical_regime(epoch_steps=1, interval_steps=10)
    own = critical_regime(epoch_steps=1, interval_steps=10, schedule=lambda count: 0.5 ** (count // 15))
    ones = np.ones((40, 1), np.float32)
    found, _ = verdicts(own, ones)
    assert (found == verdicts(given, ones, 0.5 ** (np.arange(40) // 15).astype(np.float32))[0]).all()
    assert found[15:21].all()
    assert not found[21:30].any()


DECAYS = {"cosine": optax.cosine_decay_schedule(0.1, 400), "linear": optax.linear_schedule(0.1, 0.0, 400)}


@pytest.mark.parametrize("name", DECAYS)
def test_a_smooth_decay_is_not_critical_and_any_fall_would_be_all_the_time(name):
    ones, settings = np.ones((400, 1), np.float32), {"epoch_steps": 1, "interval_steps": 10, "schedule": DECAYS[name]}
    found, _ = verdicts(critical_regime(**settings), ones)
    # The beginning, and the end, where the rate of one step is less than nine tenths of that before it.
    assert not found[11:380].any()
    with pytest.warns(UserWarning, match=r"fall by more than fall=0 step after step.*fall=1"):
        always, _ = verdicts(critical_regime(**settings, fall=0), ones)
    assert always[11:].mean() > 0.85
    alone, _ = verdicts(critical_regime(**settings, fall=1), ones)
    assert not alone[11:].any()


def test_decays_in_steps_do_not_warn():
    schedules: Any = (lambda count: 0.1, lambda count: 0.97 ** (count // 100), optax.piecewise_constant_schedule(1.0))
    for schedule in schedules:
        critical_regime(epoch_steps=1, interval_steps=10, schedule=schedule, fall=0).init(jnp.zeros(1))


@pytest.mark.parametrize("seed", range(3))
def test_verdicts_follow_the_reference(seed):
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((120, 7)).astype(np.float32) + 1.5 * rng.standard_normal((1, 7)).astype(np.float32)
    rates = np.repeat(0.5 ** rng.integers(0, 3, 8).cumsum().astype(np.float32), 15)
    for epoch, interval in ((1, 1), (3, 8), (5, 5)):
        detector = critical_regime(epoch_steps=epoch, interval_steps=interval, eta=0.4)
        found, _ = verdicts(detector, {"a": gradients[:, :3], "b": gradients[:, 3:]}, rates)
        assert found.tolist() == reference.levels(gradients, rates, epoch=epoch, interval=interval, eta=0.4)
        assert 0 < found.sum() < 120


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_verdicts_do_not_depend_on_the_scale(scale):
    rng = np.random.default_rng(0)
    gradients = (1 + rng.standard_normal((60, 3))).astype(np.float32)
    detector = critical_regime(epoch_steps=2, interval_steps=4)
    found, _ = verdicts(detector, gradients)
    assert (verdicts(detector, gradients * np.float32(scale))[0] == found).all()
    assert 0 < found.sum() < 60


def test_gradients_are_summed_and_not_their_norms():
    v = np.array([[1.0, 2.0], [-1.0, -2.0]], np.float32)
    _, state = verdicts(critical_regime(epoch_steps=2, interval_steps=2), v)
    assert float(state.norm) == 0.0


def test_half_precision_is_summed_in_float32():
    ones = jnp.ones((1000, 1), jnp.bfloat16)
    _, state = verdicts(critical_regime(epoch_steps=1000, interval_steps=1000), ones)
    assert float(state.norm) == 1.0


def test_the_verdict_stays_where_counts_end():
    detector = critical_regime(epoch_steps=1, interval_steps=1)
    state = detector.init(jnp.zeros(1))._replace(count=jnp.int32(2**31 - 1), critical=jnp.zeros((), bool))
    after = detector.after(state, jnp.full(1, 5.0))
    assert (int(after.count), bool(after.critical), float(after.norm)) == (2**31 - 1, False, 0.0)


# The reducer


def top(part):
    return jd.compressed(jd.top_k(part))


def signs():
    return jd.compressed(jd.compressors.scaled_sign())


def low_rank(rank):
    return jd.power_sgd(rank, min_compression_rate=0)


def changing(steps=24, workers=2):
    """Gradients that halve in the first third and then stay."""
    rng = np.random.default_rng(0)
    mean = np.linspace(1, 2, 108).reshape(12, 9) * 0.5 ** np.minimum(np.arange(steps), steps // 3)[:, None, None]
    return (mean[:, None] * (1 + 0.1 * rng.standard_normal((steps, workers, 12, 9)))).astype(np.float32)


def levels_of(states):
    """Whether each step was reduced with low compression: the verdict before it."""
    return np.concatenate([[True], np.asarray(states.regime.critical)[:-1, 0]])


def test_each_step_sends_the_bytes_of_its_level():
    reducer = jd.error_feedback(
        jd.reducers.with_stats(jd.reducers.accordion(low_rank(3), low_rank(1), epoch_steps=1, interval_steps=2))
    )
    _, _, states = trajectory(reducer, changing())
    low = levels_of(states.reducer.reducer)
    sent = np.diff(np.asarray(states.reducer.bytes)[:, 0, 1].astype(int), prepend=0)
    judged = np.where(np.arange(24) % 2 == 0, 4, 0)
    assert (sent == np.where(low, 4 * 3 * 21, 4 * 21) + judged).all()
    assert 4 < low.sum() < 20


@pytest.mark.slow
@pytest.mark.parametrize("interval", [30, 60])
def test_compression_is_no_change_of_regime(interval):
    """Stationary gradients: what feedback holds back under high compression, and lets go of under low, is no news."""
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal(1000) + rng.standard_normal((8 * interval, 2, 1000))).astype(np.float32)
    settings = {"epoch_steps": 30, "interval_steps": interval}
    for reducer in (
        jd.reducers.accordion(top(0.99), top(0.01), **settings),
        jd.reducers.accordion(jd.exact(), top(0.01), **settings),
    ):
        _, _, states = trajectory(jd.error_feedback(reducer), rows)
        assert np.flatnonzero(levels_of(states.reducer)).tolist() == list(range(interval + 30))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("wrap", [jd.error_feedback, lambda reducer: reducer], ids=["feedback", "none"])
@pytest.mark.parametrize(("epoch", "interval"), [(1, 1), (3, 3), (3, 5)])
def test_judged_is_what_workers_computed(wrap, epoch, interval):
    """Whatever the level has done to it: sums in float64 over the same gradients."""
    rows = changing(30)
    reducer = wrap(jd.reducers.accordion(low_rank(2), signs(), epoch_steps=epoch, interval_steps=interval))
    _, _, states = trajectory(reducer, rows)
    states = getattr(states, "reducer", states)
    assert len(set(levels_of(states).tolist())) == 2
    for start in range(0, 30 - epoch, interval):
        sums = rows[start : start + epoch].astype(np.float64).sum(0).reshape(2, -1)
        wanted = np.linalg.norm(sums, axis=1).mean() / epoch
        np.testing.assert_allclose(states.regime.norm[start + epoch - 1], wanted, rtol=2e-5)


@pytest.mark.slow
def test_feedback_outlives_every_switch():
    rows = changing()
    reducer = jd.error_feedback(jd.reducers.accordion(top(0.5), top(0.02), epoch_steps=1, interval_steps=2))
    means, owns, states = trajectory(reducer, rows)
    residuals = np.asarray(states.residual.value)
    before = np.concatenate([np.zeros_like(residuals[:1]), residuals[:-1]])
    np.testing.assert_allclose(residuals, rows + before - owns, atol=1e-6)
    np.testing.assert_allclose(means.sum(0) + residuals[-1].mean(0), rows.mean(1).sum(0), atol=1e-4)
    assert len(set(levels_of(states.reducer).tolist())) == 2


def test_the_idle_reducer_stays_as_it_is():
    _, _, states = trajectory(
        jd.reducers.accordion(low_rank(2), low_rank(1), epoch_steps=1, interval_steps=2), changing()
    )
    low = levels_of(states)[1:]
    moved = {name: np.diff(np.asarray(getattr(states, name).count)[:, 0]) for name in ("low", "high")}
    assert (moved["low"] == low).all()
    assert (moved["high"] == ~low).all()


@pytest.mark.slow
@pytest.mark.parametrize(("eta", "make"), [(0.0, lambda: low_rank(2)), (0.5, lambda: top(0.1))], ids=["low", "both"])
def test_one_level_is_the_reducer_itself(eta, make):
    """Never switched, or switched between equal reducers that keep nothing."""
    rows = changing()
    found = trajectory(jd.reducers.accordion(make(), make(), epoch_steps=1, interval_steps=2, eta=eta), rows)
    expected = trajectory(make(), rows)
    for a, b in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert levels_of(found[2]).all() == (eta == 0)


def test_half_precision_with_feedback_inside_one_level():
    """Contributions with feedback are wider than the updates; the levels must still agree on a dtype."""
    reducer = jd.reducers.accordion(jd.exact(), jd.error_feedback(top(0.1)), epoch_steps=1, interval_steps=1)
    rows = jnp.ones((4, 2, 10), jnp.bfloat16)
    means, owns, states = trajectory(reducer, rows)
    assert (means.dtype, owns.dtype) == (jnp.bfloat16, jnp.float32)
    # What one level loses does not change the gradient that it is judged by.
    assert np.count_nonzero(means, axis=1).tolist() == [10, 10, 1, 1]
    assert np.asarray(states.high.residual.value)[-1].sum() == 2 * 17


def test_the_rate_reaches_the_reducer():
    """Through `all_reduce` and feedback, as an extra argument of `update`."""
    tx = jd.all_reduce(jd.error_feedback(jd.reducers.accordion(top(1.0), top(0.1), epoch_steps=1, interval_steps=8)))

    def kept(rates):
        def step(state, rate):
            updates, state = tx.update(x, state, learning_rate=rate)
            return state, (updates != 0).sum()

        x = jnp.arange(1.0, 11.0) * (1.0 + 0 * over("data").index)
        return jax.lax.scan(step, tx.init(x), rates)[1]

    run = jax.jit(jax.vmap(kept, in_axes=None, axis_size=2, axis_name="data"))
    rates = jnp.where(jnp.arange(20) < 12, 0.1, 0.01)
    assert np.asarray(run(rates))[0].tolist() == [10] * 9 + [1] * 3 + [10] * 5 + [1] * 3


@pytest.mark.slow
def test_each_group_decides_for_itself():
    rows = {"w": changing(), "v": np.ones((24, 2, 12, 9), np.float32)}
    reducer = jd.reducers.accordion(
        low_rank(2), low_rank(1), epoch_steps=1, interval_steps=2, groups=lambda path, leaf: f"of {path}"
    )
    _, _, states = trajectory(jd.error_feedback(reducer), rows)
    low = {label: levels_of(state) for label, state in states.reducer.items()}
    assert sorted(low) == ["of v", "of w"]
    assert low["of v"].tolist() == [True] * 3 + [False] * 21
    alone = trajectory(
        jd.error_feedback(jd.reducers.accordion(low_rank(2), low_rank(1), epoch_steps=1, interval_steps=2)),
        {"w": rows["w"]},
    )
    assert (low["of w"] == levels_of(alone[2].reducer)).all()
    assert low["of w"].sum() > 6


@pytest.mark.slow
def test_both_levels_are_in_the_program_and_send_their_own_bytes(mesh):
    reducer = jd.reducers.accordion(
        low_rank(3), low_rank(1), epoch_steps=1, interval_steps=2, groups=lambda path, leaf: path
    )
    tx = jd.all_reduce(jd.error_feedback(reducer))
    like = {"v": jnp.zeros((8, 8)), "w": jnp.zeros((12, 9))}

    def step(state, batch):
        means, opt = tx.update(jax.tree.map(lambda x: x[0], batch), state.opt)
        return State(means, opt), {}

    state = jax.eval_shape(lambda: jd.init_state(lambda: State(like, tx.init(like)), 8))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), like)
    compiled = jd.distribute(step, mesh).lower(state, batch).compile()
    sides = 4 * (16 + 21)
    for branch, rank in (("min", 1), ("max", 3)):
        found = jd.analysis.collectives(compiled, branch=branch)
        # The verdict on each of two groups, in a branch of its own.
        assert sum(op.bytes for op in found.ops) == rank * sides + (2 * 4 if branch == "max" else 0)
        assert {(op.kind, op.dtype) for op in found.ops} == {("all-reduce", "float32")}


# The batch


def test_the_batch_grows_once():
    norms = [8, 3, 2.4, 9, 9, 1]
    detector, next_size = critical_regime(epoch_steps=1, interval_steps=1), accordion_batch(512, 4096)
    size, state, sizes = 512, detector.init(jnp.zeros(1)), []
    for norm in norms:
        state = detector.after(detector.before(state, 0.1), jnp.full(1, float(norm)))
        size = next_size(size, state)
        sizes.append(size)
    assert bool(state.critical)
    assert sizes == [512, 512, 4096, 4096, 4096, 4096]
    assert next_size(4096, detector.before(state, 0.01)) == 4096


def noisy(steps=40, workers=3):
    """Gradients whose noise halves while the mean over workers stays: raw norms fall, that of the mean does not."""
    rng = np.random.default_rng(1)
    noise = 5 * rng.standard_normal((steps, workers, 50)) * 0.5 ** (np.arange(steps) // 8)[:, None, None]
    return (1 + noise - noise.mean(1, keepdims=True)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "interval"), [(1, 1), (3, 8), (5, 5)])
def test_raw_and_reduced_gradients_have_verdicts_of_their_own(epoch, interval):
    rows, settings = noisy(), {"epoch_steps": epoch, "interval_steps": interval, "eta": 0.2}
    rates = np.ones(len(rows))
    wanted = {
        "raw": reference.levels(rows, rates, epoch=epoch, interval=interval, eta=0.2),
        "reduced": reference.levels(rows.mean(1), rates, epoch=epoch, interval=interval, eta=0.2),
    }
    assert wanted["raw"] != wanted["reduced"]
    reducers = (jd.exact(), top(0.1), jd.error_feedback(top(0.1)))
    for reducer in reducers:
        _, _, states = trajectory(jd.reducers.with_regime(reducer, **settings), rows)
        assert levels_of(states).tolist() == wanted["raw"]
    found, _ = verdicts(critical_regime(**settings), rows.mean(1))
    assert found.tolist() == wanted["reduced"]


def test_feedback_around_does_not_change_the_verdicts():
    rows, settings = noisy(), {"epoch_steps": 3, "interval_steps": 8, "eta": 0.2}
    reducer = jd.error_feedback(jd.reducers.with_regime(signs(), **settings))
    _, _, states = trajectory(reducer, rows)
    wanted = reference.levels(rows, np.ones(len(rows)), epoch=3, interval=8, eta=0.2)
    assert levels_of(states.reducer).tolist() == wanted


def test_a_verdict_costs_four_bytes_in_a_branch(mesh):
    tx = jd.all_reduce(jd.reducers.with_regime(jd.compressed(jd.qsgd(4)), epoch_steps=2, interval_steps=6))
    like = jnp.zeros(1024)

    def step(state, batch):
        means, opt = tx.update(batch[0], state.opt)
        return State(means, opt), {}

    state = jax.eval_shape(lambda: jd.init_state(lambda: State(like, tx.init(like)), 8))
    compiled = jd.distribute(step, mesh).lower(state, jax.ShapeDtypeStruct((8, 1024), jnp.float32)).compile()
    sent = {branch: jd.analysis.collectives(compiled, branch=branch) for branch in ("min", "max")}
    verdict = [op for op in sent["max"].ops if op.kind == "all-reduce"]
    assert [(op.dtype, op.bytes) for op in verdict] == [("float32", 4)]
    assert [op.kind for op in sent["min"].ops] == ["all-gather"]


def test_training_grows_its_batch_as_the_reference_does():
    """Least squares by two workers: the sizes of all epochs and the parameters, in float64."""
    small, large, images, epochs = 4, 16, 32, 7
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((images, 3))
    targets = inputs @ np.array([1.0, -2.0, 3.0])
    steps, next_size = images // small, accordion_batch(small, large)
    reducer = jd.reducers.with_regime(jd.exact(), epoch_steps=steps, interval_steps=steps)
    tx = jd.all_reduce(reducer)

    def step(state, batch):
        def loss(x, batch):
            return 0.5 * jnp.mean((batch[:, :3] @ x - batch[:, 3]) ** 2)

        _, gradient = jd.local_value_and_grad(loss)(state["x"], batch)
        updates, opt = tx.update(gradient, state["opt"])
        return {"x": state["x"] - state["rate"] * updates, "opt": opt, "rate": state["rate"]}, {}

    run, data = jd.simulate(step, workers=2), np.concatenate([inputs, targets[:, None]], axis=1)
    state = jd.init_state(lambda: {"x": jnp.zeros(3), "opt": tx.init(jnp.zeros(3)), "rate": jnp.zeros(())}, 2)
    size, sizes = small, []
    for _ in range(epochs):
        size = next_size(size, state["opt"])
        sizes.append(size)
        state["rate"] = jnp.float32(0.02 * size / small)
        for rows in data.reshape(-1, size, 4):
            state, _ = run(state, jnp.asarray(rows, jnp.float32))

    x, gradients, size, wanted = np.zeros(3), [], small, []
    for _ in range(epochs):
        levels = reference.levels(np.array(gradients), np.ones(len(gradients)), epoch=steps, interval=steps, full=True)
        size = large if size == large else reference.batch_sizes([levels[-1]], small, large)[0]
        wanted.append(size)
        for rows in data.reshape(-1, size, 4):
            each = [part[:, :3].T @ (part[:, :3] @ x - part[:, 3]) / len(part) for part in np.split(rows, 2)]
            gradients.append(each)
            x = x - 0.02 * size / small * np.mean(each, axis=0)
    assert sizes == wanted
    assert {small, large} == set(sizes)
    np.testing.assert_allclose(state["x"], x, rtol=1e-4)


def test_a_state_without_one_detector_is_named():
    next_size, detector = accordion_batch(4, 8), critical_regime(epoch_steps=1, interval_steps=1)
    state = detector.init(jnp.zeros(1))
    assert next_size(4, {"opt": (state, jnp.zeros(2))}) == 4
    for wrong, number in (({"x": jnp.zeros(1)}, 0), ((state, state), 2)):
        with pytest.raises(ValueError, match=f"got {number}.*with_regime"):
            next_size(4, wrong)


def test_norms_stay_comparable_when_epochs_get_shorter():
    gradient = np.ones((8, 3), np.float32)
    _, long = verdicts(critical_regime(epoch_steps=8, interval_steps=8), gradient)
    _, short = verdicts(critical_regime(epoch_steps=1, interval_steps=1), gradient[:1])
    np.testing.assert_allclose(long.norm, short.norm, rtol=1e-6)


def test_bad_arguments_are_named():
    wrong: Any = (
        ({"epoch_steps": 0, "interval_steps": 1}, "epoch_steps must be at least 1, got 0"),
        ({"epoch_steps": 5, "interval_steps": 4}, "interval_steps must be at least epoch_steps, 5, got 4"),
        ({"epoch_steps": 1, "interval_steps": 1, "eta": -0.1}, "eta must be at least 0, got -0.1"),
        ({"epoch_steps": 1, "interval_steps": 1, "fall": 1.5}, r"fall must be in \[0, 1\], got 1.5"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            jd.reducers.accordion(jd.exact(), jd.exact(), **options)
    for small, large in ((0, 4), (8, 4)):
        with pytest.raises(ValueError, match=f"got {small} and {large}"):
            accordion_batch(small, large)
