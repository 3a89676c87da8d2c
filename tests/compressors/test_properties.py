"""Every registered code on drawn shapes, dtypes and inputs: blocks that do not divide, odd sizes, scalars and nothing.

Two examples for each code by default, twelve with `--slow`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import round_trips
from hypothesis import given, settings
from hypothesis import strategies as st
from register import CODES

DRAWS = 64
BLOCKS = [8, 16, 32, 64, 256, 512]

each_code = pytest.mark.parametrize("name", CODES)
# Hypothesis begins with the simplest, which are the first of each.
around_blocks = st.builds(lambda size, more: (size + more,), st.sampled_from(BLOCKS), st.sampled_from([1, -1, 0]))
tensors = st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple)
shapes = st.one_of(
    around_blocks, st.integers(1, 600).map(lambda n: (n,)), tensors, st.sampled_from([(), (1,), (0,), (3, 0)])
)
examples = {
    "shape": shapes,
    "dtype": st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    "seed": st.integers(0, 2**32 - 1),
}


def an_input(shape, dtype, seed):
    """Normal entries of one of several magnitudes, some of them zero, some equal, one of them larger."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * rng.choice([1e-2, 1.0, 30.0])
    x = np.where(rng.random(shape) < rng.choice([0.0, 0.5]), rng.choice([0.0, 1.0]), x)
    x.reshape(-1)[:1] *= rng.choice([1.0, 20.0])
    return jnp.asarray(x, dtype)


def check(name, shape, dtype, seed):
    code, x, key = CODES[name].make(), an_input(shape, dtype, seed), jax.random.key(seed)
    with jax.numpy_dtype_promotion("strict"):
        payload, out = jax.eval_shape(lambda x, key: (p := code.compress(x, key), code.decompress(p, x)), x, key)
        found = np.asarray(round_trips(code)(x, jax.random.split(key, DRAWS)), np.float64).reshape(DRAWS, -1)
    assert (out.shape, out.dtype) == (shape, dtype)

    sent = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))
    documented = CODES[name].bytes(max(x.size, 1))
    # Of half precision, codes that send values as they are send half of the bytes.
    assert sent == documented if dtype == jnp.float32 and x.size else sent <= documented

    assert np.isfinite(found).all()
    x = np.asarray(x, np.float64).reshape(-1)
    energy, squares = (x**2).sum(), ((found - x) ** 2).sum(1)
    error, margin = squares.mean(), 6 * squares.std() / DRAWS**0.5
    omega = None if code.variance is None else code.variance(shape)
    # What is decoded is rounded to the dtype.
    rounded = 4 * float(jnp.finfo(dtype).eps) * (energy * (1 + (omega or 0.0))) ** 0.5
    if omega is not None:
        # ω bounds the spread: that of the draws themselves lacks what is rare, such as an entry of 1.0007 rounded up.
        bias = ((found.mean(0) - x) ** 2).sum() ** 0.5
        assert bias <= 6 * (omega * energy / DRAWS) ** 0.5 + rounded
        assert error <= ((omega * energy + margin) ** 0.5 + rounded) ** 2
    if code.contraction is not None:
        assert error <= (((1 - code.contraction(shape)) * energy + margin) ** 0.5 + rounded) ** 2


@pytest.mark.sampled(26)
@each_code
@settings(max_examples=2)
@given(**examples)
def test_a_code_keeps_its_word(name, shape, dtype, seed):
    check(name, shape, dtype, seed)


@pytest.mark.slow
@each_code
@settings(max_examples=12)
@given(**examples)
def test_a_code_keeps_its_word_often(name, shape, dtype, seed):
    check(name, shape, dtype, seed)
