"""A step that stays a plain jit, with its own shardings: only what the reducer sends crosses between slices."""

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
SPECS = {
    "norm": P(),
    "table": P("model", "fsdp"),
    "layers": {"up": P(None, "fsdp", "model"), "down": P(None, "model", "fsdp")},
}
PARAMETERS = 16 + 32 * 16 + 2 * (2 * 16 * 64)


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("dcn", "fsdp", "model"), axis_types=(kind,) * 3)


def make_params():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {"up": jax.random.normal(keys[0], (2, 16, 64)) / 4, "down": jax.random.normal(keys[1], (2, 64, 16)) / 8}
    return {"norm": jnp.ones(16), "table": jax.random.normal(keys[2], (32, 16)), "layers": layers}


def reshard(x, *spec):
    """FSDP's gather of a parameter, or the sharding of activations: on Explicit axes a type."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.reshard(x, P(*spec)) if explicit else jax.lax.with_sharding_constraint(x, P(*spec))


def loss_fn(params, tokens, dtype=jnp.bfloat16):
    """A residual network in bfloat16 over float32 masters, by `scan` and `remat`."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    rows = reshard(params["table"])
    x = rows.at[tokens].get(out_sharding=P("fsdp")) if explicit else rows[tokens]
    norm = reshard(params["norm"])

    def layer(x, w):
        up, down = reshard(w["up"], None, "model"), reshard(w["down"], "model")
        y = jax.nn.relu(reshard(x * norm[None], "fsdp") @ up)
        return x + jnp.matmul(y, down, out_sharding=P("fsdp") if explicit else None), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean(jnp.square(x.astype(jnp.float32) - 1))


def make_state(tx, mesh):
    def build():
        return make_params(), tx.init(make_params())

    return jd.init_state(build, mesh, axis="dcn", specs=SPECS)


def exact_loss(params, tokens):
    """In float32, so that rounding does not depend on how XLA fuses."""
    return loss_fn(params, tokens, jnp.float32)


def make_step(tx, loss_fn=loss_fn):
    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jd.transforms.per_worker_value_and_grad(loss_fn, axis="dcn")(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step


def make_tx(reducer, **options):
    return optax.chain(jd.all_reduce(reducer, axis="dcn", **options), optax.adam(1e-2))


def batch(mesh, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 32, 16).astype(np.int32)
    return jax.device_put(tokens, jax.NamedSharding(mesh, P(("dcn", "fsdp"))))


def train(tx, mesh, step, steps=3):
    with jax.set_mesh(mesh):
        state = make_state(tx, mesh)
        for seed in range(steps):
            state, loss = step(state, batch(mesh, seed))
    return state, loss


def between_slices(program, mesh):
    """The bytes that a device sends to other slices: in groups of which not all devices are of one slice."""
    slices = np.arange(mesh.size) // (mesh.size // mesh.shape["dcn"])
    return sum(
        op.wire_bytes
        for op in analysis.collectives(program).ops
        if any(len(set(slices[list(group)])) > 1 for group in op.replica_groups)
    )


@KINDS
def test_only_the_reducers_bytes_cross_between_slices(kind):
    mesh, found = make_mesh(kind), {}
    reducers = {"exact": jd.exact(), "f16": jd.compressed(jd.compressors.cast(jnp.float16))}
    for name, reducer in reducers.items():
        tx = make_tx(reducer, specs=SPECS)
        with jax.set_mesh(mesh):
            step = jax.jit(make_step(tx)).lower(make_state(tx, mesh), batch(mesh)).compile()
        found[name] = between_slices(step, mesh)
    # Each device sends its quarter of the sharded leaves, the replicated ones, and 4 bytes of the loss.
    entries = (PARAMETERS - 16) / 4 + 16
    assert found == {"exact": 4 * entries + 4, "f16": 2 * entries + 4}


def test_the_norm_of_the_mean_is_read_from_the_state():
    mesh = make_mesh()
    tx = optax.chain(
        jd.all_reduce(jd.exact(), axis="dcn", specs=SPECS),
        optax.snapshot("norm", optax.tree.norm),
        optax.clip_by_global_norm(1e-3),
    )
    with jax.set_mesh(mesh):
        (_, opt_state), _ = jax.jit(make_step(tx, exact_loss))(make_state(tx, mesh), batch(mesh))
        expected = optax.tree.norm(jax.jit(jax.grad(exact_loss))(make_params(), batch(mesh)))
    assert_close(optax.tree.get(opt_state, "norm"), expected)


@KINDS
def test_parameters_may_be_whole_inside_a_slice(kind):
    """Data parallelism inside slices: further axes shard the batch alone, and `specs=P()` says so."""
    mesh = jax.make_mesh((2, 4), ("dcn", "data"), axis_types=(kind,) * 2)
    params, x = {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}, np.arange(128, dtype=np.float32).reshape(8, 16) / 128
    reducer = jd.error_feedback(jd.compressed(jd.compressors.cast(jnp.float16)))
    tx = optax.chain(jd.all_reduce(reducer, axis="dcn", specs=P()), optax.sgd(0.5))

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)

    step = make_step(tx, loss_fn)
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: (params, tx.init(params)), mesh, axis="dcn", specs=P())
        rows = jax.device_put(x, jax.NamedSharding(mesh, P(("dcn", "data"))))
        program = jax.jit(step).lower(state, rows).compile()
        (found, _), _ = program(state, rows)
    assert between_slices(program, mesh) == 2 * (16 * 8 + 8) + 4
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss_fn)(params, x))
    assert_close(found, expected, tolerance=2e-3)


@pytest.mark.slow
@KINDS
def test_two_axes_may_shard_one_dimension(kind):
    """FSDP over both axes of a slice, as MaxText shards: a device still sends its quarter alone."""
    mesh = make_mesh(kind)
    specs = SPECS | {"layers": {"up": P(None, ("fsdp", "model")), "down": P(None, None, ("fsdp", "model"))}}
    tx = make_tx(jd.compressed(jd.compressors.cast(jnp.float16)), specs=specs)
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: (make_params(), tx.init(make_params())), mesh, axis="dcn", specs=specs)
        step = jax.jit(make_step(tx))
        program = step.lower(state, batch(mesh)).compile()
        state, _ = step(state, batch(mesh))
    assert between_slices(program, mesh) == 2 * ((PARAMETERS - 16) / 4 + 16) + 4
    assert state[0]["layers"]["up"].sharding.shard_shape((2, 16, 64)) == (2, 4, 64)


@pytest.mark.slow
@KINDS
def test_the_numbers_are_those_of_distribute(kind):
    mesh = make_mesh(kind)
    reducer = jd.error_feedback(jd.power_sgd(1, min_compression_rate=0.0))
    tx = make_tx(reducer, specs=SPECS)
    plain, loss = train(tx, mesh, jax.jit(make_step(tx, exact_loss)))

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jd.local_value_and_grad(exact_loss, axis="dcn")(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "dcn")

    mapped, wanted = train(tx, mesh, jd.distribute(train_step, mesh, axis="dcn"))
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert_close(plain[0], mapped[0], 1e-4)


@pytest.mark.slow
@KINDS
def test_shardings_stay(kind):
    mesh, tx = make_mesh(kind), make_tx(jd.error_feedback(jd.compressed(jd.top_k(0.25))), specs=SPECS)
    step = jax.jit(make_step(tx), donate_argnums=0)
    with jax.set_mesh(mesh):
        wanted = [x.sharding for x in jax.tree.leaves(make_state(tx, mesh))]
    state, _ = train(tx, mesh, step)
    for leaf, before in zip(jax.tree.leaves(state), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(before, leaf.ndim)


@pytest.mark.slow
@KINDS
def test_local_steps_between_slices_keep_the_shardings_inside(kind):
    """In `distribute`, since the slices have parameters of their own."""
    mesh = make_mesh(kind)
    tx = jd.local_sgd.diloco(optax.adam(1e-2), sync_period=2, axis="dcn")

    def train_step(state, batch):
        loss, grads = jd.local_value_and_grad(exact_loss, axis="dcn")(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt_state}, jax.lax.pmean(loss, "dcn")

    def build():
        return {"params": jd.PerWorker(make_params()), "opt": tx.init(make_params())}

    step = jd.distribute(train_step, mesh, axis="dcn")
    with jax.set_mesh(mesh):
        state = jd.init_state(build, mesh, axis="dcn", specs=SPECS)
        # A device sends its quarter of the drift in a round, and 4 bytes of each loss.
        assert between_slices(step.lower(state, batch(mesh)).compile(), mesh) == 4 * ((PARAMETERS - 16) / 4 + 16) + 4
        state, _ = step(state, batch(mesh))
    up = state["params"].value["layers"]["up"]
    assert up.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("dcn", None, "fsdp", "model")), up.ndim)


@pytest.mark.slow
def test_delay_and_micro_batches():
    mesh = make_mesh()
    tx = make_tx(jd.exact(), delay=1)
    state, _ = train(tx, mesh, jax.jit(make_step(tx)), steps=1)
    assert_close(state[0], make_params())
    whole, parts = (
        jax.jit(jd.transforms.per_worker_value_and_grad(exact_loss, axis="dcn", micro_batches=k)) for k in (1, 2)
    )
    with jax.set_mesh(mesh):
        (a, g), (b, h) = (f(make_params(), batch(mesh)) for f in (whole, parts))
    assert float(a) == pytest.approx(float(b), rel=1e-5)
    assert g["norm"].value.shape == (2, 16)
    assert_close(g["norm"].value, h["norm"].value, 1e-5)


@pytest.mark.slow
def test_accumulate_opens_a_map_too():
    mesh = make_mesh()
    inner = make_tx(jd.exact(), specs=SPECS)
    tx = jd.accumulate(inner, 2, axis="dcn")
    state, _ = train(tx, mesh, jax.jit(make_step(tx)), steps=1)
    assert_close(state[0], make_params())
    both, _ = train(tx, mesh, jax.jit(make_step(tx)), steps=2)
    assert not np.allclose(both[0]["table"], make_params()["table"])


def test_auxiliary_data_are_merged():
    def loss(w, x):
        return (w * x).mean(), {"mean": x.mean(), "count": jnp.sum(x > 1), "any": (x > 3).any()}

    with jax.set_mesh(make_mesh()):
        f = jax.jit(jd.transforms.per_worker_value_and_grad(loss, axis="dcn", has_aux=True))
        (value, aux), gradient = f(jnp.ones(()), jnp.arange(1.0, 5.0))
    assert (float(value), float(aux["mean"]), int(aux["count"]), bool(aux["any"])) == (2.5, 2.5, 3, True)
    assert gradient.value.tolist() == [1.5, 3.5]


def test_gradients_that_are_summed_already_are_refused():
    """Under plain jit autodiff has sent them in full."""
    tx = make_tx(jd.exact(), specs=SPECS)

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, batch)
        return tx.update(grads, opt_state, params)

    mesh = make_mesh()
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"jax.grad has summed them already.*nothing is left.*keep-y"),
    ):
        jax.jit(step)(make_state(tx, mesh), batch(mesh))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_constraints_over_the_workers_are_refused_by_name(kind):
    def loss(w, x):
        return reshard(x * w, ("dcn", "fsdp")).mean()

    with jax.set_mesh(make_mesh(kind)):
        of_workers = jax.jit(jd.transforms.per_worker_value_and_grad(loss, axis="dcn"))
        with pytest.raises(
            ValueError, match=r"a sharding constraint in the loss names axis 'dcn'.*leave it out, P\('fsdp'\)"
        ):
            of_workers(jnp.ones(()), batch(make_mesh(kind)) * 1.0)


@pytest.mark.parametrize("layers", [2, 3])  # as many as there are workers, too
def test_a_state_that_was_not_placed_is_refused(layers):
    """As plain JAX makes it, by `jax.jit(tx.init)(params)`."""
    tx = jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=2)), axis="dcn")
    params = {"stack": jnp.ones((layers, 4, 4)), "w": jnp.ones((4, 4))}
    of_workers = jd.transforms.per_worker_value_and_grad(
        lambda p, x: (p["stack"][0] @ p["w"]).mean() * x.mean(), axis="dcn"
    )
    with jax.set_mesh(jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(AxisType.Auto,) * 2)):
        _, grads = jax.jit(of_workers)(params, jnp.ones(8))
        with pytest.raises(
            ValueError, match=r"should be for the 2 workers of axis 'dcn': .*place\(state, mesh, axis='dcn'\)"
        ):
            jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params)


def test_what_needs_another_place_is_refused():
    of_workers = jd.transforms.per_worker_value_and_grad(loss_fn, axis="dcn")
    with pytest.raises(ValueError, match=r"the axis 'dcn', but it is not set: call jax.set_mesh"):
        of_workers(make_params(), jnp.zeros(16, jnp.int32))
    with jax.set_mesh(make_mesh()):
        with pytest.raises(ValueError, match=r"the axis 'data', but it has the axes \('dcn', 'fsdp', 'model'\)"):
            jd.transforms.per_worker_value_and_grad(loss_fn)(make_params(), jnp.zeros(16, jnp.int32))
        with pytest.raises(ValueError, match=r"batch of shape \(15,\) does not divide among 2 workers"):
            of_workers(make_params(), jnp.zeros(15, jnp.int32))
        tx = make_tx(jd.exact())
        state, (_, grads) = make_state(tx, make_mesh()), jax.jit(of_workers)(make_params(), batch(make_mesh()))
        with pytest.raises(
            ValueError, match=r"examples= has one number for each of the 2 workers of axis 'dcn', \[2\]"
        ):
            tx.update(grads, state[1], state[0], examples=3)
        with pytest.raises(ValueError, match="some gradients are marked PerWorker and others"):
            tx.update({**grads, "norm": grads["norm"].value}, state[1], state[0])

    def mapped(state, batch):
        return state, jax.lax.pmean(of_workers(state, batch)[0], "dcn")

    with pytest.raises(ValueError, match="axis 'dcn' is mapped here"):
        jd.distribute(mapped, make_mesh(), axis="dcn")(
            jd.place(make_params(), make_mesh(), axis="dcn"), batch(make_mesh())
        )


def of_slices(params):
    """Gradients as `per_worker_value_and_grad(axis="dcn")` returns them."""
    return jax.tree.map(lambda p: jd.PerWorker(jnp.ones((2, *p.shape)), axis=("dcn",)), params)


SMALL = {"w": jnp.ones((4, 4))}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_slices_are_weighted_by_their_examples(kind):
    """Numbers of all of them, `[2]`; `active=` leaves a slice out, and without any the update is zero."""
    tx = optax.chain(jd.all_reduce(jd.exact(), axis="dcn"), optax.sgd(1.0))
    weights = [({"examples": jnp.array([1, 3])}, 2.5), ({"active": jnp.array([True, False])}, 1.0)]
    weights += [({"examples": jd.PerWorker(jnp.zeros(2), axis="dcn")}, 0.0)]
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        each = jax.device_put(jnp.stack([SMALL["w"], 3 * SMALL["w"]]), jax.NamedSharding(mesh, P("dcn")))
        grads = {"w": jd.PerWorker(each, axis=("dcn",))}
        for given, mean in weights:
            updates, state = jax.jit(tx.update)(grads, tx.init(SMALL), SMALL, **given)
            np.testing.assert_allclose(updates["w"], -mean * np.ones((4, 4)), rtol=1e-6)
            assert int(state[0].empty) == (mean == 0)


@pytest.mark.parametrize(
    "transformation",
    [
        lambda: jd.all_reduce(jd.exact()),
        lambda: jd.all_reduce(jd.exact(), delay=1),
        lambda: jd.accumulate(jd.all_reduce(jd.exact(), axis="dcn"), 2),
        lambda: jd.zero_redundancy(optax.adam(0.1)),
    ],
    ids=["all_reduce", "delay", "accumulate", "zero_redundancy"],
)
def test_the_axis_of_the_slices_is_named_where_it_was_left_out(transformation):
    """`axis="data"` is the default, and no axis of this mesh."""
    tx = transformation()
    match = "gradients of the workers of axis 'dcn', but .* axis 'data': pass axis='dcn'"
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=match):
        jax.jit(tx.update)(of_slices(SMALL), tx.init(SMALL), SMALL)


@pytest.mark.parametrize("axis", ["fsdp", None])
def test_gradients_of_other_workers_are_refused(axis):
    """Along an axis of the same size they would be averaged all the same, and along none not at all."""
    tx = jd.all_reduce(jd.exact(), axis=axis)
    match = f"gradients of the workers of axis 'dcn', but .* axis {axis!r}: pass axis='dcn'"
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=match):
        jax.jit(tx.update)(of_slices(SMALL), tx.init(SMALL), SMALL)


@pytest.mark.parametrize(
    "transformation",
    [
        lambda: jd.all_reduce(jd.exact()),
        lambda: jd.zero_redundancy(optax.adam(0.1)),
        lambda: jd.local_steps(optax.sgd(0.1), optax.sgd(0.7), sync_period=2),
        lambda: jd.gossip(optax.sgd(0.1), jd.topology.ring(2)),
        lambda: jd.skip_nonfinite(optax.sgd(0.1)),
        lambda: jd.optimizers.dion(0.1, rank=2),
    ],
    ids=["all_reduce", "zero_redundancy", "local_steps", "gossip", "skip_nonfinite", "dion"],
)
def test_an_axis_that_the_mesh_lacks_is_told_with_those_that_it_has(transformation):
    """Gradients of plain JAX, on a mesh of other names."""
    tx = transformation()
    match = r"axis 'data' .*the mesh has \('dcn', 'fsdp', 'model'\): pass axis="
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=match):
        jax.jit(tx.update)(SMALL, tx.init(SMALL), SMALL)
    # Without a mesh the names are not known here.
    match = r"axis 'data' is not bound here: run the step with .*jax\.set_mesh\(mesh\), and axis="
    with pytest.raises(ValueError, match=match):
        jax.jit(tx.update)(SMALL, tx.init(SMALL), SMALL)


def small_step(tx, value_and_grad, mean):
    def train_step(state, batch):
        params, opt_state = state
        loss, grads = value_and_grad(lambda p, x: jnp.mean(jnp.square(x @ p["w"])), axis="dcn")(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), mean(loss)

    return train_step


def train_small(tx, mesh, step, batches):
    specs = {"w": P("fsdp", "model")}
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: (SMALL, tx.init(SMALL)), mesh, axis="dcn", specs=specs)
        for x in batches:
            state, _ = step(state, jax.device_put(x, jax.NamedSharding(mesh, P(("dcn", "fsdp")))))
    return state


def test_per_worker_is_each_slices_own():
    """Clipping in front of the mean: by the norm of each slice, and not by one norm of all of them."""
    tx = optax.chain(
        jd.transforms.per_worker(optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9))),
        jd.all_reduce(jd.exact(), axis="dcn", specs={"w": P("fsdp", "model")}),
        optax.sgd(1.0),
    )
    mesh = make_mesh()
    batches = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float32)
    batches[:, :4] *= 10
    plain = small_step(tx, jd.transforms.per_worker_value_and_grad, lambda loss: loss)
    found = train_small(tx, mesh, jax.jit(plain), batches)
    mapped = small_step(tx, jd.local_value_and_grad, lambda loss: jax.lax.pmean(loss, "dcn"))
    assert_close(found[0], train_small(tx, mesh, jd.distribute(mapped, mesh, axis="dcn"), batches)[0], 1e-5)
    momentum = found[1][0].value[1].trace["w"]
    assert momentum.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("dcn", "fsdp", "model")), momentum.ndim)


def test_a_bad_gradient_of_one_slice_skips_the_step():
    averaged = jd.all_reduce(jd.exact(), axis="dcn", specs={"w": P("fsdp", "model")})
    tx, mesh = jd.skip_nonfinite(optax.chain(averaged, optax.adam(0.1)), axis="dcn"), make_mesh()
    step = jax.jit(small_step(tx, jd.transforms.per_worker_value_and_grad, lambda loss: loss))
    good = np.ones((8, 4), np.float32)
    bad = np.where(np.arange(8)[:, None] == 0, np.nan, good)
    params, state = train_small(tx, mesh, step, [bad])
    assert int(state.skipped) == 1
    assert_close(params, SMALL)
    params, state = train_small(tx, mesh, step, [bad, good])
    assert int(state.skipped) == 1
    assert_close(params, {"w": np.full((4, 4), 0.9)}, 1e-5)


@pytest.mark.slow
@KINDS
def test_parameters_in_bfloat16_beside_masters(kind):
    """As the page writes it, against one gradient of the whole batch and optax alone."""
    mesh, tx = make_mesh(kind), optax.sgd(0.1, momentum=0.9)
    averaged = optax.chain(jd.all_reduce(jd.exact(), axis="dcn", specs=SPECS), tx)

    def make_step(tx, gradient):
        def train_step(state, batch):
            params, masters, opt_state = state
            loss, grads = gradient(params, batch)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            updates, opt_state = tx.update(grads, opt_state, masters)
            masters = optax.apply_updates(masters, updates)
            params = jax.tree.map(lambda p, m: m.astype(p.dtype), params, masters)
            return (params, masters, opt_state), loss

        return jax.jit(train_step)

    def build(tx):
        masters = make_params()
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters), masters, tx.init(masters)

    of_slices = jd.transforms.per_worker_value_and_grad(exact_loss, axis="dcn")
    step, plain = make_step(averaged, of_slices), make_step(tx, jax.value_and_grad(exact_loss))
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: build(averaged), mesh, axis="dcn", specs=SPECS)
        for seed in range(3):
            state, _ = step(state, batch(mesh, seed))
    # On one device.
    wanted = build(tx)
    single = jax.make_mesh((1, 1, 1), ("dcn", "fsdp", "model"), axis_types=(kind,) * 3, devices=jax.devices()[:1])
    with jax.set_mesh(single):
        for seed in range(3):
            wanted, _ = plain(wanted, np.asarray(batch(mesh, seed)))
    assert state[0]["table"].dtype == jnp.bfloat16
    assert_close(jax.device_get(state[1]), jax.device_get(wanted[1]), 1e-3)


def of_two(first, second):
    """Gradients of two slices, as `per_worker_value_and_grad(axis="dcn")` returns them."""
    return jax.tree.map(lambda x, y: jd.PerWorker(jnp.stack([x, y]), axis=("dcn",)), first, second)


TWO_LEAVES = {"used": jnp.zeros(3), "unused": jnp.ones(2)}
AROUND = {
    "all_reduce": lambda tx: tx,
    "accumulate": lambda tx: jd.accumulate(tx, 1, axis="dcn"),
    "skip_nonfinite": lambda tx: jd.skip_nonfinite(tx, axis="dcn"),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, EXPLICIT])
@pytest.mark.parametrize("around", AROUND)
def test_what_wraps_all_reduce_leaves_out_the_same_slices(around, kind):
    """A mean over no examples is NaN, and neither enters the mean nor skips the step; leaf by leaf with a tree."""
    tx = AROUND[around](optax.chain(jd.all_reduce(jd.exact(), axis="dcn"), optax.sgd(1.0)))
    grads = of_two(
        {"used": jnp.full(3, 2.0), "unused": jnp.full(2, jnp.nan)},
        {"used": jnp.full(3, jnp.nan), "unused": jnp.full(2, jnp.nan)},
    )
    finite = of_two(*[{"used": jnp.full(3, x), "unused": jnp.full(2, x)} for x in (2.0, 6.0)])
    nobody, first = jnp.zeros(2), jnp.array([4.0, 0.0])
    cases = [
        (grads, {"examples": {"used": first, "unused": nobody}}, (2.0, 0.0)),
        (finite, {"examples": {"used": jnp.array([3.0, 1.0]), "unused": first}}, (3.0, 2.0)),
        (finite, {"active": jnp.array([False, True])}, (6.0, 6.0)),
        (of_two({"used": jnp.full(3, 2.0), "unused": jnp.ones(2)}, TWO_LEAVES), {"examples": [4, 0]}, (2.0, 1.0)),
        ({**grads, "unused": grads["used"]}, {"examples": first}, (2.0, 2.0)),
    ]
    with jax.set_mesh(make_mesh(kind)):
        state = jd.init_state(lambda: tx.init(TWO_LEAVES), make_mesh(kind), axis="dcn")
        for updates, weights, (used, unused) in cases:
            params = {"used": TWO_LEAVES["used"], "unused": jnp.ones(updates["unused"].value.shape[1:])}
            state = jd.init_state(lambda params=params: tx.init(params), make_mesh(kind), axis="dcn")
            # As `per_worker_value_and_grad` leaves them, which on Explicit axes is their type.
            updates = jax.device_put(updates, jax.NamedSharding(make_mesh(kind), P("dcn")))
            found, after = jax.jit(tx.update)(updates, state, params, **weights)
            np.testing.assert_allclose(found["used"], -used * np.ones(3), rtol=1e-6)
            np.testing.assert_allclose(found["unused"], -unused * np.ones(params["unused"].shape), rtol=1e-6)
            if around == "skip_nonfinite":
                assert int(after.skipped) == 0


def test_zero_by_specs_leaves_what_no_slice_used():
    """Neither decayed nor, in its moments, changed."""
    specs = {"w": P("dcn"), "b": P()}
    params = {"w": jnp.ones(4), "b": jnp.ones(4)}
    tx = jd.zero_redundancy(optax.adamw(0.1, weight_decay=0.5), axis="dcn", specs=specs)
    grads = jax.tree.map(lambda p: jd.PerWorker(jnp.ones((2, 4)), axis=("dcn",)), params)
    mesh = jd.make_mesh({"dcn": 2})
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: tx.init(params), mesh, axis="dcn", specs=specs)
        used = {"w": jnp.zeros(2), "b": jnp.array([1, 2])}
        updates, state = jax.jit(tx.update)(grads, state, params, examples=used)
    np.testing.assert_allclose(updates["w"], np.zeros(4))
    np.testing.assert_allclose(updates["b"], -0.15 * np.ones(4), rtol=1e-5)
    np.testing.assert_allclose(state.inner[0].mu["w"], np.zeros(4))


def test_functions_of_global_arrays_stay_outside_the_map():
    """Behind `all_reduce` an optimizer calls them where they are written; one in the map is refused by name."""
    inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
    averaged = optax.chain(jd.all_reduce(jd.exact(), axis="dcn"), inner)
    params, x = {"w": jnp.ones((4, 4))}, np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)

    def loss(p, x):
        return jnp.mean(jnp.square(x @ p["w"] - 1))

    def step(tx, state, x):
        value, grads = jd.transforms.per_worker_value_and_grad(loss, axis="dcn")(params, x)
        mean = {name: gradient.value.mean(0) for name, gradient in grads.items()}
        return tx.update(grads, state, params, value=value, grad=mean, value_fn=lambda p: loss(p, x))[0]

    value, gradient = jax.value_and_grad(loss)(params, x)
    expected, _ = inner.update(
        gradient, inner.init(params), params, value=value, grad=gradient, value_fn=lambda p: loss(p, x)
    )
    with jax.set_mesh(make_mesh()):
        for tx in (averaged, jd.skip_nonfinite(averaged, axis="dcn")):
            assert_close(jax.jit(step, static_argnums=0)(tx, tx.init(params), x), expected, 1e-5)
        tx = jd.accumulate(averaged, 1, axis="dcn")
        state = jd.init_state(lambda: tx.init(params), make_mesh(), axis="dcn")
        with pytest.raises(ValueError, match=r"value_fn= is a function of the global arrays.*behind all_reduce"):
            jax.jit(step, static_argnums=0)(tx, state, x)


def test_the_host_chooses_the_sync():
    """A Python bool chooses the program, and reaches the map as one."""
    tx = jd.accumulate(optax.chain(jd.all_reduce(jd.exact(), axis="dcn"), optax.sgd(1.0)), axis="dcn")
    update = jax.jit(tx.update, static_argnames="sync")
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: tx.init(SMALL), mesh, axis="dcn")
        first, state = update(of_slices(SMALL), state, SMALL, sync=False)
        second, state = update(of_slices(SMALL), state, SMALL, sync=True)
    assert_close((first, second), ({"w": np.zeros((4, 4))}, {"w": -np.ones((4, 4))}))


def test_parts_are_weighted_by_a_function_of_theirs():
    """The error about a loss that is divided by two numbers of the batch names an argument that is there."""

    def loss(w, batch):
        error = w * batch["x"]
        return jnp.sum(error * batch["mask"]) / batch["mask"].sum() / (1 + 0 * batch["x"].max())

    parts = {"axis": "dcn", "micro_batches": 2}
    batch = {"x": jnp.arange(8.0), "mask": jnp.array([1.0, 1, 0, 1, 1, 0, 0, 1])}
    with jax.set_mesh(make_mesh()):
        with pytest.raises(ValueError, match="weights=lambda batch"):
            jax.jit(jd.transforms.per_worker_value_and_grad(loss, **parts))(jnp.ones(()), batch)
        of_slices = jd.transforms.per_worker_value_and_grad(loss, weights=lambda batch: batch["mask"].sum(), **parts)
        _, gradient = jax.jit(of_slices)(jnp.ones(()), batch)
    np.testing.assert_allclose(gradient.value, [(0 + 1 + 3) / 3, (4 + 7) / 2], rtol=1e-6)


def test_sums_keep_the_shardings_of_explicit_axes():
    """Of micro-batches, and of calls: zeros that a loop or a branch starts from have the types of what is added."""
    mesh, specs = make_mesh(AxisType.Explicit), {"w": P("fsdp", "model")}
    averaged = jd.all_reduce(jd.exact(), axis="dcn", specs=specs)
    tx = jd.accumulate(optax.chain(averaged, optax.sgd(0.1)), 2, axis="dcn")

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.matmul(reshard(x, "fsdp"), reshard(params["w"]))))

    @jax.jit
    def step(state, x):
        params, opt_state = state
        _, grads = jd.transforms.per_worker_value_and_grad(loss, axis="dcn", micro_batches=2)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    batches = np.random.default_rng(0).standard_normal((2, 16, 4)).astype(np.float32)
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: (SMALL, tx.init(SMALL)), mesh, axis="dcn", specs=specs)
        for x in batches:
            state = step(state, jax.device_put(x, jax.NamedSharding(mesh, P("dcn"))))
    assert state[0]["w"].sharding.spec == specs["w"]
    gradient = np.mean([jax.grad(lambda w, x=x: jnp.mean(jnp.square(x @ w)))(SMALL["w"]) for x in batches], 0)
    np.testing.assert_allclose(state[0]["w"], 1 - 0.1 * gradient, rtol=1e-5)
