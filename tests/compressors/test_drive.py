import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, decoded, draws, relative_error
from reference import blocks as reference

from jaxdist.compressors import drive
from jaxdist.compressors.drive import _hadamard, _random_signs


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 40])
def test_blocks_are_the_reference(size):
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    payload = drive(block=16).compress(jnp.asarray(x), KEY)
    signs = np.asarray(_random_signs(payload.seed, 16))[0].astype(np.float64)
    rows = np.pad(x, (0, -size % 16)).reshape(-1, 16)
    expected = np.concatenate([reference.drive(row, signs) for row in rows])[:size]
    np.testing.assert_allclose(decoded(drive(block=16), x), expected, atol=1e-5)


def test_rotation_is_orthonormal_and_its_signs_are_fair():
    for width in (8, 256):
        np.testing.assert_allclose(_hadamard(width) @ _hadamard(width), np.eye(width), atol=1e-6)
    signs = np.asarray(jax.vmap(lambda seed: _random_signs(seed, 64))(jnp.arange(4000, dtype=jnp.uint32)))[:, 0]
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert np.abs(signs.mean(0)).max() < 5 / np.sqrt(4000)
    products = signs.T @ signs / 4000 - np.eye(64)
    assert np.abs(products).max() < 5.5 / np.sqrt(4000)


def test_contraction_is_attained_by_two_equal_entries():
    code = drive(block=64)
    assert code.contraction((640,)) == 0.5
    x = np.zeros(64, np.float32)
    x[[3, 50]] = 1.0, -1.0
    errors = ((draws(code, x, 200) - x) ** 2).sum(1)
    np.testing.assert_allclose(errors, 1.0, rtol=1e-4)


def test_one_entry_is_exact_and_gaussian_entries_keep_two_thirds():
    for size in (1, 64, 200):
        x = np.zeros(size, np.float32)
        x[size // 2] = -3.0
        np.testing.assert_allclose(decoded(drive(block=64), x), x, atol=1e-5)
    x = np.random.default_rng(0).standard_normal(2**15).astype(np.float32)
    assert relative_error(decoded(drive(), x), x) == pytest.approx(1 - 2 / np.pi, abs=0.01)
    # Where signs alone lose nearly everything.
    x = np.random.default_rng(0).standard_cauchy(2**15).astype(np.float32)
    assert relative_error(decoded(drive(), x), x) < 0.5


def test_blocks_with_nan_stay_alone():
    x = np.ones((3, 16), np.float32)
    x[1, 2] = np.nan
    out = decoded(drive(block=16), x)
    assert np.isfinite(out[[0, 2]]).all()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("block", [0, 4, 100, -8])
def test_block_is_checked(block):
    with pytest.raises(ValueError, match=f"got {block}"):
        drive(block=block)
