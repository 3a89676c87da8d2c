"""Geometries of mirror descent: their laws, known numbers, large and small entries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.online import Geometry, ball, box, diagonal, entropy, euclidean, p_norm
from jaxdist.testing import assert_geometry_laws


def tree(*numbers):
    x = jnp.array(numbers, jnp.float32)
    return {"a": x[:2], "b": x[2:].reshape(1, -1)}


RATE = jnp.asarray(0.1)
MODELS = [tree(0.5, -0.2, 0.1, 0.0), tree(0.0, 0.0, 0.6, 0.8), tree(-0.1, -0.7, 0.2, 0.3)]
SIMPLEX = [jnp.array(rows) for rows in ([[0.2, 0.3, 0.5], [1 / 3] * 3], [[0.6, 0.3, 0.1], [0.01, 0.04, 0.95]])]


@pytest.mark.parametrize(
    ("geometry", "models"),
    [
        (euclidean(), MODELS),
        (euclidean(ball(1.0)), MODELS),
        (euclidean(box(-0.7, 0.8)), MODELS),
        (diagonal(tree(1.0, 2.0, 3.0, 4.0), low=-0.7, high=0.8), MODELS),
        (p_norm(1.3), MODELS),
        (p_norm(1.5, radius=1.2), MODELS),
        (entropy(), SIMPLEX),
    ],
    ids=["euclidean", "ball", "box", "diagonal", "p_norm", "p_norm in a ball", "entropy"],
)
def test_laws(geometry, models):
    assert_geometry_laws(geometry, models)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (euclidean()._replace(step=lambda y, g, rate: jax.tree.map(lambda y, g: y - g, y, g)), "argmin"),
        (euclidean(ball(0.5)), "gradient of 0"),
        (euclidean()._replace(divergence=lambda x, y: euclidean().divergence(x, y) / 8), "strongly convex"),
    ],
)
def test_laws_can_fail(broken, law):
    with pytest.raises(AssertionError, match=law):
        assert_geometry_laws(Geometry(*broken), MODELS)


def test_exponentiated_gradient():
    x = entropy().step(jnp.array([0.2, 0.3, 0.5]), jnp.array([1.0, 0.0, -1.0]), RATE)
    np.testing.assert_allclose(x, [0.175093, 0.290261, 0.534647], atol=1e-6)
    # A steep gradient overflows nothing, and what is gone stays gone, unless there is a share.
    steep = jnp.array([1e4, 0.0, -1e4])
    assert entropy().step(jnp.array([0.2, 0.8, 0.0]), steep, jnp.asarray(1.0)).tolist() == [0.0, 1.0, 0.0]
    shared = entropy(share=0.3).step(jnp.array([0.2, 0.8, 0.0]), steep, jnp.asarray(1.0))
    np.testing.assert_allclose(shared, [0.1, 0.8, 0.1], atol=1e-6)
    columns = entropy(axis=0).step(jnp.full((4, 2), 0.25), jnp.ones((4, 2)), RATE)
    np.testing.assert_allclose(columns.sum(0), [1.0, 1.0], atol=1e-6)
    assert entropy().divergence(jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0])) == jnp.inf


def test_p_norms_reach_from_gradient_descent_to_sparse_steps():
    y, g = MODELS[0], MODELS[1]
    for a, b in zip(
        *(jax.tree.leaves(geometry.step(y, g, RATE)) for geometry in (p_norm(2), euclidean())), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # From 0 along g: ∇R⁻¹(-ηg) = -η (p-1) sign(g) |g|^(q-1) |g|_q^(2-q); powers of 99 and gradients of 1e20.
    p = 1 + 1 / 99
    q = p / (p - 1)
    g = np.array([3.0, -1.0, 2.9], np.float64)
    expected = -0.1 * (p - 1) * np.sign(g) * np.abs(g) ** (q - 1) * (np.abs(g) ** q).sum() ** ((2 - q) / q)
    for size in (1.0, 1e20):
        found = p_norm(p).step(jnp.zeros(3), jnp.asarray(size * g, jnp.float32), RATE)
        np.testing.assert_allclose(found / size, expected, rtol=1e-4, atol=1e-12)


def test_projections():
    large = tree(3e30, 4e30, 0.0, 0.0)  # its square is not a float32
    np.testing.assert_allclose(ball(1.0)(large)["a"], [0.6, 0.8], rtol=1e-6)
    around = ball(1.0, center=tree(1.0, 1.0, 0.0, 0.0))(tree(1.0, 5.0, 0.0, 0.0))
    np.testing.assert_allclose(around["a"], [1.0, 2.0], rtol=1e-6)
    assert ball(1.0)(jnp.zeros(2)).tolist() == [0.0, 0.0]
    # optax's own serve as well: gradient descent on the simplex.
    simplex = euclidean(optax.projections.projection_simplex)
    np.testing.assert_allclose(
        simplex.step(jnp.array([0.2, 0.8]), jnp.array([3.0, 0.0]), RATE), [0.05, 0.95], atol=1e-6
    )


def test_adagrad_is_a_diagonal_geometry():
    """The root of summed squares before a Euclidean step: the same as that root as the metric."""
    y, g = jnp.array([1.0, -1.0]), jnp.array([2.0, -0.5])
    rss = optax.scale_by_rss(initial_accumulator_value=0.0)
    scaled, _ = rss.update(g, rss.init(y))
    found = euclidean(box(-1, 0.95)).step(y, scaled, RATE)
    np.testing.assert_allclose(found, diagonal(jnp.abs(g), low=-1, high=0.95).step(y, g, RATE), atol=1e-5)


def test_a_tree_without_entries_stays_as_it_is():
    for empty in ({}, {"a": jnp.zeros((0, 2))}):
        assert jax.tree.map(jnp.shape, ball(1.0)(empty)) == jax.tree.map(jnp.shape, empty)
        geometry = p_norm(1.5, radius=1.0)
        assert jax.tree.map(jnp.shape, geometry.step(empty, empty, RATE)) == jax.tree.map(jnp.shape, empty)
        assert float(geometry.divergence(empty, empty)) == 0


def test_what_cannot_work_says_so():
    for make, message in (
        (lambda: ball(0), "radius must be positive, got 0"),
        (lambda: box(1, 1), "low must be below high, got low=1 and high=1"),
        (lambda: entropy(share=1), r"share must be in \[0, 1\), got 1"),
        (lambda: p_norm(1), r"p must be in \(1, 2\], got 1"),
        (lambda: p_norm(1.5, radius=-1), "radius must be positive, got -1"),
        (lambda: diagonal({"a": jnp.array([1.0, 0.0])}), r"curvature must be positive.*\['a'\] is 0.0"),
        (lambda: diagonal(jnp.ones(2)).check(jnp.ones(3)), r"must have the shape \(3,\)"),
        (lambda: diagonal(jnp.ones(2)).check({"a": jnp.ones(2)}), "tree like the parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
