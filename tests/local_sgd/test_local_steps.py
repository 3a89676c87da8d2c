"""Local SGD, SlowMo, DiLoCo and streaming against their papers' equations and numbers."""

import functools
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_run import run, targets
from reference.local_steps import local_steps as reference

import jaxdist as jd
from jaxdist.local_sgd import Fragments, due_fragments, slow_momentum, strided

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def assert_close(found, expected, tolerance=1e-6):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


# ---- trajectories


@pytest.mark.parametrize("inner", [optax.sgd(0.2), optax.sgd(0.1, momentum=0.9), optax.sgd(0.1, 0.9, nesterov=True)])
def test_a_round_a_step_is_synchronous_sgd(inner):
    drawn = targets(30)
    local, anchors, _ = run(jd.local_steps(inner, optax.sgd(1.0), sync_period=1), drawn)

    def step(state, target):
        updates, opt_state = inner.update(state[0] - target.mean(0), state[1])
        params = state[0] + updates
        return (params, opt_state), params

    start = jnp.zeros(6)
    _, expected = jax.lax.scan(step, (start, inner.init(start)), jnp.asarray(drawn))
    assert_close([anchors, local], [expected, np.broadcast_to(expected[:, None], local.shape)])


def test_a_round_a_step_with_adam_is_not_synchronous_adam():
    """Each worker normalizes by its own gradients: nobody should believe otherwise."""
    drawn = targets(30)
    _, kept, _ = run(jd.local_steps(optax.adam(0.1), optax.sgd(1.0), sync_period=1), drawn)
    _, met, _ = run(jd.local_steps(optax.adam(0.1), optax.sgd(1.0), sync_period=1, warmup_steps=30), drawn)
    assert np.abs(kept - met)[-1].max() > 0.01


METHODS = {
    "local_sgd": ({}, {}, optax.sgd(1.0)),
    "diloco": ({}, {"outer_rate": 0.7, "outer_momentum": 0.9, "nesterov": True}, NESTEROV),
    "slowmo": ({}, {"outer_momentum": 0.5, "slow": True}, slow_momentum(momentum=0.5)),
    "streaming": (
        {"delay": 2, "merge_alpha": 0.5},
        {"outer_rate": 0.7, "outer_momentum": 0.9, "nesterov": True, "fragments": 3, "alpha": 0.5},
        NESTEROV,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", METHODS)
def test_thirty_rounds_equal_a_loop(name):
    options, expected, outer = METHODS[name]
    period, steps = 6, 180
    rates = np.where(np.arange(steps) < 90, 0.2, 0.05).astype(np.float32)
    number = expected.get("fragments", 1)
    # A list of leaves, so that each entry has a fragment.
    drawn = targets(steps)
    split = [drawn[..., i] for i in range(6)]
    by_number = Fragments(number, lambda tree: [i % number for i in range(6)])
    tx = jd.local_steps(
        optax.inject_hyperparams(optax.sgd)(lambda count: jnp.where(count < 90, 0.2, 0.05)),
        outer,
        sync_period=period,
        fragments=by_number,
        **options,
    )
    local, anchors, state = run(tx, split, learning_rate=rates)
    loop = {**expected, **({"delay": options["delay"]} if "delay" in options else {})}
    found = reference(drawn, np.zeros(6), rate=rates, period=period, **loop)
    if (
        "delay" in options
    ):  # sent at the start of the next step: the anchor is seen a step later, the parameters are not
        found = found[0], np.concatenate([found[1][:1] * 0, found[1][:-1]])
    assert_close([np.stack(local, -1), np.stack(anchors, -1)], found)
    assert int(np.asarray(state.rounds)[0].sum()) >= 30


def test_diloco_by_hand():
    """f = x²/2, gradient descent with rate 0.1, ten steps a round, outer Nesterov 0.7 and 0.9."""
    tx = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=10)
    _, anchors, _ = run(tx, np.zeros((80, 2, 1), np.float32), jnp.ones(1))
    expected = [0.133742, -0.351412, -0.428759, -0.271151, -0.070351, 0.060049, 0.096524, 0.070377]
    np.testing.assert_allclose(anchors[9::10, 0], expected, atol=2e-6)


def test_slowmo_by_hand():
    """f = x²/2, a step a round, β = 0.5: u is in units of the direction, so it drops with the rate."""
    rates = np.array([0.1, 0.1, 0.01, 0.01], np.float32)

    def inner_update(updates, state, params=None, **extra_args):
        return -extra_args["learning_rate"] * updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), inner_update)
    tx = jd.local_steps(inner, slow_momentum(momentum=0.5), sync_period=1)
    _, anchors, state = run(tx, np.zeros((4, 1, 1), np.float32), jnp.ones(1), learning_rate=rates)
    np.testing.assert_allclose(anchors[:, 0], [0.9, 0.76, 0.7454, 0.730646], atol=1e-6)
    np.testing.assert_allclose(state.outer[0].momentum[0], 1.4754, atol=1e-5)
    heavy_ball = jd.local_steps(inner, optax.sgd(1.0, momentum=0.5), sync_period=1)
    _, anchors, _ = run(heavy_ball, np.zeros((4, 1, 1), np.float32), jnp.ones(1), learning_rate=rates)
    np.testing.assert_allclose(anchors[:, 0], [0.9, 0.76, 0.6824, 0.636776], atol=1e-6)


def test_slowmo_stands_still_at_a_rate_of_zero():
    tx = jd.local_steps(optax.sgd(0.0), slow_momentum(), sync_period=2)
    _, anchors, state = run(tx, targets(4), learning_rate=np.zeros(4, np.float32))
    assert not anchors.any()
    assert not np.asarray(state.outer[0].momentum).any()


def test_special_cases_of_slowmo():
    """β = 0 is Local SGD; one worker with α = ½ is Lookahead: half way to the fast weights every period."""
    drawn = targets(20)
    rates = np.full(20, 0.2, np.float32)
    slow = jd.local_steps(optax.sgd(0.2), slow_momentum(momentum=0.0), sync_period=5)
    plain = jd.local_steps(optax.sgd(0.2), optax.sgd(1.0), sync_period=5)
    assert_close([run(slow, drawn, learning_rate=rates)[0]], [run(plain, drawn)[0]], 5e-7)

    one = drawn[:, :1]
    lookahead = jd.local_steps(optax.sgd(0.2), slow_momentum(learning_rate=0.5, momentum=0.0), sync_period=5)
    _, anchors, _ = run(lookahead, one, learning_rate=rates)
    slow_weights = fast = np.zeros(6)
    for step in range(20):
        fast = fast - 0.2 * (fast - one[step, 0])
        if step % 5 == 4:
            slow_weights = fast = slow_weights + 0.5 * (fast - slow_weights)
            np.testing.assert_allclose(anchors[step], slow_weights, atol=1e-6)


@pytest.mark.parametrize(("period", "expected"), [(1, 0.909091), (10, 0.713442), (50, 0.520006)])
def test_fixed_point_of_unequal_quadratics(period, expected):
    """f_i = a_i/2 (x - b_i)² with a = (1, 10), b = (0, 1), rate 0.05: rounds pull to the workers that converge fast."""
    steps = 40 * period
    drawn = np.broadcast_to(np.array([[[1.0, 0.0]], [[10.0, 1.0]]], np.float32)[None, :, 0], (steps, 2, 2))
    tx = jd.local_steps(optax.sgd(0.05), optax.sgd(1.0), sync_period=period)
    _, anchors, _ = run(tx, drawn, jnp.zeros(()), gradient=lambda x, target: target[0] * (x - target[1]))
    np.testing.assert_allclose(anchors[-1], expected, atol=4e-6)


def test_drift_of_pure_noise():
    """After H steps of noise: Var(x_w) = Hγ²σ², Var(mean) = Hγ²σ²/K."""
    noise = np.random.default_rng(0).normal(size=(16, 8, 4096)).astype(np.float32)
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=17)
    local, _, _ = run(tx, noise, gradient=lambda x, target: target)
    np.testing.assert_allclose(local[-1].var(), 0.16, rtol=0.03)
    np.testing.assert_allclose(local[-1].mean(0).var(), 0.02, rtol=0.1)


# ---- what stays in which precision


def test_bfloat16_parameters_have_a_float32_anchor():
    """Differences far below what bfloat16 resolves reach the anchor; averaging the parameters would lose them."""
    start = jnp.full(64, 1.0, jnp.bfloat16)
    drawn = np.zeros((40, 4, 64), np.float32).astype(jnp.bfloat16)
    tiny = optax.stateless(lambda updates, params: jax.tree.map(lambda u: jnp.full_like(u, -1e-4), updates))
    tx = jd.local_steps(optax.identity(), optax.chain(tiny), sync_period=2)
    local, anchors, _ = run(tx, drawn, start, gradient=lambda x, target: jnp.zeros_like(x))
    assert anchors.dtype == np.float32
    np.testing.assert_allclose(anchors[-1], 1 - 20e-4, atol=1e-6)
    np.testing.assert_array_equal(local[-1].astype(np.float32), np.float32(jnp.bfloat16(1 - 20e-4)))


@pytest.mark.parametrize("options", [{}, {"merge_alpha": 0.5}, {"delay": 1}, {"fragments": 2}])
def test_gradients_narrower_than_the_parameters_do_not_round_a_merge(options):
    """With steps in the dtype of the gradients, what brings a worker to the anchor is as exact as with wide ones."""
    drawn = targets(4)
    drawn = {"a": drawn[..., :3], "b": drawn[..., 3:]}

    def narrow(x, target):
        return jax.tree.map(lambda x, t: (x - t).astype(jnp.bfloat16), x, target)

    wide = optax.stateless(lambda updates, params: optax.tree.cast_like(updates, params))
    found, expected = (
        run(jd.local_steps(inner, optax.sgd(1.0), sync_period=2, **options), drawn, gradient=narrow)[:2]
        for inner in (optax.sgd(0.1), optax.chain(optax.sgd(0.1), wide))
    )
    assert_close(*map(jax.tree.leaves, (found, expected)))
    if not options:
        local, anchor = found[0]["a"][-1], found[1]["a"][-1]
        np.testing.assert_allclose(local, np.broadcast_to(anchor, local.shape), atol=1e-6)


def test_without_gradients_nothing_moves():
    tx = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=2)
    start = jnp.linspace(0.1, 1.0, 9, dtype=jnp.float32)
    drawn = np.zeros((8, 4, 9), np.float32)
    local, anchors, _ = run(tx, drawn, start, gradient=lambda x, target: jnp.zeros_like(x))
    np.testing.assert_array_equal(local[-1, 0], start)
    np.testing.assert_array_equal(anchors[-1], start)


# ---- delay, fragments


def test_no_merge_is_local_training():
    """α close to 1: workers never receive anything."""
    drawn = targets(24)
    tx = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=4, delay=1, merge_alpha=1 - 2**-24)
    local, _, _ = run(tx, drawn)
    x = np.zeros((4, 6))
    for step in range(24):
        x = x - 0.2 * (x - drawn[step])
    np.testing.assert_allclose(local[-1], x, atol=1e-5)


def test_one_fragment_without_delay_is_diloco():
    drawn = [targets(24)[..., i] for i in range(6)]
    plain = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=4)
    single = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=4, fragments=1, delay=0, merge_alpha=0.0)
    for x, y in zip(run(plain, drawn)[0], run(single, drawn)[0], strict=True):
        np.testing.assert_array_equal(x, y)


def test_fragments_cover_all_leaves_once():
    tree = {f"block_{i}": jnp.zeros((i + 1, 8)) for i in range(7)} | {"head": jnp.zeros(3)}
    for fragments in (jd.local_sgd.balanced(3), strided(3)):
        groups = jax.tree.leaves(fragments.assign(tree))
        assert set(groups) == {0, 1, 2}
        assert len(groups) == 8
    sizes = np.zeros(3)
    np.add.at(sizes, jax.tree.leaves(jd.local_sgd.balanced(3).assign(tree)), [x.size for x in jax.tree.leaves(tree)])
    assert sizes.max() <= 1.1 * sizes.mean()
    with pytest.raises(ValueError, match=r"fragments \[1\] of strided\(2\) have no leaves"):
        strided(2).assign({"kernel": jnp.zeros(3)})


# ---- who counts how much


def test_examples_weigh_the_drift():
    drawn = targets(4, workers=2)
    seen = np.array([[1, 3]] * 4, np.float32)
    tx = jd.local_steps(optax.sgd(0.2), optax.sgd(1.0), sync_period=4)
    _, anchors, state = run(tx, drawn, examples=seen)
    x = np.zeros((2, 6))
    for step in range(4):
        x = x - 0.2 * (x - drawn[step])
    np.testing.assert_allclose(anchors[-1], (x[0] + 3 * x[1]) / 4, atol=1e-6)
    assert not np.asarray(state.examples.value).any()


@pytest.mark.parametrize("reducer", [jd.exact(), jd.error_feedback(jd.compressed(jd.compressors.scaled_sign()))])
def test_a_round_without_examples_changes_nothing(reducer):
    tx = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=2, reducer=reducer)
    seen = np.array([[1, 1], [1, 1], [0, 0], [0, 0]], np.float32)
    local, anchors, _ = run(tx, targets(4, workers=2), examples=seen)
    np.testing.assert_array_equal(anchors[3], anchors[1])
    np.testing.assert_allclose(local[3], np.broadcast_to(anchors[1], (2, 6)), atol=1e-7)
    assert anchors[1].any()


def test_inactive_workers_take_no_step():
    """Biased Local SGD: the slow worker takes one step of four, and weighs as much as the fast one."""
    drawn = targets(4, workers=2)
    active = np.array([[True, True], [True, False], [True, False], [True, False]])
    tx = jd.local_steps(optax.adam(0.1), optax.sgd(1.0), sync_period=4)
    local, anchors, state = run(tx, drawn, active=active)
    np.testing.assert_array_equal(local[2, 1], local[0, 1])
    assert np.asarray(state.inner.value[0].count).tolist() == [4, 1]
    expected, opt = [], optax.adam(0.1)
    update = jax.jit(opt.update)
    for worker, count in ((0, 4), (1, 1)):
        x: Any = jnp.zeros(6)
        opt_state = opt.init(x)
        for step in range(count):
            updates, opt_state = update(x - drawn[step, worker], opt_state)
            x = optax.apply_updates(x, updates)
        expected.append(np.asarray(x))
    np.testing.assert_allclose(anchors[-1], np.mean(expected, 0), atol=1e-6)


# ---- momentum at a round


def scheduled_adam():
    return optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -0.1 / (1 + count)))


@pytest.mark.parametrize("buffers", ["maintain", "reset", "average"])
def test_buffers(buffers):
    tx = jd.local_steps(scheduled_adam(), optax.sgd(1.0), sync_period=4, buffers=buffers)
    _, _, state = run(tx, targets(8), active=np.array([[True] * 3 + [i % 4 != 1] for i in range(8)]))
    adam, schedule = state.inner.value
    assert np.asarray(schedule.count).tolist() == [8, 8, 8, 6]  # rates go on counting, for each worker its own steps
    spread = np.asarray(adam.mu).std(0).max()
    if buffers == "maintain":
        assert np.asarray(adam.count).tolist() == [8, 8, 8, 6]
        assert spread > 0
    if buffers == "reset":
        assert not np.asarray(adam.count).any()
        assert not np.asarray(adam.mu).any()
        assert not np.asarray(adam.nu).any()
    if buffers == "average":
        assert np.asarray(adam.count).tolist() == [8, 8, 8, 8]
        assert spread == 0
        assert np.asarray(adam.mu).any()


def test_buffers_restart_from_the_models_after_the_round():
    """Oracle: schedule-free SGD, begun anew from the mean model; its state has a copy of the parameters."""
    tx = jd.local_steps(optax.contrib.schedule_free_sgd(0.1), optax.sgd(1.0), sync_period=4, buffers="reset")
    goals = jnp.broadcast_to(jnp.array([-1.0, 1.0])[:, None], (2, 1))

    def step(state, goal):
        updates, opt = tx.update(state["x"] - goal[0], state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    state = jd.place({"x": jd.PerWorker(jnp.zeros(1)), "opt": tx.init(jnp.zeros(1))}, 2)
    models, run = [], jd.simulate(step, workers=2)
    for _ in range(8):
        state, _ = run(state, goals)
        models.append(np.asarray(state["x"].value))
    np.testing.assert_allclose(models[3], 0, atol=1e-6)
    np.testing.assert_allclose(models[4:], models[:4], atol=1e-6)


# ---- warm-up, periods, who decides


def test_warm_up_is_data_parallel():
    """Adam on the mean gradient while it lasts, which local steps with Adam are not; then the anchor is the model."""
    drawn = targets(12)
    tx = jd.local_steps(optax.adam(0.1), NESTEROV, sync_period=4, warmup_steps=6)
    local, anchors, state = run(tx, drawn)
    x: Any = jnp.zeros(6)
    opt = optax.adam(0.1)
    opt_state = opt.init(x)
    for step in range(6):
        updates, opt_state = opt.update(x - drawn[step].mean(0), opt_state)
        x = optax.apply_updates(x, updates)
        np.testing.assert_allclose(local[step], np.broadcast_to(x, (4, 6)), atol=1e-6)
    np.testing.assert_allclose(anchors[5], x, atol=1e-6)
    assert np.asarray(state.rounds)[0].tolist() == [1]
    assert np.asarray(state.since)[0].tolist() == [2]


def rounds_at(tx, steps=16, **extras):
    """After which steps (from 1) the anchor moves."""
    _, anchors, _ = run(tx, targets(steps), **extras)
    moved = np.abs(np.diff(anchors, axis=0, prepend=np.zeros((1, 6)))).max(1) > 0
    return (np.nonzero(moved)[0] + 1).tolist()


def test_when_rounds_end():
    def make(**options):
        return jd.local_steps(optax.sgd(0.2), optax.sgd(1.0), **options)

    assert rounds_at(make(sync_period=5)) == [5, 10, 15]
    assert rounds_at(make(sync_period=5, offset=1)) == [1, 6, 11, 16]  # PyTorch's periodic averager
    assert rounds_at(make(sync_period=lambda count: jnp.where(count < 6, 3, 5))) == [3, 6, 11, 16]
    assert rounds_at(make(sync_period=100), sync_period=np.array([4] * 8 + [2] * 8)) == [4, 8, 10, 12, 14, 16]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("options", [{}, {"fragments": 3, "delay": 1, "merge_alpha": 0.5}, {"offset": 2}])
def test_the_host_may_choose_the_program(options):
    """`sync=` at the steps that `due_fragments` names is the condition's trajectory; other steps hold no collective."""
    drawn = targets(14)
    split = [drawn[..., i] for i in range(6)]
    tx = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=6, **options)
    expected, _, _ = run(tx, split)
    plan = {name: value for name, value in options.items() if name != "merge_alpha"}

    def worker(params, opt_state, target, sync):
        updates, opt_state = tx.update(jax.tree.map(jnp.subtract, params, target), opt_state, params, sync=sync)
        return optax.apply_updates(params, updates), opt_state

    def step(*operands, sync):
        return jax.vmap(functools.partial(worker, sync=sync), axis_name="data")(*operands)

    step = jax.jit(step, static_argnames="sync")
    params = [jnp.zeros(4)] * 6
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *x.shape)), tx.init([jnp.zeros(())] * 6))
    for i in range(14):
        params, state = step(params, state, [x[i] for x in split], sync=due_fragments(i, sync_period=6, **plan))
    assert_close(params, [x[-1] for x in expected])


# ---- what it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_period": 0}, "sync_period must be at least 1, got 0"),
        ({"sync_period": 2.5}, "sync_period must be a whole number, got 2.5"),
        ({"sync_period": 2**31}, r"sync_period must be less than 2\*\*31, got 2147483648"),
        ({"sync_period": lambda count: 4, "offset": 2**31}, r"offset must be less than 2\*\*31"),
        ({"sync_period": 4, "warmup_steps": 2**31}, r"warmup_steps must be less than 2\*\*31"),
        ({"sync_period": 4, "delay": 1.5}, "delay must be a whole number, got 1.5"),
        ({"sync_period": 4, "delay": 4}, "delay must be less than sync_period=4, got 4"),
        ({"sync_period": 4, "offset": -1}, "offset must be at least 0, got -1"),
        ({"sync_period": 4, "offset": 4}, "offset must be less than sync_period=4, got 4"),
        ({"sync_period": 4, "merge_alpha": 1.0}, r"merge_alpha must be in \[0, 1\), got 1.0"),
        ({"sync_period": 4, "buffers": "average", "delay": 1}, "cannot go with a delay"),
        ({"sync_period": 4, "buffers": "reset", "fragments": 2}, "needs a single fragment"),
        ({"sync_period": 4, "fragments": 5}, "sync_period=4 must be at least the number of fragments .5."),
        ({"sync_period": lambda count: 4, "fragments": 2}, "sync_period must then be a number"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        unwrap(jd.local_steps)(optax.sgd(0.1), optax.sgd(1.0), **options)


def test_what_update_refuses():
    tx = jd.local_steps(optax.sgd(0.1), slow_momentum(), sync_period=1, axis=None)
    state = tx.init(jnp.zeros(2))
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(jnp.zeros(2), state)
    for given in (2.5, jnp.float32(2)):
        with pytest.raises(ValueError, match="sync_period must be a whole number, got float32"):
            tx.update(jnp.zeros(2), state, jnp.zeros(2), sync_period=given)
    with pytest.raises(ValueError, match="slow_momentum divides the drift by the rate"):
        tx.update(jnp.zeros(2), state, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"numbers of fragments to synchronize, 0 to 0, got \(1,\)"):
        tx.update(jnp.zeros(2), state, jnp.zeros(2), sync=(1,))
    with pytest.raises(ValueError, match="sync chooses the program, so it must be static"):
        tx.update(jnp.zeros(2), state, jnp.zeros(2), sync=jnp.array(True))
    with pytest.raises(ValueError, match="no local_steps inside"):
        jd.local_sgd.global_params(optax.sgd(0.1).init(jnp.zeros(2)))


def test_global_params_of_partitioned_parameters_are_whole():
    def local():
        return jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, axis=None)

    params = {"w": jnp.ones(2), "b": jnp.zeros(1), "n": jnp.full(1, 3.0)}
    tx = optax.partition({"a": local(), "b": local(), "c": local()}, {"w": "a", "b": "b", "n": "c"})
    found = jd.local_sgd.global_params(tx.init(params))
    assert jax.tree.map(np.ndarray.tolist, jax.device_get(found)) == {"w": [1, 1], "b": [0], "n": [3]}


def test_global_params_joins_parts_of_several_leaves_and_names_models_that_are_no_parts():
    local = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, axis=None)
    params = {"a": {"w": jnp.ones(2), "b": None}, "c": [jnp.full(1, 3.0)]}
    parted = optax.partition({"x": local, "y": local}, {"a": "x", "c": "y"}).init(params)
    found = jd.local_sgd.global_params(parted)
    assert jax.tree.map(np.ndarray.tolist, jax.device_get(found)) == {"a": {"w": [1, 1], "b": None}, "c": [[3]]}
    for second in (params, {"other": jnp.ones(1)}):
        with pytest.raises(ValueError, match="models of local_steps in 'critic', 'player', which are not"):
            jd.local_sgd.global_params({"player": local.init(params), "critic": local.init(second)})


def test_all_workers_take_the_steps_of_the_warm_up():
    """One that rests there would begin the first round elsewhere."""
    drawn, active = targets(6, 2), np.ones((6, 2), bool)
    active[::2, 1] = False
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=100, warmup_steps=4)
    found, anchors, _ = run(tx, drawn, active=active)
    np.testing.assert_array_equal(found[3, 0], found[3, 1])
    np.testing.assert_allclose(anchors[3], found[3, 0], atol=1e-6)
    np.testing.assert_array_equal(found[4, 1], found[3, 1])


@pytest.mark.parametrize("examples", [None, 1.0, {"a": 1.0, "b": 0.0}], ids=["even", "uneven", "leaves"])
def test_optimizers_that_look_at_the_loss_take_one_step_in_the_warm_up(examples):
    """Each worker has its own loss, and the step is that of their mean."""
    tx = jd.local_steps(optax.polyak_sgd(), optax.sgd(1.0), sync_period=100, warmup_steps=2)

    def step(state, batch):
        params, opt_state = state
        loss, gradient = jax.value_and_grad(lambda p: ((p["a"] - batch[0]) ** 2).sum() + (p["b"] ** 2).sum())(params)
        counts = examples if examples is None else jax.tree.map(lambda n: n + batch[0], examples)
        updates, opt_state = tx.update(gradient, opt_state, params, value=loss, examples=counts)
        return (optax.apply_updates(params, updates), opt_state), {}

    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    state = jd.init_state(lambda: (jd.PerWorker(params), tx.init(params)), 2)
    run = jd.simulate(step, 2)
    for number in range(3):
        state, _ = run(state, jnp.array([0.0, 3.0]))
        models = state[0].value["a"]
        assert (models[0] == models[1]).all() == (number < 2)
        if number == 0:
            # Polyak's step: f / |g|², of the means.
            p, goal = np.ones(5), np.array([[0.0] * 5, [3.0, 3, 3, 0, 0]])
            weights = {type(None): (1, 1, 1, 1), float: (1, 4, 1, 4), dict: (1, 4, 0, 3)}[type(examples)]
            mean = lambda x, w: (w[0] * x[0] + w[1] * x[1]) / sum(w)  # noqa: E731
            loss = mean(((p - goal) ** 2).sum(1), weights[:2])
            gradient = np.concatenate(
                [mean(2 * (p - goal)[:, :3], weights[:2]), mean(2 * (p - goal)[:, 3:], weights[2:])]
            )
            expected = p - min(loss / (gradient**2).sum(), 1) * gradient
            np.testing.assert_allclose(models[0], expected[:3], rtol=1e-5)


def test_a_function_of_one_batch_is_refused_in_a_warm_up():
    inner = optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5))
    params = jnp.ones(3)
    for warm_up in (0, 2):
        tx = jd.local_steps(inner, optax.sgd(1.0), sync_period=4, warmup_steps=warm_up, axis=None)
        given = {"value": jnp.sum(params**2), "grad": 2 * params, "value_fn": lambda p: jnp.sum(p**2)}
        if warm_up:
            with pytest.raises(ValueError, match=r"value_fn= is a function of .* use warmup_steps=0"):
                tx.update(2 * params, tx.init(params), params, **given)
        else:
            tx.update(2 * params, tx.init(params), params, **given)


def test_a_worker_without_examples_takes_no_step_even_if_its_gradient_is_nan():
    """It steps neither by itself nor, in the warm-up, with a gradient of its own; there it moves with the others."""
    drawn, seen = targets(6, 2), np.ones((6, 2), np.float32)
    seen[[0, 3], 1] = seen[5] = 0
    seen[4, 0] = 3
    tx = jd.local_steps(optax.adam(0.1), optax.sgd(1.0), sync_period=3, warmup_steps=2)
    poisoned = np.where(seen[..., None] > 0, drawn, np.nan)
    found, _, state = run(tx, poisoned, examples=seen)
    np.testing.assert_array_equal(found[0, 0], found[0, 1])
    assert state.inner.value[0].count.tolist() == [5, 4]

    # The drifts of the round of three steps count 1 + 1 + 3 and 1 + 0 + 1 examples.
    x, opts = [jnp.zeros(6)] * 2, [optax.adam(0.1).init(jnp.zeros(6))] * 2
    update = jax.jit(optax.adam(0.1).update)
    for step in range(6):
        for worker in range(2):
            if step < 2:
                used = np.flatnonzero(seen[step])
                gradient = x[worker] - drawn[step, used].mean(0)
            elif seen[step, worker]:
                gradient = x[worker] - drawn[step, worker]
            else:
                continue
            updates, opts[worker] = update(gradient, opts[worker])
            x[worker] = x[worker] + updates
        if step == 4:
            x = [(5 * x[0] + 2 * x[1]) / 7] * 2
    np.testing.assert_allclose(found[5], x, atol=1e-5)


def test_examples_of_more_fragments_than_leaves():
    drawn, seen = targets(6, 2), np.tile(np.array([1, 3], np.float32), (6, 1))
    found = [
        run(jd.local_steps(optax.sgd(0.2), optax.sgd(1.0), sync_period=3, fragments=n), drawn, examples=seen)[1][5]
        for n in (1, 3)
    ]
    np.testing.assert_allclose(*found, atol=1e-6)


def test_reset_leaves_hyperparameters_with_names_of_parameters():
    tx = jd.local_steps(
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.sgd(1.0),
        sync_period=1,
        buffers="reset",
        axis=None,
    )
    params = {"w1": jnp.ones(2), "b1": jnp.ones(1)}
    state = tx.init(params)
    state.inner.value.hyperparams["b1"] = jnp.asarray(0.5)
    _, state = tx.update(params, state, params)
    assert float(state.inner.value.hyperparams["b1"]) == 0.5
    assert float(jnp.abs(state.inner.value.inner_state[0].mu["b1"]).max()) == 0


def test_fragments_draw_different_numbers():
    reducer = jd.compressed(jd.qsgd(2))
    tx = jd.local_steps(optax.sgd(1.0), optax.sgd(1.0), sync_period=2, fragments=2, reducer=reducer, axis=None)
    state = tx.init({"a": jnp.zeros(64), "b": jnp.zeros(64)})
    keys = [
        jax.random.key_data(x).tolist()
        for x in jax.tree.leaves(state.reducer)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    assert len(keys) == 2
    assert keys[0] != keys[1]


@pytest.mark.parametrize("label", [2, -1])
def test_labels_of_fragments_are_checked(label):
    tx = jd.local_steps(
        optax.sgd(1.0),
        optax.sgd(1.0),
        sync_period=2,
        fragments=Fragments(2, lambda params: jax.tree.map(lambda _: label, params)),
        axis=None,
    )
    with pytest.raises(ValueError, match=rf"numbered from 0 to 1, and `assign` returned \{{{label}\}}"):
        tx.init(jnp.ones(2))
