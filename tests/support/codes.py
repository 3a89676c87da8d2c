"""Round trips of codes, shared by their tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(7)
X = np.array([3.0, -4.0, 0.0, 12.0], np.float32)


@functools.lru_cache(maxsize=64)
def round_trip(code):
    """Compiled once for a code and a shape, however often a test asks."""
    return jax.jit(lambda x, key: code.decompress(code.compress(x, key), x))


@functools.lru_cache(maxsize=64)
def round_trips(code):
    """The same for many keys."""
    return jax.jit(jax.vmap(lambda x, key: code.decompress(code.compress(x, key), x), in_axes=(None, 0)))


def decoded(code, x, key=KEY):
    return np.asarray(round_trip(code)(jnp.asarray(x), key), np.float64)


def draws(code, x, count, key=KEY):
    """What `count` independent round trips give, `[count, *x.shape]`."""
    return np.asarray(round_trips(code)(jnp.asarray(x), jax.random.split(key, count)), np.float64)


def relative_error(found, x):
    x = np.asarray(x, np.float64)
    return float(((found - x) ** 2).sum() / (x**2).sum())


def assert_mean(found, x):
    """The mean of the draws is x: its squared error is about the variance of a draw over their number."""
    x = np.asarray(x, np.float64)
    bias, variance = ((found.mean(0) - x) ** 2).sum(), ((found - x) ** 2).sum() / len(found)
    assert bias <= 16 * variance / len(found) + 1e-12 * (x**2).sum()


def assert_variance(found, x, expected):
    """`E|C(x) - x|²` over the draws, up to five standard errors."""
    errors = ((found - np.asarray(x, np.float64)) ** 2).reshape(len(found), -1).sum(1)
    assert abs(errors.mean() - expected) <= 5 * errors.std() / np.sqrt(len(found)) + 1e-6 * expected
