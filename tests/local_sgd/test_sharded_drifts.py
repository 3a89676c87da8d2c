"""Rounds of models that the compiler shards inside of each worker: a reducer codes each shard of a drift by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType
from problems import assert_close

import jaxdist as jd
from jaxdist import analysis

SPECS = {"w": P("fsdp", "model"), "b": P("model"), "c": P()}
HALF = jd.compressed(jd.compressors.cast(jnp.float16))
TOP = jd.error_feedback(jd.compressed(jd.top_k(0.25)))
ROWS = np.random.default_rng(0).normal(size=(6, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def sharded():
    """Two workers of four devices."""
    return jax.make_mesh((2, 2, 2), ("dcn", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def flat():
    return jd.make_mesh({"dcn": 2}, devices=jax.devices()[:2])


def params():
    return {"w": jnp.asarray(ROWS[0]) / 3, "b": jnp.ones(8), "c": jnp.zeros(3)}


def loss(p, x):
    return jnp.mean((x @ p["w"] + p["b"][None] - 1) ** 2) + jnp.sum((p["c"] - 1) ** 2)


def method(reducer, specs=SPECS, **options):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return jd.local_steps(optax.adam(0.03), outer, sync_period=2, reducer=reducer, axis="dcn", specs=specs, **options)


def run(tx, mesh, steps=5, specs=SPECS, **extras):
    """The state after some steps, and the program of one."""

    def step(state, x):
        value, gradients = jd.local_value_and_grad(loss, axis="dcn")(state["params"], x)
        given = {name: make(x) for name, make in extras.items()}
        updates, opt = tx.update(gradients, state["opt"], state["params"], **given)
        after = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return after, {"loss": jax.lax.pmean(value, "dcn"), "sent": opt.sent}

    specs = specs if "fsdp" in mesh.axis_names else None
    make = lambda: {"params": jd.PerWorker(params()), "opt": tx.init(params())}  # noqa: E731
    state, trained = jd.init_state(make, mesh, axis="dcn", specs=specs), jd.distribute(step, mesh, axis="dcn")
    program = trained.lower(state, ROWS[0]).compile()
    for number in range(steps):
        state, metrics = trained(state, ROWS[number])
    return state, metrics, analysis.collectives(program)


def anchor(state):
    return jax.tree.map(np.asarray, jd.local_sgd.global_params(state["opt"]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 1}, {"fragments": 2, "delay": 1}], ids=str)
def test_the_numbers_and_bytes_are_those_of_whole_models(sharded, flat, options):
    """A cast rounds each entry by itself, in a shard as in the whole."""
    state, metrics, sent = run(method(HALF, **options), sharded)
    wanted, expected, _ = run(method(HALF, None, **options), flat)
    assert_close(anchor(state), anchor(wanted))
    assert metrics["sent"].tolist() == expected["sent"].tolist()
    # A device sends its quarter of the matrix, its half of "b", and "c", in two bytes an entry.
    assert sent.across(sharded, "dcn").wire_bytes == pytest.approx(2 * (64 / 4 + 8 / 2 + 3), abs=8)
    assert state["params"].value["w"].sharding.spec == P("dcn", "fsdp", "model")


@pytest.mark.slow
def test_axes_that_are_part_of_types(flat):
    """On these JAX does not decide how to multiply by a matrix whose rows are sharded."""
    explicit = jax.make_mesh((2, 2, 2), ("dcn", "fsdp", "model"), axis_types=(AxisType.Explicit,) * 3)
    columns = {"w": P(None, ("fsdp", "model")), "b": P(("fsdp", "model")), "c": P()}
    state, _, _ = run(method(HALF, columns, fragments=2), explicit, specs=columns)
    wanted, _, _ = run(method(HALF, None, fragments=2), flat)
    assert_close(anchor(state), anchor(wanted))


@pytest.mark.parametrize(
    "reducer", [TOP, jd.error_feedback(jd.power_sgd(1, min_compression_rate=0.0))], ids=["top_k", "power_sgd"]
)
def test_nothing_more_crosses_the_axes_that_shard_the_model(sharded, reducer):
    plain, coded = (run(method(x), sharded, steps=3)[2] for x in (jd.exact(), reducer))
    for name in ("fsdp", "model"):
        assert coded.across(sharded, name).wire_bytes == plain.across(sharded, name).wire_bytes
    assert coded.across(sharded, "dcn").wire_bytes < plain.across(sharded, "dcn").wire_bytes


def test_a_worker_without_examples_keeps_its_residual(sharded):
    """Its drift of the first round counts for nothing, and what it has not sent of others stays."""
    state, _, _ = run(method(TOP), sharded, steps=2, examples=lambda x: jnp.where(jax.lax.axis_index("dcn") == 0, 0, 8))
    residual = state["opt"].reducer[0]["fsdp+model"].residual.value["w"].value
    assert np.count_nonzero(residual[0]) == 0
    # Each of four shards has 16 entries, of which it sends a quarter.
    assert np.count_nonzero(residual[1]) == 4 * 12


def test_what_does_not_fit_is_refused(sharded):
    with pytest.raises(ValueError, match=r"further axes \('fsdp', 'model'\).*pass local_steps\(..., specs=\)"):
        run(method(TOP, None), sharded, steps=0)
    with pytest.raises(ValueError, match=r"specs=\) name the axis of the workers, 'dcn'"):
        method(TOP, {"w": P("dcn"), "b": P(), "c": P()})
    with pytest.raises(ValueError, match="with axis=None there is one alone"):
        jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, axis=None, specs=SPECS)
    with pytest.raises(ValueError, match=r"local_steps\(specs=\) has 'fsdp' for .*pass a PartitionSpec"):
        method(TOP, {"w": "fsdp", "b": P(), "c": P()})
