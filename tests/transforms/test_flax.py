"""Models with state of their own, random layers and nnx modules: each trains alike on a mesh and in simulation."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from problems import assert_close, batch

import jaxdist as jd

TX = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1))


class State(NamedTuple):
    params: Any
    opt: Any
    other: Any  # statistics, keys and counts


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(x))


def both_ways(step, build, mesh, steps=3):
    """Trains on the mesh and in simulation, checks that they agree and learn, and returns the state on the mesh."""
    run, simulated = jd.distribute(step, mesh), jd.simulate(step, 8)
    state, other = jd.init_state(build, mesh), jd.init_state(build, 8)
    losses = []
    for seed in range(steps):
        state, metrics = run(state, batch(32, seed=seed))
        other, _ = simulated(other, batch(32, seed=seed))
        losses.append(float(metrics["loss"]))
    assert_close(state, other, 1e-5)
    assert jd.runtime.disagreement(state, mesh) == ()
    assert len(set(losses)) == steps
    return state


def update(state, gradient, other):
    updates, opt = TX.update(gradient, state.opt, state.params)
    return State(optax.apply_updates(state.params, updates), opt, other)


def normed(statistics_of):
    """`statistics_of` is what becomes of a worker's own new running statistics."""

    def loss(params, data, statistics):
        out, new = Normed().apply({"params": params, **statistics}, data["x"], mutable=["batch_stats"])
        return jnp.mean((out - data["y"]) ** 2), new

    def step(state, data):
        value_and_grad = jd.local_value_and_grad(loss, has_aux=True)
        (value, new), gradient = value_and_grad(state.params, data, state.other)
        return update(state, gradient, statistics_of(new)), {"loss": lax.pmean(value, "data")}

    return step


def variables():
    found = Normed().init(jax.random.key(0), jnp.zeros((1, 6)))
    return found["params"], {"batch_stats": found["batch_stats"]}


def running_means(steps=3):
    """What each worker's running mean should be: `[W, 6]`."""
    mean = np.zeros((8, 6))
    for seed in range(steps):
        mean = 0.5 * mean + 0.5 * batch(32, seed=seed)["x"].reshape(8, 4, 6).mean(1)
    return mean


def test_batch_norm_with_agreed_statistics(mesh):
    def build():
        params, statistics = variables()
        return State(params, TX.init(params), statistics)

    state = both_ways(normed(lambda new: lax.pmean(new, "data")), build, mesh)
    found = state.other["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(found, running_means().mean(0), atol=1e-6)


def test_batch_norm_with_statistics_of_each_worker(mesh):
    def build():
        params, statistics = variables()
        return State(params, TX.init(params), jd.PerWorker(statistics))

    state = both_ways(normed(lambda new: new), build, mesh)
    found = state.other.value["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(found, running_means(), atol=1e-6)
    one_model = jd.consensus(state)
    np.testing.assert_allclose(
        one_model.other["batch_stats"]["BatchNorm_0"]["mean"], running_means().mean(0), atol=1e-6
    )


def test_dropout_draws_for_each_worker(mesh):
    """One agreed key and a count in the state; folded with the worker's number, every worker drops other units."""

    def loss(params, data, key):
        return jnp.mean((Dropped().apply(params, data["x"], rngs={"dropout": key}) - data["y"]) ** 2)

    def step(state, data):
        key, count = state.other
        mine = jax.random.fold_in(jax.random.fold_in(key, count), lax.axis_index("data"))
        value, gradient = jd.local_value_and_grad(loss)(state.params, data, mine)
        drawn = lax.all_gather(jax.random.uniform(mine), "data")
        metrics = {"loss": lax.pmean(value, "data"), "spread": lax.pmean(drawn.max() - drawn.min(), "data")}
        return update(state, gradient, (key, count + 1)), metrics

    def build():
        params = Dropped().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, 6)))
        return State(params, TX.init(params), (jax.random.key(2), jnp.zeros((), jnp.int32)))

    state = both_ways(step, build, mesh)
    assert int(state.other[1]) == 3
    _, metrics = jd.distribute(step, mesh)(state, batch(32))
    assert float(metrics["spread"]) > 0.1


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=rngs)
        self.dense = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.norm(x))


def test_nnx_split_and_merge(mesh):
    """The module's structure is static, its variables are the state."""
    structure = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def loss(params, data, statistics):
        model = nnx.merge(structure, params, statistics, copy=True)  # variables of this trace, which may change
        value = jnp.mean((model(data["x"]) - data["y"]) ** 2)
        return value, nnx.state(model, nnx.BatchStat)

    def step(state, data):
        value_and_grad = jd.local_value_and_grad(loss, has_aux=True)
        (value, new), gradient = value_and_grad(state.params, data, state.other)
        return update(state, gradient, lax.pmean(new, "data")), {"loss": lax.pmean(value, "data")}

    def build():
        _, params, statistics = nnx.split(Model(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
        return State(params, TX.init(params), statistics)

    state = both_ways(step, build, mesh)
    np.testing.assert_allclose(state.other["norm"]["mean"][...], running_means().mean(0), atol=1e-6)
    assert nnx.merge(structure, state.params, state.other)(jnp.ones((2, 6))).shape == (2, 4)
