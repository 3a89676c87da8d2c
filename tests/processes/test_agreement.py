"""Steps that JAX cannot type: agreement is checked by value."""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from problems import TrainState, assert_close, batch, fresh, make_step

import jaxdist as jd
from jaxdist._core.hashing import hash_array, hash_of

NARROW = ["int4", "uint4", "int2", "float4_e2m1fn"]


def unequal(mesh, *values, memory=None):
    """An array that claims to be the same everywhere, and is not."""
    sharding = jax.NamedSharding(mesh, P(), memory_kind=memory)
    copies = [jax.device_put(value, device) for value, device in zip(values, mesh.devices.ravel(), strict=True)]
    copies = [jax.device_put(copy, copy.sharding.with_memory_kind(memory)) for copy in copies]
    return jax.make_array_from_single_device_arrays(values[0].shape, sharding, copies)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool", *NARROW])
def test_one_differing_copy_is_found(mesh, dtype):
    same = jnp.arange(6).astype(dtype)
    odd = same.at[3].set(jnp.asarray(0, dtype))
    state = {
        "opt": {"mu": unequal(mesh, *[same] * 5, odd, *[same] * 2), "nu": unequal(mesh, *[same] * 8)},
        "residual": jd.PerWorker(jnp.arange(8.0)),
    }
    assert jd.runtime.disagreement(state, mesh) == ("opt.mu",)


def test_copies_in_host_memory_are_compared(mesh):
    same, odd = jnp.zeros(3), jnp.ones(3)
    mu = unequal(mesh, *[same] * 5, odd, *[same] * 2, memory="pinned_host")
    state = {
        "opt": {"mu": jd.OnHost(mu), "nu": jd.OnHost(jd.PerWorker(jnp.arange(8.0)))},
        "w": unequal(mesh, *[same] * 8),
    }
    assert jd.runtime.disagreement(state, mesh) == ("opt.mu",)
    state["opt"]["mu"] = jd.OnHost(unequal(mesh, *[same] * 8, memory="pinned_host"))
    assert jd.runtime.disagreement(state, mesh) == ()


@pytest.mark.parametrize("dtype", NARROW)
def test_the_host_hashes_narrow_numbers_as_devices_do(dtype):
    x = jnp.array([1, 0, 1, -1 if "i" in dtype[:1] else 1, 0]).astype(dtype)
    assert hash_of(np.asarray(x)) == int(hash_array(x))


def test_keys_and_empty_states(mesh):
    key = jax.random.key(0)
    assert jd.runtime.disagreement(jd.place({"key": key, "none": None, "empty": jnp.zeros(0)}, mesh), mesh) == ()
    assert jd.runtime.disagreement({"r": jd.PerWorker(jnp.arange(8.0))}, mesh) == ()


def test_hash_sees_every_bit_and_place():
    x = jnp.arange(64.0)
    others = [x.at[i].add(1e-6 * (i + 1)) for i in (1, 7, 63)] + [x[::-1], x.at[0].set(-0.0), jnp.roll(x, 1)]
    assert len({int(hash_array(y)) for y in (x, *others)}) == 7
    assert int(hash_array(jnp.full(3, jnp.nan))) == int(hash_array(jnp.full(3, jnp.nan)))


def drifting(when):
    """A step of which one leaf goes its own way on each worker from the call `when` on."""

    def step(state, data):
        drift = jnp.where(state["count"] >= when, lax.axis_index("data"), 0)
        return {"w": state["w"] + 1, "count": state["count"] + 1, "lost": state["lost"] + drift}, {}

    return step


def test_a_planted_disagreement_is_named(mesh, monkeypatch):
    def state():
        zero = jnp.zeros((), jnp.int32)
        return jd.place({"w": jnp.zeros(3), "count": zero, "lost": zero}, mesh)

    with pytest.raises(ValueError, match="leaf `lost` differs"):  # typed, it is found before anything runs
        jd.distribute(drifting(0), mesh)(state(), batch())
    with pytest.raises(ValueError, match=r"after call 1: lost; reduce"):
        jd.distribute(drifting(0), mesh, check="values")(state(), batch())
    monkeypatch.setattr(sys.modules["jaxdist.runtime.distribute"], "CHECK_EVERY", 3)
    run, now = jd.distribute(drifting(1), mesh, check="values"), state()
    now, _ = run(now, batch())
    with pytest.raises(ValueError, match="after call 2: lost"):
        run(now, batch())
    run, now = jd.distribute(drifting(2), mesh, check="values"), state()
    for _ in range(3):
        now, _ = run(now, batch())
    with pytest.raises(ValueError, match="after call 4: lost"):
        run(now, batch())


def test_a_wrapper_that_compares_steps_is_named_in_the_second(mesh):
    """The first factor of mechanize is the same on all workers; it multiplies later gradients with the change since."""
    tx = optax.contrib.mechanize(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1)))
    run, state = jd.distribute(make_step(tx), mesh, check="values"), fresh(tx, mesh)
    state, _ = run(state, batch())
    with pytest.raises(ValueError, match="after call 2: "):
        run(state, batch())


@pytest.mark.slow
def test_checking_values_changes_nothing_else(mesh):
    tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.25)))), optax.sgd(0.1))
    typed, valued = (jd.distribute(make_step(tx), mesh, check=check) for check in ("types", "values"))
    assert_close(typed(fresh(tx, mesh), batch()), valued(fresh(tx, mesh), batch()), 0)
    programs = [run.lower(fresh(tx, mesh), batch()).compile() for run in (typed, valued)]
    assert len({jd.analysis.collectives(program).wire_bytes for program in programs}) == 1
    with pytest.raises((ValueError, TypeError), match="'hope'"):
        jd.distribute(make_step(tx), mesh, check="hope")


# ---- the losses that it is for


class Tagger(nn.Module):
    """An LSTM over a sequence, and scores for each place."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RNN(nn.LSTMCell(5))(x))


def lstm_loss(params, data):
    return jnp.mean((Tagger().apply(params, data["x"]) - data["y"]) ** 2)


def ctc_loss(params, data):
    logits = data["x"] @ params["w"] + params["b"][None, None]
    padding = jnp.zeros(logits.shape[:2])
    return jnp.mean(optax.ctc_loss(logits, padding, data["labels"], jnp.zeros(data["labels"].shape)))


def sequences():
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((8, 6, 3)).astype(np.float32),
        "y": rng.standard_normal((8, 6, 4)).astype(np.float32),
        "labels": rng.integers(1, 4, (8, 2)),
    }


MODELS = {
    "lstm": (lstm_loss, lambda: Tagger().init(jax.random.key(0), jnp.zeros((1, 6, 3)))),
    "ctc": (ctc_loss, lambda: {"w": jax.random.normal(jax.random.key(0), (3, 4)), "b": jnp.zeros(4)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_untypable_losses_train(mesh, name):
    objective, init = MODELS[name]
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.3))
    step = make_step(tx, grad=jd.local_value_and_grad(objective))

    def build():
        return TrainState(init(), tx.init(init()))

    with pytest.raises(TypeError, match='check="values"'):
        jd.distribute(step, mesh)(jd.init_state(build, mesh), sequences())
    run, simulated = jd.distribute(step, mesh, check="values"), jd.simulate(step, 8)
    state, other = jd.init_state(build, mesh), jd.init_state(build, 8)
    losses = []
    for _ in range(5):
        state, metrics = run(state, sequences())
        other, _ = simulated(other, sequences())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 1e-2
    assert_close(state, other, 1e-4)
    assert jd.runtime.disagreement(state, mesh) == ()


def test_what_is_broadcast_keeps_its_type():
    """A rate of 0.1 times bfloat16 is bfloat16; as an array of float32 it would make float32 of it."""
    tree = {"rate": jnp.asarray(0.1), "typed": jnp.float32(0.1), "host": np.float32(0.1)}
    same = jd.processes.broadcast(tree)
    assert (same["rate"].weak_type, same["typed"].weak_type) == (True, False)
    assert (same["rate"] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert isinstance(same["host"], np.ndarray)
