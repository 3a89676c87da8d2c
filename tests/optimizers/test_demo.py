"""DeMo against its paper, its transform, and what it keeps and sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizers_run import descend
from reference import optimizers as reference

import jaxdist as jd
from jaxdist.optimizers.demo import from_frequencies, tile_of, to_frequencies


def rows(steps, workers, *shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((steps, workers, *shape)) + rng.standard_normal((1, workers, *shape))


def test_follows_the_paper():
    with jax.enable_x64(True):
        gradients, x = rows(20, 4, 12, 10), np.random.default_rng(1).standard_normal((12, 10))
        tx = jd.optimizers.demo(0.1, decay=0.9, chunk=5, k=3, values=None)
        params, states = descend(tx, jnp.asarray(x), jnp.asarray(gradients))
        expected, momenta = reference.demo(gradients, x, 0.1, 0.9, (4, 5), 3)
        np.testing.assert_allclose(params, expected, atol=1e-12)
        np.testing.assert_allclose([state.momentum.value for state in states], momenta, atol=1e-12)


def test_the_cosine_transform_of_one_two_three_four():
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    found = to_frequencies(x, (1, 4))
    np.testing.assert_allclose(found, [[5, -2.230442, 0, -0.158513]], atol=1e-6)
    np.testing.assert_allclose(from_frequencies(found, (1, 4), x), x, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (6,), (12, 10), (7, 6), (2, 3, 4, 5)])
def test_tiles_keep_lengths_and_come_back(shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    tile = tile_of(shape, 5)
    found = to_frequencies(x, tile)
    assert found.shape == (x.size // (tile[0] * tile[1]), tile[0] * tile[1])
    np.testing.assert_allclose(jnp.sum(found**2), jnp.sum(x**2), rtol=1e-5)
    np.testing.assert_allclose(from_frequencies(found, tile, x), x, atol=1e-5)


def test_a_constant_tile_has_one_frequency():
    """Each tile by itself, rows of tiles first."""
    x = jnp.repeat(jnp.repeat(jnp.array([[1.0, 2.0], [3.0, 4.0]]), 4, 0), 4, 1)
    found = to_frequencies(x, (4, 4))
    np.testing.assert_allclose(found[:, 0], [4, 8, 12, 16], atol=1e-5)
    np.testing.assert_allclose(found[:, 1:], 0, atol=1e-5)


def test_all_frequencies_and_one_worker_are_sign_descent():
    tx = jd.optimizers.demo(0.1, k=64 * 64, values=None, axis=None)
    params = {"w": jnp.zeros((6, 10)), "b": jnp.zeros(7)}
    gradient = jax.tree.map(lambda x: jnp.asarray(rows(1, 1, *x.shape)[0, 0], jnp.float32), params)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(gradient, state, params)
        jax.tree.map(lambda u, g: np.testing.assert_array_equal(u, -0.1 * jnp.sign(g)), updates, gradient)
        jax.tree.map(lambda m: np.testing.assert_allclose(m, 0, atol=1e-6), state.momentum.value)


def test_the_mean_is_over_those_that_sent():
    """One worker sends 1 of frequency 0, three send -0.9 of frequency 1; a mean over all would weigh it three times."""
    waves = reference.cosines(2)
    gradients = np.array([waves[0], -0.9 * waves[1], -0.9 * waves[1], -0.9 * waves[1]])[None]
    params, _ = descend(jd.optimizers.demo(1.0, decay=0, k=1), jnp.zeros(2), jnp.asarray(gradients, jnp.float32))
    np.testing.assert_array_equal(np.sign(waves[0] - 0.9 * waves[1]), [1, 1])
    np.testing.assert_array_equal(np.sign(waves[0] - 2.7 * waves[1]), [-1, 1])
    np.testing.assert_array_equal(params[0], [-1, -1])


def test_what_half_precision_loses_stays_in_the_momentum():
    """`m + (what was sent)` is the momentum before, although what was sent is rounded."""
    gradient = jnp.asarray(rows(1, 1, 4, 4)[0, 0], jnp.float32)
    tx = jd.optimizers.demo(1.0, decay=0, k=16, axis=None)
    _, state = jax.jit(tx.update)(gradient, tx.init(gradient))
    exact = np.asarray(to_frequencies(gradient, (4, 4)))
    left = np.asarray(to_frequencies(state.momentum.value, (4, 4)))
    np.testing.assert_allclose(left, exact - exact.astype(jnp.bfloat16).astype(np.float32), atol=1e-6)
    assert 1e-4 < np.abs(left).max() < 2**-8 * np.abs(exact).max()


def test_weight_decay():
    tx = jd.optimizers.demo(0.1, weight_decay=0.5, axis=None)
    x = jnp.full((2, 2), 3.0)
    updates, _ = jax.jit(tx.update)(jnp.zeros((2, 2)), tx.init(x), x)
    np.testing.assert_allclose(updates, -0.1 * 0.5 * 3, rtol=1e-6)
    with pytest.raises(ValueError, match="params"):
        jax.eval_shape(tx.update, jnp.zeros((2, 2)), tx.init(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.0}, r"decay must be in \[0, 1\), got 1.0"),
        ({"chunk": 300}, "chunk must be .* got 300"),
        ({"k": 0}, "k must be .* got 0"),
        ({"weight_decay": -1.0}, "weight_decay must be .* got -1.0"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        jd.optimizers.demo(0.1, **arguments)
