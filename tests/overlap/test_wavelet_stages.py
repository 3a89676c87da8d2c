"""Waves through layers that lie on several devices: the gradient of the whole model, and what goes between stages."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P
from problems import TrainState, assert_close
from waves import LAYERS, WIDTH, data, embed, head, layer, loss, params

import jaxdist as jd
from jaxdist import analysis

WORKERS, STAGES, WAVES, EXAMPLES = 2, 3, 4, 16
TX = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0))


@pytest.fixture(scope="module")
def stages():
    return jd.make_mesh({"data": WORKERS, "stage": STAGES}, devices=jax.devices()[: WORKERS * STAGES])


def step(state, waves):
    value, grads = jd.overlap.wavelet(layer, head, embed=embed, stages="stage")(state.params, waves)
    updates, opt = TX.update(grads, state.opt, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt), {"loss": jax.lax.pmean(value, "data")}


def test_equals_the_whole_model(stages):
    start = params()
    state = jd.place(TrainState(start, TX.init(start)), stages)
    cut = jax.NamedSharding(stages, P("stage"))
    state = state._replace(params=state.params._replace(layers=jax.device_put(state.params.layers, cut)))
    waves = tuple(data(seed, EXAMPLES) for seed in range(WAVES))
    program = jd.distribute(step, stages).lower(state, waves).compile()
    ops = analysis.collectives(program).ops
    sent = [op for op in ops if op.kind == "collective-permute"]
    assert {op.count for op in sent} == {WAVES + 2 * STAGES - 1}
    assert sum(op.bytes * op.count for op in sent) == (WAVES + 2 * STAGES - 1) * 2 * 4 * EXAMPLES // WORKERS * WIDTH
    assert {op.kind for op in ops} == {"collective-permute", "all-reduce"}  # no layer is gathered
    found, metrics = program(state, waves)
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *waves)
    value, gradient = jax.jit(jax.value_and_grad(loss))(start, whole)
    moved = jax.tree.map(lambda old, new: old - new, start, found.params)
    assert_close((metrics["loss"], moved), (value, gradient), 1e-6)
    assert all(x.sharding.is_equivalent_to(cut, x.ndim) for x in jax.tree.leaves(found.params.layers))


def test_the_loss_keeps_its_dtype(stages):
    with jax.enable_x64(True):
        start, waves = jax.tree.map(lambda x: x.astype(jnp.float64), (params(), (data(0), data(1))))
        state = TrainState(start, TX.init(start))
        _, metrics = jax.eval_shape(jd.distribute(step, stages), state, waves)
    assert metrics["loss"].dtype == jnp.float64


def test_refusals(stages):
    waves = (data(0), data(1))
    with pytest.raises(ValueError, match=r"'stage' must be an axis of the mesh .* run under distribute"):
        jd.overlap.wavelet(layer, head, embed=embed, stages="stage", axis=None)(params(), waves)
    state = jd.place(TrainState(params(LAYERS + 1), TX.init(params(LAYERS + 1))), stages)
    with pytest.raises(ValueError, match="7 layers do not divide among the 3 stages"):
        jd.distribute(step, stages).lower(state, waves)
    with pytest.raises(ValueError, match="is for mode="):
        jd.overlap.wavelet(layer, head, optax.sgd(0.1), mode="rolling", stages="stage")
    with pytest.raises(ValueError, match="one function of layers"):
        jd.overlap.wavelet([layer], head, stages="stage")
