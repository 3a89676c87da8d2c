"""SlowMo without the average: each worker by itself, around gossip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import analysis

WORKERS, PERIOD, BETA = 4, 3, 0.6
TARGETS = np.arange(8.0).reshape(WORKERS, 2)
RATES = [0.1] * 6 + [0.02] * 6  # a drop between two rounds


def transformation():
    def scaled(updates, state, params=None, **given):
        del params
        return jax.tree.map(lambda g: -given["learning_rate"] * g, updates), state

    sgd = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scaled)
    mixing = jd.gossip(sgd, jd.topology.ring(WORKERS), method=jd.decentralized.sgp())
    return jd.local_sgd.local_slow_momentum(
        mixing, jd.local_sgd.slow_momentum(momentum=BETA), sync_period=PERIOD
    ), mixing


def make_step(tx):
    def step(state, batch):
        target, rate = batch["target"][0], state["rate"]
        updates, opt = tx.update(state["x"] - target, state["opt"], state["x"], learning_rate=rate)
        return {"x": state["x"] + updates, "opt": opt, "rate": rate}, {}

    return step


def start(tx, where):
    x = jnp.zeros(2)
    return jd.place({"x": jd.PerWorker(x), "opt": tx.init(x), "rate": jnp.float32(0)}, where)


def run(tx, distributed, where):
    state = start(tx, where)
    seen = []
    for rate in RATES:
        state, _ = distributed({**state, "rate": jnp.float32(rate)}, {"target": TARGETS.astype(np.float32)})
        seen.append(np.asarray(state["x"].value))
    return np.array(seen), state


def reference():
    mixing = jd.topology.matrix(jd.topology.ring(WORKERS))
    x = a = u = np.zeros((WORKERS, 2))
    seen = []
    for t, rate in enumerate(RATES, 1):
        x = mixing @ (x - rate * (x - TARGETS))
        if t % PERIOD == 0:
            u = BETA * u + (a - x) / rate
            x = a = a - rate * u
        seen.append(x)
    return np.array(seen)


@pytest.fixture(scope="module")
def simulated():
    tx, _ = transformation()
    return run(tx, jd.simulate(make_step(tx), workers=WORKERS), WORKERS)


def test_equals_a_loop_through_a_fall_of_the_rate(simulated):
    np.testing.assert_allclose(simulated[0], reference(), atol=1e-6)


def test_the_means_follow_slowmo_with_the_average(simulated):
    """Oracle: all of it is linear, so what the workers average to does not see that they never met."""
    x = a = u = np.zeros(2)
    for t, rate in enumerate(RATES, 1):
        x = x - rate * (x - TARGETS.mean(0))
        if t % PERIOD == 0:
            u = BETA * u + (a - x) / rate
            x = a = a - rate * u
        np.testing.assert_allclose(simulated[0][t - 1].mean(0), x, atol=1e-6)
    assert np.ptp(simulated[0][-1], axis=0).max() > 0.01  # while they do differ


def test_a_mesh_does_the_same_and_sends_what_gossip_sends(simulated):
    tx, mixing = transformation()
    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    distributed = jd.distribute(make_step(tx), mesh, donate=False)
    found, state = run(tx, distributed, mesh)
    np.testing.assert_allclose(found, simulated[0], atol=1e-6)
    batch = {"target": TARGETS.astype(np.float32)}
    slow = analysis.collectives(distributed.lower(state, batch).compile())
    plain = jd.distribute(make_step(mixing), mesh, donate=False).lower(start(mixing, mesh), batch).compile()
    assert slow.wire_bytes == analysis.collectives(plain).wire_bytes > 0


def test_what_cannot_be():
    with pytest.raises(ValueError, match="sync_period"):
        jd.local_sgd.local_slow_momentum(optax.sgd(0.1), optax.sgd(1.0), sync_period=0)
    tx, _ = transformation()
    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    state = {"x": jnp.zeros(2), "opt": tx.init(jnp.zeros(2)), "rate": jnp.float32(0)}
    with pytest.raises(ValueError, match="PerWorker"):
        jd.distribute(make_step(tx), mesh)(jd.place(state, mesh), {"target": TARGETS.astype(np.float32)})


DIRECTED = jd.topology.digraph(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])


@pytest.mark.parametrize(
    ("method", "graph", "keeps"),
    [
        (jd.decentralized.sgp(), DIRECTED, "push-sum weights"),
        (jd.decentralized.osgp(), jd.topology.ring(4), "messages that are under way"),
        (jd.decentralized.relay_sgd(), jd.topology.path(4), "messages that are under way"),
        (jd.decentralized.ecd_psgd(jd.qsgd(8)), jd.topology.ring(4), "estimates"),
        (
            jd.decentralized.quasi_global_momentum(0.1, method=jd.decentralized.ecd_psgd(jd.qsgd(8))),
            jd.topology.ring(4),
            "estimates",
        ),
    ],
    ids=["sgp", "osgp", "relay_sgd", "ecd_psgd", "momentum over ecd_psgd"],
)
def test_a_model_that_is_not_all_a_worker_has_is_refused(method, graph, keeps):
    """Moved by itself it would count for more or less than its share, or not at all in the next step."""
    tx = jd.gossip(optax.sgd(0.1), graph, method=method)
    with pytest.raises(ValueError, match=f"keeps .*{keeps}.*use slowmo"):
        jd.local_sgd.local_slow_momentum(tx, jd.local_sgd.slow_momentum(), sync_period=2).init(jnp.zeros(2))


def test_narrow_steps_do_not_round_a_round():
    narrow = optax.stateless(lambda updates, _: optax.tree.cast(updates, jnp.bfloat16))
    tx = jd.local_sgd.local_slow_momentum(optax.chain(optax.sgd(0.1), narrow), optax.sgd(0.7), sync_period=2, axis=None)
    x = start = jnp.linspace(1, 2, 9)
    state, update = tx.init(x), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(x - 3, state, x)
        x = x + updates
    assert float(jnp.abs(x - start).max()) > 0.1
    np.testing.assert_allclose(x, state.anchor.value, atol=1e-6)
