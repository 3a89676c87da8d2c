"""Rows of embeddings: the exact mean, whether the rows fit or not, and bytes that follow the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import trajectory

import jaxdist as jd
from jaxdist.comm import over
from jaxdist.reducers import row_sparse

VOCABULARY, WIDTH, WORKERS = 100, 6, 4


def tables(touched, *, steps=3, seed=0):
    """Gradients `[steps, W, V, d]` of which each worker has touched so many rows."""
    rng = np.random.default_rng(seed)
    found = np.zeros((steps, WORKERS, VOCABULARY, WIDTH))
    for worker in found.reshape(-1, VOCABULARY, WIDTH):
        worker[rng.choice(VOCABULARY, touched, replace=False)] = rng.standard_normal((touched, WIDTH))
    return found


@pytest.mark.parametrize("touched", [0, 1, 5, 6], ids="{} of 5".format)
def test_the_mean_is_exact_whether_the_rows_fit_or_not(touched):
    updates = tables(touched)
    with jax.enable_x64(True):
        means, owns, _ = trajectory(row_sparse(5), updates)
    np.testing.assert_allclose(means, updates.mean(1), atol=1e-15)
    np.testing.assert_array_equal(owns, updates)


def test_workers_that_touch_the_same_row_add_up():
    updates = np.zeros((1, WORKERS, VOCABULARY, WIDTH), np.float32)
    updates[:, :, -1] = np.arange(1.0, WORKERS + 1)[None, :, None]
    means, _, _ = trajectory(row_sparse(1), updates)
    expected = np.zeros((VOCABULARY, WIDTH))
    expected[-1] = 2.5
    np.testing.assert_array_equal(means[0], expected)


def sent(reducer, tree):
    """Bytes that a worker of `WORKERS` sends in the branch that sends least, from the compiled program."""

    def one_worker(x):
        return reducer.reduce(x, reducer.init(x), over("data"))[0].mean

    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    spec = jax.sharding.PartitionSpec
    step = jax.jit(jax.shard_map(one_worker, mesh=mesh, in_specs=spec(), out_specs=spec()))
    collectives = jd.analysis.collectives(step.lower(tree).compile(), branch="min")
    return collectives.wire_bytes


def test_bytes_follow_the_rows():
    tree = {"table": jnp.zeros((VOCABULARY, WIDTH)), "bias": jnp.zeros(WIDTH)}
    gathered = (WORKERS - 1) * 5 * (WIDTH * 4 + 4)
    all_reduced = 2 * (WORKERS - 1) / WORKERS * 4 * (WIDTH + 1)
    assert sent(row_sparse(5), tree) == gathered + all_reduced
    # From here on an all-reduce of the table sends less.
    plain = 2 * (WORKERS - 1) / WORKERS * 4 * WIDTH * (VOCABULARY + 1)
    assert sent(row_sparse(VOCABULARY // 2), tree) == plain


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_sent(value):
    updates = np.zeros((1, WORKERS, VOCABULARY, WIDTH), np.float32)
    updates[0, 2, 7, 3] = value
    means, _, _ = trajectory(row_sparse(1), updates)
    assert not np.isfinite(means[0][7, 3])
    assert np.isfinite(np.delete(means[0], 7, axis=0)).all()


def test_narrow_tables_are_added_in_float32():
    updates = np.zeros((1, WORKERS, VOCABULARY, WIDTH))
    # In bfloat16 the small ones would vanish beside the large one.
    updates[0, :, 3] = np.array([256.0, 1.0, 1.0, 1.0])[:, None]
    means, _, _ = trajectory(row_sparse(1), jnp.asarray(updates, jnp.bfloat16))
    assert float(means[0][3, 0]) == float(jnp.bfloat16(259 / 4))


def test_an_embedding_beside_other_leaves_trains_like_exact():
    """A model whose table is looked up: the same losses as with a plain mean, in a chain, by `per_leaf`."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (20, 4 * WORKERS))
    params = {"table": jnp.ones((VOCABULARY, WIDTH)), "out": jnp.ones((WIDTH, 1))}

    def by_name(path, leaf):
        return "table" if "table" in jax.tree_util.keystr(path) else "other"

    sparse = jd.reducers.per_leaf(by_name, {"table": row_sparse(4), "other": jd.exact()})

    def loss(params, batch):
        return jnp.mean((params["table"][batch] @ params["out"] - batch[:, None]) ** 2)

    ends = []
    for reducer in (jd.exact(), sparse):
        tx = jd.all_reduce(reducer)

        def step(state, batch, tx=tx):
            params, opt_state = state
            _, grads = jd.local_value_and_grad(loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (jax.tree.map(lambda p, u: p - 1e-4 * u, params, updates), opt_state), {}

        state = jd.init_state(lambda tx=tx: (params, tx.init(params)), WORKERS)
        run = jd.simulate(step, workers=WORKERS)
        for batch in tokens:
            state, _ = run(state, jnp.asarray(batch))
        ends.append(state[0])
    for one, other in zip(*map(jax.tree.leaves, ends)):
        np.testing.assert_allclose(one, other, rtol=1e-5)
