"""A step with NaN or Inf in one worker's gradient does not happen, on any worker."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close, batch, fresh, make_step, params

import jaxdist as jd


def guarded():
    """A chain of which every part would be spoilt: a residual that keeps a NaN, moments and decay that move."""
    reducer = jd.reducers.with_stats(jd.error_feedback(jd.compressed(jd.top_k(0.25))))
    return jd.skip_nonfinite(optax.chain(jd.all_reduce(reducer), optax.adamw(1e-2, weight_decay=0.1)))


def poisoned(value, worker, seed):
    data = batch(seed=seed)
    data["y"][2 * worker, 0] = value
    return data


@pytest.fixture(scope="module")
def run(mesh):
    return jd.distribute(make_step(guarded()), mesh, donate=False)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("value", "worker"), [(np.nan, 0), (np.inf, 5), (-np.inf, 7), (1e25, 2)])
def test_a_poisoned_step_does_not_happen(mesh, run, value, worker):
    state, _ = run(fresh(guarded(), mesh), batch())
    after, metrics = run(state, poisoned(value, worker, seed=1))
    assert not np.isfinite(metrics["loss"])
    assert_close(after.params, state.params, 0)
    assert_close(after.opt.inner, state.opt.inner, 0)  # moments, counts and every worker's residual
    assert (int(jd.transforms.stats(state.opt)["skips"]), int(jd.transforms.stats(after.opt)["skips"])) == (0, 1)
    # The next clean step is that of a run without the poisoned one.
    skipped, _ = run(after, batch(seed=2))
    never, _ = run(state, batch(seed=2))
    assert_close(skipped.params, never.params, 0)
    assert_close(skipped.opt.inner, never.opt.inner, 0)
    assert float(jnp.abs(skipped.params["w"] - state.params["w"]).max()) > 1e-3
    assert jd.runtime.disagreement(skipped, mesh) == ()


@pytest.mark.parametrize("where", ["update", "state", "parameter"])
def test_what_a_step_makes_is_looked_at_too(where):
    """Gradients are fine here; what comes of them overflows, in one place and no other."""
    big = optax.scale(1e30) if where != "parameter" else optax.scale(-7e4)
    state_only = [optax.trace(0.9), optax.scale(1e-30), optax.clip(1.0)] if where == "state" else []
    tx = jd.skip_nonfinite(optax.chain(big, *state_only), axis=None)
    params = jnp.full(2, 1.0, jnp.float16 if where == "parameter" else jnp.float32)
    updates: Any
    state: Any
    first: Any = tx.init(params)
    updates, state = tx.update(jnp.array([1.0, 1e10 if where != "parameter" else 1.0]), first, params)
    assert (updates.tolist(), int(state.skipped)) == ([0.0, 0.0], 1)
    assert_close(state.inner, first.inner, 0)
    updates, state = tx.update(jnp.array([1e-3, 1e-3]), state, params)
    assert (int(state.skipped), int(state.consecutive), bool((updates != 0).all())) == (1, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_state_on_the_host_is_guarded(inside):
    """The guard inside of what is offloaded, and around it; the statistics of both can be read."""
    chain = optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-2))
    tx = jd.offload.host(jd.skip_nonfinite(chain)) if inside else jd.skip_nonfinite(jd.offload.host(chain))
    run = jd.simulate(make_step(tx), 8)
    state, _ = run(fresh(tx, 8), batch())
    after, _ = run(state, poisoned(np.nan, 3, seed=1))
    assert_close(after.params, state.params, 0)
    (before, found), later = (jd.transforms.stats(x.opt) for x in (state, after)), run(after, batch(seed=2))[0]
    assert (int(before["skips"]), int(found["skips"])) == (0, 1)
    assert_close(later.params, run(state, batch(seed=2))[0].params, 0)


def test_what_is_infinite_by_design_is_no_fault():
    """The best loss so far, before there is any."""
    tx = jd.skip_nonfinite(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), axis=None)
    state: Any = tx.init(jnp.ones(2))
    assert any(bool(jnp.isinf(x).any()) for x in jax.tree.leaves(state))
    for value in (jnp.inf, 1.0):
        _, state = tx.update(jnp.ones(2), state, jnp.ones(2), value=jnp.asarray(value))
        assert int(state.skipped) == 0


def steps_until_refused(run, state, good, bad, kinds):
    """How many of the steps, `.` good and `x` bad, were run until one was refused, the error, and the state."""
    for number, kind in enumerate(kinds):
        try:
            state, _ = run(state, good if kind == "." else bad)
        except jd.transforms.TooManySkipsError as error:
            return number, error, state
    raise AssertionError("no step was refused")


@pytest.mark.parametrize("engine", ["mesh", "simulation", "by hand"])
def test_skipping_for_ever_is_an_error(mesh, engine):
    """Three in a row are allowed: the fourth is skipped too, and the call after it raises."""
    tx = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1)), max_consecutive=3)
    step = make_step(tx)
    run = jd.distribute(step, mesh) if engine == "mesh" else jd.simulate(step, 8)
    if engine == "by hand":
        compiled = run.lower(fresh(tx, 8), batch()).compile()

        def run(state, data):
            jd.transforms.check_skips(state)
            return compiled(state, data)

    state, kinds = fresh(tx, mesh if engine == "mesh" else 8), ".....xxx..xxxxxxxxxx"
    number, error, state = steps_until_refused(run, state, batch(), poisoned(np.nan, 3, seed=1), kinds)
    assert (number, error.skips) == (14, 4)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("skip_nonfinite has skipped 4 steps in a row")
    assert int(state.opt.skipped) == 7  # it is as it was, and can be saved


def test_one_worker_that_always_sits_out_is_an_error():
    tx = jd.local_steps(jd.skip_nonfinite(optax.sgd(0.1), axis=None, max_consecutive=3), optax.sgd(1.0), sync_period=2)
    state = jd.init_state(lambda: TrainState(jd.PerWorker(params()), tx.init(params())), 4)
    run, bad = jd.simulate(make_step(tx), 4), poisoned(np.nan, 3, seed=1)
    number, error, _ = steps_until_refused(run, state, batch(), bad, "xxxxxxxxxx")
    assert (number, error.skips) == (4, 4)


def test_without_a_limit_it_goes_on():
    tx = jd.skip_nonfinite(optax.sgd(0.1), axis=None, max_consecutive=None)
    state: Any = tx.init(jnp.ones(2))
    assert jd.transforms.check_skips(state._replace(consecutive=jnp.int32(10**9))) > 10**9
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"max_consecutive must be at least 1, got {limit}"):
            jd.skip_nonfinite(optax.sgd(0.1), max_consecutive=limit)


@pytest.mark.slow
def test_simulation_skips_too(mesh, run):
    state, simulated = fresh(guarded(), mesh), jd.simulate(make_step(guarded()), 8)
    other = state
    for data in (batch(), poisoned(np.nan, 3, seed=1), batch(seed=2)):
        state, _ = run(state, data)
        other, _ = simulated(other, data)
    assert_close(state, other)
    assert int(other.opt.skipped) == 1


def test_without_it_everything_is_lost(mesh):
    """What the guard is for; and Adam's zero-gradient step, the reason that it wraps the whole chain."""
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-2))
    bare = jd.distribute(make_step(tx), mesh, donate=False)
    state, _ = bare(fresh(tx, mesh), batch())
    spoilt, _ = bare(state, poisoned(np.nan, 3, seed=1))
    assert bool(jnp.isnan(spoilt.params["w"][:, 0]).all())
    inside = optax.chain(jd.skip_nonfinite(jd.all_reduce(jd.exact())), optax.adam(1e-2))
    half = jd.distribute(make_step(inside), mesh, donate=False)
    state, _ = half(fresh(inside, mesh), batch())
    moved, _ = half(state, poisoned(np.nan, 3, seed=1))
    assert float(jnp.abs(moved.params["w"] - state.params["w"]).max()) > 1e-3


def test_it_sends_four_bytes_more(mesh):
    def kinds(tx):
        program = jd.distribute(make_step(tx), mesh).lower(fresh(tx, mesh), batch()).compile()
        return sorted((op.kind, op.dtype, op.bytes) for op in jd.analysis.collectives(program).ops)

    bare = optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-2))
    assert sorted([*kinds(bare), ("all-reduce", "int32", 4)]) == kinds(jd.skip_nonfinite(bare))


def test_statistics(mesh, run):
    state, _ = run(fresh(guarded(), mesh), batch())
    state, _ = run(state, batch(seed=1))
    found = jd.transforms.stats(state.opt)
    assert sorted(found) == ["bytes", "compression_error", "empty", "residual_norm", "skips", "syncs"]
    residual = state.opt.inner[0].reducer.reducer.residual.value
    square = sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(residual)) / 8
    np.testing.assert_allclose(found["residual_norm"], square**0.5, rtol=1e-5)
    assert (int(found["syncs"]), int(found["skips"]), int(found["empty"])) == (2, 0, 0)
    # 6 of 24 and 1 of 4 elements kept, gathered from 7 others: float32 values and 3 bytes and 1 of positions.
    assert float(found["bytes"]) == 2 * 7 * (4 * (6 + 1) + 3 + 1)
    assert 0 < float(found["compression_error"]) < 1
    compiled = jax.jit(lambda opt: jd.transforms.stats(opt))(state.opt)
    assert_close(compiled, found, 1e-6)
    assert jd.transforms.stats(optax.adam(0.1).init(jnp.zeros(3))) == {}


def test_a_worker_without_examples_is_not_asked():
    """Its mean over no examples is NaN, and the others go on without it."""
    tx = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0)))
    gradients = jnp.array([[1.0], [3.0], [jnp.nan]])

    def step(state, batch):
        gradient, examples = batch
        updates, opt = tx.update(gradient[0], state.opt, state.params, examples=examples[0])
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.init_state(lambda: TrainState(jnp.zeros(1), tx.init(jnp.zeros(1))), 3)
    run = jd.simulate(step, 3)
    after, _ = run(state, (gradients, jnp.array([[2.0], [2.0], [0.0]])[:, 0]))
    assert after.params.tolist() == [-2.0]
    assert int(after.opt.skipped) == 0
    after, _ = run(after, (gradients, jnp.ones(3)))
    assert int(after.opt.skipped) == 1


def test_no_number_of_examples_is_as_if_it_were_left_out():
    tx = jd.skip_nonfinite(optax.sgd(1.0), axis=None)
    params = jnp.zeros(1)
    assert tx.update(jnp.ones(1), tx.init(params), params, examples=None)[0].tolist() == [-1.0]


def test_state_on_the_host_of_one_device_is_guarded():
    """On a mesh, where the state is donated: what is selected must stay on the host."""
    tx = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), jd.offload.host(optax.adam(0.1))))
    mesh, params = jd.make_mesh({"data": 1}, devices=jax.devices()[:1]), jnp.ones(8)

    def step(state, batch):
        updates, opt = tx.update(state["x"] * batch[0], state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    state = jd.init_state(lambda: {"x": params, "opt": tx.init(params)}, mesh)
    run, found = jd.distribute(step, mesh), []
    for value in (1.0, np.nan, 1.0):
        state, _ = run(state, jnp.array([value], jnp.float32))
        found.append(float(state["x"][0]))
    np.testing.assert_allclose(found, [0.9, 0.9, 0.8004], atol=1e-4)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("axis", ["chip", None])
def test_the_norm_of_residuals_inside_of_local_steps(axis):
    """Of all workers of both levels, or of those of the outer one that decide alone."""
    inner = optax.chain(jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.25))), axis=axis), optax.sgd(0.1))
    tx, axes = jd.local_steps(inner, optax.sgd(1.0), sync_period=4, axis="pod"), ("pod", "chip")
    sizes, place = {"pod": 2, "chip": 3}, jnp.zeros(4)
    state = jd.init_state(lambda: {"x": jd.PerWorker(place, axis="pod"), "opt": tx.init(place)}, sizes, axis=axes)

    def step(state, batch):
        updates, opt = tx.update(jnp.ones(4), state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    state, _ = jd.simulate(step, sizes, axis=axes)(state, jnp.zeros(6))
    # Three of four ones are left behind on each worker.
    np.testing.assert_allclose(jd.transforms.stats(state["opt"])["residual_norm"], 3**0.5, rtol=1e-6)


def label_loss(params, batch):
    """NaN for a label past the end, with a gradient that is finite."""
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"], batch["label"]).mean()


def label_step(tx, *, shared=False, weighs=False):
    def step(state, data):
        loss, gradients = jd.local_value_and_grad(label_loss)(state.params, data)
        mean = jax.lax.pmean(loss, "data")
        extras = {"value": mean if shared else loss, **({"examples": data["number"][0]} if weighs else {})}
        updates, opt = tx.update(gradients, state.opt, state.params, **extras)
        return TrainState(optax.apply_updates(state.params, updates), opt), {"loss": mean}

    return step


def label_batch(last):
    label = np.array([0, 1, 2, 1, last, 0, 1, 2])
    return {"x": np.ones((8, 4), np.float32), "label": label, "number": np.array([2, 2, 0, 2])}


LABEL_CHAINS = {
    "skip": lambda chain: jd.skip_nonfinite(chain),
    "loss scale": lambda chain: jd.transforms.dynamic_loss_scale(chain),
    "accumulated": lambda chain: jd.accumulate(jd.skip_nonfinite(chain), 2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LABEL_CHAINS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_whose_loss_is_nan_does_not_happen(name, shared):
    tx = LABEL_CHAINS[name](optax.chain(jd.all_reduce(jd.exact()), optax.adam(0.1)))
    state = jd.place(TrainState({"w": jnp.zeros((4, 3))}, tx.init({"w": jnp.zeros((4, 3))})), 4)
    run = jd.simulate(label_step(tx, shared=shared), 4)
    for last, moved, skips in ((5, False, 1), (1, True, 1)):
        bad_and_good = (last, 1) if name == "accumulated" else (last,)  # the loss of the last call is finite
        for label in bad_and_good:
            state, metrics = run(state, label_batch(label))
            assert bool(jnp.isfinite(metrics["loss"])) == (label < 3)
        assert bool(jnp.any(state.params["w"] != 0)) == moved
        assert int(jd.transforms.stats(state.opt)["skips"]) == skips


@pytest.mark.parametrize("name", ["skip", "accumulated"])
def test_the_loss_of_a_worker_without_examples_does_not_count(name):
    tx = LABEL_CHAINS[name](optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1)))
    state = jd.place(TrainState({"w": jnp.zeros((4, 3))}, tx.init({"w": jnp.zeros((4, 3))})), 4)
    run = jd.simulate(label_step(tx, weighs=True), 4)
    for _ in range(2):
        state, _ = run(state, label_batch(5))
    assert int(jd.transforms.stats(state.opt)["skips"]) == 0
    assert bool(jnp.any(state.params["w"] != 0))


def test_each_worker_skips_by_the_loss_of_its_own_local_step():
    inner = jd.skip_nonfinite(optax.sgd(0.1), axis=None)
    tx = jd.local_steps(inner, optax.sgd(1.0), sync_period=10)
    params = {"w": jnp.zeros((4, 3))}
    state = jd.place(TrainState(jd.PerWorker(params), tx.init(params)), 4)
    state, _ = jd.simulate(label_step(tx), 4)(state, label_batch(5))
    assert [bool(jnp.any(x != 0)) for x in state.params.value["w"]] == [True, True, False, True]


# Gradients that are finite, and whose step overflows: the rate makes an infinite update of 1e10.
KEEPERS = {
    "delayed": lambda sgd: optax.chain(jd.all_reduce(jd.exact()), jd.offload.delayed(sgd)),
    "delayed on shards": lambda sgd: jd.zero_redundancy(jd.offload.delayed(sgd)),
    "late": lambda sgd: optax.chain(jd.all_reduce(jd.exact(), delay=1), sgd),
    "accumulate": lambda sgd: jd.accumulate(optax.chain(jd.all_reduce(jd.exact()), sgd), 2),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_kept_gradient_whose_step_overflows_is_dropped(name):
    tx = jd.skip_nonfinite(KEEPERS[name](optax.sgd(1e30)))

    def step(state, data):
        w, opt = state
        updates, opt = tx.update({"w": jnp.full(2, data[0])}, opt, w)
        return (optax.apply_updates(w, updates), opt), {}

    w = {"w": jnp.zeros(2)}
    state, run = jd.place((w, tx.init(w)), 2), jd.simulate(step, 2)
    for gradient in (1e10, 1e-30, 1e-30, 1e-30, 1e-30, 1e-30):
        state, _ = run(state, jnp.full(2, gradient))
    assert int(state[1].skipped) == 1
    # Steps of 1e-30: late ones for all gradients between that in place of the skipped one and the last, or two syncs.
    np.testing.assert_allclose(state[0]["w"], {"accumulate": -2.0}.get(name, -3.0), rtol=1e-5)


@pytest.mark.parametrize("name", ["delayed", "late"])
def test_a_kept_gradient_outlives_the_skip_of_another_one(name):
    tx = jd.skip_nonfinite(KEEPERS[name](optax.sgd(1.0)))

    def step(state, data):
        w, opt = state
        updates, opt = tx.update({"w": jnp.full(2, data[0])}, opt, w)
        return (optax.apply_updates(w, updates), opt), {}

    w = {"w": jnp.zeros(2)}
    state, run = jd.place((w, tx.init(w)), 2), jd.simulate(step, 2)
    for gradient in ([1.0, 1.0], [2.0, np.nan], [4.0, 4.0], [0.0, 0.0]):
        state, _ = run(state, jnp.array(gradient))
    np.testing.assert_allclose(state[0]["w"], -5.0)
