"""SlowMo around gossip: an exact average every few steps, after which the method starts again from the mean model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_run import gradient, matrices, quadratics, run
from reference import slowmo as reference

import jaxdist as jd
from jaxdist import analysis
from jaxdist import topology as graphs

WORKERS, PERIOD, BETA, N = 4, 3, 0.6, 6
RATES = np.array([0.1] * 6 + [0.02] * 6, np.float32)  # a drop between two rounds
DIRECTED = graphs.digraph(WORKERS, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
SENT = 2 * (WORKERS - 1) / WORKERS


def scale_by_given_rate():
    def scale(updates, state, params=None, **given):
        del params
        return jax.tree.map(lambda u: -given["learning_rate"] * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scale)


def slowmo(gossip, **options):
    return jd.local_steps(gossip, jd.local_sgd.slow_momentum(momentum=BETA), sync_period=PERIOD, **options)


INNER = {
    "momentum": (lambda: optax.trace(0.9), lambda: reference.heavy_ball(0.9)),
    "adam": (lambda: optax.scale_by_adam(), lambda: reference.adam()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("inner", "graph", "buffers", "overlap"),
    [
        ("momentum", DIRECTED, "reset", False),
        ("adam", DIRECTED, "maintain", False),
        ("momentum", graphs.one_peer_exponential(WORKERS), "maintain", True),
        ("adam", DIRECTED, "reset", True),
    ],
    ids=["sgp, momentum", "sgp, adam", "osgp, momentum", "osgp, adam"],
)
def test_equals_the_reference(inner, graph, buffers, overlap):
    make, direction = INNER[inner]
    a, b = quadratics(WORKERS, N)
    method = jd.decentralized.osgp() if overlap else jd.decentralized.sgp()
    tx = slowmo(jd.gossip(optax.chain(make(), scale_by_given_rate()), graph, method=method), buffers=buffers)
    start = np.zeros((WORKERS, N))
    found, state = run(tx, a, b, start, steps=len(RATES), learning_rate=RATES)
    expected = reference.sgp_slowmo(
        gradient(a, b),
        start,
        matrices(graph, len(RATES)),
        RATES.astype(float),
        direction=direction(),
        period=PERIOD,
        beta=BETA,
        reset=buffers == "reset",
        overlap=overlap,
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    after = found[PERIOD - 1 :: PERIOD]
    np.testing.assert_allclose(after, np.broadcast_to(after[:, :1], after.shape), atol=1e-6)
    # A reset is a new start of the method: the weights are 1 again.
    weights = [x for x in jax.tree.leaves(state.inner.method.value) if x.shape == (WORKERS,)]
    assert all(set(np.asarray(x)) <= {0.0, 1.0} for x in weights)


def test_of_momentum_zero_with_a_complete_round_it_is_synchronous():
    """Oracle: period 1 and an average at the end of each step leave nothing of the graph."""
    a, b = quadratics(WORKERS, N)
    mixing = jd.gossip(optax.sgd(0.1), DIRECTED, method=jd.decentralized.sgp())
    tx = jd.local_steps(mixing, optax.sgd(1.0), sync_period=1)
    found, _ = run(tx, np.ones_like(a), b, np.zeros((WORKERS, N)), steps=5)
    x = np.zeros(N)
    for t in range(5):
        p = graphs.matrix(DIRECTED)
        x = ((p @ (x - 0.1 * (x - b))) / p.sum(1, keepdims=True)).mean(0)
        np.testing.assert_allclose(found[t], np.tile(x, (WORKERS, 1)), atol=1e-6)


METHODS = {
    "gradient_tracking": lambda: jd.decentralized.gradient_tracking(),
    "d2": lambda: jd.decentralized.d2(),
    "quasi_global_momentum": lambda: jd.decentralized.quasi_global_momentum(0.1),
    "quasi_global_adam": lambda: jd.decentralized.quasi_global_adam(),
    "choco": lambda: jd.decentralized.choco(jd.top_k(0.5), step_size=0.3),
    "dcd_psgd": lambda: jd.decentralized.dcd_psgd(jd.compressors.int8(block=6)),
    "relay_sgd": lambda: jd.decentralized.relay_sgd(),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", METHODS)
def test_a_round_of_any_method_is_a_fresh_run_from_the_mean(name):
    """What a method keeps (trackers, estimates, counts of a tree) belongs to models that the average has replaced."""
    a, b = quadratics(WORKERS, N)
    graph = graphs.path(WORKERS) if name == "relay_sgd" else graphs.ring(WORKERS)
    mixing = jd.gossip(optax.sgd(0.1), graph, method=METHODS[name]())
    found, _ = run(jd.local_steps(mixing, optax.sgd(1.0), sync_period=PERIOD), a, b, np.zeros((WORKERS, N)), steps=9)
    model = np.zeros(N)
    for i in range(3):
        alone, _ = run(mixing, a, b, np.tile(model, (WORKERS, 1)), steps=PERIOD, known=model)
        model = alone[-1].mean(0)
        np.testing.assert_allclose(found[3 * i : 3 * i + 2], alone[:2], atol=2e-6)
        np.testing.assert_allclose(found[3 * i + 2], np.tile(model, (WORKERS, 1)), atol=2e-6)


def make_step(tx):
    def step(state, batch):
        updates, opt = tx.update(state["x"] - batch[0], state["opt"], state["x"], learning_rate=0.1)
        return {"x": state["x"] + updates, "opt": opt}, {}

    return step


def place(tx, where):
    return jd.place({"x": jd.PerWorker(jnp.zeros(N)), "opt": tx.init(jnp.zeros(N))}, where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "buffers"),
    [(jd.decentralized.sgp(), "average"), (jd.decentralized.osgp(), "reset")],
    ids=["sgp", "osgp"],
)
def test_a_mesh_does_the_same_and_sends_one_model_more_in_a_round(method, buffers):
    mixing = jd.gossip(optax.sgd(0.1, momentum=0.9), DIRECTED, method=method)
    tx = slowmo(mixing, buffers=buffers)
    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    targets = np.arange(WORKERS * N, dtype=np.float32).reshape(WORKERS, N)
    distributed, simulated = jd.distribute(make_step(tx), mesh, donate=False), jd.simulate(make_step(tx), WORKERS)
    on_mesh, in_simulation = place(tx, mesh), place(tx, WORKERS)
    for _ in range(2 * PERIOD):
        on_mesh, in_simulation = distributed(on_mesh, targets)[0], simulated(in_simulation, targets)[0]
    for left, right in zip(jax.tree.leaves(on_mesh["x"]), jax.tree.leaves(in_simulation["x"]), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    trace = np.asarray(on_mesh["opt"].inner.inner.value[0].trace)
    assert np.ptp(trace, axis=0).max() < 1e-6
    assert (np.abs(trace).max() == 0) == (buffers == "reset")

    program = distributed.lower(on_mesh, targets).compile()
    plain = jd.distribute(make_step(mixing), mesh, donate=False).lower(place(mixing, mesh), targets).compile()
    every_step = analysis.collectives(plain).wire_bytes
    assert every_step == 5 / 4 * 4 * (N + 1)  # five links of four workers, with their weights
    assert analysis.collectives(program, branch="min").wire_bytes == every_step
    models = 2 if buffers == "average" else 1
    assert analysis.collectives(program, branch="max").wire_bytes == every_step + models * SENT * 4 * N
    total = float(jd.transforms.stats(on_mesh["opt"])["bytes"])
    assert total == pytest.approx(2 * PERIOD * every_step + 2 * models * SENT * 4 * N, abs=2 * PERIOD)


def test_what_osgp_sends_does_not_wait_for_the_gradient():
    tx = jd.gossip(optax.sgd(0.1), DIRECTED, method=jd.decentralized.osgp())
    state = jax.tree.map(lambda x: jnp.tile(x, (WORKERS, *[1] * x.ndim)), tx.init(jnp.zeros(N)).method.value)

    def sent(x, gradient, method_state):
        initial = tx.init(jnp.zeros(N))
        initial = initial._replace(method=jd.PerWorker(method_state, axis=initial.method.axis))
        return tx.update(gradient, initial, x)

    jaxpr = jax.make_jaxpr(jax.vmap(sent, axis_name="data"))(jnp.ones((WORKERS, N)), jnp.ones((WORKERS, N)), state)
    depends = {jaxpr.jaxpr.invars[1]}
    messages = 0
    for equation in jaxpr.jaxpr.eqns:
        late = any(not hasattr(x, "val") and x in depends for x in equation.invars)
        depends |= set(equation.outvars) if late else set()
        # vmap turns a permutation of workers into a gather of rows
        if equation.primitive.name == "gather" and equation.outvars[0].aval.shape[:1] == (WORKERS,):
            messages += 1
            assert not late
    assert messages >= 2


def test_osgp_keeps_the_sum_of_models_and_of_weights():
    rng = np.random.default_rng(0)
    start = rng.normal(size=(WORKERS, N))
    tx = jd.gossip(optax.sgd(0.0), DIRECTED, method=jd.decentralized.osgp())
    a = np.ones((WORKERS, N))
    found, state = run(tx, a, a, start, steps=60)
    np.testing.assert_allclose(found[-1], np.tile(start.mean(0), (WORKERS, 1)), atol=1e-4)
    method = state.method.value
    leaving = 1 - np.diag(graphs.matrix(DIRECTED))
    assert float((method.weight + leaving * method.outgoing_weight).sum()) == pytest.approx(WORKERS, abs=1e-4)


def test_slowmo_lowers_the_loss_of_sgp_on_different_data():
    """The direction of the paper, at equal steps and a small rate: on quadratics a larger one would do as well."""
    workers, steps = 8, 96
    a, b = quadratics(workers, 20, seed=1)
    a = a * np.geomspace(0.01, 1, 20)  # badly conditioned
    optimum = (a * b).sum(0) / a.sum(0)
    noise = np.random.default_rng(2).normal(size=(steps, workers, 20)) * 0.1

    def excess(tx):
        found, _ = run(tx, a, b, np.zeros((workers, 20)), steps=steps, noise=noise, every=False)
        return float((a.mean(0) * (found.mean(0) - optimum) ** 2).sum() / 2)

    mixing = jd.gossip(
        optax.sgd(0.05, momentum=0.5),
        graphs.one_peer_exponential(workers),
        method=jd.decentralized.sgp(),
    )
    tx = jd.local_sgd.slowmo(mixing, sync_period=12, learning_rate=0.05, momentum=BETA)
    assert excess(tx) < 0.7 * excess(mixing)


def test_what_cannot_be():
    mixing = jd.gossip(optax.sgd(0.1), DIRECTED, method=jd.decentralized.sgp())
    for options in ({"delay": 1}, {"fragments": 2}, {"merge_alpha": 0.5}, {"warmup_steps": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* cannot be used with it"):
            slowmo(mixing, **options).init({"a": jnp.zeros(2), "b": jnp.zeros(3)})
    overlapped = jd.gossip(optax.sgd(0.1), DIRECTED, method=jd.decentralized.osgp())
    with pytest.raises(ValueError, match="round= cannot select them"):
        jax.vmap(lambda x: overlapped.update(x, overlapped.init(x), x, round=0), axis_name="data")(jnp.zeros(WORKERS))
