"""Dion against its paper, its linearity, its drift, and the leaves that are no matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers_run import descend
from problems import assert_close
from reference import optimizers as reference

import jaxdist as jd

M = np.array([[3.0, 0.0], [0.0, 1.0], [4.0, 0.0]])


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def rows(steps, workers, n=9, m=6, *, seed=0, unlike=1.0):
    """Noise around a mean of its own for each worker, over a decaying spectrum."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((steps, workers, n, m)) + unlike * rng.standard_normal((1, workers, n, m))
    return noise * 0.8 ** np.arange(m)


def test_follows_the_paper(float64):
    gradients, x = rows(20, 4), np.random.default_rng(1).standard_normal((9, 6))
    tx = jd.optimizers.dion(0.1, rank=2, momentum=0.9)
    q = np.asarray(tx.init(jnp.asarray(x)).q)
    params, states = descend(tx, jnp.asarray(x), jnp.asarray(gradients))
    expected, momenta = reference.dion(gradients, x, q, 0.1, 0.9)
    np.testing.assert_allclose(params, expected, atol=1e-10)
    np.testing.assert_allclose([state.momentum.value for state in states], momenta, atol=1e-10)


def test_a_known_matrix():
    tx = jd.optimizers.dion(1.0, rank=1, axis=None)
    state = tx.init(jnp.zeros((3, 2)))._replace(q=jnp.ones((2, 1)) / 2**0.5)
    updates, state = jax.jit(tx.update)(jnp.asarray(M, jnp.float32), state, jnp.zeros((3, 2)))
    p, q = np.array([3, 1, 4]) / 26**0.5, np.array([0.999201, 0.039968])
    np.testing.assert_allclose(updates, -((2 / 3) ** 0.5) * np.outer(p, q), atol=1e-6)
    np.testing.assert_allclose(np.abs(state.q[:, 0]), q, atol=1e-6)
    kept = [[2.855769, -0.005769], [-0.048077, 0.998077], [3.807692, -0.007692]]
    np.testing.assert_allclose(state.momentum.value, kept, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (2, 2, 5)])
def test_at_full_rank_the_momentum_only_decays(shape):
    gradient = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    tx = jd.optimizers.dion(0.1, rank_fraction=1, momentum=0.8, axis=None)
    _, state = jax.jit(tx.update)(gradient, tx.init(gradient), gradient)
    np.testing.assert_allclose(state.momentum.value, 0.8 * gradient, atol=1e-5)


@pytest.mark.slow
def test_many_workers_are_one_worker_on_the_averaged_gradients(float64):
    gradients = {"w": jnp.asarray(rows(30, 4)), "b": jnp.asarray(rows(30, 4)[..., 0])}
    start = {"w": jnp.zeros((9, 6)), "b": jnp.zeros(9)}
    tx = jd.optimizers.dion(0.1, rank=2, rest=optax.sgd(0.1))
    many, states = descend(tx, start, gradients)
    one, alone = descend(tx, start, jax.tree.map(lambda x: x.mean(1, keepdims=True), gradients))
    assert_close(many, one, 1e-9)
    for mine, other in zip(states, alone, strict=True):
        np.testing.assert_allclose(mine.momentum.value["w"].mean(0), other.momentum.value["w"][0], atol=1e-9)


def test_momenta_of_unlike_workers_stay_together():
    """2000 steps, four workers whose gradients have other means: bounded here, a random walk in the paper's form."""
    gradients = rows(2000, 4, unlike=0.2)
    tx = jd.optimizers.dion(0.01, rank=2)

    def one_worker(gradients):
        def step(state, gradient):
            return tx.update(gradient, state, gradient)[1], jnp.linalg.norm(state.momentum.value)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)

    last, norms = jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.asarray(gradients.swapaxes(0, 1), jnp.float32))
    _, paper = reference.dion(gradients, np.zeros((9, 6)), np.asarray(last.q[0]), 0.01, 0.95, own="paper")
    norms = np.asarray(norms)
    assert norms[:, 1000:].max() < 1.5 * norms[:, 200:1000].max()
    assert np.linalg.norm(paper[-1], axis=(1, 2)).max() > 3 * norms[:, -1].max()


def test_after_zeros_it_goes_on():
    """Nothing moves, the factor stays, and the next gradient is followed."""
    zero, gradient = jnp.zeros((4, 3)), jnp.asarray(rows(1, 1, 4, 3)[0, 0], jnp.float32)
    tx = jd.optimizers.dion(0.1, rank=2, axis=None)
    first = tx.init(zero)
    updates, state = jax.jit(tx.update)(zero, first, zero)
    np.testing.assert_array_equal(updates, 0)
    np.testing.assert_array_equal(state.q, first.q)
    updates, _ = jax.jit(tx.update)(gradient, state, zero)
    np.testing.assert_allclose(jnp.linalg.norm(updates), 0.1 * (2 * 3 / 4) ** 0.5, rtol=1e-5)


def test_a_rank_that_the_momentum_lacks_is_kept_for_later():
    tx = jd.optimizers.dion(0.1, rank=2, axis=None)
    flat = jnp.outer(jnp.arange(1.0, 5.0), jnp.array([1.0, 0.0, 0.0]))
    state, update = tx.init(flat), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(flat, state, flat)
    assert np.isfinite(updates).all()
    assert float(jnp.linalg.norm(state.q, axis=0).min()) > 0.9


def test_other_leaves_have_an_optimizer_of_their_own():
    """Vectors, and matrices that a label takes out, see the mean gradient; with marks of weight decay and dtype."""
    start = {"embed": jnp.ones((4, 3)), "w": jnp.ones((4, 3)), "b": jnp.ones(3, jnp.bfloat16)}
    gradients = {"embed": jnp.ones((1, 2, 4, 3)), "w": jnp.ones((1, 2, 4, 3)), "b": jnp.ones((1, 2, 3), jnp.bfloat16)}
    gradients = jax.tree.map(lambda x: x.at[0, 1].set(3), gradients)
    tx = jd.optimizers.dion(
        0.1, rank=1, weight_decay=0.1, is_matrix=lambda path, leaf: path == "w", rest=optax.sgd(0.5)
    )
    (params,), (state,) = descend(tx, start, gradients)
    np.testing.assert_allclose(params["embed"], 1 - 0.5 * 2)
    np.testing.assert_allclose(params["b"].astype(jnp.float32), 1 - 0.5 * 2)
    # Of rank one, all entries alike: P Qᵀ is 1/√12 everywhere, times √(3/4).
    np.testing.assert_allclose(params["w"], 1 - 0.1 * (0.25 + 0.1), rtol=1e-5)
    assert [leaf.shape for leaf in jax.tree.leaves(state.momentum)] == [(2, 4, 3)]


def test_adamw_for_the_rest_by_default():
    tx, adamw = jd.optimizers.dion(0.1, rank=1, weight_decay=0.2, axis=None), optax.adamw(0.1, weight_decay=0.2)
    x = {"b": jnp.arange(3.0)}
    updates, _ = tx.update(x, tx.init(x), x)
    assert_close(updates, adamw.update(x, adamw.init(x), x)[0], 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give rank or rank_fraction, and not both"),
        ({"rank": 1, "rank_fraction": 0.5}, "rank=1, rank_fraction=0.5"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank_fraction": 1.5}, r"rank_fraction must be in \(0, 1\], got 1.5"),
        ({"rank": 1, "momentum": 1.0}, "momentum must be .* got 1.0"),
        ({"rank": 1, "weight_decay": -0.1}, "weight_decay must be .* got -0.1"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        jd.optimizers.dion(0.1, **arguments)


def test_a_fraction_of_the_rank_is_not_rounded_up_by_its_last_bit():
    tx = jd.optimizers.dion(0.1, rank_fraction=0.07, axis=None)  # 0.07 * 100 is 7.000000000000001
    state = jax.eval_shape(lambda: tx.init({"w": jnp.zeros((100, 100))}))
    assert any(leaf.shape == (100, 7) for leaf in jax.tree.leaves(state))
