"""Two levels with long vectors, gradients in parts, and workers that take no part."""

from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.reducers.dgc import _clip
from jaxdist.reducers.reducer import Extras
from jaxdist.reducers.trees import tree_norm

AXIS, SIZES = ("pod", "chip"), {"pod": 2, "chip": 2}
EXACT = jd.exact()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("size", [2**22 - 8, 2**22 + 8, 6_000_000, 2**23 + 8])
@pytest.mark.parametrize(
    "reducer",
    [
        jd.hierarchical(inner=EXACT, outer=jd.error_feedback(jd.two_shot(jd.compressors.int8()))),
        jd.recipes.bagua.c_lp_s(feedback=True, hierarchical=True),
    ],
    ids=str,
)
def test_a_residual_of_two_levels_fits_vectors_of_any_length(size, reducer):
    tx = jd.all_reduce(reducer, axis=AXIS)

    def step(state, batch):
        updates, state = tx.update(batch[0] * jnp.ones(size), state)
        return state, updates[:2]

    state = jax.eval_shape(lambda: jd.place(tx.init(jnp.zeros(size)), SIZES, axis=AXIS))
    # Shapes only: nothing of this length is computed.
    new, found = jax.eval_shape(jd.simulate(step, SIZES, axis=AXIS), state, jnp.zeros(4))
    assert found.shape == (2,)
    assert [x.shape for x in jax.tree.leaves(new)] == [x.shape for x in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (jd.error_feedback(jd.power_sgd(4)), "power_sgd factorizes matrices"),
        (jd.reducers.dgc(0.1, clip_norm=1.0), "dgc clips by the norm of all leaves"),
    ],
)
def test_what_needs_whole_gradients_gets_no_parts(outer, message):
    with pytest.raises(ValueError, match=message):
        jd.hierarchical(inner=EXACT, outer=outer)
    with pytest.raises(ValueError, match=f"unless flat=False: {message}"):
        jd.reducers.bucketed(outer)
    with pytest.raises(ValueError, match=f"into vectors: {message}"):
        jd.reducers.partitioned(outer)
    assert jd.hierarchical(inner=EXACT, outer=jd.reducers.dgc(0.1))
    assert jd.reducers.bucketed(outer, flat=False)


def test_a_third_level_with_a_state_is_refused_by_name():
    inside = jd.hierarchical(inner=EXACT, outer=jd.error_feedback(jd.compressed(jd.top_k(0.25))))
    with pytest.raises(ValueError, match="cannot store the state of a third level"):
        jd.hierarchical(inner=EXACT, outer=inside).init(jnp.zeros(21))


@pytest.mark.slow
def test_two_levels_count_what_the_program_sends():
    mesh, size = jd.make_mesh({"pod": 4, "chip": 2}), 8000
    reducer = jd.hierarchical(inner=EXACT, outer=jd.two_shot(jd.qsgd(4)))
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=1, reducer=reducer, axis=AXIS)

    def step(state, batch):
        updates, opt = tx.update(batch[0] * jnp.cos(state["p"]), state["o"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt}, {}

    params = jnp.arange(float(size))
    state = jd.place({"p": jd.PerWorker(params), "o": tx.init(params)}, mesh, axis=AXIS)
    run = jd.distribute(step, mesh, axis=AXIS)
    compiled = jd.analysis.collectives(run.lower(state, jnp.arange(8.0)).compile()).wire_bytes
    state, _ = run(state, jnp.arange(8.0))
    assert float(jd.transforms.stats(state)["bytes"]) == pytest.approx(compiled, rel=1e-3)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("warm_up", [{}, {"warmup_densities": (0.5,), "warmup_steps": 1}], ids=["now", "warm-up"])
def test_a_worker_that_takes_no_part_keeps_its_momentum(warm_up):
    reducer, x = jd.reducers.dgc(0.25, **warm_up), jnp.array([1.0, 4.0, 2.0, 3.0])

    def two_steps(x, examples):
        comm = jd.comm.over("data")
        state = reducer.reduce(x, reducer.init(x), comm, Extras(examples=jnp.ones(())))[1]
        reduced, after = reducer.reduce(x * examples, state, comm, Extras(examples=examples))
        return reduced.own, (state.momentum.value, state.unsent.value), (after.momentum.value, after.unsent.value)

    own, before, after = jax.jit(jax.vmap(two_steps, axis_name="data"))(jnp.stack([x, 2 * x]), jnp.array([1.0, 0.0]))
    assert own[1].tolist() == [0.0] * 4
    for old, new in zip(before, after):
        np.testing.assert_array_equal(new[1], old[1])
        assert not np.array_equal(new[0], old[0])


def test_a_median_has_no_divisor():
    with pytest.raises(ValueError, match='normalize_by must be "active"'):
        jd.all_reduce(jd.reducers.median(), normalize_by="workers")


@pytest.mark.parametrize("factor", [1e20, 1.0, 1e-25])
def test_the_compression_error_has_no_scale(factor):
    tx = jd.all_reduce(jd.error_feedback(jd.reducers.with_stats(jd.compressed(jd.top_k(0.5)))), axis=None)
    _, state = jax.jit(tx.update)(factor * jnp.array([1.0, 2.0]), tx.init(jnp.zeros(2)))
    assert float(jd.transforms.stats(state)["compression_error"]) == pytest.approx(0.2)


@pytest.mark.parametrize("resize", ["mean", "copy", "zero"])
def test_the_model_to_evaluate_is_the_mean(resize):
    marked = jd.PerWorker(jnp.array([[1.0], [3.0]]), axis="data", resize=resize)
    assert jd.consensus({"w": marked})["w"].tolist() == [2.0]


LARGEST = jd.top_k(0.5, method="exact")
# A reducer that keeps what it does not send, and the sum of what it delivers in the end of a gradient of one.
KEEPS = {
    "residuals": (jd.error_feedback(jd.compressed(LARGEST)), 1.0),
    "a server residual": (jd.error_feedback(jd.two_shot(LARGEST)), 1.0),
    # A momentum of one half; masking would drop it where an entry is sent.
    "dgc": (jd.reducers.dgc(0.5, momentum=0.5, masking=False, method="exact"), 2.0),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("workers", [2, 5])
def test_what_was_not_sent_arrives_after_a_change_of_workers(name, workers):
    """Entry by entry, the deliveries add up to the gradients that three workers had, and the others after them."""
    reducer, total = KEEPS[name]
    tx = jd.all_reduce(reducer)

    def step(state, gradients):
        updates, opt = tx.update(jax.tree.map(lambda x: x[0], gradients), state["opt"])
        return {"sum": jax.tree.map(jnp.add, state["sum"], updates), "opt": opt}, {}

    rng, zeros = np.random.default_rng(0), {"a": jnp.zeros(7), "w": jnp.zeros((9, 5))}
    state, expected = jd.place({"sum": zeros, "opt": tx.init(zeros)}, 3), zeros
    for count in (3, workers):
        state = jd.resize(state, count)
        gradients = {name: rng.normal(size=(count, *x.shape)).astype(np.float32) for name, x in zeros.items()}
        expected = jax.tree.map(lambda x, g: x + total * g.mean(0), expected, gradients)
        run = jd.simulate(step, count)
        state, _ = run(state, gradients)
        assert max(float(jnp.abs(state["sum"][name] - x).max()) for name, x in expected.items()) > 0.05
    gradients = jax.tree.map(np.zeros_like, gradients)
    for _ in range(24):
        state, _ = run(state, gradients)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), state["sum"], expected)


def test_statistics_around_a_condition_count_the_gather_that_they_use():
    two_levels = jd.hierarchical(inner=EXACT, outer=EXACT)
    mesh = jd.make_mesh({"pod": 2, "chip": 4})

    def count(reducer):
        tx = jd.all_reduce(jd.reducers.with_stats(reducer), axis=AXIS)

        def step(state, batch):
            return tx.update(batch[0] * jnp.ones(4096), state)[1], {}

        state, _ = jd.distribute(step, mesh, axis=AXIS)(
            jd.place(tx.init(jnp.zeros(4096)), mesh, axis=AXIS), jnp.ones(8)
        )
        return float(jd.transforms.stats(state)["bytes"])

    assert count(jd.reducers.reducer_schedule(two_levels, two_levels, 5)) == count(two_levels) == 40960


F16 = {
    "natural": (lambda: jd.compressed(jd.compressors.natural()), 65504.0),
    "two_shot of natural": (lambda: jd.two_shot(jd.compressors.natural()), 60000.0),
    "two_shot of random_k": (lambda: jd.two_shot(jd.compressors.random_k(0.25, unbiased=True)), 20000.0),
    "intsgd": (jd.reducers.intsgd, 30000.0),
    "error feedback": (lambda: jd.error_feedback(jd.compressed(jd.top_k(0.25))), 30000.0),
    "loco": (lambda: jd.reducers.loco(jd.compressed(jd.top_k(0.25))), 30000.0),
    "dgc": (lambda: jd.reducers.dgc(0.25), 30000.0),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", F16)
def test_finite_updates_in_float16_have_finite_means(name):
    """What is decoded or accumulated in float32 may exceed 65504; then the largest number takes its place."""
    make, value = F16[name]
    reducer = make()

    def steps(x):
        def step(state, _):
            reduced, state = reducer.reduce(x, state, jd.comm.over("data"))
            return state, reduced.mean

        return jax.lax.scan(step, reducer.init(x), length=4)[1]

    means = jax.jit(jax.vmap(steps, axis_name="data"))(jnp.full((2, 64), value, jnp.float16))
    assert means.dtype == jnp.float16
    assert np.isfinite(means).all()


def test_the_norm_of_a_tree_of_several_dtypes():
    """The largest entry may lie outside of the range of a narrower leaf."""
    half, norm = jnp.float16, jax.jit(tree_norm)
    np.testing.assert_allclose(norm({"a": jnp.zeros(2, half), "b": jnp.full(2, 1e-9)}), 2**0.5 * 1e-9, rtol=1e-5)
    large = {"a": jnp.full(1000, 60000.0, half), "b": jnp.array([70000.0])}
    np.testing.assert_allclose(norm(large), np.sqrt(1000 * 6e4**2 + 7e4**2), rtol=1e-5)


def test_the_error_of_an_update_that_is_not_finite_is_not_zero():
    reducer, x = jd.reducers.with_stats(jd.compressed(jd.qsgd(4))), jnp.array([1.0, jnp.nan])
    _, state = jax.jit(lambda x: reducer.reduce(x, reducer.init(x), jd.comm.alone()))(x)
    assert np.isnan(state.error.value)


def test_arguments_that_are_no_numbers_of_steps_or_entries():
    for name, make in {
        "reset_every": lambda: unwrap(jd.reducers.loco)(jd.compressed(jd.top_k(0.5)), reset_every=2.5),
        "epoch_steps": lambda: unwrap(jd.reducers.critical_regime)(epoch_steps=1.5, interval_steps=2),
        "bucket": lambda: unwrap(jd.compressors.scaled_sign)(bucket=2.5),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be a whole number, got"):
            make()
    with pytest.raises(ValueError, match="min_compression_rate must be at least 0, got nan"):
        jd.power_sgd(2, min_compression_rate=np.nan)
    with pytest.raises(ValueError, match="variance must be positive and finite, got inf"):
        jd.compressors.gspar(variance=np.inf)
    with pytest.raises(ValueError, match=r"must fall, to density=0\.1 at last"):
        jd.reducers.dgc(0.1, warmup_densities=(0.05, 0.01), warmup_steps=4)


@pytest.mark.parametrize("examples", [False, True])
def test_leaves_without_entries_are_simulated(examples):
    """A collective of no entries has none of them to divide."""
    params = {"a": jnp.zeros(0), "b": jnp.zeros((3, 0))}
    tx = jd.all_reduce(jd.two_shot(jd.qsgd(8)))

    def step(state, batch):
        given = {"examples": batch[0]} if examples else {}
        updates, state = tx.update(jax.tree.map(lambda x: x + batch[0], params), state, params, **given)
        return state, updates

    _, updates = jd.simulate(step, 4)(jd.place(tx.init(params), 4), jnp.arange(4.0))
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("largest", [3e38, 1e38, 1.0, 1e-20])
def test_norms_of_values_near_the_largest_number(largest, compiled):
    """DGC clips by the norm, which may overflow itself; a norm of 0 would leave huge gradients as they are."""
    rows = np.array([1, -1, 0.5, 0]) * largest
    tree = {"w": jnp.asarray(rows, jnp.float32)}
    run = jax.jit if compiled else lambda f: f
    length = np.linalg.norm(rows)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(run(tree_norm)(tree), np.float32(length), rtol=1e-6)
    expected = rows * min(1, 0.5 / length)
    np.testing.assert_allclose(run(lambda x: _clip(x, 0.5))(tree)["w"], expected, rtol=1e-5, atol=1e-30)
