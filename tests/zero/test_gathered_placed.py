"""`gathered(specs=)`: stage 3 layer by layer in a plain jit, beside axes that the compiler shards."""

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
from jaxdist import compressors as jc
from jaxdist.zero import gathered

EXPLICIT = pytest.param(AxisType.Explicit, id="explicit", marks=pytest.mark.slow)
KINDS = pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, id="auto"), EXPLICIT])
LAYER = {"up": P("fsdp", "model"), "down": P("model", "fsdp"), "norm": P()}
SPECS = {
    "layers": {"up": P(None, "fsdp", "model"), "down": P(None, "model", "fsdp"), "norm": P()},
    "table": P("fsdp"),
    "head": P("model", "fsdp"),
}
LAYERS, WIDTH, HIDDEN, ROWS = 3, 16, 64, 32
# Of the matrices of a layer, on one device of a mesh of 4 x 2.
SHARD = 2 * WIDTH * HIDDEN // 8


def make_mesh(kind=AxisType.Auto, shape=(4, 2), names=("fsdp", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def make_params():
    keys = jax.random.split(jax.random.key(0), 4)
    layers = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 4,
        "down": jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 8,
        "norm": jnp.ones((LAYERS, WIDTH)),
    }
    table, head = jax.random.normal(keys[2], (32, WIDTH)), jax.random.normal(keys[3], (WIDTH, 8)) / 4
    return {"layers": layers, "table": table, "head": head}


def is_explicit():
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def embed(table, tokens):
    return table.at[tokens].get(out_sharding=P(None, None) if is_explicit() else None)


def layer(p, x):
    hidden = jax.nn.relu((x * p["norm"][None]) @ p["up"])
    return x + jnp.matmul(hidden, p["down"], out_sharding=P(None, None) if is_explicit() else None)


def head(w, x):
    y = jnp.matmul(x, w, out_sharding=P(None, None) if is_explicit() else None)
    return jnp.mean(jnp.square(y - 1))


def make_loss(**options):
    """A loss of which each part is gathered; `axis` is that of the shards."""
    wrap = {name: gathered(f, axis="fsdp", specs=specs, **options) for name, f, specs in PARTS}

    def loss(params, tokens):
        x = wrap["embed"](params["table"], tokens)
        x, _ = jax.lax.scan(lambda x, p: (wrap["layer"](p, x), None), x, params["layers"])
        return wrap["head"](params["head"], x)

    return loss


PARTS = [("embed", embed, SPECS["table"]), ("layer", layer, LAYER), ("head", head, SPECS["head"])]


def plain_loss(params, tokens):
    x = params["table"][tokens]
    for i in range(LAYERS):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        x = x + jax.nn.relu((x * p["norm"][None]) @ p["up"]) @ p["down"]
    return jnp.mean(jnp.square(x @ params["head"] - 1))


def tokens_of(seed=0):
    return np.random.default_rng(seed).integers(0, 32, ROWS).astype(np.int32)


def place(mesh, params):
    return jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), params, SPECS)


def trace(mesh, loss):
    """A gradient that is not run yet, and its arguments."""
    batch = jax.device_put(tokens_of(), jax.NamedSharding(mesh, P("fsdp")))
    return jax.jit(jax.value_and_grad(loss)), place(mesh, make_params()), batch


def gradients(mesh, loss):
    gradient, params, batch = trace(mesh, loss)
    return gradient(params, batch)


@KINDS
@pytest.mark.parametrize("remat", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_device_and_are_sharded_as_the_parameters(kind, remat):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        loss, found = gradients(mesh, make_loss(remat=remat))
    wanted = jax.value_and_grad(plain_loss)(make_params(), tokens_of())
    assert float(loss) == pytest.approx(float(wanted[0]), rel=1e-5)
    assert_close(jax.device_get(found), wanted[1], 1e-4)
    for leaf, spec in zip(jax.tree.leaves(found), jax.tree.leaves(SPECS), strict=True):
        # Of what is not gathered, the compiler chooses.
        assert "fsdp" not in spec or leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), leaf.ndim)


def sent_by(mesh, loss, axis="fsdp"):
    """The bytes that a device sends across an axis, of each kind of collective, those of loops in full."""
    found = {}
    gradient, *arguments = trace(mesh, loss)
    for op in analysis.collectives(gradient.lower(*arguments)).across(mesh, axis).ops:
        found[op.kind] = found.get(op.kind, 0) + op.wire_bytes
    return found


@pytest.mark.slow
@KINDS
def test_bytes_are_those_of_shards_in_codes(kind):
    """A device gathers and scatters its half of the matrices alone, in 8 bits with codes, and layer by layer."""
    mesh, sent = make_mesh(kind), {}
    with jax.set_mesh(mesh):
        for name, options in {
            "exact": {},
            "codes": {"reducer": jd.two_shot(jc.int8()), "compressor": jc.int8()},
        }.items():
            sent[name] = sent_by(mesh, make_loss(**options))
    outside = 3 * 4 * (32 * WIDTH // 4 + WIDTH * 8 // 8)
    once = 3 * 4 * LAYERS * SHARD + outside
    exact, codes = sent["exact"], sent["codes"]
    # Layers in both passes. The gradient of the look-up takes no table, and XLA may keep the head from the end of the
    # one pass for the begin of the other.
    assert 2 * once - outside <= exact["all-gather"] < 2 * once
    assert exact.get("reduce-scatter", 0) + exact.get("all-to-all", 0) == once
    assert codes["all-gather"] < (2 * once - outside) / 3.3
    assert codes["all-to-all"] < once / 3.3
    # The gradient of the norms, and the loss.
    assert exact["all-reduce"] == codes["all-reduce"] <= 2 * 4 * (LAYERS * WIDTH + 1)


@pytest.mark.slow
def test_one_layer_is_whole_at_a_time():
    """Its parameters, and its gradient: with more layers the temporary memory grows by their shards alone."""
    mesh, width = make_mesh(), 256
    specs = {"w": P("fsdp", "model")}
    one = gathered(lambda p, x: jnp.tanh(x @ p["w"]), axis="fsdp", specs=specs)

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (one({"w": w}, x), None), x, params)[0])

    def temporary(layers):
        w = jax.ShapeDtypeStruct(
            (layers, width, width), jnp.float32, sharding=jax.NamedSharding(mesh, P(None, "fsdp", "model"))
        )
        x = jax.ShapeDtypeStruct((8, width), jnp.float32, sharding=jax.NamedSharding(mesh, P("fsdp")))
        return analysis.memory(jax.jit(jax.grad(loss), donate_argnums=0).lower(w, x).compile()).temporary

    with jax.set_mesh(mesh):
        few, many = temporary(2), temporary(12)
    # A whole layer has 4 * width² / 2 bytes on a device, and its shard, which the gradient keeps, a quarter.
    assert many - few < 10 * 1.2 * 4 * width * width / 8


@pytest.mark.slow
def test_the_gradient_is_that_of_the_coded_parameters():
    """Straight through, and the draws of both passes are the same."""
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        loss, found = gradients(mesh, make_loss(compressor=jd.qsgd(8, bucket=64)))
        again, _ = gradients(mesh, make_loss(compressor=jd.qsgd(8, bucket=64)))
    wanted = jax.value_and_grad(plain_loss)(make_params(), tokens_of())
    assert float(loss) == float(again)
    assert 0 < abs(float(loss) - float(wanted[0])) < 0.05 * float(wanted[0])
    for a, b in zip(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(wanted[1]), strict=True):
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)


@pytest.mark.slow
@KINDS
def test_codes_between_slices_too(kind):
    """FSDP in codes inside of slices, and another reducer between them, as the page composes them."""
    names = ("dcn", "fsdp", "model")
    mesh = make_mesh(kind, (2, 2, 2), names)
    tx = optax.chain(jd.all_reduce(jd.exact(), axis="dcn", specs=SPECS), optax.sgd(1.0))

    def step(params, opt_state, tokens):
        of_slices = jd.transforms.per_worker_value_and_grad(make_loss(), axis="dcn")
        loss, grads = of_slices(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return updates, loss

    with jax.set_mesh(mesh):
        params = place(mesh, make_params())
        opt_state = jd.init_state(lambda: tx.init(params), mesh, axis="dcn", specs=SPECS)
        batch = jax.device_put(tokens_of(), jax.NamedSharding(mesh, P(("dcn", "fsdp"))))
        program = jax.jit(step).lower(params, opt_state, batch).compile()
        updates, loss = program(params, opt_state, batch)
    wanted = jax.value_and_grad(plain_loss)(make_params(), tokens_of())
    assert float(loss) == pytest.approx(float(wanted[0]), rel=1e-5)
    assert_close(jax.device_get(updates), jax.tree.map(jnp.negative, wanted[1]), 1e-4)
    crossed = analysis.collectives(program).across(mesh, "dcn").wire_bytes
    entries = LAYERS * 2 * WIDTH * HIDDEN / 4 + 32 * WIDTH / 2 + WIDTH * 8 / 4 + LAYERS * WIDTH
    assert crossed == 4 * entries + 4


def test_rows_and_numbers_are_results():
    """Arrays of rows are joined, floating numbers averaged, integers added; what follows is each worker's own."""
    f = gathered(
        lambda p, rows, scale: ({"y": rows["x"] * p["w"].sum() * scale}, rows["x"].mean(), jnp.int32(1)),
        axis="fsdp",
        specs={"w": P("fsdp"), "b": P()},
    )
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        x = jnp.arange(8.0)[:, None]
        out, mean, count = jax.jit(f)({"w": jnp.ones(4), "b": jnp.zeros(2)}, {"x": x}, 2.0)
    np.testing.assert_allclose(out["y"], 8 * x)
    assert (float(mean), int(count)) == (3.5, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"specs": {"w": P(None, "model")}}, r"gathered\(specs=\) gathers .* axis 'fsdp', but no spec names it"),
        ({"specs": {"w": P(("fsdp", "model"))}}, r"gathered\(specs=\) has .*axis 'fsdp' of the workers must shard a"),
        ({"reducer": jd.power_sgd(4)}, "no reduce-scatter form"),
        ({"secondary_partition": True, "axis": ("pod", "fsdp")}, "is for parameters of zero.shard inside distribute"),
    ],
)
def test_what_it_cannot_do_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        gathered(layer, **{"axis": "fsdp", "specs": {"w": P("fsdp")}} | options)


def test_what_a_call_cannot_take_is_refused():
    specs = {"w": P("fsdp", "model")}
    params = {"w": jnp.ones((16, 16))}

    def build(f=lambda p, x: x @ p["w"], **options):
        return gathered(f, axis="fsdp", specs=specs, **options)

    with pytest.raises(ValueError, match=r"must have the axis 'fsdp', but it is not set: call jax.set_mesh"):
        build()(params, jnp.ones((8, 16)))
    with jax.set_mesh(make_mesh()):
        with pytest.raises(ValueError, match=r"the second argument of gathered\(specs=\) of shape \(6, 16\) does not"):
            build()(params, jnp.ones((6, 16)))
        with pytest.raises(ValueError, match="keeps nothing from step to step"):
            build(reducer=jd.error_feedback(jd.two_shot(jc.int4())))(params, jnp.ones((8, 16)))
        constrained = build(lambda p, x: jax.lax.with_sharding_constraint(x @ p["w"], P("fsdp")))
        with pytest.raises(ValueError, match=r"the function of gathered\(specs=\) names axis 'fsdp'.*leave it out"):
            jax.jit(constrained)(params, jnp.ones((8, 16)))
        with pytest.raises(ValueError, match=r"specs must have a PartitionSpec for each array"):
            build()({"v": params["w"]}, jnp.ones((8, 16)))
        mapped = jax.shard_map(lambda x: build()(params, x), in_specs=P("model"), out_specs=P("model"))
        with pytest.raises(ValueError, match=r"axis 'fsdp' is mapped here: .*per_worker_value_and_grad"):
            jax.jit(mapped)(jnp.ones((8, 16)))
