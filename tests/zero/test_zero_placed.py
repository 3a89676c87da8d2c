"""`zero_redundancy(specs=)`: the three stages in a plain jit, beside an axis of the compiler."""

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
SPECS = {"up": P("data", "model"), "down": P("model", "data"), "norm": P()}
# Without the axis of the workers: the parameters of stages 1 and 2.
WHOLE = {"up": P(None, "model"), "down": P("model"), "norm": P()}
HALF = 16 * 64 // 2  # the entries of a matrix on one device


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def make_params(dtype=jnp.float32):
    up, down = jax.random.normal(jax.random.key(0), (2, 16, 64)) / 4
    return jax.tree.map(lambda x: x.astype(dtype), {"up": up, "down": down.T, "norm": jnp.ones(16)})


def reshard(x, *spec):
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.reshard(x, P(*spec)) if explicit else jax.lax.with_sharding_constraint(x, P(*spec))


def loss_fn(params, x):
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    hidden = jax.nn.relu((x * reshard(params["norm"])[None]) @ reshard(params["up"], None, "model"))
    y = jnp.matmul(hidden, reshard(params["down"], "model"), out_sharding=P(None, None) if explicit else None)
    return jnp.mean(jnp.square(y - 1))


def optimizer():
    """The norm of the clip is that of all shards, along both axes."""
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def batch(mesh):
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    return jax.device_put(x, jax.NamedSharding(mesh, P("data")))


def run(tx, stage, kind=AxisType.Auto, *, steps=3, dtype=jnp.float32):
    mesh = make_mesh(kind)
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), SPECS if stage == 3 else WHOLE)

    def train_step(params, opt_state, x):
        loss, grads = jd.transforms.per_worker_value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with jax.set_mesh(mesh):
        params = jax.tree.map(jax.device_put, make_params(dtype), shardings)
        opt_state = jd.init_state(lambda: tx.init(params), mesh, specs=SPECS)
        step = jax.jit(train_step)
        program = step.lower(params, opt_state, batch(mesh)).compile()
        for _ in range(steps):
            params, opt_state, _ = step(params, opt_state, batch(mesh))
    return params, opt_state, program


def wanted(steps=3):
    """On one device."""
    tx, params, x = optimizer(), make_params(), batch(make_mesh())
    x, opt = np.asarray(x), optimizer().init(params)

    def loss(params):
        return jnp.mean(jnp.square(jax.nn.relu((x * params["norm"][None]) @ params["up"]) @ params["down"] - 1))

    for _ in range(steps):
        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        params = optax.apply_updates(params, updates)
    return params


def check_sharding(tree, specs, kind):
    for name, spec in specs.items():
        sharding = jax.NamedSharding(make_mesh(kind), spec)
        assert tree[name].sharding.is_equivalent_to(sharding, tree[name].ndim), name


@pytest.mark.sampled(9)
@KINDS
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_it_takes_the_steps_of_one_device(kind, stage):
    params, opt_state, _ = run(jd.zero_redundancy(optimizer(), stage=stage, specs=SPECS), stage, kind)
    assert_close(jax.device_get(params), wanted(), 1e-4)
    check_sharding(params, SPECS if stage == 3 else WHOLE, kind)
    check_sharding(opt_state.inner[1][0].mu, SPECS, kind)
    assert opt_state.inner[1][0].mu["up"].addressable_shards[0].data.size == HALF // 4


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_sent_in_codes_and_updates_once(kind, stage):
    sent = {}
    for name, reducer in {"exact": jd.exact(), "int8": jd.two_shot(jd.compressors.int8())}.items():
        tx = jd.zero_redundancy(optimizer(), stage=stage, reducer=reducer, specs=SPECS)
        program = run(tx, stage, kind, steps=0)[2]
        ops = analysis.collectives(program).across(make_mesh(kind), "data").ops
        scattered = sum(op.wire_bytes for op in ops if op.kind in ("all-to-all", "reduce-scatter"))
        sent[name] = scattered, sum(op.wire_bytes for op in ops if op.kind == "all-gather")
    # Of both matrices, three quarters of the half that this device has.
    once = 2 * HALF * 4 * 3 / 4
    assert sent["exact"][0] == once
    assert sent["int8"][0] < once / 3.5
    # Stage 1 gathers the updates, stage 3 the parameters for the loss, once here; in codes, the mean of the norm too.
    assert sent["exact"][1] == once
    assert once <= sent["int8"][1] <= once + 64


@KINDS
def test_parameters_are_the_rounding_of_their_masters(kind):
    tx = jd.zero_redundancy(optimizer(), master_dtype=jnp.float32, specs=SPECS)
    params, opt_state, _ = run(tx, 1, kind, dtype=jnp.bfloat16)
    check_sharding(opt_state.master, SPECS, kind)
    rounded = jax.tree.map(lambda m: m.astype(jnp.bfloat16), jax.device_get(opt_state.master))
    assert_close(jax.device_get(params), rounded, 0)
    assert_close(jax.device_get(opt_state.master), wanted(), 1e-2)


@pytest.mark.slow
def test_feedback_is_kept_for_each_worker_and_shard():
    reducer = jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign()))
    params, opt_state, _ = run(jd.zero_redundancy(optimizer(), reducer=reducer, specs=SPECS), 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    residual = opt_state.reducer["data+model"].residual
    assert residual.value["up"].value.shape[:2] == (4, 2)


def test_a_step_without_examples_changes_nothing():
    """Nor does weight decay."""
    tx, params = jd.zero_redundancy(optimizer(), specs=SPECS), make_params()
    grads = jax.tree.map(lambda p: jd.PerWorker(jnp.ones((4, *p.shape)), axis=("data",)), params)
    with jax.set_mesh(make_mesh()):
        state = jd.init_state(lambda: tx.init(params), make_mesh(), specs=SPECS)
        updates, after = jax.jit(tx.update)(grads, state, params, examples=jnp.zeros(4))
        some, _ = jax.jit(tx.update)(grads, state, params, examples=jnp.array([1, 0, 0, 0]))
    assert_close(jax.device_get(updates), jax.tree.map(jnp.zeros_like, params), 0)
    assert_close(jax.device_get(after.inner), jax.device_get(state.inner), 0)
    assert (int(state.empty), int(after.empty)) == (0, 1)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(some))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": 3, "specs": None}, "stage must be 1 or 2, got 3; .* use zero.gathered, or specs= under plain jit"),
        ({"compressor": jd.compressors.int8()}, "which has no compressor=: leave it out"),
        ({"state_compressor": jd.compressors.dynamic_fp8(block=8)}, "which has no state_compressor="),
        ({"reducer": None}, "reducer=None takes means: under plain jit zero.zero_shardings"),
        ({"specs": WHOLE}, r"but no spec names it: shard a dimension.*P\('data', 'model'\)"),
        ({"reducer": jd.power_sgd(4)}, "no reduce-scatter form"),
    ],
)
def test_what_it_cannot_do_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        jd.zero_redundancy(optimizer(), **{"specs": SPECS} | options)


def test_what_the_update_cannot_take_is_refused():
    tx, params = jd.zero_redundancy(optimizer(), specs=SPECS), make_params()
    grads = jax.tree.map(lambda p: jd.PerWorker(jnp.ones((4, *p.shape)), axis=("data",)), params)
    with jax.set_mesh(make_mesh()):
        state = jax.eval_shape(tx.init, params)
        with pytest.raises(ValueError, match="examples= has one number for each of the 4 workers"):
            jax.eval_shape(lambda s: tx.update(grads, s, params, examples=3), state)
        with pytest.raises(ValueError, match="moved=True is for local_steps"):
            jax.eval_shape(lambda s: tx.update(grads, s, params, moved=True), state)
    with pytest.raises(
        ValueError, match=r"is for a plain jit under jax.set_mesh\(mesh\) of a mesh with the axis 'data'"
    ):
        tx.update(grads, state, params)
