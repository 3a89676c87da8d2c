"""Crossing the border of steps: the iterates of synchronous training, and what waits for what."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close

import jaxdist as jd
from jaxdist import schedule
from jaxdist._cli.models import gpt
from jaxdist._core.order import order_after
from jaxdist.analysis import hlo_reader

# Not the order of the alphabet; all sizes differ.
LAYERS = ("embedding", "block", "head")
WIDTHS = (6, 8, 5, 3)


def model():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        name: {"kernel": jax.random.normal(key, shape) * 0.4, "bias": jnp.zeros(shape[1])}
        for name, key, shape in zip(LAYERS, keys, itertools.pairwise(WIDTHS), strict=False)
    }


def loss(params, batch):
    x = batch["x"].astype(params["head"]["bias"].dtype)
    for name in LAYERS:
        with jax.named_scope(f"dense_{name}"):
            x = x @ params[name]["kernel"] + params[name]["bias"][None]
        x = x if name == "head" else jnp.tanh(x)
    return jnp.mean((x - batch["y"]) ** 2)


def batches(steps, examples=16):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps, examples, WIDTHS[0])).astype(np.float32)
    return {"x": x, "y": np.tanh(x[..., :3] - x[..., 3:])}


def run(step, state, steps, start=0):
    data, losses = batches(50), []
    for i in range(start, start + steps):
        state, value = step(state, jax.tree.map(lambda x, i=i: x[i], data))
        losses.append(float(value))
    return state, losses


def falling():
    """The rate falls and the decay needs the parameters: counts and layers must be of the same age."""
    return optax.adamw(optax.linear_schedule(2e-2, 1e-3, 50), weight_decay=0.1)


def synchronous(tx, workers, reducer=None):
    """The reducer on each layer by itself, and then the optimizer on all of them."""
    reducer = jd.exact() if reducer is None else reducer

    def step(state, batch):
        params, opt, reducers = state
        value, gradients = jd.local_value_and_grad(loss)(params, batch)
        mean, new = {}, {}
        for name in LAYERS:
            part, new[name] = reducer.reduce({name: gradients[name]}, reducers[name], jd.comm.over("data"))
            mean |= part.mean
        updates, opt = tx.update(mean, opt, params)
        return (optax.apply_updates(params, updates), opt, new), jax.lax.pmean(value, "data")

    def make_state():
        return model(), tx.init(model()), {name: reducer.init({name: part}) for name, part in model().items()}

    return run(jd.simulate(step, workers), jd.state.init_state(make_state, {"data": workers}), 50)


@functools.cache
def expected(workers):
    return synchronous(falling(), workers)


def pipe(defer, tx=None, **options):
    return jd.overlap.pipelined(loss, falling() if tx is None else tx, defer=defer, **{"layers": LAYERS, **options})


def begin(pipeline, place):
    return jd.state.init_state(lambda: pipeline.init(model()), place)


def flushed(pipeline, workers, state):
    return jd.simulate(pipeline.flush, workers)(state, None)[0]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("workers", "defer"), [(1, 2), (2, 3), (4, 0), (4, 1)])
def test_the_iterates_are_those_of_synchronous_training(workers, defer):
    (params, opt_state, _), losses = expected(workers)
    pipeline = pipe(defer)
    state, found = run(jd.simulate(pipeline.step, workers), begin(pipeline, {"data": workers}), 50)
    np.testing.assert_allclose(found, losses, rtol=1e-6, atol=1e-6)
    before = state.params
    state = flushed(pipeline, workers, state)
    assert_close(state.params, params, 1e-6)
    assert_close(state.opt_state, opt_state, 1e-6)
    # Until then the first layers lack an update, and no others do.
    moved = [float(jnp.abs(before[name]["kernel"] - state.params[name]["kernel"]).max()) for name in LAYERS]
    assert all(change > 1e-5 for change in moved[:defer])
    assert not any(moved[defer:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner",
    [
        jd.compressed(jd.compressors.cast(jnp.float16)),
        jd.power_sgd(rank=1, min_compression_rate=0.0),
    ],
)
def test_error_feedback_keeps_a_residual_for_each_layer(inner):
    """In float64: choosing and orthonormalizing amplify every last bit."""
    with jax.enable_x64(True):
        reducer = jd.error_feedback(inner)
        tx = optax.adam(1e-2)
        (params, _, reducers), losses = synchronous(tx, 2, reducer)
        pipeline = pipe(2, tx, reducer=reducer)
        state, values = run(jd.simulate(pipeline.step, 2), begin(pipeline, {"data": 2}), 50)
        np.testing.assert_allclose(values, losses, rtol=1e-6, atol=1e-6)
        state = flushed(pipeline, 2, state)
        assert_close(state.params, params, 1e-6)
        for found, name in zip(state.reducers, LAYERS, strict=True):
            assert_close(found.residual.value, reducers[name].residual.value, 1e-6)


@pytest.fixture(scope="module")
def two():
    return jd.make_mesh({"data": 2}, devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def on_mesh(two):
    pipeline = pipe(2)
    step = jd.distribute(pipeline.step, two)
    data = jax.tree.map(lambda x: x[0], batches(1))
    return pipeline, step, step.lower(begin(pipeline, two), data).compile()


def test_a_mesh_with_donation_and_a_restart_between_two_steps(two, on_mesh, tmp_path):
    pipeline, step, _ = on_mesh
    state, found = run(step, begin(pipeline, two), 3)
    assert bool(state.pending)
    jd.checkpoint.save(tmp_path, state, step=3)
    state = jd.checkpoint.restore(tmp_path, state)
    state, more = run(step, state, 3, start=3)
    np.testing.assert_allclose(found + more, expected(2)[1][:6], rtol=1e-6)


def ancestors(module, name):
    """All instructions of the entry that one depends on."""
    instructions, found, open_ = module.computations[module.entry].instructions, set(), [name]
    while open_:
        for operand in instructions[open_.pop()].operands:
            if operand in instructions and operand not in found:
                found.add(operand)
                open_.append(operand)
    return found


def waits(program):
    """For the forward product of each layer the all-reduces (their bytes) that it waits for; and all of them."""
    module = hlo_reader.parse(program.as_text())
    entry = module.computations[module.entry].instructions
    reduces = {
        name: sum(size for _, size in hlo_reader.arrays(x.result))
        for name, x in entry.items()
        if x.opcode == "all-reduce"
    }

    def forward(x, layer):
        return f"dense_{layer})/dot_general" in x.attributes and "transpose" not in x.attributes

    dots = {layer: next(name for name, x in entry.items() if forward(x, layer)) for layer in LAYERS}
    found = {layer: ancestors(module, dot) for layer, dot in dots.items()}
    return {layer: sorted(reduces[x] for x in found[layer] & set(reduces)) for layer in LAYERS}, sorted(
        reduces.values()
    )


BYTES = {"embedding": 4 * (6 * 8 + 8), "block": 4 * (8 * 5 + 5), "head": 4 * (5 * 3 + 3)}


def test_a_layer_waits_for_the_layers_before_it(on_mesh):
    """In the compiled program. The head is reduced inside the step, and the loss rides along."""
    waiting, everything = waits(on_mesh[2])
    first, second = BYTES["embedding"], BYTES["block"]
    assert waiting == {"embedding": [first], "block": sorted([first, second]), "head": sorted([first, second])}
    assert everything == sorted([first, second, BYTES["head"] + 4])


def test_without_the_chain_the_compiler_merges(two, monkeypatch):
    """What the test before would see: the first layer waits for all of them."""
    monkeypatch.setattr(sys.modules["jaxdist.overlap.pipelined"], "order_after", lambda updates, _: updates)
    pipeline = pipe(2)
    lowered = jd.distribute(pipeline.step, two).lower(begin(pipeline, two), jax.tree.map(lambda x: x[0], batches(1)))
    waiting, _ = waits(lowered.compile())
    assert waiting["embedding"] == [BYTES["embedding"] + BYTES["block"]]


def test_what_is_not_a_number_stays_where_it_is():
    """The chain passes values on to the bit, whatever those before them are."""
    step = jax.jit(lambda x, y: order_after({"x": x}, [y])["x"])
    x = jnp.array([1.0, -0.0, jnp.nan, jnp.inf])
    for previous in (0.0, -1.0, jnp.nan, jnp.inf):
        np.testing.assert_array_equal(step(x, jnp.full((2, 2), previous)), x)
        assert bool(jnp.signbit(step(x, jnp.full(3, previous))[1]))


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
            "clip_by_global_norm",
        ),
        (optax.apply_if_finite(optax.adam(1e-2), 3), "apply_if_finite"),
        (optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), "MultiSteps"),
        (optax.contrib.normalize(), "normalize"),
        (optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1e-2)), "instead of all_reduce"),
        (jd.zero_redundancy(optax.adam(1e-2)), "reducer="),
    ],
)
def test_optimizers_that_look_at_all_layers_are_refused(tx, message):
    with pytest.raises(ValueError, match=message):
        pipe(1, tx).init(model())


@pytest.mark.parametrize("make", [optax.lion, optax.lamb, optax.adafactor, optax.contrib.muon, optax.adamaxw])
def test_optimizers_that_look_at_one_leaf_are_not(make):
    pipe(1, optax.chain(optax.clip(1.0), optax.clip_by_block_rms(1.0), make(1e-2))).init(model())


def test_a_statistic_over_all_layers_is_seen_too():
    def init(params):
        del params
        return jnp.zeros(())

    def update(updates, state, params=None):
        del params, state
        return updates, optax.tree.norm(updates)

    with pytest.raises(ValueError, match="the optimizer's state depends"):
        pipe(1, optax.GradientTransformation(init, update)).init(model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"defer": -1}, "at least 0, got -1"),
        ({"defer": 4}, "defer=4 is more than the 3 layers"),
        ({"defer": 1, "layers": None}, "forward_order"),
        ({"defer": 1, "layers": ("embedding", "head")}, "'block'"),
        ({"defer": 1, "layers": ("embedding", "block", "block", "head")}, "exactly once"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        pipe(**options).init(model())


def test_the_order_of_layers():
    data = jax.tree.map(lambda x: x[0], batches(1))
    assert schedule.forward_order(loss, model(), data) == LAYERS
    assert schedule.forward_order(lambda p, batch: loss(p["params"], batch), {"params": model()}, data) == LAYERS

    def cast_first(params, batch):
        return jax.jit(jax.checkpoint(loss))(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)

    unused = {**model(), "a": {"kernel": jnp.zeros(2)}}
    assert schedule.forward_order(cast_first, unused, data) == (*LAYERS, "a")
    config = gpt.GPTConfig(layers=11, width=8, heads=1, context=4)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    found = schedule.forward_order(functools.partial(gpt.loss, config), params, tokens)
    blocks = tuple(f"block_{i}" for i in range(11))
    assert set(found[:2]) == {"tokens", "positions"}
    assert found[2:] == (*blocks, "final_norm", "out")


def test_several_entries_can_make_up_a_layer_and_a_list_needs_no_names():
    pipeline = pipe(1, layers=(("embedding", "block"), "head"))
    assert [sorted(mark.value) for mark in pipeline.init(model()).carried] == [["block", "embedding"]]
    pipeline = jd.overlap.pipelined(lambda p, x: jnp.mean(x @ p[0] @ p[1]), optax.sgd(0.1), defer=1)
    assert pipeline.init([jnp.ones((3, 2)), jnp.ones((2, 1))]).carried[0].value[0].shape == (3, 2)
