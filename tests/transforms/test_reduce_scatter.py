"""Compression over the very axis that shards the parameters, in a plain jit: a reduce-scatter into their shards."""

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

EXPLICIT = pytest.param(AxisType.Explicit, id="explicit", marks=pytest.mark.slow)
KINDS = pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, id="auto"), EXPLICIT])
SPECS = {"up": P("fsdp", "model"), "down": P("model", "fsdp"), "norm": P()}


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(kind,) * 2)


def make_params():
    up, down = jax.random.normal(jax.random.key(0), (2, 16, 64)) / 4
    return {"up": up, "down": down.T, "norm": jnp.ones(16)}


def reshard(x, *spec):
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.reshard(x, P(*spec)) if explicit else jax.lax.with_sharding_constraint(x, P(*spec))


def loss_fn(params, x):
    """Each parameter is gathered over "fsdp" where it is used."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    hidden = jax.nn.relu((x * reshard(params["norm"])[None]) @ reshard(params["up"], None, "model"))
    down = reshard(params["down"], "model")
    y = jnp.matmul(hidden, down, out_sharding=P(None, None) if explicit else None)
    return jnp.mean(jnp.square(y - 1))


def make_step(tx):
    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jd.transforms.per_worker_value_and_grad(loss_fn, axis="fsdp")(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, updates)

    return jax.jit(train_step)


def run(reducer, kind, steps=2, **options):
    mesh = make_mesh(kind)
    tx = optax.chain(jd.all_reduce(reducer, axis="fsdp", specs=SPECS, **options), optax.adam(1e-2))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: (make_params(), tx.init(make_params())), mesh, axis="fsdp", specs=SPECS)
        batch, step = jax.device_put(x, jax.NamedSharding(mesh, P("fsdp"))), make_step(tx)
        program, updates = step.lower(state, batch).compile(), None
        for _ in range(steps):
            state, (_, updates) = step(state, batch)
    return state, updates, program, x


def wanted(x, steps=2):
    """On one device."""
    tx, params = optax.adam(1e-2), make_params()
    opt = tx.init(params)

    def loss(params):
        y = jax.nn.relu((x * params["norm"][None]) @ params["up"]) @ params["down"]
        return jnp.mean(jnp.square(y - 1))

    for _ in range(steps):
        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        params = optax.apply_updates(params, updates)
    return params


@KINDS
def test_parameters_moments_and_updates_stay_sharded_and_numbers_are_the_same(kind):
    state, updates, _, x = run(jd.exact(), kind)
    assert_close(state[0], wanted(x), 1e-4)
    for tree in (state[0], updates, state[1][1][0].mu):
        for name, spec in SPECS.items():
            sharding = jax.NamedSharding(make_mesh(kind), spec)
            assert tree[name].sharding.is_equivalent_to(sharding, tree[name].ndim), name


@pytest.mark.slow
@KINDS
def test_the_gradients_are_sent_once_in_the_codes_of_the_reducer(kind):
    """Four workers exchange three quarters of a shard's codes: 8 bits an entry in place of 32."""
    sent = {}
    for name, reducer in {"exact": jd.exact(), "two_shot": jd.two_shot(jd.compressors.int8())}.items():
        ops = analysis.collectives(run(reducer, kind, steps=0)[2]).ops
        sent[name] = sum(op.wire_bytes for op in ops if op.kind in ("all-to-all", "reduce-scatter"))
    # Both matrices are halved over "model", 512 entries each.
    assert sent["exact"] == 2 * 512 * 4 * 3 / 4
    assert sent["two_shot"] < sent["exact"] / 3.5


@pytest.mark.slow
def test_feedback_has_a_residual_for_each_worker_and_shard():
    reducer = jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign()))
    state, *_ = run(reducer, AxisType.Auto, steps=3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state[0]))
    residual = state[1][0].reducer["fsdp+model"].residual
    assert residual.value["up"].value.shape[:2] == (4, 2)


def test_states_map_over_parameters():
    """`optax.tree.map_params` makes the state of a placeholder, which must have the same tree."""
    for reducer in (jd.exact(), jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign()))):
        tx = optax.chain(jd.all_reduce(reducer, axis="fsdp", specs=SPECS), optax.adam(1e-2))
        with jax.set_mesh(make_mesh()):
            state = jax.eval_shape(lambda tx=tx: tx.init(make_params()))
        same = optax.tree.map_params(tx, lambda x: x, state)
        assert jax.tree.structure(same) == jax.tree.structure(state)


def test_what_cannot_be_scattered_is_refused():
    with pytest.raises(
        ValueError, match=r"for the parameter \['w'\]: axis 'fsdp' of the workers must shard a dimension by"
    ):
        jd.all_reduce(jd.exact(), axis="fsdp", specs={"w": P(("fsdp", "model"))})
    with pytest.raises(ValueError, match=r"no reduce-scatter form.*leave axis 'fsdp' of the work.*\['down'\] in place"):
        jd.all_reduce(jd.power_sgd(4), axis="fsdp", specs=SPECS)
    mesh, tx = make_mesh(), jd.all_reduce(jd.exact(), axis="fsdp", specs=SPECS)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"shape \(6, 64\) does not divide into 4 shards"):
        jd.all_reduce(jd.exact(), axis="fsdp", specs=SPECS).init({**make_params(), "up": jnp.ones((6, 64))})
    state = jd.init_state(lambda: {"p": make_params(), "opt": tx.init(make_params())}, mesh, axis="fsdp")

    def step(state, x):
        _, grads = jd.local_value_and_grad(loss_fn, axis="fsdp")(state["p"], x)
        updates, opt = tx.update(grads, state["opt"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "opt": opt}, {}

    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"specs=\) names axis 'fsdp'.*\['down'\] has P\(None, 'fsdp'\)"),
    ):
        jd.distribute(step, mesh, axis="fsdp")(state, jnp.ones((32, 16)))
