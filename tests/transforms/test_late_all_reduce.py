"""`all_reduce(delay=1)`: the mean gradient of the last step, whose reduction waits for nothing in this one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close, batch, fresh, loss, make_step, params
from reference.late import pipe_sgd

import jaxdist as jd
from jaxdist import analysis
from jaxdist._core.jaxprs import propagate
from jaxdist.analysis import hlo_reader

SIGNS = jd.error_feedback(jd.compressed(jd.compressors.scaled_sign()))
POWER_SGD = jd.error_feedback(jd.power_sgd(1, min_compression_rate=0.0))


def late(reducer, after=None, **options):
    return optax.chain(jd.all_reduce(reducer, delay=1, **options), optax.sgd(0.1) if after is None else after)


# ---- the numbers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("k", [8, 2], ids=["exact", "top_k"])
@pytest.mark.parametrize("weighted", [False, True])
def test_against_the_formula_in_float64(k, weighted):
    """A quadratic for each worker; weights, whose mean of 4 divides exactly, belong to the gradients they came with."""
    rng = np.random.default_rng(0)
    curvatures, goals = rng.uniform(0.5, 1.5, (4, 8)), rng.standard_normal((4, 8))
    weights = rng.multinomial(16, [0.25] * 4, 20) if weighted else np.ones((20, 4))
    wanted, residual = pipe_sgd(lambda theta, t: curvatures * (theta - goals), np.zeros(8), 0.3, weights, k)
    with jax.enable_x64(True):
        tx = late(jd.error_feedback(jd.compressed(jd.top_k(k / 8))), optax.sgd(0.3))

        def step(state, data):
            passed = {"examples": data["weight"][0]} if weighted else {}
            gradient = data["curvature"][0] * (state.params - data["goal"][0])
            updates, opt = tx.update(gradient, state.opt, state.params, **passed)
            return TrainState(state.params + updates, opt), {}

        state = jd.place(TrainState(jnp.zeros(8), tx.init(jnp.zeros(8))), 4)
        run = jd.simulate(step, workers=4)
        for t in range(20):
            state, _ = run(state, {"curvature": curvatures, "goal": goals, "weight": weights[t]})
            np.testing.assert_allclose(state.params, wanted[t], rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.opt[0].inner.reducer.residual.value, residual, rtol=0, atol=1e-12)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("reducer", [jd.exact(), POWER_SGD], ids=["exact", "power_sgd"])
def test_mesh_and_simulation_agree(mesh, reducer):
    tx = late(reducer, optax.adam(1e-2))
    state, simulated = fresh(tx, mesh), fresh(tx, 8)
    run, simulate = jd.distribute(make_step(tx), mesh), jd.simulate(make_step(tx), 8)
    for seed in range(4):
        state, _ = run(state, batch(seed=seed))
        simulated, _ = simulate(simulated, batch(seed=seed))
    assert_close(state, simulated)
    assert jd.runtime.disagreement(state, mesh) == ()


def test_the_first_update_is_zero_and_no_reduction(mesh):
    """A warm start of low rank that had seen zeros would remain zero."""
    tx = late(POWER_SGD)
    start = fresh(tx, mesh)
    run = jd.distribute(make_step(tx), mesh, donate=False)
    state, _ = run(start, batch())
    assert_close(state.params, start.params, 0)
    assert_close(state.opt[0].inner, start.opt[0].inner, 0)
    assert (bool(start.opt[0].pending), bool(state.opt[0].pending)) == (False, True)
    again, _ = run(state, batch(seed=1))
    now, _ = jd.distribute(make_step(optax.chain(jd.all_reduce(POWER_SGD), optax.sgd(0.1))), mesh)(
        fresh(optax.chain(jd.all_reduce(POWER_SGD), optax.sgd(0.1)), mesh), batch()
    )
    assert_close(again.params, now.params)


def test_the_weight_travels_with_its_gradient(mesh):
    """Finished workers have NaN; a last call without any example applies what is pending."""
    tx = late(jd.exact(), optax.sgd(1.0))

    def step(state, data):
        updates, opt = tx.update(data["gradient"][0], state.opt, state.params, examples=data["examples"][0])
        return TrainState(state.params + updates, opt), {}

    run = jd.distribute(step, mesh, donate=False)
    state = jd.init_state(lambda: TrainState(jnp.zeros(()), tx.init(jnp.zeros(()))), mesh)
    gradients = jnp.array([1.0, 2.0, 3.0, 4.0, *[jnp.nan] * 4])
    state, _ = run(state, {"gradient": gradients, "examples": jnp.array([4, 2, 1, 1, 0, 0, 0, 0])})
    assert float(state.params) == 0
    done, _ = run(state, {"gradient": jnp.full(8, jnp.nan), "examples": jnp.zeros(8, jnp.int32)})
    assert float(done.params) == -(4 + 4 + 3 + 4) / 8
    assert jd.transforms.stats(done.opt)["empty"] == 0
    more, _ = run(done, {"gradient": gradients, "examples": jnp.ones(8, jnp.int32)})
    assert float(more.params) == float(done.params)
    assert jd.transforms.stats(more.opt)["empty"] == 1


def test_gradients_of_another_dtype(mesh):
    """The state keeps the dtype of the parameters, updates that of the gradients."""
    tx = jd.all_reduce(jd.exact(), delay=1)
    half = jnp.zeros(3, jnp.bfloat16)

    def step(state, gradient):
        updates, opt = tx.update(gradient[0], state["opt"], half)
        return {"opt": opt, "last": updates}, {}

    state = jd.init_state(lambda: {"opt": tx.init(half), "last": jnp.zeros(3)}, mesh)
    run = jd.distribute(step, mesh)
    for _ in range(2):
        state, _ = run(state, jnp.full((8, 3), 1.5))
    assert state["opt"].gradient.value.dtype == jnp.bfloat16
    assert state["last"].tolist() == [1.5] * 3


# ---- what waits for what


def masks_of(tx):
    """Whether the update, and what is kept, depend on (1) this step's gradient and (2) the last one."""
    state = jd.place(tx.init(params()), 4)
    gradients = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), params())
    marked = jax.tree.map(lambda _: 1, gradients), jax.tree.map(lambda _: 2, state)
    axes = (0, jax.tree.map(lambda spec: 0 if spec else None, jd.state.specs(state)))

    def update(gradient, state):
        return tx.update(gradient, state)

    mapped = jax.vmap(update, in_axes=axes, axis_name="data", out_axes=0)
    closed = jax.make_jaxpr(mapped)(gradients, state)
    found = propagate(closed, jax.tree.leaves(marked)).masks
    return found[: len(jax.tree.leaves(gradients))], found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reducer", [jd.exact(), SIGNS, POWER_SGD], ids=["exact", "signs", "power_sgd"])
def test_the_update_does_not_depend_on_this_gradient(reducer):
    assert set(masks_of(jd.all_reduce(reducer, delay=1))[0]) == {2}
    assert all(mask & 1 for mask in masks_of(jd.all_reduce(reducer))[0])


def compiled(tx, mesh, metrics=False):
    step = make_step(tx)

    def quiet(state, data):
        return step(state, data)[0], {}

    return jd.distribute(step if metrics else quiet, mesh).lower(fresh(tx, mesh), batch()).compile()


def dependent_pairs(program):
    """The all-reduces and products of matrices of which one waits for the other."""
    module = hlo_reader.parse(program.as_text())
    entry = module.computations[module.entry].instructions

    def ancestors(name):
        found, open_ = set(), [name]
        while open_:
            new = [x for x in entry[open_.pop()].operands if x in entry and x not in found]
            found.update(new)
            open_ += new
        return found

    reduces = [name for name, x in entry.items() if x.opcode == "all-reduce"]
    products = [name for name, x in entry.items() if "dot_general" in x.attributes]
    assert reduces
    assert products
    before = {name: ancestors(name) for name in (*reduces, *products)}
    return [(r, p) for r in reduces for p in products if p in before[r] or r in before[p]]


def test_the_compiled_reduction_is_independent_of_the_products(mesh):
    """No product waits for the reduction, and the reduction waits for no product."""
    assert dependent_pairs(compiled(late(jd.exact()), mesh)) == []
    assert dependent_pairs(compiled(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1)), mesh))


def test_the_compiler_may_merge_it_with_the_mean_of_the_loss(mesh):
    """Which the guide warns of: the reduction then waits for the forward pass."""
    program = compiled(late(jd.exact()), mesh, metrics=True)
    assert len(analysis.collectives(program).ops) == 1
    assert dependent_pairs(program)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reducer", [jd.exact(), SIGNS, jd.two_shot(jd.compressors.int8())])
def test_the_bytes_stay(mesh, reducer):
    def sent(tx):
        ops = analysis.collectives(compiled(tx, mesh)).ops
        return sorted((op.kind, op.dtype, op.bytes, op.messages) for op in ops)

    assert sent(late(reducer)) == sent(optax.chain(jd.all_reduce(reducer), optax.sgd(0.1)))


@pytest.mark.slow
def test_no_delay_is_the_program_of_before(mesh):
    plain, zero = jd.all_reduce(SIGNS), jd.all_reduce(SIGNS, delay=0)
    assert jax.tree.structure(plain.init(params())) == jax.tree.structure(zero.init(params()))
    first, second = (jd.distribute(make_step(tx), mesh).lower(fresh(tx, mesh), batch()) for tx in (plain, zero))
    assert first.as_text() == second.as_text()


# ---- its state


def test_another_number_of_workers_applies_the_same_update():
    """New workers have the mean of the old gradients, so the next update stays what it was."""
    tx = late(jd.exact())
    state, _ = jd.simulate(make_step(tx), 4)(fresh(tx, 4), batch())
    eight, _ = jd.simulate(make_step(tx), 8)(jd.resize(state, 8), batch(seed=1))
    two, _ = jd.simulate(make_step(tx), 2)(jd.resize(state, 2), batch(seed=1))
    four, _ = jd.simulate(make_step(tx), 4)(state, batch(seed=1))
    assert_close(eight.params, four.params, 1e-6)
    assert_close(two.params, four.params, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_weights_of_a_pending_gradient_count_on_other_workers(dtype):
    """Its mean is over the examples that it came from; a product with their number may exceed the range of float16."""
    tx = late(jd.exact(), optax.sgd(1.0))

    def step(state, data):
        gradient = data["gradient"][0].astype(dtype)
        updates, opt = tx.update(gradient, state.opt, state.params, examples=data["examples"][0])
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    start = jnp.zeros((), dtype)
    state = jd.place(TrainState(start, tx.init(start)), 4)
    gradients, examples = jnp.array([100.0, 200.0, 300.0, jnp.nan]), jnp.array([1024, 512, 256, 0])
    state, _ = jd.simulate(step, 4)(state, {"gradient": gradients, "examples": examples})
    for workers in (4, 2, 1, 8):
        last = {"gradient": jnp.zeros(workers), "examples": jnp.ones(workers)}
        done, _ = jd.simulate(step, workers)(jd.resize(state, workers), last)
        assert float(done.params) == pytest.approx(-(400 + 400 + 300) / 7, rel=1e-6 if dtype == "float32" else 1e-3)


def test_a_checkpoint_between_a_gradient_and_its_update(mesh, tmp_path):
    tx = late(SIGNS)
    run = jd.distribute(make_step(tx), mesh, donate=False)
    state, _ = run(fresh(tx, mesh), batch())
    jd.checkpoint.save(tmp_path, state, step=1)
    restored = jd.checkpoint.restore(tmp_path, fresh(tx, mesh))
    assert_close(restored, state, 0)
    assert_close(run(restored, batch(seed=1))[0], run(state, batch(seed=1))[0], 0)


def test_leaves_that_the_compiler_shards():
    both = jd.make_mesh({"data": 4, "model": 2})
    specs = {"b": jax.P("model"), "w": jax.P(None, "model")}
    flat = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    states = []
    for mesh, options in ((both, {"specs": specs}), (flat, {})):
        tx = late(jd.error_feedback(jd.compressed(jd.compressors.cast(jnp.float16))), **options)
        state, run = fresh(tx, mesh), jd.distribute(make_step(tx), mesh)
        for seed in range(3):
            state, _ = run(state, batch(seed=seed))
        states.append(state)
    assert_close(states[0].params, states[1].params)


# ---- in other transformations


def test_an_update_that_overflows_is_skipped_once(mesh):
    """The gradient that is pending must not be tried again in every step."""
    tx = jd.skip_nonfinite(late(jd.exact(), optax.sgd(1e30)))

    def step(state, gradient):
        updates, opt = tx.update(gradient[0], state.opt, state.params)
        return TrainState(state.params + updates, opt), {}

    run = jd.distribute(step, mesh)
    state = jd.init_state(lambda: TrainState(jnp.zeros(()), tx.init(jnp.zeros(()))), mesh)
    path = []
    for gradient in (1e10, 1e-30, 2e-30, jnp.nan, 4e-30, 8e-30):
        state, _ = run(state, jnp.full(8, gradient))
        path.append(float(state.params))
    # 1e10 and the gradient of the step that failed on it are lost, and so is NaN; what was pending then is applied.
    np.testing.assert_allclose(path, [0, 0, 0, 0, -2, -6], rtol=1e-6)
    assert int(state.opt.skipped) == 2


def test_accumulated_gradients_are_applied_a_cycle_later(mesh):
    tx = jd.accumulate(late(jd.exact(), optax.sgd(1.0)), 2)

    def step(state, gradient):
        updates, opt = tx.update(gradient[0], state.opt, state.params)
        return TrainState(state.params + updates, opt), {}

    run = jd.distribute(step, mesh)
    state = jd.init_state(lambda: TrainState(jnp.zeros(()), tx.init(jnp.zeros(()))), mesh)
    path = []
    for gradient in (1.0, 3.0, 5.0, 7.0):
        state, _ = run(state, jnp.full(8, gradient))
        path.append(float(state.params))
    assert path == [0, 0, 0, -2.0]


def test_refusals(mesh):
    for delay in (-1, 2):
        with pytest.raises(ValueError, match=f"delay must be 0 or 1, got {delay}"):
            jd.all_reduce(jd.exact(), delay=delay)
    tx = late(jd.exact())
    step = jd.distribute(make_step(tx, grad=jax.value_and_grad(loss)), mesh)
    with pytest.raises(ValueError, match="the same on all workers"):
        step(fresh(tx, mesh), batch())
    with pytest.raises(ValueError, match="micro_batches"):
        jd.distribute(make_step(optax.MultiSteps(tx, 2)), mesh)(fresh(optax.MultiSteps(tx, 2), mesh), batch())
