"""Options that the pages and the other tests leave at their defaults do what they say."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import offload, zero
from jaxdist.analysis import cost
from jaxdist.asynchronous import replay, rules
from jaxdist.local_sgd import due_fragments
from jaxdist.schedule import Profile, timeline
from jaxdist.testing import assert_geometry_laws


@pytest.mark.slow
def test_seeds_draw_other_numbers():
    params, inner = {"w": jnp.ones((8, 6))}, optax.sgd(0.1)
    for make in (
        lambda seed: jd.optimizers.dion(0.1, rank=2, seed=seed, axis=None).init(params),
        lambda seed: jd.local_sgd.noloco(inner, sync_period=2, seed=seed).init(params),
        lambda seed: jd.reducers.intsgd(seed=seed).init(params),
        lambda seed: jd.reducers.integer_sum(seed=seed).init(params),
        lambda seed: jd.reducers.ring(jd.qsgd(4), seed=seed).init(params),
        lambda seed: jd.two_shot(jd.qsgd(4), seed=seed).init(params),
        lambda seed: jd.reducers.alq(seed=seed).init(params),
        lambda seed: jd.reducers.amq(seed=seed).init(params),
        lambda seed: _mean(jd.power_sgd(1, seed=seed), jnp.arange(48.0).reshape(8, 6) ** 2 % 7),
        lambda seed: jd.gossip(inner, jd.topology.ring(4), seed=seed).init(params),
        lambda seed: _weights(jd.topology.random_matchings(8, seed=seed)),
        lambda seed: _weights(jd.topology.relabeled_ring(8, seed=seed)),
        lambda seed: _models(rules.ad_psgd(jd.topology.ring, inner, exchange=rules.power_gossip(1, seed=seed))),
    ):
        first, again, other = (_numbers(make(seed)) for seed in (0, 0, 1))
        assert all(np.array_equal(a, b) for a, b in zip(first, again))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other))


def _numbers(state):
    def plain(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return [plain(x) for x in jax.tree.leaves(state)]


def _mean(reducer, x):
    return reducer.reduce(x, reducer.init(x), jd.comm.over(None))[0].mean


def _weights(graph):
    return [jd.topology.matrix(graph, step) for step in range(len(graph.rounds))]


def _models(rule):
    drawn = np.random.default_rng(0).normal(size=(4, 6, 5)).astype(np.float32)
    task = replay.Task(np.zeros((6, 5), np.float32), lambda x, b: jnp.sum((x - b) ** 2), lambda seed, i, job: drawn[i])
    return replay.run(rule, task, workers=4, seconds=3).params


# The axis of the workers has another name where there are several, and every function that reads it takes that name.


def on_pods(worker, *data):
    """Runs a worker under a `pod` axis; a function that looked for `data` would not find it."""
    return jax.jit(jax.vmap(worker, axis_name="pod"))(*data)


def test_gradients_of_neighbors_cross_any_axis():
    for make in (jd.decentralized.neighborhood_value_and_grad, jd.decentralized.cross_value_and_grad):
        found, expected = (
            jax.jit(jax.vmap(make(lambda x, a: jnp.vdot(a, x), jd.topology.ring(4), axis=axis), axis_name=axis))(
                jnp.ones((4, 2)), jnp.arange(8.0).reshape(4, 2)
            )
            for axis in ("pod", "data")
        )
        np.testing.assert_array_equal(found[1], expected[1])


def test_participation_draws_over_any_axis():
    def drawn(_):
        return jd.local_sgd.participation(jax.random.key(0), 3, count=2, axis="pod")

    assert on_pods(drawn, jnp.arange(5)).tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]


def test_unused_parameters_are_found_over_any_axis():
    def loss(params, x):
        return jax.lax.pmean(params["used"] * x, "pod")

    params = {"used": jnp.ones(()), "idle": jnp.ones(())}
    found = jd.transforms.find_unused_parameters(loss, params, jnp.ones(()), axis="pod")
    assert found == {"used": False, "idle": True}


def test_tiles_are_gathered_over_any_axis():
    mesh, x = jd.make_mesh({"pod": 4}), jnp.arange(12.0).reshape(3, 4)
    kernels = jnp.arange(32.0).reshape(4, 8) / 10, jnp.arange(24.0).reshape(8, 3) / 10
    dense = nn.Dense(8, use_bias=False)

    def flax_layer(remat):
        def apply(x, w, _):
            with nn.intercept_methods(offload.tiled_layers(axis="pod", remat=remat)):
                return dense.apply({"params": {"kernel": w}}, x)

        return apply

    for compute, expected in (
        (lambda x, w, _: offload.tiled_dense(x, w, axis="pod"), x @ kernels[0]),
        (lambda x, *both: offload.tiled_mlp(x, *both, jnp.tanh, axis="pod"), jnp.tanh(x @ kernels[0]) @ kernels[1]),
        (flax_layer(remat=True), x @ kernels[0]),
        (flax_layer(remat=False), x @ kernels[0]),
    ):

        def make_state():
            tiles = offload.tile(kernels[0], out_splits=2), offload.tile(kernels[1], in_splits=2)
            return jax.tree.map(lambda tile: zero.shard(tile, axis="pod"), tiles)

        def step(tiles, x, compute=compute):
            return tiles, jax.lax.pmean(compute(x, *tiles), "pod")

        step = jd.distribute(step, mesh, axis="pod", batch_specs=jax.P())
        _, found = step(jd.init_state(make_state, mesh, axis="pod"), x)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_layers_on_disk_are_cut_over_any_axis(tmp_path):
    stack = offload.LayerStack(
        embed=lambda p, batch: batch["x"] @ p,
        layer=lambda p, x: jnp.tanh(x @ p),
        head=lambda p, x, batch: jnp.mean((x @ p - batch["y"]) ** 2),
    )
    matrix, head = np.eye(3, dtype=np.float32), np.ones((3, 1), np.float32)
    batch, losses = {"x": jnp.arange(24.0).reshape(8, 3) / 10, "y": jnp.ones((8, 1))}, {}
    for axis in ("pod", "data"):
        mesh = jd.make_mesh({axis: 2})
        run = offload.nvme_layers(stack, optax.sgd(0.1), offload.Store(tmp_path / axis), mesh=mesh, axis=axis)
        run.init(lambda number: matrix / 2, 2, embed=matrix, head=head)
        losses[axis] = [float(run.step(batch)) for _ in range(2)]
        run.close()
    assert losses["pod"] == losses["data"]


def test_a_pipeline_runs_over_any_axis_and_passes_auxiliary_results():
    def loss(params, x):
        hidden = jnp.tanh(x @ params[0])
        return jnp.mean((hidden @ params[1] - 1.0) ** 2), hidden.mean()

    settings, params = {"defer": 1, "has_aux": True}, [jnp.ones((3, 4)) / 4, jnp.ones((4, 2))]
    found = []
    for axis in ("pod", "data"):
        pipeline = jd.overlap.pipelined(loss, optax.sgd(0.1), axis=axis, **settings)
        state = jd.init_state(lambda p=pipeline: p.init(params), 4, axis=axis)
        step = jd.simulate(pipeline.step, 4, axis=axis)
        for _ in range(2):
            state, out = step(state, jnp.arange(24.0).reshape(8, 3) / 10)
        found.append(out)
    assert [float(x) for x in found[0]] == [float(x) for x in found[1]]
    # The mean over the workers, of the model after one step; the auxiliary result is that of the hidden layer.
    assert found[0][0] != found[0][1]


def test_uneven_batches_are_joined_over_any_axis():
    mesh, batches = jd.make_mesh({"pod": 4}), [np.ones((8, 3), np.float32)]
    ((batch, examples),) = jd.runtime.join_uneven(batches, batches[0], mesh, axis="pod")
    assert batch.sharding.spec == jax.P("pod")
    assert examples.tolist() == [2, 2, 2, 2]


def test_evaluation_and_plans_take_the_specs_of_a_batch():
    mesh, specs = jd.make_mesh({"data": 4}), {"rows": jax.P("data"), "table": jax.P()}
    batch = {"rows": jnp.arange(8.0), "table": jnp.arange(3.0)}

    def mean(_, batch):
        return jax.lax.pmean(batch["rows"].sum() + batch["table"].sum(), "data")

    assert float(jd.evaluate(mean, mesh, batch_specs=specs)(jd.place(jnp.zeros(()), mesh), batch)) == 28 / 4 + 3
    step = jd.distribute(lambda state, batch: (state, mean(state, batch)), mesh, batch_specs=specs)
    like = jax.eval_shape(lambda: batch)
    # A worker gets two of the rows and all of the table, which three entries could not be cut for.
    found = jd.analysis.pods.plan(step, lambda: jnp.zeros(()), like, mesh, batch_specs=specs).memory
    assert found.arguments == 4 * (1 + 2 + 3)


def test_noise_decides_how_nuqsgd_rounds():
    x = jnp.array([1.0, 0.6, 0.3])
    rounded = [
        jax.jit(lambda x, code=code: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
        for code in (
            jd.compressors.nuqsgd(4, norm="max", noise=lambda key, shape, u=u: jnp.full(shape, u)) for u in (0.0, 0.999)
        )
    ]
    assert sorted(np.round(rounded, 3).tolist()) == [[1.0, 0.5, 0.25], [1.0, 1.0, 0.5]]


def test_a_tolerance_forgives_a_geometry_its_rounding():
    sound = jd.online.euclidean()
    rough = sound._replace(divergence=lambda x, y: sound.divergence(x, y) + 1e-3)
    models = [jnp.zeros(2), jnp.ones(2)]
    with pytest.raises(AssertionError, match="divergence"):
        assert_geometry_laws(rough, models)
    assert_geometry_laws(rough, models, tolerance=1e-2)


def one_worker(tx, steps):
    """A matrix and a vector of worker 0 of two, after some steps along gradients that differ between them."""
    params = {"matrix": jnp.arange(6.0).reshape(2, 3), "vector": jnp.arange(3.0)}

    def step(state, number):
        gradients = jax.tree.map(lambda x: jnp.cos(x + number[0]), state[0])
        updates, opt_state = tx.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), {}

    state, simulated = jd.place((jd.PerWorker(params), tx.init(params)), 2), jd.simulate(step, 2)
    for _ in range(steps):
        state, _ = simulated(state, jnp.arange(2.0))
    return jax.tree.map(lambda x: np.asarray(x[0]), state[0].value)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("slowmo", {"slow_learning_rate": 0.5}),
        ("streaming_diloco", {"learning_rate": 0.1}),
        ("streaming_diloco", {"momentum": 0.1}),
        ("streaming_diloco", {"merge_alpha": 0.9}),
        ("sparse_loco", {"decay": 0.1}),
        ("palsgd", {"slow_learning_rate": 0.1}),
        ("palsgd", {"momentum": 0.1}),
        ("muloco", {"weight_decay": 0.5}),
        ("muloco", {"matrices": lambda path, leaf: False}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_options_of_recipes_change_the_run(recipe, options):
    sgd, settings = optax.sgd(0.1), {"sync_period": 1}
    make = {
        "slowmo": lambda **own: jd.local_sgd.slowmo(sgd, **settings, learning_rate=0.1, **own),
        "streaming_diloco": lambda **own: jd.local_sgd.streaming_diloco(sgd, sync_period=2, fragments=1, **own),
        "sparse_loco": lambda **own: jd.local_sgd.sparse_loco(sgd, **settings, density=0.4, **own),
        "palsgd": lambda **own: jd.local_sgd.palsgd(sgd, **settings, learning_rate=0.1, warmup_steps=0, **own),
        "muloco": lambda **own: jd.local_sgd.muloco(0.1, **settings, adam_learning_rate=0.1, **own),
    }[recipe]
    default, other = (one_worker(make(**own), steps=6) for own in ({}, options))
    assert not np.allclose(default["matrix"], other["matrix"], atol=1e-3)


def test_half_the_slow_rate_of_slowmo_is_half_the_step():
    start = {"matrix": np.arange(6.0).reshape(2, 3), "vector": np.arange(3.0)}
    whole, half = (
        one_worker(
            jd.local_sgd.slowmo(optax.sgd(0.1), sync_period=1, learning_rate=0.1, slow_learning_rate=rate), steps=1
        )
        for rate in (1.0, 0.5)
    )
    np.testing.assert_allclose(half["matrix"] - start["matrix"], (whole["matrix"] - start["matrix"]) / 2, atol=1e-6)


def test_groups_exchange_in_the_code_that_they_are_given():
    def sent(exchange):
        rule = rules.hierarchical_ad_psgd(jd.topology.ring, optax.sgd(0.1), group_size=2, exchange=exchange)
        task = replay.Task(np.zeros((64, 64), np.float32), lambda x, b: jnp.sum(x**2), lambda *job: None)
        return replay.run(rule, task, workers=8, seconds=4, timing_only=True).sent.sum()

    assert sent(rules.power_gossip(1)) < sent(None)


def test_the_base_decides_the_levels_of_nuqsgd():
    x = jax.random.normal(jax.random.key(0), (512,))

    @partial(jax.jit, static_argnums=0)
    def decoded(base):
        code = jd.compressors.nuqsgd(4, base=base)
        return code.decompress(code.compress(x, jax.random.key(1)), jax.ShapeDtypeStruct(x.shape, x.dtype))

    assert not np.allclose(decoded(0.5), decoded(0.7))


def test_due_fragments_counts_from_the_warm_up_offset_and_delay():
    late = {"sync_period": 4, "offset": 2, "warmup_steps": 3}
    assert [step for step in range(14) if due_fragments(step, **late)] == [4, 8, 12]
    assert [step for step in range(14) if due_fragments(step, **late, delay=1)] == [5, 9, 13]


def test_offloading_every_other_layer_hides_better():
    settings = {"width": 1024, "bandwidth": 1e9, "flops": 70e12}
    once, twice = (cost.offload_efficiency("activations", every=every, **settings) for every in (1, 2))
    assert twice > once


def test_latency_lengthens_a_timeline():
    profile = Profile([1, 2], [1, 2], [1, 1])
    assert timeline(profile, bandwidth=1, latency=0.5).makespan > timeline(profile, bandwidth=1).makespan


def test_groups_choose_their_partners_as_they_are_told():
    def steps(choice):
        rule = rules.hierarchical_ad_psgd(jd.topology.ring, optax.sgd(0.1), group_size=2, choice=choice)
        return repr(replay.run(rule, workers=8, seconds=6).trace)

    assert steps("uniform") != steps("in_turn")
