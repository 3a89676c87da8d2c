"""Meshes with a further axis that the compiler shards: reducers run on each shard and never gather it."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P
from jax.sharding import AxisType
from problems import TrainState, assert_close, batch, fresh, make_step, params

import jaxdist as jd
from jaxdist import analysis

SPECS = {"b": P("model"), "w": P(None, "model")}
F16 = jd.compressors.cast(jnp.float16)


@pytest.fixture(scope="module")
def both():
    """Four workers of two devices each."""
    return jd.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def flat():
    return jd.make_mesh({"data": 4}, devices=jax.devices()[:4])


def make(reducer, specs=None):
    return optax.chain(jd.all_reduce(reducer, specs=specs), optax.sgd(0.1))


def start(tx, mesh):
    """The parameters sharded over the model axis, as tensor parallelism has them."""
    state = fresh(tx, mesh)
    sharded = {k: jax.device_put(v, jax.NamedSharding(mesh, SPECS[k])) for k, v in state.params.items()}
    return TrainState(sharded, state.opt)


def train(tx, mesh, state, steps=3):
    run = jd.distribute(make_step(tx), mesh, donate=False)
    for seed in range(steps):
        state, _ = run(state, batch(seed=seed))
    return state


def over_model(tx, mesh):
    """The collectives of a step that cross the model axis: partners 2i and 2i + 1."""
    program = jd.distribute(make_step(tx), mesh).lower(start(tx, mesh), batch()).compile()
    ops = analysis.collectives(program).ops
    return sorted(
        (op.kind, op.dtype, op.bytes)
        for op in ops
        if any(group != tuple(range(group[0], group[0] + 8, 2))[: len(group)] for group in op.replica_groups)
    )


@pytest.fixture(scope="module")
def baseline(both):
    """What crosses the model axis when each leaf is reduced in place."""
    return over_model(make(jd.exact()), both)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "reducer",
    [
        jd.compressed(F16),
        jd.error_feedback(jd.compressed(jd.top_k(0.25))),
        jd.error_feedback(jd.power_sgd(1, min_compression_rate=0.0)),
        jd.reducers.per_leaf(lambda path, leaf: leaf.ndim, {1: jd.exact(), 2: jd.compressed(jd.qsgd(4))}),
    ],
    ids=["f16", "top_k", "power_sgd", "per_leaf"],
)
def test_no_bytes_over_the_model_axis(both, baseline, reducer):
    """Beyond what the loss itself needs."""
    assert over_model(make(reducer, SPECS), both) == baseline
    assert sum(size for _, _, size in baseline) < params()["w"].nbytes / 2


@pytest.mark.parametrize("reducer", [jd.exact(), jd.error_feedback(jd.compressed(F16))], ids=["exact", "f16"])
def test_the_numbers_are_those_without_a_model_axis(both, flat, reducer):
    sharded = make(reducer, SPECS)
    with_axis = train(sharded, both, start(sharded, both))
    without = make(reducer)
    wanted = train(without, flat, fresh(without, flat))
    assert_close(with_axis.params, wanted.params)
    assert with_axis.params["w"].sharding.is_equivalent_to(jax.NamedSharding(both, SPECS["w"]), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto_workers", "explicit_workers"])
def test_explicit_model_axis_keeps_its_shards(both, baseline, kind):
    """The step sees the parameters sharded, as they were placed, and has the results and the bytes of Auto axes."""
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, AxisType.Explicit))
    tx, seen = make(jd.error_feedback(jd.power_sgd(1, min_compression_rate=0.0)), SPECS), []

    def noted(state, batch):
        seen.append(jax.typeof(state.params["w"]).sharding.spec)
        return make_step(tx)(state, batch)

    jd.distribute(noted, explicit).lower(start(tx, explicit), batch())
    assert seen == [SPECS["w"]]
    assert_close(train(tx, explicit, start(tx, explicit)), train(tx, both, start(tx, both)))
    # Before jax 0.12, and on mixed axes, a `shard_map` over some axes gathers what the others shard.
    if kind == AxisType.Explicit and jax.__version_info__ >= (0, 12):
        assert over_model(tx, explicit) == baseline


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "reducer",
    [jd.exact(), jd.error_feedback(jd.compressed(F16)), jd.error_feedback(jd.power_sgd(1, min_compression_rate=0.0))],
    ids=["exact", "f16", "power_sgd"],
)
def test_replicated_leaves_beside_sharded_ones(both, flat, reducer):
    """The norms and embeddings of a transformer: together with shards, their mean was typed as differing."""
    tx, without = make(reducer, {"b": P(), "w": P(None, "model")}), make(reducer)
    found = train(tx, both, start(tx, both), steps=1)
    wanted = train(without, flat, fresh(without, flat), steps=1)
    # A shard of a matrix has factors of its own.
    same = ["b"] if "power_sgd" in repr(reducer) else ["b", "w"]
    assert_close(*({name: state.params[name] for name in same} for state in (found, wanted)))


def test_replicated_leaves_have_no_state_for_each_shard(both):
    tx = make(jd.error_feedback(jd.compressed(F16)), {"b": P(), "w": P(None, "model")})
    state = fresh(tx, both).opt[0].reducer
    assert state["replicated"].residual.value["b"].shape == (4, 4)
    assert state["model"].residual.value["w"].value.shape == (4, 2, 6, 2)


def test_exact_needs_no_specs(both, flat):
    tx = make(jd.exact())
    assert_close(train(tx, both, start(tx, both)).params, train(tx, flat, fresh(tx, flat)).params)


@pytest.mark.slow
def test_each_shard_has_its_own_state(both):
    """top-k keeps a quarter of each shard; residual plus what was sent is the gradient."""
    tx = make(jd.error_feedback(jd.compressed(jd.top_k(0.25))), SPECS)
    residual = fresh(tx, both).opt[0].reducer.residual
    assert residual.value["w"].value.shape == (4, 2, 6, 2)
    state = train(tx, both, start(tx, both), steps=1)
    kept = (state.opt[0].reducer.residual.value["w"].value == 0).sum((2, 3))
    assert kept.tolist() == [[3, 3]] * 4


def test_feedback_is_scaled_by_the_rate_of_the_step(both, flat):
    """A value of the step, which JAX refuses in a map over the model axis that closes over it."""

    def final_params(mesh, specs):
        reducer = jd.error_feedback(jd.compressed(F16), with_learning_rate=True)
        tx = optax.with_extra_args_support(make(reducer, specs))

        def step(state, batch):
            rate = 0.5 / (1 + state.params["b"][0] ** 2)
            scaled = optax.GradientTransformationExtraArgs(tx.init, partial(tx.update, learning_rate=rate))
            return make_step(scaled)(state, batch)

        run, state = jd.distribute(step, mesh, donate=False), start(tx, mesh) if specs else fresh(tx, mesh)
        for seed in range(3):
            state, _ = run(state, batch(seed=seed))
        return state.params

    assert_close(final_params(both, SPECS), final_params(flat, None))


def test_refused_without_specs(both):
    tx = make(jd.error_feedback(jd.compressed(jd.top_k(0.25))))
    with pytest.raises(ValueError, match=r"further axes \('model',\).*specs="):
        jd.distribute(make_step(tx), both)(fresh(tx, both), batch())


def test_state_of_flattened_leaves_is_refused(both):
    feedback, bucket = jd.error_feedback, jd.compressed(jd.compressors.scaled_sign())
    tx = make(jd.reducers.bucketed(feedback(bucket), bucket_bytes=64), SPECS)
    with pytest.raises(ValueError, match="put error feedback around bucketed"):
        jd.distribute(make_step(tx), both)(fresh(tx, both), batch())
    around = make(feedback(jd.reducers.bucketed(bucket, bucket_bytes=64)), SPECS)
    assert train(around, both, start(around, both), steps=1).opt[0].reducer.residual.value["w"].value.shape == (
        4,
        2,
        6,
        2,
    )


def test_specs_need_a_mesh_that_has_them(flat):
    tx = make(jd.compressed(F16), SPECS)
    with pytest.raises(ValueError, match=r"\['model'\], which are unknown here"):
        tx.init(params())
    with pytest.raises(ValueError, match="unknown here"):
        fresh(tx, flat)
    odd = make(jd.compressed(F16), {"b": P("model"), "w": P(None, "model")})
    with pytest.raises(ValueError, match="does not divide into 2 shards"):
        jd.init_state(
            lambda: odd.init({"b": jnp.zeros(3), "w": jnp.zeros((6, 4))}), jd.make_mesh({"data": 4, "model": 2})
        )


def test_shardings_in_place_of_specs_are_refused():
    mesh = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"for the parameter \['w'\]: pass its spec, sharding.spec"):
        jd.all_reduce(jd.exact(), specs={"w": jax.NamedSharding(mesh, jax.P())})
