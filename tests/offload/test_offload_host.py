"""State in host memory: the numbers of the optimizer itself; where things lie; what crosses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close, batch, fresh, make_step

import jaxdist as jd
from jaxdist import analysis, offload

OPTIMIZERS = {
    "chain": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(1e-2, 50)), optax.ema(0.9)
    ),
    "norms": optax.chain(optax.lamb(1e-2), optax.clip_by_global_norm(0.05)),
    "branches": optax.novograd(1e-2),
}
SLOW = {
    "inject": optax.inject_hyperparams(optax.lion)(1e-2),
    "masked": optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "adafactor": optax.adafactor(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "noise": optax.chain(optax.add_noise(0.1, 0.1, 0), optax.adam(1e-2)),
    "l2": optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2)),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "partition": optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"w": "a", "b": "b", "s": "a"}),
}
STEPS = 4


def params(dtype=jnp.float32):
    return {
        "w": jnp.linspace(-1, 1, 116, dtype=dtype).reshape(29, 4),
        "b": jnp.ones(3, dtype),
        "s": jnp.array(2, dtype),
    }


def gradient(params):
    return jax.tree.map(lambda p: jnp.sin(3 * p) + p, params)


def run(tx, dtype=jnp.float32, steps=STEPS) -> tuple[Any, Any]:
    found = params(dtype)
    state = tx.init(found)

    @jax.jit
    def step(found, state):
        updates, state = tx.update(gradient(found), state, found)
        return optax.apply_updates(found, updates), state

    for _ in range(steps):
        found, state = step(found, state)
    return found, state


def kinds(tree):
    """The memories of all leaves but typed keys, which remain on the device."""
    leaves = jax.tree.leaves(tree)
    return {x.sharding.memory_kind for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}


def check_equal(inner):
    expected, _ = run(inner)
    on_host, state = run(offload.host(inner))
    assert_close(on_host, expected, 0)
    assert kinds(state) == {"pinned_host"}
    assert kinds(on_host) == {"device"}
    streamed, state = run(offload.host(inner, compute="device", tile_bytes=100))
    assert_close(streamed, expected, 1e-6)
    assert kinds(state) == {"pinned_host"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_optimizer(name):
    check_equal(OPTIMIZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equals_more_optimizers(name):
    check_equal(SLOW[name])


SHAPES = [(29, 4), (40, 3), (41, 2, 9), (4096,), (5120,), (33,), (2, 3)]


@pytest.mark.slow
def test_tiles_of_every_shape():
    """With a remainder that fills registers and one that does not; vectors that do and one that does not."""
    found = {str(shape): jnp.linspace(-1, 1, math.prod(shape)).reshape(shape) for shape in SHAPES}
    tx, streamed = optax.adamw(1e-2), offload.host(optax.adamw(1e-2), compute="device", tile_bytes=100)

    @jax.jit
    def both(p, q, state, streamed_state):
        updates, state = tx.update(gradient(p), state, p)
        others, streamed_state = streamed.update(gradient(q), streamed_state, q)
        return optax.apply_updates(p, updates), optax.apply_updates(q, others), state, streamed_state

    p, q, state, streamed_state = found, found, tx.init(found), streamed.init(found)
    for _ in range(3):
        p, q, state, streamed_state = both(p, q, state, streamed_state)
    assert_close(q, p, 1e-6)
    assert kinds(streamed_state) == {"pinned_host"}


@pytest.mark.slow
def test_bytes_that_cross():
    """The formulas, and a few numbers of four bytes (counts and rates) besides."""
    like = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(4096)}
    entries, few = 2 * 64 * 64, 64

    def found(inner, dtype=jnp.float32, **options):
        tx = offload.host(inner, **options)
        cast = jax.tree.map(lambda x: x.astype(dtype), like)
        return analysis.transfers(tx.update, cast, tx.init(cast), cast)

    def close(transfers, down, up):
        assert down <= transfers.to_host <= down + few
        assert up <= transfers.to_device <= up + few

    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    close(found(adamw), 4 * entries, 4 * entries)
    close(found(adamw, jnp.bfloat16, master_dtype=jnp.float32), 2 * entries, 2 * entries)
    late = {"master_dtype": jnp.float32, "delayed": True}
    close(found(adamw, jnp.bfloat16, **late), 2 * entries, 2 * entries)  # the gradients wait in bfloat16
    close(found(adamw, compute="device"), 8 * entries, 8 * entries)
    close(found(adamw, compute="device", tile_bytes=5000), 8 * entries, 8 * entries)
    close(found(optax.nadamw(1e-3)), 4 * entries, 4 * entries)
    # The sum of gradient and decay crosses, not both.
    close(found(optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3))), 4 * entries, 4 * entries)


def test_a_state_that_comes_on_the_device_goes_to_the_host():
    tx = offload.host(optax.sgd(0.1, momentum=0.9), compute="device", tile_bytes=100)
    state = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tx.init(params()))
    assert kinds(state) == {"device"}
    updates, state = jax.jit(tx.update)(params(), state)
    assert kinds(state) == {"pinned_host"}
    assert_close(updates, jax.tree.map(lambda x: -0.1 * x, params()), 1e-6)


def test_types_of_the_trace():
    """No equation outside the host's region makes an array there but a move."""
    tx = offload.host(optax.adam(1e-2))
    closed = jax.make_jaxpr(tx.update)(params(), tx.init(params()))
    regions = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "compute_on"]
    assert regions
    assert all(eqn.params["compute_type"] == "device_host" for eqn in regions)
    assert "float32<host>[29,4]" in {str(var.aval) for eqn in regions for var in eqn.outvars}
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name not in ("compute_on", "device_put"):
            assert not any("<host>" in str(var.aval) for var in eqn.outvars)


@pytest.mark.slow
def test_master_takes_what_bfloat16_loses():
    tiny = optax.sgd(1e-5)
    found, state = run(offload.host(tiny, master_dtype=jnp.float32), jnp.bfloat16, 300)
    assert kinds(state) == {"pinned_host"}
    master = jax.tree.map(lambda x: x.value, state.master, is_leaf=lambda x: isinstance(x, jd.OnHost))
    assert (np.abs(np.asarray(master["b"]) - 1) > 1e-3).all()
    assert_close(found, jax.tree.map(lambda x: x.astype(jnp.bfloat16), master), 0)


def reference_delayed(inner, start, steps):
    """A loop: gradients wait one step from `start` on."""
    found = params()
    state, pending = inner.init(found), None
    update = jax.jit(inner.update)
    for t in range(steps):
        gradients = gradient(found)
        used = gradients if t < start else pending
        pending = gradients
        if t == start:
            continue
        updates, state = update(used, state, found)
        found = optax.apply_updates(found, updates)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 3])
def test_delayed(start):
    """Clipping sees the norm of the gradients of the step before."""
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    found, state = run(offload.host(inner, delayed=start or True), steps=6)
    assert_close(found, reference_delayed(inner, start, 6), 1e-7)
    assert kinds(state) == {"pinned_host"}
    if start:
        assert_close(run(offload.host(inner, delayed=start), steps=start)[0], run(inner, steps=start)[0], 1e-6)


@pytest.mark.parametrize(("rate", "low", "high"), [(0.99, 1e-6, 1e-3), (1.0, 0.9, 1.1), (1.01, 1e3, 1e6)])
def test_delay_halves_the_stable_rate(rate, low, high):
    tx = offload.delayed(optax.sgd(rate))

    def step(carry, _):
        theta, state = carry
        updates, state = tx.update(theta, state)
        return (theta + updates, state), theta

    _, thetas = jax.lax.scan(step, (jnp.array(1.0), tx.init(jnp.array(1.0))), length=2000)
    assert low < np.abs(thetas[-12:]).max() < high


def test_a_delayed_update_waits_for_nothing():
    """What the host computes does not depend on this step's gradients, nor they on it."""
    tx = offload.host(optax.adamw(1e-2), delayed=True)

    def step(found, state, target):
        gradients = jax.tree.map(lambda p: p - target, found)
        return tx.update(gradients, state, found)

    closed = jax.make_jaxpr(step)(params(), tx.init(params()), 1.0)
    target = closed.jaxpr.invars[-1]
    tainted = {target}
    from_host = set()
    seen = 0
    for eqn in closed.jaxpr.eqns:
        reads = [var for var in eqn.invars if not hasattr(var, "val")]
        if eqn.primitive.name == "compute_on":
            seen += 1
            assert not tainted & set(reads)
            from_host |= set(eqn.outvars)
        if target in reads:
            assert not from_host & set(reads)
        if tainted & set(reads):
            tainted |= set(eqn.outvars)
        if from_host & set(reads):
            from_host |= set(eqn.outvars)
    assert seen


def test_two_programs_for_warm_up():
    tx = offload.delayed(optax.adam(1e-2), 2)
    found, state = params(), tx.init(params())
    for t in range(5):
        updates, state = tx.update(gradient(found), state, found, delay=t >= 2)
        found = optax.apply_updates(found, updates)
    assert_close(found, reference_delayed(optax.adam(1e-2), 2, 5), 1e-7)
    with pytest.raises(ValueError, match="Python bool"):
        tx.update(gradient(found), state, found, delay=jnp.array(True))


@pytest.fixture(scope="module")
def four():
    return jd.make_mesh({"data": 4}, devices=jax.devices()[:4])


ZERO = jd.zero_redundancy(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


@pytest.fixture(scope="module")
def expected(four):
    """Three steps of ZeRO whose state stays on the device."""
    return three_steps(ZERO, four).params


def three_steps(tx, place):
    step = jd.simulate(make_step(tx), place) if isinstance(place, int) else jd.distribute(make_step(tx), place)
    state = fresh(tx, place)
    for seed in range(3):
        state, _ = step(state, batch(seed=seed))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["host", "device"])
def test_around_zero(compute, four, expected):
    state = three_steps(offload.host(ZERO, compute=compute), four)
    assert_close(state.params, expected, 1e-6)
    assert kinds(state.opt) == {"pinned_host"}
    moment = state.opt.inner[1][0].mu["w"].value.value
    assert {shard.data.nbytes for shard in moment.addressable_shards} == {4 * 8}  # 24 entries in parts of 8, not whole


def test_keys_stay_on_the_device():
    """As words on the host a key comes back from a step of a mesh as one on the device, and the next step fails."""
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    tx = offload.host(jd.zero_redundancy(optax.add_noise(0.1, 0.5, key=jax.random.key(0))))

    def step(state, batch):
        updates, opt = tx.update(state["params"] * batch[0], state["opt"], state["params"])
        return {"params": updates, "opt": opt}, {}

    params = jnp.ones(4, jnp.bfloat16)
    state = jd.place({"params": params, "opt": tx.init(params)}, mesh)
    run = jd.distribute(step, mesh)
    for _ in range(3):
        state, _ = run(state, jnp.ones(2, jnp.bfloat16))
    assert state["opt"].inner.rng_key.sharding.memory_kind == "device"
    assert state["opt"].inner.count.value.sharding.memory_kind == "pinned_host"
    with pytest.raises(ValueError, match=r"OnHost around a typed key .* OnHost\(jax.random.key_data\(key\)\)"):
        jd.place({"opt": {"key": jd.OnHost(jax.random.key(0))}}, mesh)


def test_simulated(expected):
    state = three_steps(offload.host(ZERO), 4)
    assert_close(state.params, expected, 1e-5)
    assert kinds(state.opt) == {"pinned_host"}


BRANCHES = {
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "sm3": optax.sm3(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    "conditionally_mask": optax.conditionally_mask(optax.adam(0.1), lambda step: step % 2 == 0),
}


@pytest.mark.parametrize(
    "name",
    [
        # The others have a branch on an agreed value, and whole leaves, as these.
        pytest.param(name, marks=() if name in ("apply_if_finite", "adafactor") else pytest.mark.slow)
        for name in BRANCHES
    ],
)
def test_branches_and_whole_leaves_simulated(name):
    """There a worker's shard is cut from a whole array on the host."""
    plain, tx = (three_steps(wrap(jd.zero_redundancy(BRANCHES[name])), 4) for wrap in (lambda tx: tx, offload.host))
    assert_close(tx.params, plain.params, 1e-6)


def test_delay_of_means_and_of_parts(four):
    """After `all_reduce` and inside `zero_redundancy`, which keeps this worker's part."""
    inner = optax.adam(1e-2)
    means = three_steps(optax.chain(jd.all_reduce(jd.exact()), offload.host(inner, delayed=True)), four)
    parts = three_steps(offload.host(jd.zero_redundancy(offload.delayed(inner))), four)
    assert_close(means.params, parts.params, 1e-6)
    assert int(means.opt[1].count.value) == 3
    assert parts.opt.inner.pending["w"].value.value.addressable_shards[0].data.shape == (8,)


def test_refusals(four):
    with pytest.raises(ValueError, match="tile_bytes"):
        offload.host(optax.adam(1.0), tile_bytes=0)
    with pytest.raises(ValueError, match="start must be at least 0"):
        offload.delayed(optax.adam(1.0), -1)
    with pytest.raises(ValueError, match=r"offload.host\(zero_redundancy"):
        jd.zero_redundancy(offload.host(optax.adam(1.0))).init(params())
    tx = offload.host(optax.adam(1.0), master_dtype=jnp.float32)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params(), tx.init(params()))
    around = offload.delayed(optax.chain(jd.all_reduce(jd.exact(), axis=None), optax.sgd(1.0)))
    for weight in ({"examples": 3}, {"active": False}):
        with pytest.raises(ValueError, match="would weight the gradients of the last one"):
            around.update(params(), around.init(params()), **weight)
    late = offload.host(ZERO, delayed=True)
    with pytest.raises(ValueError, match="differ between workers"):
        jd.distribute(make_step(late), four).lower(fresh(late, four), batch())

    def looping(updates, state, params=None):
        del params
        return updates, jax.lax.fori_loop(0, 3, lambda _, x: jax.tree.map(jnp.add, x, updates), state)

    loop = offload.host(optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), looping))
    with pytest.raises(ValueError, match="inside a `scan`"):
        loop.update(params(), loop.init(params()))
