"""Narrow dtypes, values that overflow, and arguments that optimizers and geometries refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.online import ball, entropy, mirror_descent, p_norm
from jaxdist.optimizers import demo, dion, zero_one_adam
from jaxdist.processes import consistency


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("longest", [2, 4])
def test_local_steps_of_half_precision_are_not_rounded_away(dtype, longest):
    def moved(dtype):
        tx = zero_one_adam(1e-3, freeze_step=2, b2=0.5, doubling_steps=2, longest_interval=longest, axis=None)
        params = jnp.ones(4, dtype)
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(200):
            updates, state = update(jnp.ones(4, dtype), state, params)
            params = optax.apply_updates(params, updates)
        return 1 - float(state.anchor.value[0]), 1 - float(params[0])

    expected, _ = moved(jnp.float32)
    anchor, params = moved(dtype)
    assert anchor == pytest.approx(expected, rel=1e-3)
    assert params == pytest.approx(expected, abs=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("values", [jnp.float16, jnp.float8_e4m3fn])
def test_values_of_a_narrow_range_saturate(values):
    tx = demo(1e-3, axis=None, values=values, chunk=8, k=4)
    params = jnp.zeros((8, 8))
    gradient = 1e8 * jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(gradient, state, params)
    assert np.isfinite(updates).all()
    assert np.isfinite(state.momentum.value).all()


def unchecked(function):
    """The function as users call it, without the type checks of the tests."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: demo(1e-3, axis=None, values=jnp.int8), "values must be a floating dtype, such as bfloat16, got int8"),
        (lambda: unchecked(dion)(0.1, rank=1.5), "rank must be a whole number, got 1.5"),
        (lambda: unchecked(jd.initialize)(timeout_seconds=1.5), "timeout_seconds must be a whole number, got 1.5"),
    ],
)
def test_what_would_fail_later_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_geometries_at_the_edges():
    tx = mirror_descent(entropy(), 0.1, axis=None)
    params = {"w": jnp.full((2, 2), 0.5), "empty": jnp.zeros((2, 0))}
    assert tx.update(params, tx.init(params), params)[0]["empty"].shape == (2, 0)
    divergence, rng = jax.jit(p_norm(1.2).divergence), np.random.default_rng(0)
    for y in jnp.asarray(rng.standard_normal((50, 50)), jnp.float32):
        assert divergence(y + 1e-4 * jnp.asarray(rng.standard_normal(50), jnp.float32), y) >= 0
    with jax.enable_x64(True):
        assert np.isfinite(ball(1e200)({"w": jnp.full(4, 1e201)})["w"]).all()


def test_recipes_name_empty_containers_and_numpy_numbers():
    found = consistency._flat_recipe({"layers": [], "freeze": {}, "rate": np.float32(0.5), "none": None})
    assert found == {"layers": "[]", "freeze": "{}", "rate": "0.5", "none": "null"}


def test_a_wave_may_carry_what_does_not_depend_on_the_batch():
    params, batch = jd.overlap.Layered((), jnp.ones((4, 3, 3)) * 0.1, ()), jnp.ones((4, 3))
    value_and_grad = jd.overlap.wavelet(
        lambda p, x: (jnp.tanh(x[0] @ p + x[1][:, None]), x[1]),
        lambda p, x, b: jnp.mean(x[0]),
        embed=lambda p, b: (b, jnp.arange(b.shape[0])),
    )

    def step(params, waves):
        return params, jax.lax.pmean(value_and_grad(params, waves)[0], "data")

    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    found = jd.distribute(step, mesh, donate=False)(params, (batch, batch))[1]
    assert float(found) == pytest.approx(float(jd.simulate(step, 2)(params, (batch, batch))[1]))


@pytest.mark.parametrize("keyword", ["examples", "active"])
def test_a_rolling_wave_refuses_the_weight_of_another_one(keyword):
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0))
    rolling = jd.overlap.wavelet(
        lambda p, x: p * x, lambda p, x, b: jnp.mean(x), tx, mode="rolling", embed=lambda p, b: b["x"]
    )
    params = jd.overlap.Layered((), jnp.array([1.0]), ())
    state = jd.init_state(lambda: rolling.init(params, {"x": jnp.zeros(2)}), 2)

    def step(state, batch):
        return rolling.step(state, {"x": batch["x"]}, **{keyword: batch["n"][0]})[0], {}

    with pytest.raises(ValueError, match=f"{keyword}= of this call would weight the gradient of the previous wave"):
        jd.simulate(step, 2)(state, {"x": jnp.ones(4), "n": jnp.array([2, 0])})
