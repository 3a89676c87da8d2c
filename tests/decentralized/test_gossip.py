"""Decentralized methods: their equations, what they converge to, what stays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_run import CURVATURES, OPTIMA, apart, gradient, matrices, quadratics, run
from reference import gossip as reference

import jaxdist as jd
from jaxdist import topology as graphs

RATE = 0.1
CTA = "combine_then_adapt"
# method, topology, reference
EQUATIONS = {
    "d_psgd": (jd.decentralized.d_psgd(), graphs.ring(5), reference.d_psgd, {}),
    "d_psgd, combine first": (
        jd.decentralized.d_psgd(order=CTA),
        graphs.star(5),
        reference.d_psgd,
        {"combine_first": True},
    ),
    "d_psgd, changing": (jd.decentralized.d_psgd(), graphs.random_matchings(5, rounds=3), reference.d_psgd, {}),
    "sgp": (
        jd.decentralized.sgp(),
        graphs.digraph(5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2), (0, 3), (2, 0)]),
        reference.sgp,
        {},
    ),
    "d2": (jd.decentralized.d2(), graphs.ring(5), reference.d2, {}),
    "gradient_tracking": (
        jd.decentralized.gradient_tracking(),
        graphs.one_peer_exponential(5),
        reference.gradient_tracking,
        {},
    ),
    "gradient_tracking, combine first": (
        jd.decentralized.gradient_tracking(order=CTA),
        graphs.ring(5),
        reference.gradient_tracking,
        {"combine_first": True},
    ),
    "quasi_global_momentum": (
        jd.decentralized.quasi_global_momentum(RATE),
        graphs.ring(5),
        reference.quasi_global_momentum,
        {},
    ),
    "quasi_global_momentum, nesterov": (
        jd.decentralized.quasi_global_momentum(RATE, momentum=0.8, decay=0.6, nesterov=True),
        graphs.relabeled_ring(5, rounds=2),
        reference.quasi_global_momentum,
        {"beta": 0.8, "mu": 0.6, "nesterov": True},
    ),
    "quasi_global_adam": (jd.decentralized.quasi_global_adam(), graphs.ring(5), reference.quasi_global_adam, {}),
    "quasi_global_momentum over choco": (
        jd.decentralized.quasi_global_momentum(
            RATE, method=jd.decentralized.choco(jd.top_k(0.5), step_size=0.3), momentum=0.8
        ),
        graphs.torus(6),
        reference.quasi_global_choco,
        {"known": 0, "code": lambda x: reference.top_k(x, 3), "step_size": 0.3, "beta": 0.8},
    ),
    "choco": (
        jd.decentralized.choco(jd.top_k(0.5), step_size=0.3),
        graphs.torus(6),
        reference.choco,
        {"known": 0, "code": lambda x: reference.top_k(x, 3), "step_size": 0.3},
    ),
    "dcd_psgd": (
        jd.decentralized.dcd_psgd(jd.top_k(0.5)),
        graphs.star(5),
        reference.dcd_psgd,
        {"code": lambda x: reference.top_k(x, 3)},
    ),
    "dcd_psgd, as BAGUA": (
        jd.decentralized.dcd_psgd(jd.top_k(0.5)),
        graphs.ring(5),
        reference.low_precision_ring,
        {"code": lambda x: reference.top_k(x, 3)},
    ),
    "ecd_psgd": (
        jd.decentralized.ecd_psgd(jd.top_k(0.5)._replace(variance=lambda shape: 1.0)),
        graphs.ring(5),
        reference.ecd_psgd,
        {"code": lambda x: reference.top_k(x, 3)},
    ),
    "saps_psgd": (
        jd.decentralized.saps_psgd(jd.compressors.random_k(0.5)),
        graphs.random_matchings(5, rounds=3),
        reference.saps_psgd,
        {"mask": lambda t: drawn_entries(jd.compressors.random_k(0.5), t)},
    ),
}


def drawn_entries(code, count):
    """Ones where the code keeps entries of a leaf of 6 in this step, on all workers."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), count), 0)
    return np.asarray(jax.jit(lambda x, key: code.decompress(code.compress(x, key), x))(jnp.ones(6), key))


@pytest.mark.slow
@pytest.mark.parametrize("graph", [graphs.random_matchings(8), graphs.one_peer_exponential(8)], ids=lambda g: g.name)
def test_sparse_mixing_reaches_consensus_on_graphs_that_change(graph):
    """Without steps the mean stays, and the workers' distance shrinks with every step; not to a floor."""
    start = np.random.default_rng(0).normal(size=(8, 256))
    density, steps = 0.25, 96
    tx = jd.gossip(optax.sgd(0.0), graph, method=jd.decentralized.saps_psgd(jd.compressors.random_k(density)))
    found, _ = run(tx, np.ones_like(start), np.zeros_like(start), start, steps=steps)
    np.testing.assert_allclose(found.mean(1) - start.mean(0), 0, atol=2e-6)
    left = (apart(found) / apart(start)) ** 2
    # A pairing drawn at random leaves (1 - 1/7) / 2 of the error of the entries that it averages.
    rate = 1 - density * (1 - (1 - 1 / 7) / 2)
    assert 0.3 * rate**12 < left[11] < 3 * rate**12
    assert left[-1] < 3e-4


def test_sparse_mixing_needs_entries_as_they_are():
    for code in (jd.top_k(0.1), jd.compressors.random_k(0.1, unbiased=True), jd.compressors.cast(jnp.bfloat16)):
        with pytest.raises(ValueError, match="keeps the same entries on all workers, got"):
            jd.decentralized.saps_psgd(code)


def check_against_the_paper(name, *, atol, **options_of_run):
    method, graph, expect, options = EQUATIONS[name]
    a, b = quadratics(graph.workers)
    # Methods whose workers remember each other start from one model.
    equal = name in ("dcd_psgd", "dcd_psgd, as BAGUA", "ecd_psgd")
    start = np.random.default_rng(1).normal(size=(1 if equal else graph.workers, 6)) * np.ones((graph.workers, 1))
    tx = jd.gossip(optax.sgd(RATE), graph, method=method)
    found, state = run(tx, a, b, start, known=start[0] if equal else None, **options_of_run)
    if "known" in options:
        options = {**options, "known": np.zeros_like(start)}
    expected = expect(gradient(a, b), start, matrices(graph, 20), RATE, **options)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    assert np.abs(expected[0] - expected[-1]).max() > 0.1
    assert state.count.tolist() == [20] * graph.workers


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", EQUATIONS)
def test_twenty_steps_equal_the_paper(name):
    check_against_the_paper(name, atol=3e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EQUATIONS)
def test_twenty_steps_in_float64_round_nothing_to_float32(name):
    with jax.enable_x64(True):
        check_against_the_paper(name, atol=1e-13, dtype=np.float64)


def test_the_distance_of_models_that_differ_less_than_float32_resolves():
    with jax.enable_x64(True):
        models = jnp.array([[1 - 1e-9], [1 + 1e-9]])
        assert float(jd.decentralized.consensus_distance(jd.PerWorker(models))) == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize("graph", [graphs.path(4), graphs.binary_tree(6), graphs.star(4)], ids=lambda g: g.name)
def test_relaying_is_the_delayed_average_over_all_workers(graph):
    a, b = quadratics(graph.workers)
    start = np.random.default_rng(1).normal(size=6) * np.ones((graph.workers, 1))
    found, _ = run(jd.gossip(optax.sgd(RATE), graph, method=jd.decentralized.relay_sgd()), a, b, start, known=start[0])
    joined = (graphs.matrix(graph) != 0).astype(float)
    distances = np.full(joined.shape, -1)
    for steps in range(graph.workers, -1, -1):
        distances[np.linalg.matrix_power(joined, steps) > 0] = steps
    expected = reference.relay_sgd(gradient(a, b), start, distances, RATE, 20)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("method", "mean", "error"),
    [
        (jd.decentralized.d_psgd(), 4.797676, 1.161883),
        (jd.decentralized.d_psgd(order=CTA), 4.622643, 1.304653),
        (jd.decentralized.sgp(), 4.797676, 1.161883),
        (jd.decentralized.d2(), 5.0, 0.0),
        (jd.decentralized.gradient_tracking(), 5.0, 0.0),
        (jd.decentralized.gradient_tracking(order=CTA), 5.0, 0.0),
    ],
)
def test_where_data_differ(method, mean, error):
    """Plain gossip ends off the optimum by what the page computed; the methods that correct for it end in it."""
    tx = jd.gossip(optax.sgd(0.1), graphs.ring(8), method=method)
    found, _ = run(tx, CURVATURES, OPTIMA, np.zeros((8, 1)), steps=3000, every=False)
    assert found.mean() == pytest.approx(mean, abs=2e-5)
    assert apart(found) == pytest.approx(error, abs=2e-5)


def test_relaying_has_no_bias():
    a, b = np.arange(1.0, 5)[:, None], np.arange(4.0, 0, -1)[:, None]
    tx = jd.gossip(optax.sgd(0.05), graphs.path(4), method=jd.decentralized.relay_sgd())
    found, _ = run(tx, a, b, np.zeros((4, 1)), steps=2000, every=False)
    np.testing.assert_allclose(found, 2.0, atol=1e-5)


def test_d2_where_it_would_diverge():
    """A torus of 8 has an eigenvalue of -1/2: plain D² blows up, and the default does not."""
    graph = graphs.torus(8)
    tx = jd.gossip(optax.sgd(0.1), graph, method=jd.decentralized.d2())
    found, _ = run(tx, CURVATURES, OPTIMA, np.zeros((8, 1)), steps=3000, every=False)
    np.testing.assert_allclose(found, 5.0, atol=1e-5)
    plain = reference.d2(gradient(CURVATURES, OPTIMA), np.zeros((8, 1)), matrices(graph, 100), 0.1)
    assert np.abs(plain[-1]).max() > 1e6
    with pytest.raises(ValueError, match=r"smallest eigenvalue is -0.500, and must be above -1/3"):
        jd.gossip(optax.sgd(0.1), graph, method=jd.decentralized.d2(exact_diffusion=False))


def test_d2_is_not_kicked_when_the_rate_drops():
    schedule = optax.piecewise_constant_schedule(0.1, {1000: 0.1})
    tx = jd.gossip(optax.sgd(schedule), graphs.ring(8), method=jd.decentralized.d2())
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(1002)))
    told, _ = run(tx, CURVATURES, OPTIMA, np.zeros((8, 1)), steps=1002, learning_rate=rates)
    untold, _ = run(tx, CURVATURES, OPTIMA, np.zeros((8, 1)), steps=1002)
    assert np.abs(told[-2:] - 5).max() < 1e-4
    assert np.abs(untold[-2:] - 5).max() > 1


def test_tracking_keeps_the_mean_gradient():
    a, b = quadratics(8)
    tx = jd.gossip(optax.sgd(0.1), graphs.one_peer_exponential(8), method=jd.decentralized.gradient_tracking())
    found, state = run(tx, a, b, np.zeros((8, 6)), steps=31)
    last = (a * (found[-2] - b)).mean(0)
    np.testing.assert_allclose(np.asarray(state.method.value.tracker).mean(0), last, atol=1e-5)


@pytest.mark.parametrize("order", ["adapt_then_combine", CTA])
@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "float64")])
def test_tracking_keeps_the_dtypes_of_its_state(order, dtypes):
    """Whatever those of parameters and gradients, which differ in a run in x64."""
    tx = jd.gossip(optax.sgd(0.1), graphs.ring(4), method=jd.decentralized.gradient_tracking(order=order))

    def worker(x, gradient):
        state = tx.init(x)
        return state, tx.update(gradient, state, x)[1]

    with jax.enable_x64(True):
        before, after = jax.eval_shape(jax.vmap(worker, axis_name="data"), *(jnp.ones((4, 3), x) for x in dtypes))
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(before)]


def test_quasi_global_momentum_keeps_workers_together():
    """Ring of 16, losses (x - i)²/2, rate .01, momentum .9: 2.4285 apart with local momentum, .5761 with this."""
    a, b = np.ones((16, 1)), np.arange(16.0)[:, None]
    local = jd.gossip(optax.sgd(0.01, momentum=0.9), graphs.ring(16))
    quasi = jd.gossip(optax.sgd(0.01), graphs.ring(16), method=jd.decentralized.quasi_global_momentum(0.01))
    for tx, expected in ((local, 2.4285), (quasi, 0.5761)):
        found, _ = run(tx, a, b, np.zeros((16, 1)), steps=6000, every=False)
        assert apart(found) == pytest.approx(expected, abs=1e-3)
        assert found.mean() == pytest.approx(7.5, abs=1e-3)


def test_quasi_global_momentum_rests_where_the_rate_is_zero():
    rates = np.array([0.0, 0.0, 0.1, 0.1], np.float32)
    tx = jd.gossip(
        optax.sgd(lambda t: jnp.asarray(rates)[t]), graphs.ring(4), method=jd.decentralized.quasi_global_momentum()
    )
    a, b = quadratics(4)
    found, state = run(tx, a, b, np.zeros((4, 6)), steps=4, learning_rate=rates)
    assert not found[:2].any()
    assert np.isfinite(jax.tree.leaves(state.method.value)[0]).all()
    assert found[-1].any()


STILL = {
    "ring": graphs.ring(8),
    "torus": graphs.torus(8),
    "relabeled ring": graphs.relabeled_ring(8, rounds=3),
    "complete": graphs.complete(8),
}


@pytest.mark.parametrize("name", STILL)
def test_mixing_keeps_the_mean_and_contracts_at_the_rate_of_the_graph(name):
    graph = STILL[name]
    turn = len(graph.order)
    product = np.linalg.multi_dot([np.eye(8), *reversed(matrices(graph, turn)), np.eye(8)])
    start = np.linalg.svd(product - 1 / 8)[2][:4].T.astype(np.float32) + 3  # the slowest direction first
    found, _ = run(jd.gossip(optax.sgd(0.0), graph), np.ones((8, 4)), np.zeros((8, 4)), start, steps=3 * turn)
    np.testing.assert_allclose(found.mean(1), np.broadcast_to(start.mean(0), (3 * turn, 4)), atol=2e-6)
    before, after = (np.linalg.norm(x - x.mean(0), axis=0) for x in (start, found[turn - 1]))
    rate = graphs.mixing_rate(graph) ** turn
    assert after[0] == pytest.approx(rate * before[0], abs=3e-6)
    assert (after <= rate * before + 3e-6).all()


def test_one_turn_of_the_one_peer_exponential_graph_is_the_mean():
    """64 workers, in simulation: six steps, one model sent in each."""
    start = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    graph = graphs.one_peer_exponential(64)
    found, state = run(jd.gossip(optax.sgd(0.0), graph), np.ones((64, 5)), np.zeros((64, 5)), start, steps=6)
    assert apart(found[4].astype(float)) > 0.05
    np.testing.assert_allclose(found[5], np.broadcast_to(start.mean(0), (64, 5)), atol=1e-6)
    assert np.asarray(state.sent)[0].tolist() == [0, 6 * 5 * 4]


def test_push_sum_finds_the_mean_on_any_directed_graph():
    graph = graphs.digraph(6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3), (1, 4), (2, 0), (0, 2)])
    start = np.arange(6.0)[:, None]
    tx = jd.gossip(optax.sgd(0.0), graph, method=jd.decentralized.sgp())
    found, state = run(tx, np.ones((6, 1)), np.zeros((6, 1)), start, steps=100)
    np.testing.assert_allclose(found[-1], 2.5, atol=1e-5)
    weights = np.asarray(state.method.value.weight)
    assert weights.sum() == pytest.approx(6, abs=1e-4)
    assert np.ptp(weights) > 0.5  # so the models themselves are far from the mean
    with pytest.raises(ValueError, match="use method=sgp"):
        jd.gossip(optax.sgd(0.0), graph)


@pytest.mark.slow
def test_compressed_gossip_agrees_or_diverges_with_its_step_size():
    """The largest of 10 entries on a ring of 8: dispersion after 400 steps."""
    start = np.random.default_rng(0).normal(size=(8, 10))
    zeros = np.zeros((8, 10))
    left = {}
    for size in (0.2, 0.05, 1.0):
        tx = jd.gossip(optax.sgd(0.0), graphs.ring(8), method=jd.decentralized.choco(jd.top_k(0.1), step_size=size))
        found, _ = run(tx, zeros, zeros, start, steps=400)
        finite = found[(np.abs(found) < 1e9).all((1, 2))].astype(float)
        left[size] = apart(finite[-1]) / apart(start)
        if size < 1:
            np.testing.assert_allclose(found[-1].mean(0), start.mean(0), atol=1e-5)
    assert left[0.2] < 1e-4 < left[0.05] < 0.1
    assert left[1.0] > 10


def test_without_a_code_choco_and_dcd_are_plain_gossip():
    a, b = quadratics(8)
    exact = jd.compressors.identity()
    plain, _ = run(
        jd.gossip(optax.sgd(RATE), graphs.ring(8), method=jd.decentralized.d_psgd(order=CTA)), a, b, np.zeros((8, 6))
    )
    for method in (
        jd.decentralized.dcd_psgd(exact),
        jd.decentralized.ecd_psgd(exact._replace(variance=lambda shape: 0.0)),
    ):
        found, _ = run(jd.gossip(optax.sgd(RATE), graphs.ring(8), method=method), a, b, np.zeros((8, 6)))
        np.testing.assert_allclose(found, plain, atol=2e-6)


@pytest.mark.parametrize(
    "method",
    [jd.decentralized.d_psgd(), jd.decentralized.sgp(), jd.decentralized.d2(), jd.decentralized.gradient_tracking()],
)
def test_on_the_complete_graph_all_of_it_is_all_reduce(method):
    a, b = quadratics(6)
    found, _ = run(jd.gossip(optax.sgd(RATE), graphs.complete(6), method=method), a, b, np.zeros((6, 6)))
    expected, _ = run(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(RATE)), a, b, np.zeros((6, 6)))
    np.testing.assert_allclose(found, expected, atol=3e-6)


def test_who_is_not_active_takes_no_step():
    """It averages its neighbors' models all the same, as if its gradient were zero."""
    a, b = quadratics(4)
    active = np.ones((6, 4), bool)
    active[:, 1] = False
    tx = jd.gossip(optax.sgd(0.1), graphs.ring(4))
    found, _ = run(tx, a, b, np.zeros((4, 6)), steps=6, active=active)
    silent, _ = run(tx, np.where(np.arange(4)[:, None] == 1, 0, a), b, np.zeros((4, 6)), steps=6)
    np.testing.assert_allclose(found, silent, atol=1e-6)
    tracking = jd.gossip(optax.sgd(0.1), graphs.ring(4), method=jd.decentralized.gradient_tracking())
    _, state = run(tracking, a, b, np.zeros((4, 6)), steps=6, active=active)
    assert not np.asarray(state.method.value.gradient)[1].any()  # its last gradient is none at all
    assert np.asarray(state.method.value.gradient)[[0, 2, 3]].any()
