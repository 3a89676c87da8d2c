"""ZeRO stages 1 and 2 against the optimizer itself; what is sent and what is kept."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import analysis
from jaxdist.wire.shards import shard_of
from jaxdist.zero import shards
from jaxdist.zero.parts import on_parts
from jaxdist.zero.values import Part, all_gather_shards

ELEMENTWISE = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 50)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(1e-3),
    "inject": optax.inject_hyperparams(optax.adamw)(1e-2),
    "partition": optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"w": "a", "b": "b", "s": "a", "e": "b"}
    ),
}
LEAFWISE = {
    "adafactor": optax.adafactor(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "novograd": optax.novograd(1e-2),
    "masked": optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
}


def params(dtype=jnp.float32):
    """No leaf divides among the workers; one is empty."""
    w = jax.random.normal(jax.random.key(0), (7, 5), dtype)
    return {"w": w, "b": jnp.ones(3, dtype), "s": jnp.zeros((), dtype), "e": jnp.zeros((0, 4), dtype)}


def gradient(params, batch):
    """Of `|params - batch|²/2`, `batch` a number for each worker."""
    return jax.tree.map(lambda p: jnp.sin(3 * p) + p - batch.mean().astype(p.dtype), params)


def make(tx):
    def step(state, batch):
        updates, opt = tx.update(gradient(state.params, batch), state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def batches(steps):
    return np.random.default_rng(0).normal(size=(steps, 8)).astype(np.float32)


def plain(tx, steps=20, dtype=jnp.float32):
    """The optimizer on the mean gradient."""
    tx = optax.chain(tx)
    found = params(dtype)
    state = tx.init(found)
    update = jax.jit(tx.update)
    for batch in batches(steps):
        updates, state = update(gradient(found, batch), state, found)
        found = optax.apply_updates(found, updates)
    return found


def run(tx, place, steps=20, dtype=jnp.float32):
    state = jd.place(TrainState(params(dtype), tx.init(params(dtype))), place)
    step = jd.simulate(make(tx), place) if isinstance(place, int) else jd.distribute(make(tx), place)
    for batch in batches(steps):
        state, _ = step(state, batch)
    return state


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_equals_the_optimizer(name):
    found = run(jd.zero_redundancy(ELEMENTWISE[name]), 4)
    assert_close(found.params, plain(ELEMENTWISE[name]), 1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_any_number_of_workers(workers):
    mesh = jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    assert_close(run(jd.zero_redundancy(inner, stage=2), mesh).params, plain(inner), 1e-6)


def test_after_a_full_mean():
    tx = optax.chain(jd.all_reduce(jd.exact()), jd.zero_redundancy(optax.adamw(1e-2), reducer=None))
    assert_close(run(tx, 4).params, plain(optax.adamw(1e-2)), 1e-6)


def test_master_parameters_take_what_bfloat16_loses():
    """A thousand steps of 1e-4 of what bfloat16 resolves: the parameters stand still without a master."""
    tiny = optax.sgd(1e-5)
    with_master = run(jd.zero_redundancy(tiny, master_dtype=jnp.float32), 2, 300, jnp.bfloat16)
    without = run(jd.zero_redundancy(tiny), 2, 300, jnp.bfloat16)
    np.testing.assert_array_equal(without.params["b"], params(jnp.bfloat16)["b"])
    master = jd.consensus(with_master.opt.master)
    assert master["b"].dtype == jnp.float32
    assert (np.abs(master["b"] - 1) > 1e-3).all()
    np.testing.assert_array_equal(with_master.params["b"], master["b"].astype(jnp.bfloat16))


@pytest.mark.slow
def test_bytes_and_memory():
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    big = {"w": jnp.zeros((64, 256)), "b": jnp.zeros(100)}
    entries = 64 * 256 + 128  # padded

    def compiled(tx):
        def step(state, batch):
            grads = jax.tree.map(lambda p: p + batch.mean(), state.params)
            updates, opt = tx.update(grads, state.opt, state.params)
            return TrainState(optax.apply_updates(state.params, updates), opt), {}

        state = jd.place(TrainState(big, tx.init(big)), mesh)
        return jd.distribute(step, mesh).lower(state, np.zeros(8, np.float32)).compile()

    program = compiled(jd.zero_redundancy(optax.adam(1e-2)))
    found = analysis.collectives(program)
    assert found.wire_bytes == 2 * 3 / 4 * 4 * entries
    assert [op.kind for op in found.ops] == ["all-to-all", "all-gather"]
    in_buckets = analysis.collectives(compiled(jd.zero_redundancy(optax.adam(1e-2), stage=2)))
    assert in_buckets.wire_bytes == found.wire_bytes
    clipped = analysis.collectives(
        compiled(jd.zero_redundancy(optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1))))
    )
    assert clipped.wire_bytes == found.wire_bytes + 2 * 3 / 4 * 4 * 2  # a sum for each leaf
    muon = analysis.collectives(compiled(jd.zero_redundancy(optax.contrib.muon(1e-2))))
    # Its momentum is gathered, and so the update need not be; a sum for its norm.
    assert muon.wire_bytes == found.wire_bytes + 2 * 3 / 4 * 4
    full = optax.chain(jd.all_reduce(jd.exact()), jd.zero_redundancy(optax.adam(1e-2), reducer=None))
    assert analysis.collectives(compiled(full)).wire_bytes == 3 / 4 * 4 * (2 * (64 * 256 + 100) + entries)
    assert analysis.memory(program).arguments == pytest.approx(4 * (entries + 2 * entries / 4), rel=0.02)


@pytest.mark.slow
def test_stage_2_needs_less_memory(mesh, monkeypatch):
    """Gradients leave as they arise, and never exist all at once."""
    monkeypatch.setattr(shards, "BUCKET_BYTES", 4 * 128**2)
    layers = [jnp.zeros((128, 128)) for _ in range(8)]

    def loss(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer)
        return (x**2).mean()

    def temporary(stage):
        tx = jd.zero_redundancy(optax.sgd(1e-2), stage=stage)

        def step(state, batch):
            _, grads = jd.local_value_and_grad(loss)(state.params, batch)
            updates, opt = tx.update(grads, state.opt, state.params)
            return TrainState(optax.apply_updates(state.params, updates), opt), {}

        state = jd.place(TrainState(layers, tx.init(layers)), mesh)
        return analysis.memory(
            jd.distribute(step, mesh).lower(state, np.zeros((8, 128), np.float32)).compile()
        ).temporary

    assert temporary(2) < 0.6 * temporary(1)


def test_examples_weigh_and_none_changes_nothing():
    tx = jd.zero_redundancy(optax.adam(1e-2))

    def step(state, batch):
        grads = gradient(state.params, batch[:, 0])
        updates, opt = tx.update(grads, state.opt, state.params, examples=batch[0, 1])
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.place(TrainState(params(), tx.init(params())), 2)
    simulated = jd.simulate(step, 2)
    weighted, _ = simulated(state, jnp.array([[1.0, 1.0], [5.0, 3.0]]))
    optimizer = optax.adam(1e-2)
    updates, _ = optimizer.update(gradient(params(), jnp.array(4.0)), optimizer.init(params()))
    assert_close(weighted.params, optax.apply_updates(params(), updates), 1e-6)
    idle, _ = simulated(weighted, jnp.array([[1.0, 0.0], [5.0, 0.0]]))
    assert_close(idle.params, weighted.params, 0)
    assert_close(idle.opt.inner, weighted.opt.inner, 0)
    assert int(idle.opt.empty) == 1


def run_tree(tx, start, workers, *, mean_first=False):
    """Twenty steps of `tx` on the gradients of another model."""

    def step(state, batch):
        mean = jax.lax.pmean(batch.mean(), "data") if mean_first else batch.mean()
        grads = jax.tree.map(lambda p: jnp.sin(3 * p) + p - mean, state.params)
        updates, opt = tx.update(grads, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.place(TrainState(start, tx.init(start)), workers)
    simulated = jd.simulate(step, workers)
    for batch in batches(20):
        state, _ = simulated(state, batch)
    return state.params


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", LEAFWISE)
def test_what_looks_at_more_than_entries(name):
    start = {name: x for name, x in params().items() if x.size} | {"m": jnp.ones((128, 130)) * 0.1}
    tx = LEAFWISE[name]
    expected = run_tree(optax.chain(jd.all_reduce(jd.exact()), tx), start, 4)
    assert_close(run_tree(jd.zero_redundancy(tx), start, 4), expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["adamw", "momentum", "lion", "adafactor", "lamb", "muon"])
def test_every_stage_on_any_number_of_workers(name, stage, monkeypatch):
    """Twenty steps with leaves that divide nowhere; in stage 3 their gradients are means, cut."""
    monkeypatch.setattr(shards, "BUCKET_BYTES", 200)
    start: Any = {name: x for name, x in params().items() if x.size} | {"m": jnp.ones((129, 130)) * 0.1}
    inner = (ELEMENTWISE | LEAFWISE)[name]
    expected = run_tree(optax.chain(jd.all_reduce(jd.exact()), inner), start, 8)
    tx = jd.zero_redundancy(inner, stage=1 if stage == 3 else stage)
    for workers in (1, 2, 4, 8):
        if stage < 3:
            found = run_tree(tx, start, workers)
        else:
            found = jd.consensus(run_tree(tx, jd.zero.shard(start, smallest=0), workers, mean_first=True))
        assert_close(found, expected, 1e-6)


@pytest.mark.slow
def test_on_parts():
    """Reductions see no padding; what is not known is gathered; branches and calls are entered."""

    def f(x, y):
        smooth = jax.nn.gelu(x) + jnp.exp(x).sum() + x.min() + x.max() + jnp.linalg.norm(y)
        rolled = jnp.roll(x, 1, axis=0) * x.ravel().sum()
        chosen = jax.lax.cond(x.sum() > 0, lambda x: (x + 1, x.sum()), lambda x: (jnp.ones_like(x), x.min()), x)
        products = x @ x.T, jnp.arange(21.0).reshape(3, 7) @ x, jnp.ones((3, 7)) @ x
        return smooth, rolled, chosen, (x > 0).any(), (x > -9).all(), jnp.where(x > 0, x, 0.0), products

    x, y = jax.random.normal(jax.random.key(0), (7, 5)), jnp.arange(3.0)
    assert_close(evaluate_on_parts(f, x, y), f(x, y), 1e-5)


def evaluate_on_parts(f, *arrays):
    def one_worker(_):
        comm = jd.comm.over("data")
        parts = tuple(Part(shard_of(array, comm), array.shape) for array in arrays)
        found = on_parts(f, comm, arrays, parts)
        return jax.tree.map(
            lambda p: all_gather_shards(p.value, p.shape, comm) if isinstance(p, Part) else p,
            found,
            is_leaf=lambda p: isinstance(p, Part),
        )

    found = jax.vmap(one_worker, axis_name="data")(jnp.arange(4))
    return jax.tree.map(lambda p: p[2], found)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "bool", "float8_e4m3fn"])
def test_reductions_of_dtypes_without_infinity(dtype):
    """With numbers that have no negative, or that padding must not replace."""
    extremes = [0, 1] if dtype == "bool" else [jnp.finfo(dtype).min, 5] if "f" in dtype else [jnp.iinfo(dtype).min, 5]
    x = jnp.array(extremes * 10).astype(dtype)

    def f(x):
        return x.min(), x.max(), -x.min() if dtype == "int8" else 0, jnp.sum(x != 0)

    assert evaluate_on_parts(f, x) == f(x)


def test_bitwise_reductions_of_integers():
    x = jnp.array([1, 2, 12] * 7)
    assert evaluate_on_parts(lambda x: (jax.lax.reduce_or(x, (0,)), jax.lax.reduce_and(x, (0,))), x) == (15, 0)


def test_refusals():
    tx = jd.zero_redundancy(optax.adam(1e-2), axis=None)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params(), tx.init(params()))
