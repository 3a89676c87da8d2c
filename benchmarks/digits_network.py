"""A perceptron with one hidden layer on scikit-learn's handwritten digits, which several benchmarks train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

# Learning rates are tuned on a seed of their own; the others count.
TUNING_SEED, SEEDS = 100, (0, 1, 2)


def digits():
    """Images and labels: 1437 to train on and 360 held out."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def network(key, hidden=32):
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (64, hidden)) / 8,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, 10)) / hidden**0.5,
        "b2": jnp.zeros(10),
    }


def losses(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["w2"] + params["b2"], y)


def accuracy(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return jnp.mean(jnp.argmax(hidden @ params["w2"] + params["b2"], 1) == y)
