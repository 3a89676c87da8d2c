"""Gossip where graphs are irregular, axes in another order than the mesh's, or the number of workers changes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxdist as jd
from jaxdist.decentralized import dcd_psgd, due_round, gradient_tracking, relay_sgd, sgp

NONE = optax.sgd(0.0)
ONE_WAY = jd.topology.digraph(3, [(0, 1), (1, 2), (2, 1)])


@pytest.mark.parametrize("axis", [("pod", "chip"), ("chip", "pod")])
def test_axes_may_have_another_order_than_the_mesh(axis):
    sizes = {"pod": 2, "chip": 4}
    mesh = jd.make_mesh(sizes)
    # A directed graph without symmetries: every other numbering of the workers gives other models.
    graph = jd.topology.digraph(8, [(i, (i + 1) % 8) for i in range(8)] + [(0, 3), (2, 6)])
    tx = jd.gossip(optax.sgd(0.05), graph, axis=axis, method=sgp())

    def step(state, batch):
        updates, opt = tx.update(state[0] - batch[0], state[1], state[0])
        return (state[0] + updates, opt), {}

    def models(run, where):
        state = jd.init_state(
            lambda: (jd.PerWorker(jnp.zeros(()), axis=axis), tx.init(jnp.zeros(()))), where, axis=axis
        )
        for _ in range(3):
            state, _ = run(state, jnp.arange(8.0) ** 2)
        return np.ravel(state[0].value)

    on_mesh = models(jd.distribute(step, mesh, axis=axis), mesh)
    simulated = models(jd.simulate(step, sizes, axis=axis), sizes)
    np.testing.assert_allclose(on_mesh, simulated, rtol=1e-5)


@pytest.mark.parametrize("axes", [("a", "b", "c"), ("c", "a", "b"), ("b", "a"), ("c", "a")])
def test_a_permutation_follows_the_order_of_its_axes(axes):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    size = 2 ** len(axes)
    pairs = [(i, (3 * i + 1) % size) for i in range(size)]
    source = {destination: source for source, destination in pairs}

    def send():
        comm = jd.comm.over(axes)
        return comm.ppermute(comm.varying(jnp.asarray(comm.index, jnp.int32)), pairs)[None]

    run = jax.shard_map(send, mesh=mesh, in_specs=(), out_specs=PartitionSpec(axes), axis_names=set(axes))
    assert jax.jit(run)().tolist() == [source[i] for i in range(size)]


@pytest.mark.parametrize("method", [relay_sgd(), dcd_psgd(jd.compressors.int8(), replicas=True)], ids=str)
def test_another_number_of_workers_continues_from_consensus(method, tmp_path):
    def start(workers):
        tx = jd.gossip(optax.sgd(0.1), jd.topology.path(workers), method=method)

        def step(state, batch):
            updates, opt = tx.update(batch[0] * (state[0] - 5), state[1], state[0])
            return (state[0] + updates, opt), {}

        x = jnp.zeros(1)
        return jd.init_state(lambda: (jd.PerWorker(x), tx.init(x)), workers), jd.simulate(step, workers)

    state, run = start(4)
    for _ in range(120):
        state, _ = run(state, jnp.ones(4))
    jd.checkpoint.save(tmp_path, state, 120)
    like, run = start(6)
    warned = "relay" in str(method)
    with pytest.warns(UserWarning, match="mean_params") if warned else contextlib.nullcontext():
        state = jd.checkpoint.resume(tmp_path, like).state
    for _ in range(50):
        state, _ = run(state, jnp.zeros(6))  # without a gradient
    np.testing.assert_allclose(np.ravel(state[0].value), 5.0, atol=0.05)


def test_a_loss_without_a_gradient_at_zero_needs_no_edge_there():
    def loss(x, a):
        return jnp.vdot(a, x / jnp.linalg.norm(x))

    nearby = jd.decentralized.neighborhood_value_and_grad(loss, jd.topology.star(4))
    found = jax.jit(jax.vmap(nearby, axis_name="data"))(jnp.ones((4, 2)), jnp.arange(8.0).reshape(4, 2))[1]
    assert np.isfinite(found).all()


def test_cross_gradients_take_empty_leaves():
    cross = jd.decentralized.cross_value_and_grad(
        lambda x, a: jnp.sum(x["w"]) * a + jnp.sum(x["none"]), jd.topology.ring(2)
    )
    params = {"w": jnp.ones((2, 3)), "none": jnp.ones((2, 0))}
    assert jax.vmap(cross, axis_name="data")(params, jnp.ones(2))[1]["none"].shape == (2, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: jd.gossip(NONE, jd.topology.digraph(3, [(0, 1), (1, 2), (2, 1)]), method=sgp()),
            "worker 1 never receives",
        ),
        (lambda: jd.gossip(NONE, jd.topology.from_matrix(np.eye(4))), "worker 1 never receives"),
        (
            lambda: jd.gossip(NONE, jd.topology.from_edges(4, [(0, 1), (2, 3)])),
            "worker 2 never receives",
        ),
        (lambda: jd.gossip(NONE, jd.topology.complete(4), carriers="data"), "carriers must be another axis"),
        (lambda: jd.gossip(NONE, jd.topology.ring(2), axis=("a", "b"), carriers="b"), "carriers must be another axis"),
        (
            lambda: jd.topology.matcha(jd.topology.ring(8), budget=0.01, rounds=2),
            "some workers of .* never communicate",
        ),
    ],
)
def test_workers_that_never_agree_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_matcha_draws_until_all_communicate():
    """Of these seeds, the first draws of 2 and 4 leave workers out."""
    rates = [jd.topology.mixing_rate(jd.topology.matcha(jd.topology.ring(8), budget=0.1, seed=s)) for s in range(1, 5)]
    assert max(rates) < 1 - 1e-9


def test_push_sum_weights_survive_a_round_that_is_doubly_stochastic():
    irregular = jd.topology.digraph(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
    graph = jd.topology.Topology("changing", 4, irregular.rounds + jd.topology.ring(4).rounds, (0, 1))
    tx = jd.gossip(NONE, graph, method=sgp())

    def one_worker(x, static):
        opt = tx.init(x)
        for i in range(2):
            chosen = {"round": due_round(i, graph)} if static else {}
            updates, opt = tx.update(0 * x, opt, x, **chosen)
            x = x + updates
        return x, opt.method.value

    start = jnp.array([0.0, 4.0, 8.0, 12.0])
    chosen, counted = (
        jax.jit(jax.vmap(lambda x, s=s: one_worker(x, s), axis_name="data"))(start) for s in (True, False)
    )
    np.testing.assert_allclose(chosen[0], counted[0], rtol=1e-6)
    np.testing.assert_allclose(chosen[1], counted[1], rtol=1e-6)


def test_a_method_that_stacks_leaves_refuses_axes_of_the_compiler():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for method in (jd.decentralized.choco(jd.compressors.int8(), step_size=0.5), gradient_tracking()):
        tx = jd.gossip(NONE, jd.topology.ring(4), method=method)
        params = {"w": jnp.ones((8, 4))}
        state = jd.place((jd.PerWorker(params), tx.init(params)), mesh)

        def step(state, batch, tx=tx):
            updates, opt = tx.update(jax.tree.map(lambda x: x * batch[0], state[0]), state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt), {}

        run = jd.distribute(step, mesh)
        if method.flattens:
            with pytest.raises(ValueError, match="flattens leaves"):
                run(state, jnp.ones(4))
        else:
            run(state, jnp.ones(4))


def test_gradient_tracking_skips_a_gradient_that_is_not_finite_with_all_workers():
    tx = jd.skip_nonfinite(jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=gradient_tracking()))

    def step(state, batch):
        updates, opt = tx.update(state[0] - batch[0], state[1], state[0])
        return (state[0] + updates, opt), {}

    state = jd.init_state(lambda: (jd.PerWorker(jnp.zeros(())), tx.init(jnp.zeros(()))), 4)
    run = jd.simulate(step, 4)
    for number in range(200):
        batch = np.arange(3.0, 7.0, dtype=np.float32)
        batch[2] = np.nan if number == 3 else batch[2]
        state, _ = run(state, batch)
    np.testing.assert_allclose(state[0].value, 4.5, atol=1e-3)
