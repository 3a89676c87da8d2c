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


@pytest.mark.parametrize("overlap", [False, True], ids=["sgp", "osgp"])
def test_of_period_one_without_momentum_it_is_data_parallel(overlap):
    """Oracle, section 2 of the SlowMo paper, for any base method: an exact average leaves nothing of the graph."""
    a, b = quadratics(WORKERS, N)
    method = jd.decentralized.osgp() if overlap else jd.decentralized.sgp()
    tx = jd.local_steps(jd.gossip(optax.sgd(0.1), DIRECTED, method=method), optax.sgd(1.0), sync_period=1)
    found, _ = run(tx, a, b, np.zeros((WORKERS, N)), steps=5)
    x = np.zeros(N)
    for t in range(5):
        x = x - 0.1 * (a * (x - b)).mean(0)
        np.testing.assert_allclose(found[t], np.tile(x, (WORKERS, 1)), atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["osgp", "sgp", "relay_sgd", "d_psgd"])
def test_the_mean_of_a_method_is_what_its_mixing_agrees_on(name):
    """Oracle: the same state after many steps without gradients. A round has the same mean."""
    a, b = quadratics(WORKERS, N)
    graph = {"relay_sgd": graphs.path(WORKERS), "d_psgd": graphs.ring(WORKERS)}.get(name, DIRECTED)
    tx = jd.gossip(optax.sgd(0.1), graph, method=getattr(jd.decentralized, name)())
    active = np.arange(120)[:, None].repeat(WORKERS, 1) < 4
    found, _ = run(tx, a, b, np.zeros((WORKERS, N)), steps=120, active=active)
    agreed = found[-1].mean(0)
    assert np.abs(found[-1] - agreed).max() < 1e-5
    early, state = run(tx, a, b, np.zeros((WORKERS, N)), steps=4)
    mean = jd.decentralized.mean_params(jd.PerWorker(jnp.asarray(early[-1]), axis="data"), state)
    np.testing.assert_allclose(mean, agreed, atol=1e-5)
    assert (np.abs(early[-1].mean(0) - agreed).max() < 1e-5) == (name == "d_psgd")
    rounds, _ = run(jd.local_steps(tx, optax.sgd(1.0), sync_period=4), a, b, np.zeros((WORKERS, N)), steps=4)
    np.testing.assert_allclose(rounds[-1], np.tile(agreed, (WORKERS, 1)), atol=1e-5)


KEPT = {
    "gradient_tracking": lambda: jd.decentralized.gradient_tracking(),
    "d2": lambda: jd.decentralized.d2(exact_diffusion=False),
    "quasi_global_momentum": lambda: jd.decentralized.quasi_global_momentum(0.1),
    "quasi_global_adam": lambda: jd.decentralized.quasi_global_adam(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("buffers", ["maintain", "reset", "average"])
def test_what_does_not_belong_to_models_goes_on_through_rounds(name, buffers):
    a, b = quadratics(5, N)
    graph = graphs.ring(5)
    mixing = jd.gossip(optax.sgd(0.1), graph, method=KEPT[name]())
    tx = jd.local_steps(mixing, optax.sgd(1.0), sync_period=PERIOD, buffers=buffers)
    found, _ = run(tx, a, b, np.zeros((5, N)), steps=9)
    matrix, start, rounds = graphs.matrix(graph), np.zeros((5, N)), {"period": PERIOD, "buffers": buffers}
    expected = reference.kept_through_rounds(name, gradient(a, b), start, matrix, 0.1, steps=9, **rounds)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gradient_tracking", "d2"])
def test_different_data_cause_no_bias_with_rounds_either(name):
    """A tracker or a correction that began again with each round would leave .02 to .2."""
    a, b = quadratics(5, N)
    mixing = jd.gossip(optax.sgd(0.1), graphs.ring(5), method=KEPT[name]())
    found, _ = run(
        jd.local_steps(mixing, optax.sgd(1.0), sync_period=PERIOD), a, b, np.zeros((5, N)), steps=600, every=False
    )
    np.testing.assert_allclose(found, np.tile((a * b).sum(0) / a.sum(0), (5, 1)), atol=1e-5)


def test_coded_drifts_of_push_sum_are_as_small_as_those_of_models():
    """The difference of numerators `w z` from the anchor would be as large as the model."""
    start = np.full((WORKERS, N), 1000.0)
    a, b = np.ones((WORKERS, N)), 1000 + quadratics(WORKERS, N)[1]
    mixing = jd.gossip(optax.sgd(0.1), DIRECTED, method=jd.decentralized.osgp())
    reducer = jd.error_feedback(jd.compressed(jd.compressors.int8(block=N)))
    tx = jd.local_steps(mixing, optax.sgd(1.0), sync_period=2, reducer=reducer)
    found, _ = run(tx, a, b, start, steps=80, known=start[0], every=False)
    np.testing.assert_allclose(found, np.tile(b.mean(0), (WORKERS, 1)), atol=0.01)


METHODS = {
    "d_psgd": lambda: jd.decentralized.d_psgd(),
    "choco": lambda: jd.decentralized.choco(jd.top_k(0.5), step_size=0.3),
    "dcd_psgd": lambda: jd.decentralized.dcd_psgd(jd.compressors.int8(block=6)),
    "ecd_psgd": lambda: jd.decentralized.ecd_psgd(jd.compressors.identity()),
    "saps_psgd": lambda: jd.decentralized.saps_psgd(jd.compressors.random_k(1.0)),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", METHODS)
def test_a_round_of_any_method_is_a_fresh_run_from_the_mean(name):
    """The estimates that a method keeps belong to models that the average has replaced."""
    a, b = quadratics(WORKERS, N)
    graph = graphs.ring(WORKERS)
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
    with pytest.raises(ValueError, match=r"gossip inside has axis=\('data',\) and local_steps around it axis='pod'"):
        slowmo(mixing, axis="pod").init(jnp.zeros(2))
    parts = optax.partition({"a": mixing, "b": optax.sgd(0.1)}, {"x": "a", "y": "b"})
    with pytest.raises(ValueError, match=r"keeps push-sum weights.*partition\({label: local_steps\(gossip"):
        slowmo(parts).init({"x": jnp.zeros(2), "y": jnp.zeros(3)})
    inside = jd.local_steps(
        jd.gossip(optax.sgd(0.1), DIRECTED, method=jd.decentralized.sgp()), optax.sgd(1.0), sync_period=2
    )
    with pytest.raises(ValueError, match="loses what gossip keeps then: push-sum weights"):
        jd.local_steps(inside, optax.sgd(1.0), sync_period=3, axis="pod").init(jnp.zeros(2))
    with pytest.raises(ValueError, match="with one gossip inside, got 0"):
        jd.decentralized.mean_params(jd.PerWorker(jnp.zeros(2)), ())
    with pytest.raises(ValueError, match="round= cannot select them"):
        jax.vmap(lambda x: overlapped.update(x, overlapped.init(x), x, round=0), axis_name="data")(jnp.zeros(WORKERS))
