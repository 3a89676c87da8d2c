"""PALSGD: its step against a loop with the same coins, its limits, its warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from local_run import run, targets

import jaxdist as jd
from jaxdist.local_sgd import random_pull

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def coins(steps, workers, probability, seed=0):
    """Everybody's own: by step, then by worker."""
    key = jax.random.key(seed)

    def one(step, worker):
        return jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(key, step), worker), probability)

    return np.asarray(jax.vmap(jax.vmap(one, (None, 0)), (0, None))(jnp.arange(steps), jnp.arange(workers)))


def loop(drawn, pulls, rate, probability, pull, period):
    """Heavy-ball workers on `|x - target|²/2`, in float64; a pull leaves their momentum as it is."""
    _, workers, n = drawn.shape
    anchor, velocity, out = np.zeros(n), np.zeros(n), []
    local, momentum = np.zeros((workers, n)), np.zeros((workers, n))
    for step, target in enumerate(drawn):
        for i in range(workers):
            if pulls[step, i]:
                local[i] -= rate * pull / probability * (local[i] - anchor)
            else:
                momentum[i] = 0.9 * momentum[i] + (local[i] - target[i])
                local[i] -= rate / (1 - probability) * momentum[i]
        if (step + 1) % period == 0:
            drift = anchor - local.mean(0)
            velocity = 0.9 * velocity + drift
            anchor = anchor - 0.7 * (drift + 0.9 * velocity)
            local[:] = anchor
        out.append(local.copy())
    return np.stack(out)


@pytest.mark.slow
def test_forty_steps_equal_a_loop_with_the_same_coins():
    drawn = targets(40)
    rates = np.full(40, 0.05, np.float32)
    inner = random_pull(optax.sgd(0.05, momentum=0.9), probability=0.3, pull=0.5, seed=3)
    found, _, _ = run(jd.local_steps(inner, NESTEROV, sync_period=8), drawn, learning_rate=rates)
    pulls = coins(40, 4, 0.3, seed=3)
    assert 20 < pulls.sum() < 80
    assert (pulls.any(1) & ~pulls.all(1)).sum() > 15  # workers toss for themselves
    np.testing.assert_allclose(found, loop(drawn, pulls, 0.05, 0.3, 0.5, 8), rtol=0, atol=2e-6)


def test_without_pulls_it_is_diloco():
    drawn = targets(24)
    found, _, _ = run(
        jd.local_sgd.palsgd(optax.adam(0.05), sync_period=6, learning_rate=0.05, probability=0, warmup_steps=4), drawn
    )
    expected, _, _ = run(jd.local_sgd.diloco(optax.adam(0.05), sync_period=6, warmup_steps=4), drawn)
    np.testing.assert_array_equal(found, expected)


def test_a_step_is_right_on_average():
    """Over 20,000 workers: with no pull the gradient's step `γ g`, and `γ η (x - a)` more with one."""
    rate, probability, gradient, x, a = 0.1, 0.2, 4.0, 2.0, 0.5
    for pull in (0.0, 0.5):
        tx = random_pull(optax.sgd(rate), probability=probability, pull=pull)

        def one(_, tx=tx):
            params = jnp.float32(x)
            updates, _ = tx.update(
                jnp.float32(gradient), tx.init(params), params, anchor=jnp.float32(a), learning_rate=rate
            )
            return updates

        found = np.asarray(jax.jit(jax.vmap(one, axis_name="data"))(jnp.zeros(20000)), np.float64)
        assert len(np.unique(found)) == 2
        expected = -rate * gradient - rate * pull * (x - a)
        assert abs(found.mean() - expected) < 5 * found.std() / np.sqrt(found.size)


def test_the_warm_up_pulls_nobody():
    drawn = targets(12)
    tx = jd.local_sgd.palsgd(
        optax.sgd(0.1), learning_rate=lambda step: 0.1, probability=0.5, warmup_steps=8, sync_period=100
    )
    found, _, _ = run(tx, drawn)
    synchronous, _, _ = run(jd.local_sgd.local_sgd(optax.sgd(0.1), sync_period=1), drawn[:8])
    np.testing.assert_allclose(found[:8], synchronous, atol=1e-6)
    assert np.ptp(found[-1], axis=0).min() > 1e-3


def test_schedules_of_the_inner_optimizer_count_pulls_too():
    """A rate that ends after ten steps ends after ten steps, pulls or not; Adam's count is that of its moments."""
    rate = optax.piecewise_constant_schedule(1.0, {10: 0.0})
    inner = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(rate))
    tx = random_pull(inner, probability=0.5, pull=0.0, axis=None)
    params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
    steps, take = [], jax.jit(tx.update)
    for _ in range(20):
        update, state = take(jnp.ones(()), state, params, anchor=params, learning_rate=0.1)
        steps.append(float(update))
    taken = sum(abs(step) > 0 for step in steps)
    assert 2 <= taken <= 9
    assert steps[10:] == [0.0] * 10
    adam, schedule = state.inner
    assert int(schedule.count) == 20
    assert taken <= int(adam.count) < 20


def test_a_worker_that_rests_neither_steps_nor_pulls():
    drawn, active = targets(8, 2), np.ones((8, 2), bool)
    active[2:5, 1] = False
    tx = jd.local_sgd.palsgd(optax.sgd(0.1), learning_rate=0.1, probability=0.5, warmup_steps=0, sync_period=100)
    found, _, state = run(tx, drawn, active=active)
    np.testing.assert_array_equal(found[1, 1], found[4, 1])
    assert np.asarray(state.inner.value.count).tolist() == [8, 5]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("multi_head_attention/query", True),
        ("MultiHeadDotProductAttention_0", True),
        ("multihead_attn", True),
        ("ensemble", True),
        ("lm_head", False),
        ("head", False),
        ("token_emb", False),
        ("Embed_0", False),
        ("pos_embedding", False),
    ],
)
def test_attention_with_several_heads_is_no_head(name, hidden):
    found = jax.tree_util.tree_map_with_path(jd.local_sgd.hidden_matrix, {name: {"w": jnp.zeros((4, 4))}})
    assert found == {name: {"w": hidden}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["palsgd", "muloco"])
def test_simulation_equals_the_mesh(name):
    """Keys and counts of each worker, and states of some leaves only, are placed as any other."""
    if name == "palsgd":
        tx = jd.local_sgd.palsgd(optax.adam(0.05), learning_rate=0.05, probability=0.5, warmup_steps=1, sync_period=2)
    else:
        tx = jd.local_sgd.muloco(0.04, adam_learning_rate=0.01, sync_period=2)

    def state_of(place):
        return jd.init_state(
            lambda: problems.TrainState(jd.PerWorker(problems.params()), tx.init(problems.params())), place
        )

    mesh = jd.make_mesh({"data": 2})
    step, simulate = jd.distribute(problems.make_step(tx), mesh, donate=False), jd.simulate(problems.make_step(tx), 2)
    on_mesh, simulated = state_of(mesh), state_of(2)
    for i in range(4):
        on_mesh, _ = step(on_mesh, problems.batch(seed=i))
        simulated, _ = simulate(simulated, problems.batch(seed=i))
    problems.assert_close(on_mesh, simulated, 1e-4 if name == "muloco" else 2e-5)
    assert int(jd.transforms.stats(on_mesh.opt)["rounds"]) == (1 if name == "palsgd" else 2)


def test_what_is_missing_is_named():
    tx = random_pull(optax.sgd(0.1), probability=0.5, pull=0.5, axis=None)
    x = jnp.zeros(2)
    with pytest.raises(ValueError, match="needs anchor=, which local_steps passes"):
        tx.update(x, tx.init(x), x, learning_rate=0.1)
    with pytest.raises(ValueError, match="pass learning_rate= to the update"):
        tx.update(x, tx.init(x), x, anchor=x)
    with pytest.raises(ValueError, match=r"probability must be in \[0, 1\), got 1"):
        random_pull(optax.sgd(0.1), probability=1, pull=0.5)


def test_a_pull_of_float64_is_not_rounded_to_float32():
    with jax.enable_x64(True):
        tx, x, seen = random_pull(optax.sgd(0.0), probability=0.5, pull=0.3, axis=None), jnp.ones(()), set()
        state = tx.init(x)
        for _ in range(12):
            update, state = tx.update(x, state, x, anchor=jnp.zeros(()), learning_rate=0.1)
            seen.add(float(update))
    np.testing.assert_allclose(sorted(seen), [-0.06, 0], rtol=1e-15)
