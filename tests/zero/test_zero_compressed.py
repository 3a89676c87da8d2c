"""Codes inside ZeRO stages 1 and 2: reduce-scatter forms of reducers, and the gather of the updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import analysis
from jaxdist import compressors as jc
from jaxdist.comm import over
from jaxdist.reducers.reducer import shards_of
from jaxdist.testing import assert_reducer_laws
from jaxdist.wire import buffers
from jaxdist.zero import shards

SHAPES = {"w": (7, 5), "b": (3,), "s": (), "e": (0, 4)}
W = 4
FORMS = {
    "exact": jd.exact,
    "identity": lambda: jd.two_shot(jc.identity()),
    "int8": lambda: jd.two_shot(jc.int8()),
    "feedback": lambda: jd.error_feedback(jd.two_shot(jd.qsgd(2))),
    "switch": lambda: jd.reducers.reducer_schedule(jd.exact(), jd.two_shot(jc.int8()), 1),
    "loco": lambda: jd.reducers.loco(jd.two_shot(jc.int4())),
    "policy": lambda: jd.reducers.per_leaf(
        lambda path, leaf: path[0], {"w": jd.two_shot(jd.qsgd(4)), "b": None, "s": jd.exact(), "e": jd.exact()}
    ),
}


def zeros():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def noise(steps, seed=0):
    """A gradient for each step and worker, whatever the parameters are."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(steps, W, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def total(grads):
    """The sum over steps of the mean over workers."""
    return {name: x.mean(1).sum(0) for name, x in grads.items()}


def run(tx, grads, place=W, start=None, opt=None):
    """Every step's gradient through `tx`. Returns the last state."""

    def step(state, batch):
        mine = jax.tree.map(lambda x: x[0], batch)
        updates, opt = tx.update(mine, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    start = zeros() if start is None else start
    state = jd.place(TrainState(start, tx.init(start)), place)
    compiled = jd.simulate(step, place) if isinstance(place, int) else jd.distribute(step, place)
    for i in range(len(grads["w"])):
        state, _ = compiled(state, {name: x[i] for name, x in grads.items()})
    return state


@pytest.fixture(scope="module")
def scattered():
    """Each form: the pieces of everybody `[W, n]`, and what each contributed. With memory the second step."""
    grads = noise(2)

    def one_worker(grads):
        first, second = (jax.tree.map(lambda x, i=i: x[i], grads) for i in range(2))
        out = {}
        for name, make in FORMS.items():
            form = shards_of(make())
            state = form.init(zeros())
            if name in ("feedback", "switch"):
                _, state = form.reduce(first, state, over("data"))
            out[name], _ = form.reduce(second, state, over("data"))
        return out

    return jax.jit(jax.vmap(one_worker, in_axes=1, axis_name="data"))(grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_pieces_of_the_mean_of_what_was_sent(name, scattered):
    found = scattered[name]
    for leaf, shape in SHAPES.items():
        pieces, size = found.mean[leaf], int(np.prod(shape))
        assert pieces.shape == (W, -(-size // (8 * W)) * 8)
        expected = np.asarray(found.own[leaf]).mean(0)
        if (name, leaf) == ("policy", "b"):
            expected = np.zeros(shape)
        np.testing.assert_allclose(pieces.ravel()[:size].reshape(shape), expected, atol=1e-6)
    exact = noise(2)["w"][1].mean(0)
    off = np.abs(found.mean["w"].ravel()[:35].reshape(7, 5) - exact).max()
    assert off < {"exact": 1e-6, "identity": 1e-6, "int8": 0.02, "switch": 0.02}.get(name, 3)
    assert (off > 1e-4) == (name not in ("exact", "identity"))


@pytest.mark.slow
def test_the_laws_see_pieces_of_a_wrong_length():
    two_shot = jd.two_shot(jc.int8())
    assert_reducer_laws(two_shot, like={"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, steps=1, dtypes=[jnp.bfloat16])
    with pytest.raises(AssertionError, match="shards are split like Sharded"):
        assert_reducer_laws(two_shot._replace(forms=two_shot.forms._replace(shards=lambda groups: two_shot)), steps=1)


@pytest.mark.slow
def test_two_levels_give_the_same_pieces():
    """qgZ with codes that lose nothing, and the mean of int8 on both levels; workers own the pieces of `Sharded`."""
    grads = {name: x[0].reshape(2, 2, *SHAPES[name]) for name, x in noise(1).items()}
    forms = {
        "exact": jd.hierarchical(inner=jd.exact(), outer=jd.exact()),
        "int8": jd.hierarchical(inner=jd.error_feedback(jd.two_shot(jc.int8())), outer=jd.two_shot(jd.qsgd(8))),
        "reduce": jd.hierarchical(inner=jd.two_shot(jc.int8()), outer=jd.exact()),
    }

    def one_worker(grads):
        comm = over(("pod", "chip"))
        out = {}
        for name, reducer in forms.items():
            form = reducer if name == "reduce" else shards_of(reducer)
            out[name] = form.reduce(grads, form.init(zeros()), comm)[0].mean
        return out

    found = jax.jit(jax.vmap(jax.vmap(one_worker, axis_name="chip"), axis_name="pod"))(grads)
    for name, shape in SHAPES.items():
        expected, size = grads[name].mean((0, 1)), int(np.prod(shape))
        np.testing.assert_allclose(found["exact"][name].ravel()[:size].reshape(shape), expected, atol=1e-6)
        np.testing.assert_allclose(found["int8"][name].ravel()[:size].reshape(shape), expected, atol=0.04)
        np.testing.assert_allclose(found["reduce"][name][1, 1], expected, atol=0.02)


@pytest.mark.slow
def test_feedback_inside_telescopes(monkeypatch):
    """What 2-bit gradients delivered, and the mean of what workers hold, is all there was; in three buckets."""
    monkeypatch.setattr(shards, "BUCKET_BYTES", 4)
    grads = noise(12)
    tx = jd.zero_redundancy(optax.sgd(1.0), stage=2, reducer=jd.error_feedback(jd.two_shot(jd.qsgd(2))))
    state = run(tx, grads)
    assert len(state.opt.reducer) == 3
    held = {}
    for bucket in state.opt.reducer:
        held |= {name: x.mean(0) for name, x in bucket.residual.value.items() if x is not None}
    assert max(np.abs(x).max(initial=0) for x in held.values()) > 0.1
    assert_close(jax.tree.map(lambda p, e: e - p, state.params, held), total(grads), 1e-5)


@pytest.mark.parametrize(
    "code", [jd.qsgd(2), *(pytest.param(code, marks=pytest.mark.slow) for code in (jc.int4(), jc.top_k(0.3)))]
)
def test_the_residual_of_the_updates_telescopes(code):
    grads = noise(12)
    state = run(jd.zero_redundancy(optax.sgd(1.0, momentum=0.9), compressor=code), grads)
    plain = run(jd.zero_redundancy(optax.sgd(1.0, momentum=0.9)), grads)
    owed = jd.consensus(state.opt.coded.residual)
    assert np.abs(owed["w"]).max() > 0.01
    assert_close(jax.tree.map(jnp.add, state.params, owed), plain.params, 1e-5)


def test_master_parameters_are_the_residual():
    """The master is what it would be without a code, and parameters follow it."""
    grads = noise(30)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), zeros())
    tx = jd.zero_redundancy(optax.adam(1e-2), compressor=jc.int4(), master_dtype=jnp.float32)
    state = run(tx, grads, start=half)
    plain = run(jd.zero_redundancy(optax.adam(1e-2)), grads)
    master = jd.consensus(state.opt.master)
    assert_close(master, plain.params, 1e-6)
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.opt.coded.residual == ()
    off = np.abs(np.asarray(state.params["w"], np.float32) - np.asarray(master["w"])).max()
    assert 0 < off < 0.01  # a step of Adam


def test_large_shards_of_one_shape(monkeypatch):
    """They are not stacked, and their payloads are decoded one by one."""
    grads = {name: noise(3, seed)["w"] for seed, name in enumerate("vw")}
    start = {name: jnp.zeros((7, 5)) for name in grads}
    tx = jd.zero_redundancy(optax.sgd(1.0), compressor=jd.qsgd(4))
    stacked = run(tx, grads, start=start)
    monkeypatch.setattr(buffers, "LARGE", 8)
    assert_close(run(tx, grads, start=start).params, stacked.params, 0)


def test_no_examples_change_nothing():
    tx = jd.zero_redundancy(optax.adam(1e-2), reducer=jd.error_feedback(jd.two_shot(jc.int4())), compressor=jd.qsgd(4))

    def step(state, batch):
        mine = {"w": jnp.full((7, 5), batch[0, 0]) + jnp.arange(35.0).reshape(7, 5)}
        updates, opt = tx.update(mine, state.opt, state.params, examples=batch[0, 1])
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    start = {"w": jnp.zeros((7, 5))}
    state = jd.place(TrainState(start, tx.init(start)), 2)
    simulated = jd.simulate(step, 2)
    moved, _ = simulated(state, jnp.array([[1.0, 1.0], [5.0, 3.0]]))
    assert np.abs(moved.params["w"]).min() > 1e-3
    idle, _ = simulated(moved, jnp.array([[1.0, 0.0], [5.0, 0.0]]))
    assert int(idle.opt.empty) == 1
    assert_close(idle.params, moved.params, 0)
    assert_close(idle.opt.reducer, moved.opt.reducer, 0)
    assert_close(idle.opt.coded.residual, moved.opt.coded.residual, 0)


def test_bytes():
    """An exchange and a gather of bytes: a code of a quarter for each worker, there and back."""
    mesh = jd.make_mesh({"data": W}, devices=jax.devices()[:W])
    big = {"w": jnp.zeros((64, 256)), "b": jnp.zeros(100)}
    part = 64 * 256 // W

    def sent(**options):
        tx = jd.zero_redundancy(optax.adam(1e-2), **options)

        def step(state, batch):
            grads = jax.tree.map(lambda p: p + batch.mean(), state.params)
            updates, opt = tx.update(grads, state.opt, state.params)
            return TrainState(optax.apply_updates(state.params, updates), opt), {}

        state = jd.place(TrainState(big, tx.init(big)), mesh)
        program = jd.distribute(step, mesh).lower(state, np.zeros(8, np.float32)).compile()
        found = analysis.collectives(program)
        assert [op.kind for op in found.ops] == ["all-to-all", "all-gather"]
        return found.wire_bytes

    def int8(n):  # whole blocks of 256 and their scales
        return -(-n // 256) * (256 + 4)

    def int4(n):
        return -(-n // 32) * (16 + 4)

    both = sent(reducer=jd.two_shot(jc.int4()), compressor=jc.int8())
    assert both <= 3 * (int4(part + 32) + int8(part) + 32 + 4)
    assert both >= 3 * (int4(part + 32) + int8(part) + 32)
    dense = sent()
    assert dense == 2 * 3 * 4 * (part + 32)
    assert dense > 4.7 * both


def test_alone():
    grads = {name: x[:, :1] for name, x in noise(3).items()}
    tx = jd.zero_redundancy(optax.adam(1e-2), compressor=jc.identity(), axis=None)
    params, state, update = zeros(), tx.init(zeros()), jax.jit(tx.update)
    optimizer = optax.adam(1e-2)
    expected, expected_state = zeros(), optimizer.init(zeros())
    for i in range(3):
        mine = {name: jnp.asarray(x[i, 0]) for name, x in grads.items()}
        updates, new = update(mine, state, params)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert [x.shape for x in jax.tree.leaves(new)] == [x.shape for x in jax.tree.leaves(state)]
        params, state = optax.apply_updates(params, updates), new
        updates, expected_state = optimizer.update(mine, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_close(params, expected, 1e-6)


def test_leaves_of_the_state_that_stand_beside_parameters():
    tx = jd.zero_redundancy(optax.adam(1e-2), reducer=jd.error_feedback(jd.two_shot(jc.int4())), compressor=jc.int8())
    state = tx.init(zeros())
    tagged: Any = optax.tree.map_params(tx, lambda x: "beside", state, transform_non_params=lambda x: "not")
    assert tagged.inner[0].count == "not"
    assert jax.tree.leaves(tagged.inner[0].mu) == ["beside"] * 4
    assert set(jax.tree.leaves(tagged.reducer)) == {"not"}


def test_refusals():
    with pytest.raises(ValueError, match=r"reducer=None\)\), which sends 3Ψ"):
        jd.zero_redundancy(optax.sgd(1), reducer=jd.compressed(jd.top_k(0.1)))
    with pytest.raises(ValueError, match="neither its contraction"):
        jd.zero_redundancy(optax.sgd(1), compressor=jc.int8()._replace(contraction=None))
    levels = jd.hierarchical(inner=jd.exact(), outer=jd.error_feedback(jd.two_shot(jc.int8())))
    with pytest.raises(ValueError, match="cannot store what outer= keeps"):
        jd.zero_redundancy(optax.sgd(1), reducer=levels, axis=("pod", "chip")).init(zeros())
    with pytest.raises(ValueError, match=r"cut into shards of shape \(18,\) for 2 workers.*shards of 24"):
        run(jd.zero_redundancy(optax.sgd(1)), {"w": np.zeros((1, 2))}, 2, {"w": jd.Sharded(jnp.zeros(35))})
    with pytest.raises(ValueError, match="marked PerWorker"):
        run(jd.zero_redundancy(optax.sgd(1)), {"w": np.zeros((1, 2))}, 2, {"w": jd.PerWorker(jnp.zeros(35))})
