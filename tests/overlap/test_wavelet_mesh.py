"""Two waves at a time on several workers: bytes, a state that is saved in the middle, and a GPT."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close
from waves import LAYERS, data, embed, head, layer, loss, params

import jaxdist as jd
from jaxdist import analysis
from jaxdist._cli.models import gpt
from jaxdist.overlap import Layered

WORKERS, EXAMPLES = 2, 16
REDUCED = jd.all_reduce(jd.exact())


@pytest.fixture(scope="module")
def pair():
    return jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])


def paired(state, waves):
    """The metrics are left out, which would be an all-reduce of their own."""
    _, grads = jd.overlap.wavelet(layer, head, embed=embed)(state.params, waves)
    updates, opt = optax.chain(REDUCED, optax.sgd(0.1)).update(grads, state.opt, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt), {}


def rolling(tx: optax.GradientTransformation = REDUCED, **options):
    """A step without metrics, and what makes its state."""
    wave = jd.overlap.wavelet(layer, head, optax.chain(tx, optax.sgd(0.1, 0.9)), embed=embed, mode="rolling", **options)
    part = jax.eval_shape(lambda: data(0, EXAMPLES // WORKERS))
    return lambda state, batch: ({"wave": wave.step(state["wave"], batch)[0]}, {}), lambda: {
        "wave": wave.init(params(), part)
    }


@pytest.mark.slow
def test_pair_on_a_mesh(pair):
    """One all-reduce of the gradients for two waves."""
    tx = optax.chain(REDUCED, optax.sgd(0.1))
    waves = (data(0, EXAMPLES), data(1, EXAMPLES))
    step = jd.distribute(paired, pair)
    state = jd.place(TrainState(params(), tx.init(params())), pair)
    program = step.lower(state, waves).compile()
    found = analysis.collectives(program)
    assert [(op.kind, op.count) for op in found.ops] == [("all-reduce", 1)]
    assert found.wire_bytes == 4 * sum(x.size for x in jax.tree.leaves(params()))
    state, _ = program(state, waves)
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *waves)
    g = jax.grad(loss)(params(), whole)
    assert_close(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params(), g), 1e-6)


@pytest.mark.slow
def test_rolling_on_a_mesh(pair, tmp_path):
    """One all-reduce a wave; saved between two calls and restored, it goes on to the bit; simulated, the same."""
    step, make_state = rolling()
    state = jd.init_state(make_state, pair)
    run = jd.distribute(step, pair).lower(state, data(0, EXAMPLES)).compile()
    found = analysis.collectives(run)
    assert [(op.kind, op.count) for op in found.ops] == [("all-reduce", 1)]
    assert found.wire_bytes == 4 * sum(x.size for x in jax.tree.leaves(params()))
    simulated, apart = jd.simulate(step, WORKERS), jd.place(make_state(), WORKERS)
    for seed in range(3):
        state, _ = run(state, data(seed, EXAMPLES))
        apart, _ = simulated(apart, data(seed, EXAMPLES))
    assert_close(state, apart, 1e-5)
    jd.checkpoint.save(tmp_path, state, 3)
    restored = jd.checkpoint.restore(tmp_path, jd.init_state(make_state, pair))
    for seed in range(3, 5):
        state, _ = run(state, data(seed, EXAMPLES))
        restored, _ = run(restored, data(seed, EXAMPLES))
    assert_close(restored, state, 0)


@pytest.mark.slow
def test_reduced_in_the_loop(pair):
    """A collective for each layer, the same bytes, the same numbers."""
    step, make_state = rolling()
    run, expected = jd.distribute(step, pair), jd.init_state(make_state, pair)
    for seed in range(5):
        expected, _ = run(expected, data(seed, EXAMPLES))
    step, make_state = rolling(optax.identity(), reducer=jd.exact())
    state = jd.init_state(make_state, pair)
    run = jd.distribute(step, pair).lower(state, data(0, EXAMPLES)).compile()
    found = analysis.collectives(run)
    assert sorted(op.count for op in found.ops) == [1, LAYERS]  # in the loop, and for both ends together
    assert found.wire_bytes == 4 * sum(x.size for x in jax.tree.leaves(params()))
    for seed in range(5):
        state, _ = run(state, data(seed, EXAMPLES))
    assert_close(state["wave"].params, expected["wave"].params, 1e-6)


@pytest.mark.slow
def test_a_whole_gpt():
    """The three parts of the parameters get the gradients of the plain loss."""
    config = gpt.GPTConfig(layers=2, width=16, heads=2, context=8)
    start = gpt.init(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, size=(4, 9), dtype=np.uint8)

    def apply(method):
        return lambda params, x: gpt.GPT(config).apply({"params": params}, x, method=method)

    def final(params, x, tokens):
        logits: Any = apply(gpt.GPT.head)(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()

    def split(params):
        blocks = [params[f"block_{number}"] for number in range(config.layers)]
        ends = [{name: params[name] for name in names} for names in (("tokens", "positions"), ("final_norm", "out"))]
        return Layered(ends[0], jax.tree.map(lambda *x: jnp.stack(x), *blocks), ends[1])

    wave = jd.overlap.wavelet(
        lambda params, x: gpt.TransformerBlock(config).apply({"params": params}, x),
        final,
        embed=lambda params, tokens: apply(gpt.GPT.embed)(params, tokens[:, :-1].astype(jnp.int32)),
    )
    value, grads = jax.jit(wave)(split(start), (tokens[:2], tokens[2:]))
    expected = jax.jit(jax.value_and_grad(lambda p: gpt.loss(config, p, tokens)))(start)
    assert_close((value, grads), (expected[0], split(expected[1])), 1e-5)
