"""Bases of the columns of stacked matrices: orthonormal whatever they are given, and of the same span."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.wire.low_rank import orthonormal


def matrices():
    """Stacks `[k, n, r]` of two ranks and heights that share a loop; columns that are hard to tell apart."""
    rng = np.random.default_rng(0)
    small, wide = rng.standard_normal((3, 4, 3)), rng.standard_normal((2, 40, 20))
    nearly = rng.standard_normal((1, 40, 1)) + 1e-6 * rng.standard_normal((1, 40, 20))
    graded = wide * 10.0 ** np.linspace(0, -30, 20)
    steep = wide * 10.0 ** np.linspace(0, -30, 40)[:, None]
    short = rng.standard_normal((1, 33, 2)) @ rng.standard_normal((1, 2, 20))
    doubled = np.repeat(rng.standard_normal((1, 40, 4)), 5, axis=2)[:, :, ::-1]
    square, nothing = rng.standard_normal((1, 3, 3)), np.zeros((1, 4, 3))
    return [small, wide, nearly, graded, steep, short, doubled, square, wide * 1e30, wide * 1e-30, nothing]


@pytest.mark.parametrize("bits", [32, 64])
def test_bases_are_orthonormal_and_span_the_columns(bits):
    with jax.enable_x64(bits == 64):
        stacks = [jnp.asarray(stack, f"float{bits}") for stack in matrices()]
        bases = jax.jit(orthonormal)([*stacks, stacks[0].at[0, 2, 0].set(jnp.nan)])
    eps = np.finfo(f"float{bits}").eps
    assert np.isnan(np.asarray(bases.pop())[0]).any()
    np.testing.assert_array_equal(bases[-1][0], np.eye(3, 4))  # of nothing: columns of the identity
    for stack, basis in zip(stacks, bases, strict=True):
        a, q = np.asarray(stack, np.float64), np.asarray(basis, np.float64)
        identity = np.broadcast_to(np.eye(a.shape[2]), (len(a), a.shape[2], a.shape[2]))
        np.testing.assert_allclose(q @ np.swapaxes(q, 1, 2), identity, atol=50 * eps)
        # Each column lies in the span of as many vectors of the basis: a triangular factor, and nothing is left over.
        a = a / np.maximum(np.abs(a).max(1, keepdims=True), 1e-300)
        np.testing.assert_allclose(np.tril(q @ a, -1), 0, atol=100 * eps)
        np.testing.assert_allclose(np.swapaxes(q, 1, 2) @ (q @ a), a, atol=100 * eps)
