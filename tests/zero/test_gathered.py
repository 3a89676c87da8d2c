"""ZeRO stage 3: parameters that are cut, against the same step with whole ones."""

import functools
import importlib
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

LAYERS, WIDTH, STEPS = 3, 33, 6


def params(width=WIDTH, count=LAYERS):
    keys = jax.random.split(jax.random.key(0), count)
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


def run(tx, through, start, place, steps=STEPS):
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
    width, count = 256, 6
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    whole = params(width, count)
    entries = sum(-(-x.size // 32) * 32 for x in jax.tree.leaves(whole))

    def compiled(tx, start, through):
        state = jd.place(TrainState(start, tx.init(start)), mesh)
        return jd.distribute(make(tx, through), mesh).lower(state, batches(1, width)[0]).compile()

    cut = compiled(jd.zero_redundancy(optax.adam(1e-2)), shard(whole, smallest=0), in_a_loop)
    found = analysis.collectives(cut)
    kinds = {kind: sum(op.count for op in found.ops if op.kind == kind) for kind in ("all-gather", "all-to-all")}
    # The backward pass of the head follows at once: a compiler may keep what was gathered, `width` entries less.
    kept = 2 * 2 * count + 2 - kinds["all-gather"]
    assert kept in (0, 1)
    assert kinds["all-to-all"] == count + 1  # the gradients of a layer together
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
    with pytest.raises(ValueError, match="smallest must be at least 0, got -1"):
        shard({}, smallest=-1)
    with pytest.raises(ValueError, match="all alike, got 2 kinds"):
        gathered_scan(layer, [{"w": jnp.zeros(2)}, {"w": jnp.zeros(3)}], jnp.zeros(2))
    tx = jd.zero_redundancy(optax.adam(1e-2), axis=None)
    cut: Any = {"w": jd.Sharded(jnp.zeros(8), multiple=8)}
    with pytest.raises(ValueError, match="weigh the loss by the examples"):
        tx.update(cut, tx.init(cut), cut, examples=3)


def dense_loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)


def times(collectives, kind):
    return sum(op.count for op in collectives.ops if op.kind == kind)


def test_bytes_of_a_window_of_parts():
    """Micro-batches gather and reduce in each part; a mean over the parts inside of `gathered` once."""
    parts = 4

    def window(p, x):
        part = jax.checkpoint(lambda part: dense_loss(p, part))
        return jnp.mean(jax.lax.map(part, x.reshape(parts, -1, *x.shape[1:])))

    def run(value_and_grad):
        def step(state, x):
            value, gradient = value_and_grad(state["w"], x)
            return {"w": gradient}, jax.lax.pmean(value, "data")

        mesh = jd.make_mesh({"data": 8})
        state = jd.place({"w": shard({"w": jnp.eye(64)}, smallest=0)}, mesh)
        x = np.random.default_rng(0).normal(size=(8 * parts, 64)).astype(np.float32)
        compiled = jd.distribute(step, mesh, donate=False).lower(state, x).compile()
        return analysis.collectives(compiled), compiled(state, x)[0]

    once, expected = run(jd.local_value_and_grad(gathered(dense_loss)))
    of_window, found = run(jd.local_value_and_grad(gathered(window)))
    of_parts, again = run(jd.local_value_and_grad(gathered(dense_loss), micro_batches=parts))
    assert of_window.wire_bytes == once.wire_bytes
    # XLA of jax 0.12 gathers parameters a second time for the backward pass; gradients are reduced once a pass.
    assert times(of_parts, "all-to-all") == parts * times(once, "all-to-all")
    assert times(of_parts, "all-gather") >= parts
    assert_close(found, expected, 1e-6)
    assert_close(again, expected, 1e-6)


MODES = ("types", "values", "simulate")


def train(tx, mode, metric=lambda gradients: None, *, steps=4, stage=3, smallest=10):
    """Returns the parameters after these steps, and the last metric."""
    start = {"w": jnp.eye(6, 5), "b": jnp.zeros(5)}
    start = shard(start, smallest=smallest) if stage == 3 else start
    place = 2 if mode == "simulate" else jd.make_mesh({"data": 2}, devices=jax.devices()[:2])

    def step(state, x):
        _, gradients = jd.local_value_and_grad(gathered(dense_loss))(state["p"], x)
        updates, opt = tx.update(gradients, state["opt"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "opt": opt}, metric(gradients)

    state = jd.init_state(lambda: {"p": start, "opt": tx.init(start)}, place)
    run = jd.simulate(step, place) if mode == "simulate" else jd.distribute(step, place, check=mode)
    logged = None
    for i in range(steps):
        state, logged = run(state, np.random.default_rng(i).normal(size=(8, 6)).astype(np.float32))
    return jd.consensus(state["p"]), logged


@functools.cache
def after_two_means():
    """The parameters after two steps of Adam, each on the mean gradient of two batches."""
    start, tx = {"w": jnp.eye(6, 5), "b": jnp.zeros(5)}, optax.adam(0.05)

    @jax.jit
    def step(start, state, each):
        mean = jax.tree.map(lambda *g: sum(g) / 2, *[jax.grad(dense_loss)(start, x) for x in each])
        updates, state = tx.update(mean, state, start)
        return optax.apply_updates(start, updates), state

    state = tx.init(start)
    for i in (0, 2):
        each = [np.random.default_rng(i + k).normal(size=(8, 6)).astype(np.float32) for k in range(2)]
        start, state = step(start, state, each)
    return start


@pytest.mark.parametrize("mode", MODES)
def test_accumulated_over_calls(mode):
    """Of large leaves, which are sharded, and small ones, which are not."""
    found, _ = train(jd.accumulate(jd.zero_redundancy(optax.adam(0.05)), 2), mode)
    assert_close(found, after_two_means(), 1e-6)


def test_examples_cannot_weigh_sharded_gradients():
    tx = jd.accumulate(jd.zero_redundancy(optax.sgd(0.1), axis=None), 2, axis=None)
    params = shard({"w": jnp.ones(4)}, smallest=0)
    for given in ({"examples": 3}, {"active": True}):
        with pytest.raises(ValueError, match=r"cannot weigh the gradients of Sharded parameters.* weigh the loss"):
            tx.update(params, tx.init(params), params, **given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_norm_of_the_mean_gradient(mode, stage):
    _, found = train(jd.zero_redundancy(optax.sgd(0.1)), mode, jd.zero.global_norm, steps=1, stage=stage)
    batch = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    expected = optax.tree.norm(jax.grad(dense_loss)({"w": jnp.eye(6, 5), "b": jnp.zeros(5)}, batch))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    if mode != "values":
        with pytest.raises(ValueError, match=r"the norm of sharded gradients .* jd.zero.global_norm"):
            train(jd.zero_redundancy(optax.sgd(0.1)), mode, optax.tree.norm, steps=1)


def test_norms_of_other_trees():
    padded = jd.Sharded(jnp.array([3.0, 4.0, 7.0]), shape=(2,))
    assert jd.zero.global_norm({"w": jnp.array([3.0, 4.0]), "b": None}, axis=None) == 5.0
    assert jd.zero.global_norm([padded], axis=None) == 5.0
    assert jd.zero.global_norm({}, axis=None) == 0.0
    with pytest.raises(ValueError, match="is marked PerWorker: workers have no common norm"):
        jd.zero.global_norm({"w": jd.PerWorker(jnp.ones(2))}, axis=None)


WRAPPERS = {
    "finite": (lambda tx: optax.apply_if_finite(tx, 3), r"by its own shards.* zero_redundancy\(optax.apply_if_finite"),
    "steps": (
        lambda tx: optax.MultiSteps(jd.offload.host(tx), 2).gradient_transformation(),
        r"MultiSteps around offload.host .* offload.host\(optax.MultiSteps",
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_that_cannot_be_around_it(name, mode):
    wrap, match = WRAPPERS[name]
    with pytest.raises(ValueError, match=match):
        train(wrap(jd.zero_redundancy(optax.adam(0.1))), mode, steps=1, smallest=0)


def test_the_wrapper_inside_host_memory():
    """What the refusal of `MultiSteps` around it advises."""
    inside = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    plain = train(jd.zero_redundancy(inside), "simulate", steps=2, stage=1)
    found = train(jd.offload.host(jd.zero_redundancy(inside)), "simulate", steps=2, stage=1)
    assert_close(found, plain, 1e-6)


@pytest.mark.parametrize("name", ["conditionally_mask", "conditionally_transform"])
def test_conditions_around_communication_are_refused(name):
    around = getattr(optax, name)(jd.zero_redundancy(optax.adam(0.1)), lambda step: step % 2 == 0)
    for mode in MODES:
        with pytest.raises(ValueError, match=rf"optax.{name} .* put it inside, zero_redundancy\(optax.{name}"):
            train(around, mode, steps=1, stage=1)


@pytest.mark.parametrize("through", [in_a_loop, one_ahead])
def test_there_is_no_loop_where_its_collectives_would_meet_others(monkeypatch, expected, through):
    """Between CPU processes a gather of the head begins while the loop gathers layers, and gloo fails."""
    monkeypatch.setattr(importlib.import_module("jaxdist.zero.gathered"), "mixes_collectives", lambda: True)
    tx = jd.zero_redundancy(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    start = shard(params(), smallest=100)
    state, _ = run(tx, through, start, mesh)
    assert_close(jd.consensus(state.params), expected, 2e-6)
    lowered = jd.distribute(make(tx, through), mesh).lower(state, batches(1)[0])
    assert "while" not in lowered.as_text()
