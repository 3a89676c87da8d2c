"""BAGUA's primitives and algorithms against its pseudo-code; what crosses the network is in `test_bagua_mesh.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_run import apart, gradient, quadratics, run
from local_run import run as run_locally
from local_run import targets
from optimizers_run import descend
from reference import bagua as reference
from reference.blocks import min_max
from workers import trajectory

import jaxdist as jd
from jaxdist.recipes import bagua

RATE = 0.1
WORKERS = 4


def decoded(x):
    return min_max(x)[1]


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


# ---- the primitives


def test_the_centralized_primitives_are_the_mean():
    updates = {"a": rows(1, WORKERS, 5, 3).astype(np.float32), "b": rows(1, WORKERS, 41).astype(np.float32)}
    full, _, _ = trajectory(bagua.c_fp_s(bucket_bytes=64), updates)
    lossless, _, _ = trajectory(bagua.c_lp_s(jd.compressors.identity()), updates)
    for name, x in updates.items():
        np.testing.assert_allclose(full[name], x.mean(1), atol=1e-6)
        np.testing.assert_allclose(lossless[name], x.mean(1), atol=1e-6)


def test_both_errors_of_the_low_precision_primitive_telescope(float64):
    updates = rows(20, WORKERS, 64)
    means, _, ((state,)) = trajectory(bagua.c_lp_s(feedback=True), updates)
    mine = np.asarray(state.residual.value)[-1].mean(0)
    owner = np.asarray(state.reducer.residuals[0].value)[-1].ravel()
    np.testing.assert_allclose(means.sum(0) + mine + owner, updates.mean(1).sum(0), atol=1e-12)
    assert np.abs(mine).max() > 1e-4
    assert np.abs(owner).max() > 1e-4


def test_bytegrad_is_off_by_half_a_step_of_each_code():
    """`trajectory` compares the workers' means bit for bit."""
    updates = (rows(1, WORKERS, 4096) * np.repeat([0.1, 1, 3, 10], 1024)).astype(np.float32)
    (mean,), _, _ = trajectory(bagua.c_lp_s(bucket_bytes=None), updates)
    expected, first, second = reference.c_lp_s(updates[0].astype(np.float64), decoded)
    off = np.abs(mean - updates[0].mean(0)).reshape(WORKERS, -1).max(1)
    assert (off <= (first + second) / 2 * (1 + 1e-3)).all()
    assert (off > (first + second) / 8).all()
    # Entries halfway between two codes may go either way.
    assert (np.abs(mean - expected).reshape(WORKERS, -1) > 0.01 * first[:, None]).mean() < 0.01


# ---- one model


def test_bytegrad_moves_by_the_coded_mean():
    gradients = rows(1, WORKERS, 64).astype(np.float32)
    found, _ = descend(bagua.bytegrad(optax.sgd(1.0)), jnp.zeros(64), jnp.asarray(gradients))
    expected, first, second = reference.c_lp_s(gradients[0].astype(np.float64), decoded)
    np.testing.assert_allclose(found[0], -expected, atol=float((first + second).max()))
    assert (np.abs(np.asarray(found[0]) + expected) < 1e-5).mean() > 0.9


def test_qadam_is_adam_and_then_sends_codes(float64):
    gradients, x = rows(20, WORKERS, 64) + rows(1, WORKERS, 64, seed=2), rows(64, seed=1)
    tx = bagua.qadam(RATE, warmup_steps=5, b1=0.8, b2=0.9, eps=1e-3)
    params, _ = descend(tx, jnp.asarray(x), jnp.asarray(gradients))
    expected = reference.qadam(gradients, x, RATE, 5, 0.8, 0.9, 1e-3, decoded)
    exact = reference.qadam(gradients, x, RATE, 5, 0.8, 0.9, 1e-3, lambda x: x)
    np.testing.assert_allclose(params[4], exact[4], atol=1e-12)
    assert np.abs(params[-1] - expected[-1]).max() < np.abs(expected[-1] - exact[-1]).max() / 10


# ---- models that differ


@pytest.mark.parametrize(("peers", "interval", "workers"), [("all", 1, 5), ("shift_one", 1, 6), ("shift_one", 3, 4)])
def test_decentralized_follows_its_pseudo_code(peers, interval, workers):
    a, b = quadratics(workers)
    start = rows(workers, 6, seed=1)
    tx = bagua.decentralized(optax.sgd(RATE), workers, peers=peers, interval=interval)
    found, state = run(tx, a, b, start)
    expected = reference.decentralized(gradient(a, b), start, RATE, 20, peers=peers, interval=interval)
    np.testing.assert_allclose(found, expected, atol=3e-5)
    # The mean moves by the mean of the steps.
    before = np.concatenate([start[None], found[:-1]])
    np.testing.assert_allclose(found.mean(1), (before - RATE * a * (before - b)).mean(1), atol=1e-5)
    message = 2 * (workers - 1) / workers if peers == "all" else 1
    assert state.sent[0].tolist() == [0, pytest.approx(20 // interval * message * 4 * 6, abs=20)]


@pytest.mark.parametrize(("workers", "steps"), [(2, 1), (4, 2)])
def test_shift_one_without_gradients_ends_in_the_mean(workers, steps):
    start = rows(workers, 6)
    tx = bagua.decentralized(optax.sgd(0.0), workers, peers="shift_one")
    found, _ = run(tx, np.zeros((workers, 6)), start, start, steps=steps)
    np.testing.assert_allclose(found[-1], np.tile(start.mean(0), (workers, 1)), atol=1e-6)
    if steps > 1:
        assert apart(found[0]) > 0.1


def test_the_host_may_choose_the_round():
    graph = jd.topology.shift_one(6)
    tx = bagua.decentralized(optax.sgd(1.0), 6, peers="shift_one", interval=2)
    start, talks = jnp.asarray(rows(6), jnp.float32), []
    for step in range(6):
        found = jd.decentralized.due_round(step, graph, interval=2)
        if found is None:
            continue
        x = jax.vmap(lambda x, found=found: x + tx.update(0 * x, tx.init(x), x, round=found)[0], axis_name="data")(
            start
        )
        talks.append([reference.partner(r, len(talks), 6) for r in range(6)])
        np.testing.assert_allclose(x, (start + start[jnp.array(talks[-1])]) / 2, atol=1e-6)
    assert len({tuple(talk) for talk in talks}) == 3


@pytest.mark.parametrize(("replicas", "interval"), [(True, 2), (False, 2)])
def test_the_low_precision_ring_follows_its_pseudo_code(replicas, interval):
    a, b = quadratics(5)
    start = np.tile(rows(6, seed=1), (5, 1))
    tx = bagua.low_precision_decentralized(optax.sgd(RATE), 5, interval=interval, replicas=replicas)
    found, _ = run(tx, a, b, start, known=start[0])
    expected = reference.low_precision_decentralized(gradient(a, b), start, RATE, 20, code=decoded, interval=interval)
    # A code may fall to the other side now and then: the range of what is sent is about 0.3.
    assert np.abs(found - expected).max() < 0.3 / 255


def test_without_a_code_the_low_precision_ring_is_the_average_of_three():
    a, b = quadratics(5)
    start = np.tile(rows(6, seed=1), (5, 1))
    tx = bagua.low_precision_decentralized(optax.sgd(RATE), 5, compressor=jd.compressors.identity())
    found, _ = run(tx, a, b, start, known=start[0])
    x = np.concatenate([start[None], found[:-1]])
    around = (x + np.roll(x, 1, 1) + np.roll(x, -1, 1)) / 3
    np.testing.assert_allclose(found, around - RATE * a * (x - b), atol=1e-6)


def test_the_low_precision_ring_without_gradients_agrees_as_fast_as_its_matrix_says():
    """From the slowest direction of a ring of 6; the first step tells everybody where the others start."""
    n = 6
    eigenvalue = 1 - 2 / 3 * (1 - np.cos(2 * np.pi / n))
    start = np.cos(2 * np.pi * np.arange(n) / n)[:, None] * np.ones((1, 8))
    zero = np.zeros((n, 8))
    lossless = bagua.low_precision_decentralized(optax.sgd(0.0), n, compressor=jd.compressors.identity())
    found, _ = run(lossless, zero, zero, start, steps=11)
    np.testing.assert_allclose(found[1:], start * eigenvalue ** np.arange(1, 11)[:, None, None], atol=1e-6)


@pytest.mark.parametrize(("period", "delay"), [(2, 1), (5, 3)])
def test_async_model_average_follows_its_pseudo_code(period, delay):
    drawn = targets(30)
    tx = bagua.async_model_average(optax.sgd(RATE), sync_period=period, delay=delay)
    found, _, _ = run_locally(tx, drawn)
    expected = reference.async_model_average(
        lambda t, x: x - drawn[t], np.zeros((4, 6)), RATE, 30, period=period, delay=delay
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)
    # The mean over workers never hears of it: nobody's progress is lost.
    mean = np.zeros(6)
    for t in range(30):
        mean = mean - RATE * (mean - drawn[t].mean(0))
        np.testing.assert_allclose(found[t].mean(0), mean, atol=2e-6)


def test_async_model_average_of_equal_models_changes_nothing():
    drawn = np.broadcast_to(targets(12)[:, :1], (12, 4, 6))
    found, _, state = run_locally(bagua.async_model_average(optax.sgd(RATE), sync_period=3), drawn)
    x = np.zeros((4, 6))
    for t in range(12):
        x = x - RATE * (x - drawn[t])
        np.testing.assert_allclose(found[t], x, atol=1e-6)
    assert state.rounds[0] == 3


# ---- what cannot work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bagua.decentralized(optax.sgd(1.0), 5, peers="shift_one"), "even number of workers, got 5"),
        (
            lambda: bagua.decentralized(optax.sgd(1.0), 4, interval=0),
            "interval must be at least 1, got 0",
        ),
        (lambda: bagua.d_lp_s(interval=-1), "interval must be at least 1, got -1"),
        (lambda: bagua.qadam(0.1, warmup_steps=0), "warmup_steps must be at least 1, got 0"),
        (lambda: bagua.bytegrad(optax.sgd(1.0), bucket_bytes=0), "bucket_bytes must be"),
        (lambda: bagua.bytegrad(optax.sgd(1.0), hierarchical=True), "two axes, the slow one first"),
        (lambda: bagua.low_precision_decentralized(optax.sgd(1.0), 4, hierarchical=True), "got 'data'"),
        (lambda: bagua.async_model_average(optax.sgd(1.0), sync_period=4, delay=0), "needs delay >= 1"),
        (lambda: bagua.async_model_average(optax.sgd(1.0), sync_period=2, delay=2), "delay"),
    ],
)
def test_what_cannot_work_says_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()
