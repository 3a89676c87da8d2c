"""A step with NaN or Inf in one worker's gradient does not happen, on any worker."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import TrainState, assert_close, batch, fresh, make_step

import jaxdist as jd


def guarded():
    """A chain of which every part would be spoilt: a residual that keeps a NaN, moments and decay that move."""
    reducer = jd.tracked(jd.error_feedback(jd.compressed(jd.top_k(0.25))))
    return jd.skip_nonfinite(optax.chain(jd.all_reduce(reducer), optax.adamw(1e-2, weight_decay=0.1)))


def poisoned(value, worker, seed):
    data = batch(seed=seed)
    data["y"][2 * worker, 0] = value
    return data


@pytest.fixture(scope="module")
def run(mesh):
    return jd.distribute(make_step(guarded()), mesh, donate=False)


@pytest.mark.parametrize(("value", "worker"), [(np.nan, 0), (np.inf, 5), (-np.inf, 7)])
def test_a_poisoned_step_does_not_happen(mesh, run, value, worker):
    state, _ = run(fresh(guarded(), mesh), batch())
    after, metrics = run(state, poisoned(value, worker, seed=1))
    assert not np.isfinite(metrics["loss"])
    assert_close(after.params, state.params, 0)
    assert_close(after.opt.inner, state.opt.inner, 0)  # moments, counts and every worker's residual
    assert (int(jd.stats(state.opt)["skips"]), int(jd.stats(after.opt)["skips"])) == (0, 1)
    # The next clean step is that of a run without the poisoned one.
    skipped, _ = run(after, batch(seed=2))
    never, _ = run(state, batch(seed=2))
    assert_close(skipped.params, never.params, 0)
    assert_close(skipped.opt.inner, never.opt.inner, 0)
    assert float(jnp.abs(skipped.params["w"] - state.params["w"]).max()) > 1e-3
    assert jd.parallel.disagreement(skipped, mesh) == ()


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
    found = jd.stats(state.opt)
    assert sorted(found) == ["bytes", "compression_error", "empty", "residual_norm", "skips", "syncs"]
    residual = state.opt.inner[0].reducer.reducer.residual.value
    square = sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(residual)) / 8
    np.testing.assert_allclose(found["residual_norm"], square**0.5, rtol=1e-5)
    assert (int(found["syncs"]), int(found["skips"]), int(found["empty"])) == (2, 0, 0)
    # 6 of 24 and 1 of 4 elements kept, gathered from 7 others: float32 values and 3 bytes and 1 of positions.
    assert float(found["bytes"]) == 2 * 7 * (4 * (6 + 1) + 3 + 1)
    assert 0 < float(found["compression_error"]) < 1
    compiled = jax.jit(lambda opt: jd.stats(opt))(state.opt)
    assert_close(compiled, found, 1e-6)
    assert jd.stats(optax.adam(0.1).init(jnp.zeros(3))) == {}


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
