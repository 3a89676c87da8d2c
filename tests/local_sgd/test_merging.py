"""Radial-directional averaging of drifts against float64, and what it keeps, sends and refuses."""

from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_run import run, targets
from problems import TrainState, assert_close, batch, loss, params
from reference.local_steps import local_steps as reference
from reference.local_steps import rda

import jaxdist as jd
from jaxdist import analysis
from jaxdist.local_sgd import Fragments

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
WORKERS = 4


def merged(drifts, **extras):
    """What a round makes of the drifts `[W, ...]` of a tree: workers step to minus their drift, and merge."""
    tx = jd.local_steps(optax.sgd(1.0), optax.sgd(1.0), sync_period=1, merge="rda")
    drawn = jax.tree.map(lambda x: -jnp.asarray(x, jnp.float32)[None], drifts)
    _, anchors, _ = run(tx, drawn, gradient=lambda p, target: jax.tree.map(jnp.subtract, p, target), **extras)
    return jax.tree.map(lambda x: -x[0], anchors)


def test_orthogonal_drifts_keep_their_length():
    """The mean of eight orthogonal drifts of length 2 has a length of 0.707."""
    found = merged(2 * np.eye(8))
    np.testing.assert_allclose(found, np.full(8, 0.7071068), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found), 2, rtol=1e-6)


def test_a_round_is_that_of_float64():
    """Squares of small and large entries are zero and infinite in float32."""
    rng, scales = np.random.default_rng(0), {"w": 1.0, "small": 1e-30, "large": 1e25, "none": 1.0}
    drifts = {name: scale * rng.normal(size=(4, 3, 5)) for name, scale in scales.items()}
    drifts["none"] = np.zeros((4, 0))
    found = merged(drifts)
    for name, drift in drifts.items():
        expected = rda(np.float32(drift).astype(float).reshape(4, -1)).reshape(drift.shape[1:])
        np.testing.assert_allclose(found[name] / scales[name], expected / scales[name], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"sync_period": 3}, {"sync_period": 6, "delay": 2, "merge_alpha": 0.5}], ids=str)
def test_rounds_equal_a_loop(options):
    number = 3
    drawn = targets(60)
    by_number = Fragments(number, lambda tree: list(range(number)))
    tx = jd.local_steps(optax.sgd(0.2), NESTEROV, fragments=by_number, merge="rda", **options)
    # Entry i of the loop belongs to fragment i mod 3; so has a leaf of each.
    leaves = [drawn[..., i::number] for i in range(number)]
    local, anchors, _ = run(tx, leaves)
    names = {"sync_period": "period", "merge_alpha": "alpha", "delay": "delay"}
    found = reference(
        drawn,
        np.zeros(6),
        rate=0.2,
        outer_rate=0.7,
        outer_momentum=0.9,
        nesterov=True,
        fragments=number,
        merge=rda,
        **{names[name]: value for name, value in options.items()},
    )
    # Directions of short means turn by much more than a rounding.
    for i in range(number):
        np.testing.assert_allclose(local[i], found[0][..., i::number], atol=2e-5)
        expected = found[1][..., i::number]
        # With a delay, a drift is sent at the start of the next step.
        expected = np.concatenate([expected[:1] * 0, expected[:-1]]) if "delay" in options else expected
        np.testing.assert_allclose(anchors[i], expected, atol=2e-5)


def test_equal_drifts_and_one_worker_are_the_mean():
    drift = np.random.default_rng(1).normal(size=7).astype(np.float32)
    for workers in (1, 3):
        np.testing.assert_allclose(merged(np.tile(drift, (workers, 1))), drift, rtol=1e-6)


def test_drifts_of_zeros_and_drifts_that_cancel():
    """A drift of zeros has no direction, and shortens the mean; where directions cancel nothing moves."""
    turns = 2 * np.pi * np.arange(3) / 3
    found = merged(
        {
            "zeros": np.zeros((3, 2)),
            "one": np.array([[3.0, 4], [0, 0], [0, 0]]),
            "against": np.array([[3.0, 4], [-6, -8], [0, 0]]),
            # To rounding: a direction of 1e-8 is none.
            "around": np.stack([np.cos(turns), np.sin(turns)], -1),
        }
    )
    assert not found["zeros"].any()
    np.testing.assert_allclose(found["one"], [1, 4 / 3], rtol=1e-6)
    for name in ("against", "around"):
        np.testing.assert_allclose(found[name], 0, atol=1e-6)


def test_what_is_not_finite_stays_so_in_its_leaf():
    drifts = {"nan": np.ones((3, 5000)), "inf": np.ones((3, 5000)), "ones": np.ones((3, 2))}
    drifts["nan"][1, 4321], drifts["inf"][2, 7] = np.nan, np.inf
    found = merged(drifts)
    assert not np.isfinite(found["nan"]).any()
    assert not np.isfinite(found["inf"]).any()
    np.testing.assert_allclose(found["ones"], 1, rtol=1e-6)


def test_weights_are_those_of_the_mean():
    drifts = np.random.default_rng(2).normal(size=(4, 6))
    weights = np.array([[3.0, 1.0, 0.0, 7.0]], np.float32)
    drifts[2] = np.nan  # without examples it takes no step
    expected = rda(drifts[[0, 1, 3]], weights[0, [0, 1, 3]])
    np.testing.assert_allclose(merged(drifts, examples=weights), expected, rtol=2e-6)
    assert not merged(drifts, examples=np.zeros((1, 4), np.float32)).any()


def test_a_tree_of_weights_is_that_of_leaves():
    drifts = np.random.default_rng(3).normal(size=(2, 3, 4)).astype(np.float32)
    weights = np.array([[1, 2, 5], [0, 0, 0]], np.float32)
    tx = jd.local_steps(optax.sgd(1.0), optax.sgd(1.0), sync_period=1, merge="rda")

    def worker(drift, weight):
        zeros = [jnp.zeros(4)] * 2
        _, state = tx.update(list(drift), tx.init(zeros), zeros, examples=list(weight))
        return jd.local_sgd.global_params(state)

    mapped = jax.jit(jax.vmap(worker, axis_name="data", in_axes=1))
    first, second = mapped(jnp.asarray(drifts), jnp.asarray(weights))
    np.testing.assert_allclose(-first[0], rda(drifts[0].astype(float), weights[0]), rtol=2e-6)
    assert not second.any()


def step_of(tx):
    def step(state, data, sync=None):
        _, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params, **({} if sync is None else {"sync": sync}))
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def test_a_mesh_sends_one_more_number_a_leaf_and_is_the_simulation():
    tx = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=2, merge="rda")
    mesh = jd.make_mesh({"data": WORKERS})
    on_mesh, simulated = (jd.place(TrainState(jd.PerWorker(params()), tx.init(params())), x) for x in (mesh, WORKERS))
    step, simulation = jd.distribute(step_of(tx), mesh, static_argnames=("sync",)), jd.simulate(step_of(tx), WORKERS)
    found = analysis.collectives(step.lower(on_mesh, batch(), sync=True).compile())
    leaves, entries = 2, 28
    assert found.wire_bytes == 2 * (WORKERS - 1) / WORKERS * 4 * (entries + leaves)
    assert len(found.ops) == 1
    for seed in range(4):
        on_mesh, _ = step(on_mesh, batch(seed=seed))
        simulated, _ = simulation(simulated, batch(seed=seed))
    assert_close(on_mesh, simulated, 2e-6)
    assert float(jd.transforms.stats(on_mesh.opt)["bytes"]) == 2 * found.wire_bytes


def test_reducers_without_lengths_of_single_drifts_are_refused():
    tx = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=2, merge="rda", reducer=jd.compressed(jd.qsgd(4)))
    with pytest.raises(ValueError, match=r"directions and lengths of single drifts, and compressed\(qsgd\(4\)\)"):
        tx.init(params())
    with pytest.raises(ValueError, match='merge must be "mean" or "rda", got \'median\''):
        unwrap(jd.local_steps)(optax.sgd(0.1), NESTEROV, sync_period=2, merge="median")


def test_lengths_of_shards_are_refused():
    tx = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=2, merge="rda")
    with pytest.raises(ValueError, match="takes lengths of whole drifts, and of Sharded parameters"):
        tx.init({"w": jd.Sharded(jnp.ones(8), axis="chip")})


def test_models_that_do_not_count_alike_are_refused():
    inner = jd.gossip(optax.sgd(0.1), jd.topology.one_peer_exponential(4), method=jd.decentralized.osgp())
    with pytest.raises(ValueError, match="the gossip inside sends parts of models"):
        jd.local_steps(inner, NESTEROV, sync_period=2, merge="rda").init(params())
    even = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.d_psgd())
    jd.local_steps(even, NESTEROV, sync_period=2, merge="rda").init(params())
