"""ZeRO++: codes and two levels in the gathers and reduce-scatters of cut parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist import analysis
from jaxdist import compressors as jc
from jaxdist.zero import gathered, gathered_scan, shard

AXES = ("pod", "chip")
PLACE = {"pod": 2, "chip": 2}
W, WIDTH = 4, 33
LEVELS = jd.hierarchical(inner=jd.exact(), outer=jd.exact())
QGZ = jd.hierarchical(inner=jd.two_shot(jc.int4()), outer=jd.two_shot(jc.int4()))


def params(width=WIDTH, layers=2):
    keys = jax.random.split(jax.random.key(0), layers)
    return [{"w": jax.random.normal(key, (width, width)) / width**0.5, "b": jnp.ones(width) * 0.1} for key in keys]


def layer(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"][None])


def loss_of(**options):
    def loss(p, x):
        return jnp.mean(jnp.square(gathered_scan(layer, p, x, axis=AXES, **options) - 1))

    return loss


def gradient_step(loss):
    """Gradients take the place of the parameters."""

    def step(state, batch):
        value, grads = jd.local_value_and_grad(loss, axis=AXES)(state["params"], batch)
        return {"params": grads}, jax.lax.pmean(value, AXES)

    return step


def batch(width=WIDTH):
    return np.random.default_rng(0).normal(size=(8, width)).astype(np.float32)


def plain(p, x):
    for one in p:
        x = layer(one, x)
    return jnp.mean(jnp.square(x - 1))


def cut(width=WIDTH, smallest=0):
    return {"params": shard(params(width), smallest=smallest)}


def coded_parts(code, p):
    """What the parts that four workers have of a leaf decode to, put together again."""

    def one(x):
        flat = jnp.pad(x.ravel(), (0, -x.size % (8 * W))).reshape(W, -1)
        decoded = [code.decompress(code.compress(row, jax.random.key(0)), row) for row in flat]
        return jnp.concatenate(decoded)[: x.size].reshape(x.shape)

    return jax.tree.map(one, p)


def check(found, start, value, tolerance=1e-5):
    expected = jax.value_and_grad(plain)(start, batch())
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(jd.consensus(found["params"])), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance)


@pytest.mark.slow
def test_two_levels_give_the_same_gradients():
    mesh = jd.make_mesh(PLACE, devices=jax.devices()[:W])
    step = jd.distribute(gradient_step(loss_of(secondary_partition=True, reducer=LEVELS)), mesh, axis=AXES)
    found, value = step(jd.place(cut(), mesh, axis=AXES), batch())
    check(found, params(), value)


@pytest.mark.slow
@pytest.mark.parametrize("secondary", [False, True])
def test_the_gradient_is_that_of_the_coded_parameters(secondary):
    """Straight through, at the parameters that everybody computed with, in forward and backward pass."""
    step = jd.simulate(gradient_step(loss_of(compressor=jc.int8(), secondary_partition=secondary)), PLACE, axis=AXES)
    found, value = step(jd.place(cut(), PLACE, axis=AXES), batch())
    check(found, coded_parts(jc.int8(), params()), value, 2e-6)


@pytest.mark.slow
def test_coded_gradients():
    """4 bits twice; leaves that are not cut keep their local gradient."""
    options = {"compressor": jc.int8(), "secondary_partition": True, "reducer": QGZ}
    step = jd.simulate(gradient_step(loss_of(**options)), PLACE, axis=AXES)
    start = cut()
    found, _ = step(jd.place(start, PLACE, axis=AXES), batch())
    expected = jax.grad(plain)(coded_parts(jc.int8(), params()), batch())
    for x, y in zip(jax.tree.leaves(jd.consensus(found["params"])), jax.tree.leaves(expected), strict=True):
        off = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert 0.01 < off < 0.2


def test_random_codes_draw_by_what_they_code():
    """The gradient of `|w|²/2` is w: the same in both passes, another with other parameters, right on average."""
    quadratic = gathered(lambda p: 0.5 * jnp.sum(jnp.square(p["w"])), compressor=jd.qsgd(2))
    whole = np.linspace(-1, 1, 48, dtype=np.float32)

    def step(state, batch):
        value, grads = jd.local_value_and_grad(quadratic)(state["params"])
        return {"params": grads}, jax.lax.pmean(value, "data")

    start = jd.place({"params": shard({"w": jnp.asarray(whole)}, smallest=0)}, 2)
    simulated = jd.simulate(step, 2)
    values, grads = [], []
    for scale in 1 + np.arange(200, dtype=np.float32) * 1e-5:
        found, value = simulated(jax.tree.map(lambda x, scale=scale: x * scale, start), np.zeros((2, 1)))
        values.append(value)
        grads.append(np.asarray(found["params"]["w"].value))
    np.testing.assert_allclose(values, 0.5 * np.square(grads).sum(1), rtol=1e-5)
    assert len({np.sign(x).tobytes() for x in grads}) > 190
    np.testing.assert_allclose(np.mean(grads, 0), whole, atol=5 * 0.5 / 200**0.5)


def crossing(op):
    """Whether a collective has members of two pods."""
    return any(len({device // 2 for device in group}) > 1 for group in op.replica_groups)


@pytest.mark.slow
def test_bytes_between_pods():
    width, layers = 64, 2
    mesh = jd.make_mesh(PLACE, devices=jax.devices()[:W])
    entries = width * width + width

    def ops(**options):
        step = jd.distribute(gradient_step(loss_of(**options)), mesh, axis=AXES)
        program = step.lower(jd.place(cut(width), mesh, axis=AXES), batch(width)).compile()
        found = [op for op in analysis.collectives(program).ops if op.kind != "all-reduce"]  # the mean of the loss
        assert not analysis.collectives(program).warnings
        return [op for op in found if crossing(op)], [op for op in found if not crossing(op)]

    def total(found):
        return sum(op.wire_bytes for op in found) / layers

    flat, nothing = ops()
    assert not nothing
    assert total(flat) == 3 * 3 / 4 * 4 * entries
    plus, inside = ops(compressor=jc.int8(), secondary_partition=True, reducer=QGZ)
    part = entries // W
    gathers = [op for op in plus if op.kind == "all-gather"]
    assert sum(op.count for op in gathers) == layers  # forward only
    assert total(gathers) == part + 4 * (width * width // W // 256 + 1)
    scatters = [op for op in plus if op.kind == "all-to-all"]
    assert total(scatters) == part / 2 + 4 * -(-part // 32)
    assert len(gathers) + len(scatters) == len(plus)
    assert sum(op.count for op in inside if op.kind == "all-gather") == 2 * layers
    assert total(flat) > 15 * total(plus)
    levels, _ = ops(secondary_partition=True, reducer=LEVELS)
    assert total(levels) == 2 * 4 * part
    assert total(levels) > 4 * total(plus)


def test_refusals():
    with pytest.raises(ValueError, match=r"two levels of workers, axis=\(slow, fast\), got axis='data'"):
        gathered(layer, secondary_partition=True)
    with pytest.raises(ValueError, match="remat=False does not"):
        gathered(layer, secondary_partition=True, axis=AXES, remat=False)
    with pytest.raises(ValueError, match="no reduce-scatter form"):
        gathered(layer, reducer=jd.power_sgd(rank=2))
    fed = gathered(layer, reducer=jd.error_feedback(jd.two_shot(jc.int4())), axis=None)
    with pytest.raises(ValueError, match="keeps nothing from step to step"):
        fed({"w": jd.Sharded(jnp.zeros((8, 8)), axis=()), "b": jnp.zeros(8)}, jnp.zeros((1, 8)))
