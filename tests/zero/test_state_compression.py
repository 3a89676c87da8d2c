"""`zero_redundancy(state_compressor=)`: each worker's part of the moments in one or two bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import analysis
from jaxdist.compressors import cast, dynamic_fp8, int4, int8

EIGHT = dynamic_fp8(block=8)
BFLOAT16 = cast(jnp.bfloat16, rounding="stochastic")


def params():
    """The large leaf does not divide among the workers, and is not a multiple of eight."""
    return {"w": jax.random.normal(jax.random.key(0), (63, 67)), "b": jnp.ones(5)}


def make(tx):
    def step(state, batch):
        noise = batch[:, 0].mean()
        grads = jax.tree.map(lambda p: jnp.sin(3 * p) + p - noise, state.params)
        updates, opt = tx.update(grads, state.opt, state.params, examples=batch[0, 1])
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def batches(steps):
    noise = np.random.default_rng(0).normal(size=(steps, 8, 1))
    return np.concatenate([noise, np.ones_like(noise)], -1).astype(np.float32)


def placed(tx, place):
    return jd.place(TrainState(params(), jax.jit(tx.init)(params())), place)


@pytest.fixture(scope="module")
def mesh4():
    return jd.make_mesh({"data": 4}, devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def coded(mesh4):
    tx = jd.zero_redundancy(optax.adam(1e-2, b2=0.99), state_compressor=EIGHT)
    return tx, jd.distribute(make(tx), mesh4, donate=False)


@pytest.mark.slow
def test_takes_the_steps_of_the_optimizer(mesh4, coded):
    """Within the noise of the code; on the mesh as in simulation; and what is small is not touched."""
    bare = jd.zero_redundancy(optax.adam(1e-2, b2=0.99))
    tx, step = coded
    state, other, plain = placed(tx, mesh4), placed(tx, 4), placed(bare, 4)
    simulated, simulated_bare = jd.simulate(make(tx), 4), jd.simulate(make(bare), 4)
    for number, batch in enumerate(batches(20)):
        state, _ = step(state, batch)
        plain, _ = simulated_bare(plain, batch)
        if number < 1:  # later a last bit may turn a draw
            other, _ = simulated(other, batch)
            assert_close(state.params, other.params, 1e-6)
    moved = plain.params["w"] - params()["w"]
    off = float(jnp.linalg.norm(state.params["w"] - plain.params["w"]) / jnp.linalg.norm(moved))
    assert 0 < off < 0.05
    assert_close(state.params["b"], plain.params["b"], 1e-6)
    assert jd.runtime.disagreement(state, mesh4) == ()


def test_bytes_on_each_worker_and_none_more_on_the_wire(mesh4, coded):
    entries, own = 63 * 67, 1056 + 8  # of the large leaf and of both for each worker, padded
    tx, step = coded
    program = step.lower(placed(tx, mesh4), batches(1)[0]).compile()
    expected = 4 * (entries + 5) + 2 * 1056 * (1 + 1 / 8) + 2 * 4 * 8 + 4 * 4 + 8 * 2 * 4 / 4
    assert analysis.memory(program).arguments == pytest.approx(expected, abs=16)
    bare = jd.zero_redundancy(optax.adam(1e-2))
    uncoded = jd.distribute(make(bare), mesh4).lower(placed(bare, mesh4), batches(1)[0]).compile()
    assert analysis.collectives(program).wire_bytes == analysis.collectives(uncoded).wire_bytes
    assert analysis.memory(uncoded).arguments > 4 * (entries + 5) + 2 * 4 * own


def test_no_examples_change_no_bit(mesh4, coded):
    tx, step = coded
    state, _ = step(placed(tx, mesh4), batches(1)[0])
    idle, _ = step(state, batches(1)[0] * np.array([1.0, 0.0], np.float32))
    assert_close(idle.params, state.params, 0)
    assert_close(idle.opt.inner.inner, state.opt.inner.inner, 0)
    assert int(idle.opt.empty) == 1


def test_another_number_of_workers_reads_the_same_moments(mesh4, coded):
    """Blocks lie where they lay: cut anew for two workers, the next step is that of four, but for the draws."""
    tx, step = coded
    state = placed(tx, mesh4)
    for batch in batches(3):
        state, _ = step(state, batch)
    after, _ = step(state, batches(4)[3])
    fewer, _ = jd.simulate(make(tx), 2)(jd.resize(state, 2), batches(4)[3])
    assert_close(fewer.params, after.params, 1e-6)


@pytest.mark.parametrize("workers", [3])
def test_bfloat16_with_master_parameters(workers):
    """And an optimizer that makes something of the padding: a state that starts at one."""
    inner = optax.chain(optax.scale_by_rss(initial_accumulator_value=1.0), optax.sgd(1e-2, momentum=0.9))
    tx = jd.zero_redundancy(inner, state_compressor=BFLOAT16, master_dtype=jnp.float32, stage=2)
    bare = jd.zero_redundancy(inner, master_dtype=jnp.float32)
    state, plain = placed(tx, workers), placed(bare, workers)
    simulated, simulated_bare = jd.simulate(make(tx), workers), jd.simulate(make(bare), workers)
    for batch in batches(10):
        state, plain = simulated(state, batch[:6])[0], simulated_bare(plain, batch[:6])[0]
    moved = plain.params["w"] - params()["w"]
    off = float(jnp.linalg.norm(state.params["w"] - plain.params["w"]) / jnp.linalg.norm(moved))
    assert 0 < off < 0.01


@pytest.mark.slow
def test_refusals():
    with pytest.raises(ValueError, match=r"every 8 entries by themselves.*dynamic_fp8\(block=8\)"):
        jd.zero_redundancy(optax.adam(1e-3), state_compressor=int8())
    with pytest.raises(ValueError, match=r"packs codes of several entries into the same bytes"):
        jd.zero_redundancy(optax.adam(1e-3), state_compressor=int4(block=8))
    with pytest.raises(ValueError, match=r"use zero_redundancy\(optimizer, state_compressor="):
        jd.zero_redundancy(jd.transforms.quantized_state(optax.adam(1e-3))).init(params())
