"""A model of two leaves, its data, and the train step as one worker sees it: shared by the tests of the core."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd


class TrainState(NamedTuple):
    params: Any
    opt: Any


def params():
    return {"b": jnp.zeros(4), "w": jax.random.normal(jax.random.key(1), (6, 4)) * 0.3}


def batch(examples=16, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((examples, 6)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :4]) + 0.1 * rng.standard_normal((examples, 4)).astype(np.float32)}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) - batch["y"]) ** 2)


def make_step(tx, *, axis: str | tuple[str, ...] = "data", grad=None, **options):
    """`options` go to `local_value_and_grad`; `grad` replaces it."""
    value_and_grad = grad or jd.local_value_and_grad(loss, axis=axis, **options)

    def step(state, batch):
        value, gradient = value_and_grad(state.params, batch)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {"loss": jax.lax.pmean(value, axis)}

    return step


def fresh(tx, mesh, *, axis="data"):
    return jd.init_state(lambda: TrainState(params(), tx.init(params())), mesh, axis=axis)


def numbers(tree):
    """Host copies of the leaves, keys as words."""

    def one(x):
        return np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(one, tree)


def assert_close(left, right, tolerance=1e-5):
    """Same tree, same values; `tolerance=0`: the same bits."""
    left, right = numbers(left), numbers(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(left)[0], jax.tree.leaves(right), strict=True):
        name = jax.tree_util.keystr(path)
        if tolerance == 0:
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)
