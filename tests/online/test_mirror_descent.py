"""Any-batch mirror descent: the papers' equations, who counts for how much, graphs, what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
import reference.mirror_descent as reference

import jaxdist as jd
from jaxdist import topology
from jaxdist.online import anytime_minibatch, entropy, euclidean, mirror_descent

RATES = optax.polynomial_schedule(0.3, 0.05, 1.0, 20)


def run(tx, start, targets, counts=None):
    """Models `[steps, W, n]` under gradients `x - target`; `counts [steps, W]` are the examples."""

    def worker(targets, counts):
        def step(state, inputs):
            x, opt_state = state
            given = {} if inputs[1] is None else {"examples": inputs[1]}
            updates, opt_state = tx.update(x - inputs[0], opt_state, x, **given)
            x = optax.apply_updates(x, updates)
            return (x, opt_state), x

        return jax.lax.scan(step, (start, tx.init(start)), (targets, counts))[1]

    mapped = jax.jit(jax.vmap(worker, in_axes=(1, None if counts is None else 1), out_axes=1, axis_name="data"))
    return np.asarray(mapped(targets, counts))


def drawn(steps=20, workers=4, n=6, seed=0):
    """Targets around one of each worker, and examples of 0 to 5."""
    rng = np.random.default_rng(seed)
    targets = rng.normal(size=(1, workers, n)) + 0.3 * rng.normal(size=(steps, workers, n))
    counts = rng.integers(0, 6, (steps, workers))
    counts[3] = 0  # nobody
    counts[4] = [0, 0, 0, 2, *counts[4, 4:]][:workers]  # two workers of a ring of four hear of nobody
    return targets.astype(np.float32), counts


def mixing(graph):
    return lambda step: topology.matrix(graph, step)


@pytest.mark.parametrize(
    ("graph", "rounds", "weights", "order", "shape"),
    [
        (topology.ring(4), 1, "batch", "adapt_then_combine", "euclidean"),
        (topology.path(4), 2, "uniform", "combine_then_adapt", "euclidean"),
        (topology.one_peer_exponential(4), 3, "batch", "combine_then_adapt", "entropy"),
        (topology.ring(4), 1, "uniform", "adapt_then_combine", "entropy"),
        (None, 1, "batch", "adapt_then_combine", "entropy"),
    ],
)
def test_twenty_rounds_equal_the_equations(graph, rounds, weights, order, shape):
    targets, counts = drawn()
    start = np.full(6, 1 / 6, np.float32)
    geometry = {"euclidean": euclidean, "entropy": entropy}[shape]()
    tx = mirror_descent(geometry, RATES, topology=graph, rounds=rounds, weights=weights, order=order)
    found = run(tx, jnp.asarray(start), targets, counts)
    matrices = (lambda _: np.full((4, 4), 0.25)) if graph is None else mixing(graph)
    expected = reference.mirror_descent(
        start,
        targets,
        counts,
        matrices=matrices,
        rounds=rounds,
        rate=lambda t: np.asarray(RATES(t)).item(),
        step=getattr(reference, shape),
        weights=weights,
        order=order,
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("graph", "rounds"), [(topology.ring(4), 2), (None, 1)])
def test_twenty_rounds_of_anytime_minibatch(graph, rounds):
    targets, counts = drawn(seed=1)
    start = np.full(6, 1 / 6, np.float32)
    found = run(anytime_minibatch(entropy(), RATES, topology=graph, rounds=rounds), jnp.asarray(start), targets, counts)
    expected = reference.anytime_minibatch(
        start,
        targets,
        counts,
        matrices=(lambda _: np.full((4, 4), 0.25)) if graph is None else mixing(graph),
        rounds=rounds,
        rate=lambda t: np.asarray(RATES(t)).item(),
        step=reference.entropy,
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


def test_an_exact_mean_is_a_step_along_the_pooled_batch():
    """With weights by batch: as one machine with all examples; dual averaging at a constant rate is the same."""
    targets, counts = drawn(5)
    found = run(mirror_descent(euclidean(), 0.2), jnp.zeros(6), targets, counts)
    x, expected = np.zeros(6), []
    for target, b in zip(targets, counts, strict=True):
        x = x - 0.2 * (b[:, None] * (x - target)).sum(0) / max(b.sum(), 1)
        expected.append(x)
    np.testing.assert_allclose(found, np.repeat(np.stack(expected)[:, None], 4, 1), atol=1e-6)
    dual = run(anytime_minibatch(euclidean(), 0.2), jnp.zeros(6), targets, counts)
    np.testing.assert_allclose(dual, found, atol=1e-6)


@pytest.mark.parametrize("make", [mirror_descent, anytime_minibatch])
def test_equal_batches_make_both_weights_equal(make):
    targets, _ = drawn(5)
    counts = np.full((5, 4), 7)
    ring = topology.ring(4)
    by_batch, uniform = (
        run(make(euclidean(), 0.2, topology=ring, weights=weights), jnp.zeros(6), targets, counts)
        for weights in ("batch", "uniform")
    )
    np.testing.assert_allclose(by_batch, uniform, atol=1e-6)
    assert np.ptp(uniform[-1], axis=0).max() > 0.01  # workers of a graph do differ


def test_models_are_averaged_in_one_and_gradients_in_the_other():
    """Two entropic models: their arithmetic mean, and the geometric one of dual averaging."""
    models = jnp.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
    pair = topology.complete(2)

    def primal(x):
        tx = mirror_descent(entropy(), 0.0, topology=pair)
        return optax.apply_updates(x, tx.update(x, tx.init(x), x)[0])

    def dual(x):
        start = jnp.full(3, 1 / 3)
        tx = anytime_minibatch(entropy(), 1.0, topology=pair)
        return optax.apply_updates(start, tx.update(jnp.log(start) - jnp.log(x), tx.init(start), start)[0])

    found = [jax.jit(jax.vmap(f, axis_name="data"))(models) for f in (primal, dual)]
    np.testing.assert_allclose(found[0], [[0.4, 0.3, 0.3]] * 2, atol=1e-6)
    np.testing.assert_allclose(found[1], [[0.398165, 0.344821, 0.257014]] * 2, atol=1e-6)


@pytest.mark.parametrize(("rounds", "left"), [(2, 0.6476), (5, 0.3375)])
def test_rounds_of_consensus_contract_and_keep_the_mean(rounds, left):
    """The slowest deviation on a ring of eight: `ρ^r`, `ρ = .804738`."""
    away = np.cos(2 * np.pi * np.arange(8) / 8).astype(np.float32)

    def worker(x):
        tx = mirror_descent(euclidean(), 0.0, topology=topology.ring(8), rounds=rounds)
        return optax.apply_updates(x, tx.update(x, tx.init(x), x)[0])

    found = jax.jit(jax.vmap(worker, axis_name="data"))(jnp.asarray(3 + away))
    np.testing.assert_allclose(found, 3 + left * away, atol=1e-4)


def test_regret_stays_under_its_bound():
    """`η = D/(G√t)` on absolute losses in a ball: `Reg_T <= 1.5 D G √T` beside every fixed model, and near zero."""
    rng = np.random.default_rng(0)
    points, counts = rng.uniform(-1, 1, (400, 4)).astype(np.float32), rng.integers(1, 6, (400, 4))
    tx = mirror_descent(euclidean(jd.online.ball(1.0)), lambda t: 2 / jnp.sqrt(t + 1.0))

    def worker(points, counts):
        def step(state, inputs):
            x, opt_state = state
            point, count = inputs
            updates, opt_state = tx.update(jnp.sign(x - point), opt_state, x, examples=count)
            return (optax.apply_updates(x, updates), opt_state), x

        return jax.lax.scan(step, (jnp.ones(()), tx.init(jnp.ones(()))), (points, counts))[1]

    models = np.asarray(jax.jit(jax.vmap(worker, in_axes=1, out_axes=1, axis_name="data"))(points, counts))

    def losses(x):  # [steps, m] of models [steps, m]: the pooled loss of the round
        return (np.abs(x[:, :, None] - points[:, None]) * counts[:, None]).sum(2) / counts.sum(1, keepdims=True)

    fixed = losses(np.tile(np.linspace(-1, 1, 41), (400, 1)))
    regret = jd.online.static_regret(losses(models), fixed)
    rounds = np.arange(1, 401)
    assert (regret <= 1.5 * 2 * np.sqrt(rounds)).all()
    assert regret[399] / 400 < 0.5 * regret[49] / 50


@pytest.fixture(scope="module")
def ran():
    """Four workers on a ring, two rounds of consensus, unequal batches: on a mesh and in simulation."""
    grad = jd.online.any_batch(
        lambda params, batch: jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) - batch["y"]) ** 2, 1)
    )
    tx = mirror_descent(euclidean(), 0.1, topology=topology.ring(4), rounds=2, order="combine_then_adapt")

    def step(state, batch):
        examples = batch.pop("b")[0]
        _, gradient = grad(state.params, batch, examples)
        updates, opt = tx.update(gradient, state.opt, state.params, examples=examples)
        return problems.TrainState(optax.apply_updates(state.params, updates), opt), {}

    def state_of(place):
        return jd.init_state(
            lambda: problems.TrainState(jd.PerWorker(problems.params()), tx.init(problems.params())), place
        )

    mesh = jd.make_mesh({"data": 4})
    on_mesh, simulated, simulate = state_of(mesh), state_of(4), jd.simulate(step, 4)
    batches = [{**problems.batch(seed=i), "b": np.array([4, i, 1, 0])} for i in range(3)]
    compiled = jd.distribute(step, mesh, donate=False).lower(on_mesh, batches[0]).compile()
    for batch in batches:
        on_mesh, _ = compiled(on_mesh, batch)
        simulated, _ = simulate(simulated, batch)
    return on_mesh, simulated, compiled


def test_simulation_equals_the_mesh(ran):
    on_mesh, simulated, _ = ran
    problems.assert_close(on_mesh, simulated, 2e-5)
    assert float(jd.transforms.stats(on_mesh.opt)["bytes"]) == 3 * 4 * 4 * 29
    assert jd.consensus(on_mesh).params["w"].shape == (6, 4)


def test_a_round_sends_one_message_to_each_neighbor(ran):
    """The model of 28 entries and one number for its weight, whatever the batch."""
    *_, compiled = ran
    found = [(op.kind, op.dtype, op.bytes) for op in jd.analysis.collectives(compiled).ops]
    assert found == [("collective-permute", "float32", 4 * 29)] * 4


def test_with_an_exact_mean_parameters_stay_agreed(mesh):
    tx = mirror_descent(entropy(), 0.1)
    dual = anytime_minibatch(entropy(), 0.1)
    start = {"x": jnp.full((2, 4), 0.25)}

    def step(state, batch):
        out = []
        for one, (x, opt) in zip((tx, dual), state, strict=True):
            updates, opt = one.update({"x": batch["g"][0]}, opt, x, examples=batch["b"][0])
            out.append((optax.apply_updates(x, updates), opt))
        return tuple(out), {}

    state = jd.init_state(lambda: tuple((start, one.init(start)) for one in (tx, dual)), mesh)
    batch = {"g": np.random.default_rng(0).normal(size=(8, 2, 4)).astype(np.float32), "b": np.arange(8)}
    compiled = jd.distribute(step, mesh, donate=False).lower(state, batch).compile()
    state, _ = compiled(state, batch)
    pooled = np.einsum("wij,w->ij", batch["g"], batch["b"]) / 28
    expected = reference.entropy(np.full((2, 4), 0.25), pooled, 0.1)
    np.testing.assert_allclose(state[1][0]["x"], expected, atol=1e-6)  # one step: dual averaging is exact
    np.testing.assert_allclose(state[0][0]["x"], expected, atol=1e-3)
    # One all-reduce each, which the compiler may join: eight entries and their weight.
    ops = jd.analysis.collectives(compiled).ops
    assert {op.kind for op in ops} == {"all-reduce"}
    assert sum(op.bytes for op in ops) == 2 * 4 * 9


def test_what_cannot_work_says_so():
    ring = topology.ring(4)
    with pytest.raises(ValueError, match="doubly stochastic"):
        mirror_descent(euclidean(), 0.1, topology=topology.digraph(3, [(0, 1), (1, 2), (2, 0), (0, 2)]))
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        mirror_descent(euclidean(), 0.1, topology=ring, rounds=0)
    with pytest.raises(ValueError, match="rounds must be 1, got 2"):
        anytime_minibatch(euclidean(), 0.1, rounds=2)
    x = jnp.zeros(2)
    for make in (mirror_descent, anytime_minibatch):
        tx = make(euclidean(), 0.1, topology=ring, axis=None)
        with pytest.raises(ValueError, match="params"):
            tx.update(x, tx.init(x))
        with pytest.raises(ValueError, match="has 4 workers, but the axis has 1"):
            tx.update(x, tx.init(x), x)
        with pytest.raises(ValueError, match="distributions along that dimension"):
            make(entropy(axis=1), 0.1).init(x)
    wrapped = optax.MultiSteps(mirror_descent(euclidean(), 0.1), 2)
    with pytest.raises(ValueError, match=r"optax\.MultiSteps"):
        jd.simulate(lambda state, batch: (state, {}), 2)(wrapped.init(x), x)


@pytest.mark.parametrize("make", [mirror_descent, anytime_minibatch])
def test_what_is_no_geometry_and_no_graph_is_named(make):
    # Without the type checks of the tests, which would raise first.
    make = getattr(make, "__wrapped__", make)
    with pytest.raises(TypeError, match=r"expected a geometry, such as euclidean\(\), got <function euclidean"):
        make(euclidean, 0.1)
    with pytest.raises(TypeError, match=r"expected a topology, such as topology\.ring\(8\), got 4"):
        make(euclidean(), 0.1, topology=4)


def test_parameters_of_a_graph_must_be_per_worker(mesh):
    tx = mirror_descent(euclidean(), 0.1, topology=topology.ring(8))

    def step(state, batch):
        updates, opt = tx.update(batch[0], state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    state = jd.init_state(lambda: {"x": jnp.zeros(2), "opt": tx.init(jnp.zeros(2))}, mesh)
    with pytest.raises(ValueError, match="mark the parameters in the train state"):
        jd.distribute(step, mesh)(state, jnp.ones((8, 2)))


def test_half_precision_ends_where_float32_does():
    """The difference of two models is rounded more than the new model."""
    found = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        tx, x = jd.online.mirror_descent(jd.online.entropy(), 1.0, axis=None), jnp.array([0.5, 0.5], dtype)
        state, found[dtype] = tx.init(x), []
        for gradient in ([7.0, 0.0], [-14.0, 0.0]):
            updates, state = tx.update(jnp.array(gradient, dtype), state, x)
            x = optax.apply_updates(x, updates)
            assert x.dtype == dtype
            found[dtype].append(x.astype(jnp.float32))
    np.testing.assert_allclose(found[jnp.bfloat16], found[jnp.float32], rtol=0.05)
