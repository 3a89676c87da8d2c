"""Adam on each worker before a compressed mean, against a float64 transcription."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.recipes import compressed_adam

WORKERS, STEPS, SIZE, KEPT = 4, 20, 40, 4
# A large ε: otherwise all updates of the first step have the magnitude 1, and top-k selects by rounding errors.
B1, B2, EPS, RATE, DECAY = 0.8, 0.95, 1.0, 0.1, 0.02


def gradients():
    """Of every step and worker, with entries whose scales span three decades."""
    drawn = np.random.default_rng(0).normal(size=(STEPS, WORKERS, SIZE)) + 0.5
    return drawn * np.logspace(-2, 1, SIZE)


def reference(drawn):
    """Chen et al., with top-k in place of their quantizer: moments, feedback and mean as printed."""
    x, m, v, e = np.ones(SIZE), *np.zeros((3, WORKERS, SIZE))
    for t, g in enumerate(drawn, start=1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        wanted = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + e
        sent = np.where(np.abs(wanted) >= -np.sort(-np.abs(wanted))[:, KEPT - 1 : KEPT], wanted, 0)
        e = wanted - sent
        x = x - RATE * (sent.mean(0) + DECAY * x)
    return x


def run(tx, drawn):
    def step(state, gradient):
        params, opt_state = state
        updates, opt_state = tx.update(gradient[0], opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    params = jnp.ones(SIZE)
    state, simulated = jd.place((params, tx.init(params)), drawn.shape[1]), jd.simulate(step, drawn.shape[1])
    for gradient in drawn:
        state, _ = simulated(state, jnp.asarray(gradient, jnp.float32))
    return np.asarray(state[0])


def settings() -> Any:
    return {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY}


def top_k():
    return jd.error_feedback(jd.compressed(jd.top_k(KEPT / SIZE, method="exact")))


def test_it_follows_the_reference():
    found = run(compressed_adam(RATE, top_k(), **settings()), gradients())
    np.testing.assert_allclose(found, reference(gradients()), rtol=1e-4, atol=1e-5)


def test_one_worker_without_a_code_is_adamw():
    drawn = gradients()[:, :1]
    found = run(compressed_adam(RATE, jd.exact(), **settings()), drawn)
    np.testing.assert_allclose(
        found, run(optax.chain(jd.all_reduce(jd.exact()), optax.adamw(RATE, **settings())), drawn), rtol=1e-5
    )


@pytest.mark.slow
def test_it_moves_rare_entries_as_far_as_others():
    """With a steady gradient every entry should move by the rate in every step; after the mean few do."""
    steady = np.broadcast_to(np.logspace(-2, 1, SIZE), (60, WORKERS, SIZE))
    before = 1 - run(compressed_adam(RATE, top_k()), steady)
    after = 1 - run(optax.chain(jd.all_reduce(top_k()), optax.adam(RATE)), steady)
    assert before.min() > 0.6 * RATE * len(steady)
    assert after.min() < 0.1 * RATE * len(steady)


@pytest.mark.slow
def test_only_the_code_is_sent():
    mesh = jd.make_mesh({"data": WORKERS})

    def sent(tx):
        def step(state, gradient):
            updates, opt_state = tx.update(gradient[0], state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt_state), {}

        state = jd.place((jnp.ones(SIZE), tx.init(jnp.ones(SIZE))), mesh)
        lowered = jd.distribute(step, mesh).lower(state, jnp.ones((WORKERS, SIZE)))
        return jd.analysis.collectives(lowered.compile()).wire_bytes

    # Three other workers receive four float32 values, and their positions below 2^8 in a byte each.
    assert sent(compressed_adam(RATE, top_k())) == sent(optax.chain(jd.all_reduce(top_k()), optax.sgd(RATE)))
    assert sent(compressed_adam(RATE, top_k())) <= 3 * KEPT * 8


def test_moments_are_per_worker():
    state: Any = compressed_adam(RATE, top_k()).init(jnp.ones(3))
    assert isinstance(state[0], jd.PerWorker)
    assert isinstance(state[0].value, optax.ScaleByAdamState)


@pytest.mark.parametrize("wrong", [{"b1": 1.0}, {"b2": -0.1}, {"eps": -1.0}, {"weight_decay": -0.1}])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be .* got {next(iter(wrong.values()))}"):
        compressed_adam(RATE, jd.exact(), **wrong)


@pytest.mark.parametrize("dummy", [np.nan, 1e3])
def test_a_worker_without_examples_keeps_its_moments(dummy):
    """The gradient of no data is not part of the moments; without it they go on as if the step had not been."""
    tx = compressed_adam(RATE, top_k(), **settings())

    def two_steps(first, second, examples):
        params = jnp.ones(SIZE)
        _, state = tx.update(first, tx.init(params), params, examples=examples)
        updates, after = tx.update(second, state, params, examples=jnp.ones(()))
        return updates, state[0].value, after[0].value

    rows = np.random.default_rng(1).normal(size=(2, 3, SIZE)).astype(np.float32)
    rows[0, 2] = dummy
    run_all = jax.jit(jax.vmap(two_steps, axis_name="data"))
    updates, first, second = run_all(*rows, jnp.array([1.0, 2.0, 0.0]))
    assert np.isfinite(updates).all()
    assert first.count.tolist() == [1, 1, 0]
    assert not first.mu[2].any()
    np.testing.assert_allclose(second.mu[2], (1 - B1) * rows[1, 2], rtol=1e-6)
    zeros = rows.copy()
    zeros[0, 2] = 0
    np.testing.assert_array_equal(updates, run_all(*zeros, jnp.array([1.0, 2.0, 0.0]))[0])


def test_the_variance_falls_in_bfloat16():
    """In its own precision 0.999 v would be rounded to v: after a large gradient steps would stay short for ever."""
    tx = compressed_adam(0.1, jd.error_feedback(jd.compressed(jd.top_k(0.5))), axis=None)
    params = jnp.zeros(4, jnp.bfloat16)
    state = tx.init(params)
    update = jax.jit(tx.update)
    updates, state = update(jnp.full(4, 8.0, jnp.bfloat16), state, params)
    first = np.asarray(state[0].value.nu)
    for _ in range(20):
        updates, state = update(jnp.zeros(4, jnp.bfloat16), state, params)
    moments = state[0].value
    assert updates.dtype == jnp.bfloat16
    assert moments.mu.dtype == moments.nu.dtype == jnp.float32
    np.testing.assert_allclose(moments.nu, first * 0.999**20, rtol=1e-5)
