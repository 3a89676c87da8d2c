"""Bases of the columns of stacked matrices: orthonormal whatever they are given, and of the same span."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.wire.low_rank import SOLVER_RANK, _on_gpu, orthonormal


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


def orthonormal_on_gpu(stacks):
    """As GPUs do it, each stack by itself."""
    return [_on_gpu(jnp.swapaxes(stack, 1, 2)) for stack in stacks]


@pytest.mark.parametrize(("bits", "make"), [(32, orthonormal), (64, orthonormal), (32, orthonormal_on_gpu)])
def test_bases_are_orthonormal_and_span_the_columns(bits, make):
    with jax.enable_x64(bits == 64):
        stacks = [jnp.asarray(stack, f"float{bits}") for stack in matrices()]
        bases = jax.jit(make)([*stacks, stacks[0].at[0, 2, 0].set(jnp.nan)])
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


def test_gpus_solve_where_there_are_many_columns():
    """A loop over few columns of many matrices is faster than a call for each matrix."""

    def has_loop(k, r):
        return "scan[" in str(jax.make_jaxpr(_on_gpu)(jnp.zeros((k, r, 64))))

    assert not has_loop(1, SOLVER_RANK)
    assert has_loop(2, 2 * SOLVER_RANK - 1)
