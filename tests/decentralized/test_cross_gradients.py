"""Gradients that neighbors take for each other, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from scipy.optimize import nnls

import jaxdist as jd
from jaxdist import topology as graphs

WORKERS = 4


def loss(params, data):
    return jnp.mean((data["a"] @ params - data["b"]) ** 2) / 2


def data(seed=0):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(WORKERS, 8, 5)), "b": rng.normal(size=(WORKERS, 8))}, rng.normal(size=(WORKERS, 5))


def gradients(drawn, x):
    """`[i, j]`: of worker `i`'s loss at the parameters of `j`, in float64."""
    a, b = drawn["a"], drawn["b"]
    return np.einsum("iek,ije->ijk", a, np.einsum("iek,jk->ije", a, x) - b[:, None]) / a.shape[1]


def single(f, drawn, x):
    cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (x, drawn))
    return jax.jit(jax.vmap(f, axis_name="data"))(*cast)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("graph", [graphs.ring(4), graphs.star(4)], ids=lambda graph: graph.name)
def test_neighborhood_gradients_equal_the_paper(share, graph):
    drawn, x = data()
    f = jd.decentralized.neighborhood_value_and_grad(loss, graph, data_share=share)
    value, found = single(f, drawn, x)
    table, weights = gradients(drawn, x), graphs.matrix(graph)
    there, back = np.einsum("ij,ijk->ik", weights, table), np.einsum("ij,jik->ik", weights, table)
    np.testing.assert_allclose(found, (1 - share) * there + share * back, atol=2e-6)
    own = ((np.einsum("iek,ik->ie", drawn["a"], x) - drawn["b"]) ** 2).mean(1) / 2
    np.testing.assert_allclose(value, own, rtol=1e-5)


def nearest(g, rows):
    """min |z - g|² with rows z >= 0, by non-negative least squares: z = g + v rows."""
    v, _ = nnls(rows.T, -g)
    return g + v @ rows


def test_cross_gradients_raise_no_neighbors_loss():
    graph = graphs.path(4)  # ends have one neighbor, and nothing must come of the other
    joined = graphs.matrix(graph) != 0
    f, bent = jd.decentralized.cross_value_and_grad(loss, graph), 0
    for seed in range(4):
        drawn, x = data(seed)
        drawn["b"], x = 3 * drawn["b"], 0.1 * x  # gradients that have little in common
        _, found = single(f, drawn, x)
        table = gradients(drawn, x)
        for i in range(WORKERS):
            rows = np.array([table[j, i] for j in range(WORKERS) if joined[i, j]])
            np.testing.assert_allclose(found[i], nearest(table[i, i], rows), atol=2e-4)
            bent += np.abs(found[i] - table[i, i]).max() > 0.01
    assert bent > 3  # somebody's gradient was in somebody's way


def test_sharpness_aware_gradients_are_those_uphill():
    drawn, x = data()
    f = jd.decentralized.sharpness_aware(jd.local_value_and_grad(loss), radius=0.2)
    _, found = single(f, drawn, x)
    own = np.einsum("iik->ik", gradients(drawn, x))
    uphill = x + 0.2 * own / np.linalg.norm(own, axis=1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("iik->ik", gradients(drawn, uphill)), atol=2e-5)
    flat = jd.decentralized.sharpness_aware(jd.local_value_and_grad(lambda x, _: 0.0 * jnp.sum(x), axis=None))
    assert flat(jnp.ones(3), None)[1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_n_saddle_takes_every_gradient_uphill(share):
    (drawn, x), graph, radius = data(), graphs.ring(4), 0.2
    f = jd.decentralized.neighborhood_value_and_grad(loss, graph, data_share=share, radius=radius)
    value, found = single(f, drawn, x)
    flat, table = gradients(drawn, x), np.zeros((WORKERS, WORKERS, 5))
    for i in range(WORKERS):
        for j in range(WORKERS):
            uphill = x[j] + radius * flat[i, j] / np.linalg.norm(flat[i, j])
            table[i, j] = gradients(drawn, np.tile(uphill, (WORKERS, 1)))[i, j]
    subscripts = "ij,jik->ik" if share else "ij,ijk->ik"
    np.testing.assert_allclose(found, np.einsum(subscripts, graphs.matrix(graph), table), atol=1e-5)
    own = ((np.einsum("iek,ik->ie", drawn["a"], x) - drawn["b"]) ** 2).mean(1) / 2
    np.testing.assert_allclose(value, own, rtol=1e-5)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("radius", [0.0, 0.1])
@pytest.mark.parametrize(("share", "order", "models"), [(1.0, "adapt_then_combine", 3), (0.0, "combine_then_adapt", 1)])
def test_what_is_sent(share, order, models, radius):
    """One model for each neighbor, and with a share of the data another one back; gossip's own may be the same one."""
    graph = graphs.ring(4)
    tx = jd.gossip(optax.sgd(0.1), graph, method=jd.decentralized.d_psgd(order=order))
    grad = jd.decentralized.neighborhood_value_and_grad(problems.loss, graph, data_share=share, radius=radius)
    mesh, params = jd.make_mesh({"data": 4}), problems.params()

    def start(place):
        return jd.init_state(lambda: problems.TrainState(jd.PerWorker(params), tx.init(params)), place)

    step = problems.make_step(tx, grad=grad)
    compiled = jd.distribute(step, mesh, donate=False).lower(start(mesh), problems.batch()).compile()
    ops = [op for op in jd.analysis.collectives(compiled).ops if op.kind == "collective-permute"]
    assert [op.bytes for op in ops] == [4 * 28] * (2 * models)
    problems.assert_close(
        compiled(start(mesh), problems.batch())[0], jd.simulate(step, 4)(start(4), problems.batch())[0], 2e-5
    )


def test_what_cannot_work_says_so():
    for make in (jd.decentralized.neighborhood_value_and_grad, jd.decentralized.cross_value_and_grad):
        with pytest.raises(ValueError, match="needs symmetric weights"):
            make(loss, graphs.exponential(8))
        with pytest.raises(ValueError, match="same neighbors in every step"):
            make(loss, graphs.shift_one(8))
        with pytest.raises(ValueError, match="has 3 workers, but axis 'data' has 4"):
            single(make(loss, graphs.ring(3)), *data())
    with pytest.raises(ValueError, match=r"data_share must be in \[0, 1\], got 2"):
        jd.decentralized.neighborhood_value_and_grad(loss, graphs.ring(4), data_share=2)
    with pytest.raises(ValueError, match="radius must be at least 0, got -1"):
        jd.decentralized.neighborhood_value_and_grad(loss, graphs.ring(4), radius=-1)
    with pytest.raises(ValueError, match="radius must be positive, got 0"):
        jd.decentralized.sharpness_aware(jd.local_value_and_grad(loss), radius=0)
