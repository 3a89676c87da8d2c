"""Decentralized methods on a mesh: the numbers of the simulation, and what crosses the network."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest

import jaxdist as jd
from jaxdist import topology as graphs

N = 28  # parameters of the tiny model, in two leaves


def state_of(tx, place, axis="data"):
    params = problems.params()
    return jd.init_state(lambda: problems.TrainState(jd.PerWorker(params, axis=axis), tx.init(params)), place)


def sent(compiled, branch="max"):
    """Kind, dtype and bytes of each collective; the loss, a metric of these tests, is averaged too."""
    ops = jd.analysis.collectives(compiled, branch=branch).ops
    return sorted((op.kind, op.dtype, op.bytes) for op in ops if op.bytes > 8)


def payload_of(compressor):
    """The bytes of the codes of the tiny model."""
    return sum(
        x.size * x.dtype.itemsize
        for leaf in jax.tree.leaves(problems.params())
        for x in jax.tree.leaves(jax.eval_shape(compressor.compress, leaf, jax.random.key(0)))
    )


MODEL = ("collective-permute", "float32", 4 * N)
# method, topology of four workers, what a step sends
WIRE = {
    "d_psgd": (jd.decentralized.d_psgd(), graphs.ring(4), [MODEL, MODEL]),
    "one peer": (jd.decentralized.d_psgd(), graphs.one_peer_exponential(4), [MODEL]),
    "complete": (
        jd.decentralized.d_psgd(),
        graphs.complete(4),
        [("all-reduce", "float32", 4 * N + 4)],
    ),  # merged with the loss
    "sgp": (jd.decentralized.sgp(), graphs.digraph(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]), None),
    "tracking": (
        jd.decentralized.gradient_tracking(order="combine_then_adapt"),
        graphs.random_matchings(4, rounds=2),
        [("collective-permute", "float32", 8 * N)],
    ),
    "choco": (jd.decentralized.choco(jd.qsgd(4), step_size=0.4), graphs.ring(4), None),
    "relay": (jd.decentralized.relay_sgd(), graphs.path(4), [MODEL, MODEL]),
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", WIRE)
def test_the_mesh_equals_the_simulation_and_sends_what_it_says(name):
    method, graph, expected = WIRE[name]
    tx = jd.gossip(optax.adam(0.05), graph, method=method)
    mesh = jd.make_mesh({"data": 4})
    on_mesh, simulated = state_of(tx, mesh), state_of(tx, 4)
    compiled = jd.distribute(problems.make_step(tx), mesh, donate=False).lower(on_mesh, problems.batch()).compile()
    simulation = jd.simulate(problems.make_step(tx), 4)
    for i in range(3):
        on_mesh, _ = compiled(on_mesh, problems.batch(seed=i))
        simulated, _ = simulation(simulated, problems.batch(seed=i))
        if i == 0:  # later a last bit may flip a stochastic rounding
            problems.assert_close(on_mesh, simulated, 2e-5)
    if name != "choco":
        problems.assert_close(on_mesh, simulated, 2e-5)
    found = sent(compiled)
    if name == "sgp":  # the weight rides along, and who has fewer neighbors sends fewer messages
        assert found == [("collective-permute", "float32", 4 * (N + 1))] * 2
        assert float(jd.transforms.stats(on_mesh.opt)["bytes"]) == pytest.approx(3 * 5 / 4 * 4 * (N + 1), abs=3)
    elif name == "choco":
        payload = payload_of(jd.qsgd(4))
        assert found == [("collective-permute", "uint8", payload)] * 2
        assert payload < 4 * N / 2
        assert float(jd.transforms.stats(on_mesh.opt)["bytes"]) == 3 * 2 * payload
    else:
        assert found == expected
    assert jd.consensus(on_mesh).params["w"].shape == (6, 4)
    assert float(jd.decentralized.consensus_distance(on_mesh.params)) > 0 or name == "complete"
    if len(graph.rounds) > 1:  # all rounds are in the program, and one of them runs
        assert len(sent(compiled, "all")) == len(graph.rounds)
        assert len(sent(compiled, "min")) == 1


def test_eight_devices_agree_after_one_turn(mesh):
    """One-peer exponential without gradients: three steps from different models to their mean."""
    tx = jd.gossip(optax.sgd(0.0), graphs.one_peer_exponential(8))
    state = state_of(tx, mesh)
    start = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
    params = {"b": state.params.value["b"], "w": jax.device_put(start, state.params.value["w"].sharding)}
    state = state._replace(params=jd.PerWorker(params, axis="data"))
    step = jd.distribute(problems.make_step(tx), mesh)
    for _ in range(3):
        state, _ = step(state, problems.batch())
    np.testing.assert_allclose(state.params.value["w"], np.broadcast_to(start.mean(0), start.shape), atol=1e-6)


INT8 = jd.compressors.int8(block=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "size"),
    [(jd.decentralized.d_psgd(), 4 * N), (jd.decentralized.choco(INT8, step_size=0.5), payload_of(INT8))],
    ids=["plain", "choco"],
)
def test_groups_that_act_as_one(method, size, pods):
    """All-reduce among the chips of a pod, gossip across pods, each chip carrying a quarter of the model."""
    both = optax.chain(
        jd.all_reduce(jd.exact(), axis="chip"),
        jd.gossip(optax.sgd(0.1), graphs.ring(2), method=method, axis="pod", carriers="chip"),
    )
    step, state = problems.make_step(both, axis=("pod", "chip")), state_of(both, pods, axis="pod")
    distributed = jd.distribute(step, pods, axis=("pod", "chip"), donate=False)
    compiled = distributed.lower(state, problems.batch()).compile()
    found, simulated = state, state
    simulate = jd.simulate(step, {"pod": 2, "chip": 4})
    for _ in range(2):
        found, simulated = compiled(found, problems.batch())[0], simulate(simulated, problems.batch())[0]
    assert found.params.value["w"].shape == (2, 6, 4)
    problems.assert_close(found, simulated, 2e-6)
    flat = jd.gossip(optax.sgd(0.1), graphs.ring(2), method=method)
    expected, run = state_of(flat, 2), jd.simulate(problems.make_step(flat), 2)
    for _ in range(2):
        expected, _ = run(expected, problems.batch())
    problems.assert_close(found.params.value, expected.params.value, 2e-6)
    ops = jd.analysis.collectives(compiled).ops
    across = [op.bytes for op in ops if op.kind == "collective-permute"]
    assert across == [-(-size // 4)]


def test_agreed_parameters_are_refused(mesh):
    tx = jd.gossip(optax.sgd(0.1), graphs.ring(8))
    params = problems.params()
    state = jd.place(problems.TrainState(params, tx.init(params)), mesh)
    with pytest.raises(ValueError, match="mark the parameters in the train state"):
        jd.distribute(problems.make_step(tx), mesh)(state, problems.batch())


def test_wrapped_gossip_is_refused():
    tx = optax.MultiSteps(jd.gossip(optax.sgd(0.1), graphs.ring(4)), 2)
    with pytest.raises(ValueError, match="MultiSteps around a transformation that communicates"):
        jd.simulate(problems.make_step(tx), 4)(state_of(tx, 4), problems.batch())


def test_half_precision_models_travel_as_they_are_and_keep_their_mean():
    def one_worker(x):
        tx = jd.gossip(optax.sgd(0.0), graphs.ring(4))
        updates, _ = tx.update(jnp.zeros_like(x), tx.init(x), x)
        return x + updates

    start = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    found = jax.vmap(one_worker, axis_name="data")(jnp.asarray(start, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    expected = graphs.matrix(graphs.ring(4)) @ np.asarray(jnp.asarray(start, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.02)


def test_gradients_narrower_than_the_models_do_not_round_the_mean():
    def one_worker(x):
        tx = jd.gossip(optax.sgd(0.0), graphs.complete(4))
        updates, _ = tx.update(jnp.zeros(x.shape, jnp.bfloat16), tx.init(x), x)
        return x + updates

    start = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    found = jax.vmap(one_worker, axis_name="data")(jnp.asarray(start))
    np.testing.assert_allclose(found, np.broadcast_to(start.mean(0), start.shape), atol=1e-6)
