"""Two waves at a time: the gradients of one after the other, and the memory of one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Var
from problems import assert_close
from waves import LAYERS, WIDTH, data, embed, head, layer, loss, params, separate, together

import jaxdist as jd
from jaxdist import analysis
from jaxdist.overlap import Layered


def one_by_one(params, waves):
    """Each wave forward and then back, layer by layer; gradients added in this order."""
    total = None
    for wave in waves:
        inputs = [embed(params.embed, wave)]
        for p in params.layers:
            inputs.append(layer(p, inputs[-1]))
        value, (of_head, g) = jax.value_and_grad(head, argnums=(0, 1))(params.head, inputs.pop(), wave)
        of_layers = []
        for p, x in zip(params.layers[::-1], inputs[::-1], strict=True):
            one, g = jax.vjp(layer, p, x)[1](g)
            of_layers.append(one)
        of_embed = jax.vjp(lambda p, wave=wave: embed(p, wave), params.embed)[1](g)[0]
        found = (value, Layered(of_embed, tuple(of_layers[::-1]), of_head))
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    return jax.tree.map(lambda x: x / len(waves), total)


@pytest.mark.slow
def test_pair_equals_one_by_one():
    """To the bit, in a loop and unrolled, with three waves, which turn the slots around and back."""
    waves = tuple(data(seed) for seed in range(3))
    expected = jax.jit(one_by_one)(separate(params()), waves)
    value, found = jax.jit(jd.overlap.wavelet(layer, head, embed=embed))(params(), waves)
    assert_close((value, separate(found)), expected, 0)
    unrolled = jd.overlap.wavelet([layer] * LAYERS, head, embed=embed)
    assert_close(jax.jit(unrolled)(separate(params()), waves), expected, 0)
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *waves)
    assert_close((value, found), jax.jit(jax.value_and_grad(loss))(params(), whole), 1e-6)


def test_layers_of_different_shapes():
    """And parameters of layers without any, a tree as what goes through, keys and integers in it, and no embedding."""

    def first(p, x):
        h, key, scale = x
        return {"h": jnp.tanh(h @ p), "key": jax.random.fold_in(key, 1), "scale": scale}

    def second(p, x):
        del p
        kept = jax.random.bernoulli(x["key"], 0.5, x["h"].shape)
        return jnp.where(kept, x["h"], 0) * x["scale"].astype(jnp.float32)

    def final(p, x, batch):
        return jnp.mean(x * p) + 0 * batch[0][0].sum()

    start = Layered((), (jnp.ones((WIDTH, 3)) / WIDTH, ()), jnp.array(2.0))
    waves = tuple(((data(seed)[0], jax.random.key(seed), jnp.array(3)), None) for seed in (0, 1))

    def plain(p, waves):
        return sum(final(p.head, second((), first(p.layers[0], wave[0])), wave) for wave in waves) / 2

    found = jax.jit(jd.overlap.wavelet((first, second), final))(start, waves)
    assert_close(found, jax.value_and_grad(plain)(start, waves), 1e-6)


def delayed(tx, batches, count, stale=True):
    """θ' = θ + U(g(θ_before; x)): wave w goes forward and back with what was there when it set off."""
    gradient = jax.jit(one_by_one)
    now = separate(params())
    before, opt, losses = now, tx.init(now), []
    for wave in batches[:count]:
        value, g = gradient(before if stale else now, (wave,))
        losses.append(value)
        updates, opt = tx.update(g, opt, now)
        before, now = now, optax.apply_updates(now, updates)
    return now, losses


def run(wave, start, batches, flush=True):
    state, losses = wave.init(start, batches[0]), []
    step = jax.jit(wave.step)
    for batch in batches:
        state, value = step(state, batch)
        losses.append(value)
    return (jax.jit(wave.flush)(state) if flush else state), losses


BATCHES = [data(seed) for seed in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
def test_rolling_equals_delayed_gradients(unroll):
    tx = optax.sgd(0.5)
    layers, start = ([layer] * LAYERS, separate(params())) if unroll else (layer, params())
    state, losses = run(jd.overlap.wavelet(layers, head, tx, embed=embed, mode="rolling", axis=None), start, BATCHES)
    expected, values = delayed(tx, BATCHES, len(BATCHES))
    found = state.params if unroll else separate(state.params)
    assert_close(found, expected, 0)
    assert_close(losses, values, 1e-6)
    wrong: Any = delayed(tx, BATCHES, len(BATCHES), stale=False)[0]
    assert not np.allclose(found.layers[0]["w"], wrong.layers[0]["w"], atol=1e-5)
    assert not state.pending


@pytest.mark.slow
def test_flush_and_go_on():
    """Flushing applies the last wave once; with nothing under way it changes nothing, and the next wave is fresh."""
    tx = optax.adamw(0.1)
    wave = jd.overlap.wavelet(layer, head, tx, embed=embed, mode="rolling", axis=None)
    state, _ = run(wave, params(), BATCHES[:3], flush=False)
    assert int(state.opt_state[0].count) == 2
    flush = jax.jit(wave.flush)
    state = flush(state)
    assert int(state.opt_state[0].count) == 3
    assert_close(flush(state), state, 0)
    assert_close(separate(state.params), delayed(tx, BATCHES, 3)[0], 1e-4)
    again = jax.jit(wave.step)(state, BATCHES[3])[0]
    assert int(again.opt_state[0].count) == 3
    assert_close(again.params, state.params, 0)
    g = jax.jit(one_by_one)(separate(state.params), (BATCHES[3],))[1]
    updates, _ = tx.update(together(g), state.opt_state, state.params)
    assert_close(flush(again).params, optax.apply_updates(state.params, updates), 1e-4)


def test_stability_of_a_delay():
    """SGD on ½λθ² with one step of delay: θ'' - θ' + ηλθ = 0 has its roots inside the unit circle iff ηλ < 1."""

    @jax.jit
    def last(rate):
        one = (jnp.ones(()),)
        tx = optax.sgd(rate)
        wave = jd.overlap.wavelet(lambda p, x: x * p, lambda p, x, _: 0.5 * x**2, tx, mode="rolling", axis=None)
        state = wave.init(Layered((), jnp.ones((1,)), ()), one)
        return jax.lax.scan(lambda state, _: wave.step(state, one), state, length=200)[0].params.layers[0]

    assert abs(last(0.9)) < 0.1
    assert abs(last(1.1)) > 10


def compiled(f, *args, donate=()):
    return jax.jit(f, donate_argnums=donate).lower(*args).compile()


@pytest.mark.slow
def test_memory():
    """By the compiler's plan, with activations of many times the bytes of the parameters."""
    layers, examples = 24, 4 * WIDTH
    start, tick, tock = params(layers), data(0, examples), data(1, examples)
    size = 4 * sum(x.size for x in jax.tree.leaves(start))
    activations = 4 * examples * WIDTH
    assert layers * activations >= 2 * size
    alone = analysis.memory(compiled(jax.value_and_grad(loss), start, tick)).temporary
    double = jax.tree.map(lambda *parts: jnp.concatenate(parts), tick, tock)
    assert analysis.memory(compiled(jax.value_and_grad(loss), start, double)).temporary >= 1.8 * alone
    program = compiled(jd.overlap.wavelet(layer, head, embed=embed), start, (tick, tock))
    assert analysis.memory(program).temporary <= alone + size + 2 * activations
    shape = f"f32[{layers},{examples},{WIDTH}]"
    assert not copies(program, shape)
    rolling = jd.overlap.wavelet(layer, head, optax.sgd(0.1), embed=embed, mode="rolling", axis=None)
    state = rolling.init(start, tick)
    program = compiled(rolling.step, state, tick, donate=0)
    assert analysis.memory(program).aliased >= layers * activations + 2 * size
    assert analysis.memory(program).temporary <= 2 * size + 6 * activations < layers * activations
    assert not copies(program, shape)


def copies(program, shape):
    return [line for line in program.as_text().splitlines() if shape in line.split(" copy(")[0] and " copy(" in line]


def test_independence():
    """In the loop of both passes, what goes forward depends on what goes backward in the number of the slot alone."""
    jaxpr = jax.make_jaxpr(jd.overlap.wavelet(layer, head, embed=embed))(params(), (data(0), data(1))).jaxpr
    loops = [equation.params["jaxpr"].jaxpr for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(loops) == 3
    for numbers, expected in ((False, [False, False]), (True, [False, True])):
        body = loops[1]
        start = len(body.invars) - 4 - len(jax.tree.leaves(params().layers))  # g, x, slots; number, parameters
        reached = {body.invars[start]}
        for equation in body.eqns:
            data_inputs = {"dynamic_index_in_dim": 1, "dynamic_update_index_in_dim": 2}
            known = None if numbers else data_inputs.get(equation.params.get("name"))
            if any(v in reached for v in equation.invars[:known] if isinstance(v, Var)):
                reached.update(equation.outvars)
        assert body.outvars[0] in reached
        assert [v in reached for v in body.outvars[1:3]] == expected


def test_refusals():
    wave = jd.overlap.wavelet(layer, head, embed=embed)
    with pytest.raises(ValueError, match=r"tuple of two waves or more, \(tick, tock\), got tuple of 1"):
        wave(params(), (data(0),))
    with pytest.raises(ValueError, match="must be a Layered"):
        wave({"w": jnp.zeros(3)}, (data(0), data(1)))
    with pytest.raises(ValueError, match="begin with the number of layers"):
        wave(params()._replace(layers={"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}), (data(0), data(1)))
    with pytest.raises(ValueError, match="must return the shapes and dtypes"):
        jd.overlap.wavelet(lambda p, x: x[:, :2] @ p["w"][:2], head, embed=lambda p, b: b[0][:, :2])(
            params(), (data(0),) * 2
        )
    with pytest.raises(ValueError, match="one floating number"):
        jd.overlap.wavelet(layer, lambda p, x, _: x @ p["w"], embed=embed)(params(), (data(0), data(1)))
    with pytest.raises(ValueError, match="no gradient: pass it in the batch"):
        wave(params()._replace(embed=jnp.arange(3)), (data(0), data(1)))
    with pytest.raises(ValueError, match="is Sharded, but wavelet needs whole"):
        wave(params()._replace(embed=jd.Sharded(jnp.zeros(3))), (data(0), data(1)))
    with pytest.raises(ValueError, match="need a tuple of"):
        jd.overlap.wavelet([layer], head, embed=embed)(params(), (data(0), data(1)))
    with pytest.raises(ValueError, match="leave out tx"):
        jd.overlap.wavelet(layer, head, optax.sgd(0.1))
    with pytest.raises(ValueError, match="pass tx"):
        jd.overlap.wavelet(layer, head, mode="rolling")
    with pytest.raises(ValueError, match="reducer= is for"):
        jd.overlap.wavelet(layer, head, reducer=jd.exact())
    with pytest.raises(ValueError, match="keeps nothing from wave to wave"):
        jd.overlap.wavelet(layer, head, optax.sgd(0.1), mode="rolling", reducer=jd.error_feedback(jd.power_sgd(2)))
    with pytest.raises(ValueError, match="at least one layer"):
        jd.overlap.wavelet([], head)
    rolling = jd.overlap.wavelet(layer, head, optax.sgd(0.1), embed=embed, mode="rolling", axis=None)
    with pytest.raises(ValueError, match="all batches must be alike"):
        rolling.step(rolling.init(params(), data(0)), data(0, 4))
