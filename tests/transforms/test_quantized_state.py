"""The state of optimizers in one or two bytes an entry: what it weighs, what it does, where it may stand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import analysis, checkpoint
from jaxdist.compressors import cast, int8
from jaxdist.transforms.quantized_state import is_coded

BFLOAT16 = cast(jnp.bfloat16, rounding="stochastic")


def params():
    """One leaf that is coded, not a multiple of a block, and one that is too small."""
    return {"w": jax.random.normal(jax.random.key(0), (50, 83)), "b": jnp.zeros(7)}


def make(tx):
    """Least squares against numbers of very different size, with noise from the batch."""

    def step(state, batch):
        scales = jnp.geomspace(1e-3, 1.0, 50)[:, None]
        noise = jnp.sin(jnp.arange(83.0)[None, :] * batch.mean())
        grads = {"w": scales * (state.params["w"] - 1 + noise), "b": state.params["b"] - batch.mean()}
        updates, opt = tx.update(grads, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def batches(steps):
    return np.random.default_rng(0).normal(size=(steps, 8)).astype(np.float32)


def run(tx, steps=60):
    state, step = TrainState(params(), jax.jit(tx.init)(params())), jax.jit(make(tx))
    for batch in batches(steps):
        state, _ = step(state, batch)
    return state


def moved(state):
    return np.asarray(state.params["w"] - params()["w"])


@pytest.fixture(scope="module")
def plain():
    return run(optax.adam(1e-2, b2=0.99))


@pytest.mark.slow
@pytest.mark.parametrize(("code", "within"), [(None, 0.05), (BFLOAT16, 0.02)], ids=["fp8", "bfloat16"])
def test_takes_the_steps_of_the_optimizer(plain, code, within):
    state = run(jd.transforms.quantized_state(optax.adam(1e-2, b2=0.99), code))
    difference = np.linalg.norm(moved(state) - moved(plain)) / np.linalg.norm(moved(plain))
    assert 0 < difference < within
    np.testing.assert_array_equal(state.params["b"], plain.params["b"])  # too small to be coded
    assert [x.shape for x in jax.tree.leaves(state.opt, is_leaf=is_coded) if is_coded(x)] == [(50, 83)] * 2


@pytest.mark.slow
def test_evenly_spaced_numbers_would_not_do():
    """A small second moment becomes zero, and Adam divides by it: the first step of it is a thousand times too long."""
    grads = {"w": jnp.geomspace(1e-4, 1.0, 4096)}

    def second_step(code):
        tx = jd.transforms.quantized_state(optax.adam(1e-2), code)
        update = jax.jit(tx.update)
        _, state = update(grads, jax.jit(tx.init)(grads))
        return float(jnp.abs(update(jax.tree.map(jnp.zeros_like, grads), state)[0]["w"]).max())

    assert second_step(None) < 0.02
    assert second_step(int8(block=4096)) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("code", "bytes_each"), [(None, 1 + 1 / 32), (BFLOAT16, 2)], ids=["fp8", "bfloat16"])
def test_memory_of_the_compiled_step(code, bytes_each):
    big = {"w": jnp.zeros((128, 256)), "v": jnp.zeros(8192)}
    tx = jd.transforms.quantized_state(optax.adam(1e-3), code)
    state = TrainState(big, jax.jit(tx.init)(big))
    program = jax.jit(make_plain(tx), donate_argnums=0).lower(state, big).compile()
    entries = 128 * 256 + 8192
    assert analysis.memory(program).arguments == pytest.approx(entries * (4 + 4 + 2 * bytes_each), rel=1e-3)


def make_plain(tx):
    def step(state, grads):
        updates, opt = tx.update(grads, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt)

    return step


@pytest.mark.slow
def test_on_a_mesh_all_workers_keep_the_same(tmp_path):
    """Behind a reducer and inside `skip_nonfinite`; and the bits come back from a checkpoint."""
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    tx = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), jd.transforms.quantized_state(optax.adamw(1e-2))))
    step = jd.distribute(make(tx), mesh, donate=False)
    state = jd.place(TrainState(params(), jax.jit(tx.init)(params())), mesh)
    for batch in batches(3):
        before, (state, _) = state, step(state, batch)
    assert jd.runtime.disagreement(state, mesh) == ()
    skipped, _ = step(state, np.full(8, np.nan, np.float32))
    assert_close(skipped.opt.inner, state.opt.inner, 0)
    checkpoint.save(tmp_path, state, 3)
    assert_close(checkpoint.restore(tmp_path, before), state, 0)


@pytest.mark.slow
def test_each_worker_has_its_own_inside_local_steps():
    """And a round may set it to zero, but not average the codes."""

    def local(buffers):
        return jd.local_steps(
            jd.transforms.quantized_state(optax.adam(1e-2)), optax.sgd(1.0), sync_period=2, buffers=buffers
        )

    state = jd.place(TrainState(jd.PerWorker(params()), jax.jit(local("reset").init)(params())), 2)
    simulated = jd.simulate(make(local("reset")), 2)
    found = []
    for batch in batches(2):
        state, _ = simulated(state, batch)
        found.append(state.opt.inner.value.inner[0].mu["w"].payload.codes)
    assert found[0].shape == (2, 50 * 83 + 2)
    assert (np.asarray(found[0][0]) != found[0][1]).any()
    assert (np.asarray(found[1]) == 0).all()
    assert np.isfinite(jd.local_sgd.global_params(state.opt)["w"]).all()
    with pytest.raises(ValueError, match="cannot average the encoded arrays of quantized_state"):
        jd.simulate(make(local("average")), 2)(state, batches(1)[0])


def test_refusals():
    with pytest.raises(ValueError, match=r"chain\(all_reduce\(...\), quantized_state"):
        jax.eval_shape(
            jd.transforms.quantized_state(jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.1))))).init, params()
        )
    with pytest.raises(ValueError, match="got 0"):
        jd.transforms.quantized_state(optax.adam(1e-3), smallest=0)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("host", [False, True])
def test_codes_and_their_scales_stay_together_when_workers_leave(host):
    """The mean of one worker's scales and another's is of neither; each worker goes on with what one had."""
    inner = jd.transforms.quantized_state(optax.trace(0.5), jd.compressors.min_max_uint8())
    tx = jd.transforms.per_worker(jd.offload.host(inner) if host else inner)
    gradients = jnp.stack([jnp.linspace(0, 1, 4096), 100 * jnp.linspace(1, 0, 4096)])
    state = jd.init_state(lambda: {"u": jnp.zeros(4096), "opt": tx.init(jnp.zeros(4096))}, 2)

    def step(state, batch):
        updates, opt = tx.update(batch[0], state["opt"])
        return {"u": jax.lax.pmean(updates, "data"), "opt": opt}, {}

    state, _ = jd.simulate(step, 2)(state, gradients)
    for workers, ends in ((1, [0.0, 0.5]), (2, [25.0, 0.25]), (3, [50 / 3, 1 / 3])):
        kept, _ = jd.simulate(step, workers)(jd.resize(state, workers), jnp.zeros((workers, 4096)))
        np.testing.assert_allclose(kept["u"][jnp.array([0, 4095])], ends, atol=0.2)
