"""The majority vote; its laws and bytes are in `test_laws.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from register_run import State
from workers import trajectory

import jaxdist as jd


def signs(x):
    return np.where(x >= 0, 1.0, -1.0)


def test_votes_and_ties():
    rows = np.array([[1, 1, -1], [1, -1, -1], [-1, 1, -1], [1, -1, 1]], np.float32)[None] * 7
    means, owns, _ = trajectory(jd.reducers.majority_vote(), rows)
    np.testing.assert_array_equal(means[0], [1, 1, -1])
    np.testing.assert_array_equal(owns, rows / 7)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_shapes_and_dtypes_in_one_vote(workers):
    rng = np.random.default_rng(workers)
    updates = {
        "a": rng.standard_normal((2, workers, 3, 7)).astype(np.float32),
        "b": rng.standard_normal((2, workers)).astype(np.float16),
        "c": np.zeros((2, workers, 0), np.float32),
        "d": np.zeros((2, workers, 9), np.float32),
    }
    means, _, _ = trajectory(jd.reducers.majority_vote(), updates)
    for name, rows in updates.items():
        assert means[name].dtype == rows.dtype
        np.testing.assert_array_equal(means[name], signs(signs(rows).sum(1)))


def test_the_vote_climbs_where_the_mean_descends():
    """Gradients 4 (a quarter of the time) and -1 of x / 4: the mean is 1/4, the mean sign -1/2."""
    rows = np.array([4.0, -1, -1, -1], np.float32).reshape(1, 4, 1)
    means, owns, _ = trajectory(jd.reducers.majority_vote(), rows)
    assert rows.mean() == 0.25
    assert owns.mean() == -0.5
    assert means.tolist() == [[-1.0]]
    for wrap in (jd.error_feedback, jd.reducers.ef21):
        with pytest.raises(ValueError, match="a majority vote"):
            wrap(jd.reducers.majority_vote())


def test_signum():
    """Momentum on each worker, then the vote."""
    tx = optax.chain(
        jd.transforms.per_worker(optax.ema(0.9)), jd.all_reduce(jd.reducers.majority_vote()), optax.scale(-0.01)
    )

    def step(state, batch):
        updates, opt = tx.update({"w": batch[0]}, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), {}

    params = {"w": jnp.zeros(5)}
    state = jd.init_state(lambda: State(params, tx.init(params)), 3)
    run = jd.simulate(step, 3)
    gradients = np.random.default_rng(0).standard_normal((20, 3, 5)).astype(np.float32)
    momentum, expected = np.zeros((3, 5)), np.zeros(5)
    for gradient in gradients:
        state, _ = run(state, gradient)
        momentum = 0.9 * momentum + 0.1 * gradient
        expected = expected - 0.01 * signs(signs(momentum).sum(0))
    np.testing.assert_allclose(state.params["w"], expected, atol=1e-6)


def test_one_exchange_and_one_gather_for_leaves_of_all_dtypes(mesh):
    like = {"a": jax.ShapeDtypeStruct((20,), jnp.float32), "b": jax.ShapeDtypeStruct((30,), jnp.bfloat16)}
    tx = jd.all_reduce(jd.reducers.majority_vote())

    def step(state, batch):
        means, opt = tx.update(jax.tree.map(lambda x: x[0], batch), state.opt)
        return State(means, opt), {}

    state = State(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), tx.init(like))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), like)
    compiled = jd.distribute(step, mesh).lower(jd.place(state, mesh), batch).compile()
    ops = [(op.kind, op.dtype, op.bytes) for op in jd.analysis.collectives(compiled).ops]
    assert sorted(ops) == [("all-gather", "uint8", 1), ("all-to-all", "uint8", 8)]


@pytest.mark.parametrize(
    "reducer",
    [
        jd.reducers.majority_vote(),
        jd.compressed(jd.compressors.sign()),
        jd.compressed(jd.compressors.chained(jd.top_k(0.5), jd.compressors.sign())),
        jd.two_shot(jd.compressors.sign(), server_feedback=False),
        jd.reducers.ring(jd.compressors.sign()),
        jd.reducers.per_leaf(lambda path, leaf: 0, {0: jd.reducers.majority_vote(), 1: jd.exact()}),
        jd.hierarchical(inner=jd.two_shot(jd.compressors.sign(), server_feedback=False), outer=jd.exact()),
        jd.hierarchical(inner=jd.exact(), outer=jd.reducers.majority_vote()),
    ],
    ids=repr,
)
def test_signs_refuse_examples(reducer):
    """A worker without examples would vote +1 for each entry, and one with many has one vote."""
    tx = jd.all_reduce(reducer)

    def update(x, examples):
        return tx.update(x, tx.init(x), examples=examples)[0]

    with pytest.raises(ValueError, match="cannot weight signs"):
        jax.eval_shape(jax.vmap(update, axis_name="data"), jnp.ones((4, 3)), jnp.array([4.0, 4.0, 0.0, 0.0]))


def test_a_reduce_scatter_of_signs_refuses_examples():
    tx = jd.zero.zero_redundancy(
        optax.sgd(0.1), reducer=jd.two_shot(jd.compressors.sign(), server_feedback=False), axis=None
    )
    params = jnp.ones(16)
    with pytest.raises(ValueError, match="cannot weight signs"):
        tx.update(params, tx.init(params), params, examples=jnp.zeros(()))
