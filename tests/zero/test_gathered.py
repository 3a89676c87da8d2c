"""ZeRO stage 3: parameters that are cut, against the same step with whole ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import analysis
from jaxdist.zero import gathered, gathered_scan, shard

LAYERS, WIDTH = 6, 33


def params(width=WIDTH):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = [{"w": jax.random.normal(key, (width, width)) / width**0.5, "b": jnp.zeros(width)} for key in keys]
    return {"layers": layers, "head": jnp.ones((width, 1)) / width}


def layer(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"][None])


def loss(p, batch, through):
    x = through(p["layers"], batch)
    return jnp.mean(jnp.square(gathered(lambda w, x: x @ w)(p["head"], x) - 1))


def plainly(layers, x):
    for p in layers:
        x = layer(p, x)
    return x


def one_by_one(layers, x):
    for p in layers:
        x = gathered(layer)(p, x)
    return x


def in_a_loop(layers, x):
    return gathered_scan(layer, layers, x)


def one_ahead(layers, x):
    return gathered_scan(layer, layers, x, prefetch=True)


def make(tx, through):
    def step(state, batch):
        value, grads = jd.local_value_and_grad(lambda p, b: loss(p, b, through))(state.params, batch)
        updates, opt = tx.update(grads, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {"loss": jax.lax.pmean(value, "data")}

    return step


def batches(steps, width=WIDTH):
    return np.random.default_rng(0).normal(size=(steps, 8, width)).astype(np.float32)


def run(tx, through, start, place, steps=20):
    state = jd.place(TrainState(start, tx.init(start)), place)
    step = jd.simulate(make(tx, through), place) if isinstance(place, int) else jd.distribute(make(tx, through), place)
    for batch in batches(steps):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.fixture(scope="module")
def expected():
    """The same with whole parameters."""
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    return run(tx, plainly, params(), 4)[0].params


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("through", "smallest"),
    [(one_by_one, 0), (one_by_one, 100), (in_a_loop, 0), (in_a_loop, 100), (one_ahead, 100)],
)
def test_equals_whole_parameters(through, smallest, expected):
    """All leaves cut, or vectors left whole."""
    tx = jd.zero_redundancy(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    state, _ = run(tx, through, shard(params(), smallest=smallest), mesh)
    assert_close(jd.consensus(state.params), expected, 2e-6)


@pytest.mark.slow
def test_simulated(expected):
    tx = jd.zero_redundancy(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))
    state, _ = run(tx, in_a_loop, shard(params(), smallest=0), 4)
    assert_close(jd.consensus(state.params), expected, 2e-6)


def test_master_parameters():
    """Cut bfloat16 parameters beside a cut float32 master: they are its rounding, and nothing is gathered for it."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    tx = jd.zero_redundancy(optax.adam(1e-3), master_dtype=jnp.float32)
    start = shard(half, smallest=0)
    state = jd.place(TrainState(start, tx.init(start)), 2)
    step = jd.simulate(make(tx, one_by_one), 2)
    for batch in batches(3):
        state, _ = step(state, batch.astype(jnp.bfloat16))
    master = jd.consensus(state.opt.master)
    assert_close(jd.consensus(state.params), jax.tree.map(lambda x: x.astype(jnp.bfloat16), master), 0)


@pytest.mark.slow
def test_bytes_and_memory():
    width = 256
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    whole = params(width)
    entries = sum(-(-x.size // 32) * 32 for x in jax.tree.leaves(whole))

    def compiled(tx, start, through):
        state = jd.place(TrainState(start, tx.init(start)), mesh)
        return jd.distribute(make(tx, through), mesh).lower(state, batches(1, width)[0]).compile()

    cut = compiled(jd.zero_redundancy(optax.adam(1e-2)), shard(whole, smallest=0), in_a_loop)
    found = analysis.collectives(cut)
    kinds = {kind: sum(op.count for op in found.ops if op.kind == kind) for kind in ("all-gather", "all-to-all")}
    # The backward pass of the head follows at once: a compiler may keep what was gathered, `width` entries less.
    kept = 2 * 2 * LAYERS + 2 - kinds["all-gather"]
    assert kept in (0, 1)
    assert kinds["all-to-all"] == LAYERS + 1  # the gradients of a layer together
    assert found.wire_bytes == 3 / 4 * 4 * (3 * entries - kept * width) + 2 * 3 / 4 * 4
    plain = compiled(optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-2)), whole, plainly)
    memory, before = analysis.memory(cut), analysis.memory(plain)
    assert memory.arguments == pytest.approx(3 * 4 * entries / 4, rel=0.05)
    assert before.arguments > 3.9 * memory.arguments
    assert memory.temporary < 0.8 * before.temporary


def test_marked_parameters_stay():
    params = {"w": jd.zero.shard(jnp.zeros(8), smallest=0, axis="chip"), "v": jnp.zeros(8)}
    marked = jd.zero.shard(params, smallest=0)
    assert marked["w"] is params["w"]
    assert isinstance(marked["v"], jd.Sharded)


def test_refusals():
    with pytest.raises(ValueError, match="smallest must not be negative, got -1"):
        shard({}, smallest=-1)
    with pytest.raises(ValueError, match="all alike, got 2 kinds"):
        gathered_scan(layer, [{"w": jnp.zeros(2)}, {"w": jnp.zeros(3)}], jnp.zeros(2))
    tx = jd.zero_redundancy(optax.adam(1e-2), axis=None)
    cut: Any = {"w": jd.Sharded(jnp.zeros(8), multiple=8)}
    with pytest.raises(ValueError, match="weigh the loss by the examples"):
        tx.update(cut, tx.init(cut), cut, examples=3)
