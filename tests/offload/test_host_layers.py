"""Layers in host memory: the optimizer's steps, three layers on the device, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stacks import STACK, WIDTH, difference, make_batch, make_params, plain_steps, whole_loss

import jaxdist as jd
from jaxdist import offload
from jaxdist.offload.host_layers.step import HostStep
from jaxdist.offload.layers.passes import Pass


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def start(run, params):
    return run.init(lambda i: params["layers"][i], len(params["layers"]), embed=params["embed"], head=params["head"])


def read_all(state):
    return {
        "embed": state.embed.params,
        "layers": [layer.params for layer in state.layers],
        "head": state.head.params,
    }


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    ("count", "prefetch", "clip"),
    [
        (1, 2, 0.3),
        (5, 2, None),
        pytest.param(1, 0, None, marks=pytest.mark.slow),
        pytest.param(2, 5, 0.3, marks=pytest.mark.slow),
        pytest.param(4, 1, 0.3, marks=pytest.mark.slow),
        pytest.param(4, 3, None, marks=pytest.mark.slow),
        pytest.param(6, 5, 1e3, marks=pytest.mark.slow),
    ],
)
def test_equals_the_optimizer_in_memory(x64, count, prefetch, clip):
    tx = optax.adamw(optax.cosine_decay_schedule(1e-2, 50), mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    params = make_params(count, np.float64)
    whole = tx if clip is None else optax.chain(optax.clip_by_global_norm(clip), tx)
    every, adam, losses = plain_steps(whole, params, 4, np.float64)
    run = offload.host_layers(STACK, tx, prefetch=prefetch, clip_norm=clip)
    state, found = start(run, params), []
    for k in range(4):
        state, loss = run.step(state, make_batch(k, np.float64))
        assert kinds(state) == {"pinned_host"}
        found.append(float(loss))
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    assert difference(read_all(state), every[-1]) < 1e-12
    adam, mine = (adam if clip is None else adam[1])[0], state.layers[-1].opt_state[0]
    assert int(mine.count) == 4
    assert difference((mine.mu, mine.nu), (adam.mu["layers"][-1], adam.nu["layers"][-1])) < 1e-12
    batch = make_batch(9, np.float64)
    np.testing.assert_allclose(run.loss(state, batch), whole_loss(every[-1], batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.lamb(1e-2), id="lamb"),
        pytest.param(optax.contrib.muon(1e-2), id="muon"),
        pytest.param(optax.inject_hyperparams(optax.lion)(1e-2), id="inject"),
        pytest.param(optax.adafactor(1e-2), id="adafactor"),
        pytest.param(optax.contrib.schedule_free_adamw(1e-2), id="schedule_free"),
    ],
)
def test_optimizers_that_are_not_entrywise(tx):
    params = make_params(2)
    every, _, _ = plain_steps(tx, params, 3)
    run = offload.host_layers(STACK, tx)
    state = start(run, params)
    for k in range(3):
        state, _ = run.step(state, make_batch(k))
    assert difference(read_all(state), every[-1]) < 1e-4


@pytest.mark.parametrize(
    ("low", "high", "clip", "tolerance"),
    [
        ("bfloat16", "float32", 0.3, 4e-3),
        pytest.param("float32", "float64", 0.3, 1e-5, marks=pytest.mark.slow),
        pytest.param("float32", "float64", None, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_masters(x64, low, high, clip, tolerance):
    """Computed in one precision and updated in another: as `offload.host(master_dtype=)` around the whole model."""
    low, high = jnp.dtype(low), jnp.dtype(high)
    params = jax.tree.map(lambda x: jnp.asarray(x, low), make_params(3))
    stack = STACK._replace(
        embed=lambda p, batch: batch["x"].astype(low) @ p["w"],
        head=lambda p, x, batch: jnp.mean(((x @ p["w"]).astype(jnp.float32) - batch["y"]) ** 2),
    )
    tx = optax.sgd(0.05, momentum=0.9)
    whole = tx if clip is None else optax.chain(optax.clip_by_global_norm(clip), tx)
    whole = offload.host(whole, compute="device", master_dtype=high)
    run = offload.host_layers(stack, tx, clip_norm=clip, master_dtype=high)
    state, opt_state = start(run, params), whole.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(whole_loss)(params, batch, stack)
        updates, opt_state = whole.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for k in range(4):
        params, opt_state = step(params, opt_state, make_batch(k))
        state, _ = run.step(state, make_batch(k))
    masters = [layer.opt_state.master for layer in state.layers]
    expected = jax.tree.map(lambda x: x.value, opt_state.master["layers"], is_leaf=lambda x: isinstance(x, jd.OnHost))
    # Gradients in the lower precision are rounded otherwise in another program.
    assert difference(masters, expected) < tolerance
    assert {x.dtype for x in jax.tree.leaves(masters)} == {high}
    rounded = jax.tree.map(lambda x: x.astype(low), masters)
    assert difference(rounded, [layer.params for layer in state.layers]) == 0


def test_workers_and_their_examples():
    """Of two workers one has three times as many rows; one without any is left out, whatever its rows give."""
    params, mesh = make_params(2), jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    stack = STACK._replace(
        head=lambda p, x, batch: jnp.sum(batch["real"] * (x @ p["w"] - batch["y"]).sum(1) ** 2) / batch["real"].sum()
    )
    run = offload.host_layers(stack, optax.sgd(0.1), clip_norm=0.5, mesh=mesh)
    state = start(run, params)
    assert kinds(state) == {"pinned_host"}
    batch = {**make_batch(0), "real": np.array([1, 1, 1, 0, 1, 0, 0, 0], np.float32)}
    loss, grads = jax.jit(jax.value_and_grad(whole_loss), static_argnums=2)(params, batch, stack)
    np.testing.assert_allclose(run.loss(state, batch, [3, 1]), loss, rtol=1e-6)
    state, found = run.step(state, batch, [3, 1])
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    clipped, _ = optax.clip_by_global_norm(0.5).update(grads, optax.EmptyState())
    assert difference(read_all(state), jax.tree.map(lambda p, g: p - 0.1 * g, params, clipped)) < 1e-6
    batch["real"] = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32)
    state, found = run.step(state, batch, [4, 0])
    assert np.isfinite(found)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    same, found = run.step(state, batch, [0, 0])
    assert same is state
    assert np.isnan(found)


def test_the_state_is_donated_and_may_be_numpy():
    """The host never holds the model twice; what a checkpoint gives back continues in the same bits."""
    params, tx = make_params(3), optax.adam(1e-2)
    run = offload.host_layers(STACK, tx)
    state, _ = run.step(start(run, params), make_batch(0))
    saved = jax.tree.map(np.array, state)
    kept = jax.tree.map(np.copy, saved)
    after, _ = run.step(state, make_batch(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    resumed, _ = run.step(saved, make_batch(1))
    assert difference(resumed, after) == 0
    assert difference(saved, kept) == 0
    with pytest.raises(TypeError, match="contracting"):
        run.step(after, {"x": np.zeros((8, 2), np.float32), "y": np.zeros((8, 3), np.float32)})
    # A batch that fails fails before the first update.
    run.step(after, make_batch(2))


def test_more_than_a_gpu_pins_is_refused_before_it_is_allocated(monkeypatch):
    class Gpu:
        platform = "gpu"

    run, params = offload.host_layers(STACK, optax.adam(1e-2), clip_norm=1.0), make_params(1, width=256)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(params[name])) for name in ("embed", "layers", "head")]
    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    # Parameters, gradients and two moments.
    layers = 2**30 // (4 * sizes[1])

    outside = {"embed": params["embed"], "head": params["head"]}
    with pytest.raises(
        ValueError, match=r"takes 1.1 GB of host memory, but XLA gives a GPU 1 GiB .*_LIMIT_GB=2 before"
    ):
        run.init(lambda i: params["layers"][0] if i == 0 else pytest.fail("allocated"), layers, **outside)


@pytest.mark.slow
def test_a_checkpoint_continues_in_host_memory(tmp_path):
    params = make_params(2)
    run = offload.host_layers(STACK, optax.adam(1e-2), clip_norm=1.0)
    state, _ = run.step(start(run, params), make_batch(0))
    jd.checkpoint.save(tmp_path, state, step=1)
    found = jd.checkpoint.restore(tmp_path, start(run, params))
    assert kinds(found) == {"pinned_host"}
    assert difference(run.step(found, make_batch(1))[0], run.step(state, make_batch(1))[0]) == 0


def live_bytes():
    """Of arrays in device memory; several may be views of one buffer."""
    live = [x for x in jax.live_arrays() if x.sharding.memory_kind == "device" and len(x.sharding.device_set) == 1]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in live}.values())


@pytest.mark.sampled(9)
@pytest.mark.parametrize("clip", [None, 1e-2])
def test_three_layers_on_the_device(monkeypatch, clip):
    """Beside activations at most three layers: of parameters in the forward pass, with gradient and state afterwards.

    The most is reached when the second layer ahead is sent while one is computed: the arrays that are there for later,
    and what the program that runs takes, returns and needs in between, as the compiler plans it.
    """
    width, count = 64, 12
    params, adam = make_params(count, width=width), optax.adam(1e-2)
    run = offload.host_layers(STACK, adam, clip_norm=clip)
    state, found = start(run, params), []
    layer, x = jax.tree.map(jnp.asarray, params["layers"][0]), jnp.ones((8, width))

    def planned(f, *arguments):
        return jd.analysis.memory(f.lower(*arguments).compile()).peak

    programs, update = run.step.__self__.programs, run.step.__self__.update
    backward = planned(programs.layer_grads, layer, x, x, None)
    change = planned(update.update, layer, adam.init(layer), layer, None if clip is None else jnp.ones(()))
    running = {Pass.FORWARD: planned(programs.layer, layer, x), Pass.UPDATE: change}
    running[Pass.BACKWARD] = backward if clip else max(backward, change)
    visit, load, last = HostStep.visit, HostStep.load, []

    def note_visit(step, k):
        last[:] = [step.visits[k]]
        return visit(step, k)

    def note_load(step, k):
        load(step, k)
        if last and 0 < last[0].part < step.last:
            found.append(live_bytes() - base + running[last[0].kind])

    monkeypatch.setattr(HostStep, "visit", note_visit)
    monkeypatch.setattr(HostStep, "load", note_load)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(layer))
    # On a CPU the inputs of all layers wait in the memory of the device.
    activations = (count + 10) * x.nbytes
    base = live_bytes()
    run.loss(state, make_batch(0))
    assert 2.9 * size < max(found) < 3 * size + activations
    found.clear()
    run.step(state, make_batch(0))
    # Parameters, gradient and two moments; with a clip all of three layers, without it two gradients fewer.
    assert (11.9 if clip else 9.9) * size < max(found) < 3 * 4 * size + activations


def test_layers_are_sent_ahead(monkeypatch):
    """While a part is computed the next two are on the way, across the turn from forward to backward too."""
    seen = []
    visit = HostStep.visit

    def note(step, k):
        seen.append(sorted(step.loaded))
        return visit(step, k)

    monkeypatch.setattr(HostStep, "visit", note)
    for prefetch in (0, 1, 2):
        seen.clear()
        run = offload.host_layers(STACK, optax.sgd(0.1), prefetch=prefetch)
        run.step(start(run, make_params(2)), make_batch(0))
        # When a visit is dispatched, the last one's turn to send the second part ahead is still to come.
        last = 6
        assert seen == [list(range(k, min(k + max(prefetch, 1), last + 1))) for k in range(last + 1)]


def test_each_program_is_compiled_once():
    traces = []

    def layer(p, x):
        traces.append(1)
        return STACK.layer(p, x)

    run = offload.host_layers(STACK._replace(layer=layer), optax.adam(1e-2))
    state = start(run, make_params(4))
    for k in range(2):
        state, _ = run.step(state, make_batch(k))
    assert sum(traces) == 2  # forward, and backward


def test_parameters_that_are_returned_are_copied():
    """`jit` returns an argument itself where it can, and the update gives its memory to the new parameters."""
    stack = offload.LayerStack(
        embed=lambda p, batch: p["x"], layer=lambda p, x: x + p["w"], head=lambda p, x, batch: jnp.sum(x * x) / 2
    )
    run = offload.host_layers(stack, optax.sgd(0.5))
    state = run.init(lambda i: {"w": np.full(8, i, np.float32)}, 3, embed={"x": np.ones(8, np.float32)}, head={})
    state, loss = run.step(state, ())
    # The gradient of every part is x = 1 + 0 + 1 + 2.
    assert float(loss) == 8 * 16 / 2
    assert [float(layer.params["w"][0]) for layer in state.layers] == [-2.0, -1.0, 0.0]
    assert float(state.embed.params["x"][0]) == -1.0


def test_refuses_by_name():
    params = make_params(2)

    def build(tx=None, stack=STACK, **options):
        return offload.host_layers(stack, tx or optax.adam(1e-2), **options)

    for match, options in {
        "prefetch must be": {"prefetch": -1},
        "clip_norm must be positive": {"clip_norm": 0.0},
        "not an axis of the mesh": {"mesh": jd.make_mesh({"data": 8}), "axis": "pod"},
        "residuals or random keys": {"reducer": jd.error_feedback(jd.power_sgd(rank=1))},
    }.items():
        with pytest.raises(ValueError, match=match):
            build(**options)
    for match, tx in {
        r"host_layers\(clip_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        "several parameters at once": optax.contrib.prodigy(),
        "random key": optax.chain(optax.adam(1e-2), optax.add_noise(0.1, 0.5, 0)),
        "the optimizer communicates": optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-2)),
        "placed already": offload.host(optax.adam(1e-2)),
    }.items():
        with pytest.raises(ValueError, match=match):
            start(build(tx), params)
    # A norm of one parameter is that of all where a part has one.
    with pytest.raises(ValueError, match="several parameters at once"):
        build(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))).init(
            lambda i: {"w": np.ones((2, 2), np.float32)}, 2, embed={}, head={}
        )
    with pytest.raises(ValueError, match="layer 1 differs"):
        start(build(), {**params, "layers": [params["layers"][0], params["head"]]})
    run = build(stack=STACK._replace(layer=lambda p, x: x[:, :2]))
    with pytest.raises(ValueError, match="must return what it takes"):
        run.step(start(run, params), make_batch(0))
    for head, match in (
        (lambda p, x, batch: x, r"head must return one floating number.* got \(\(8, 12\), 'float32'\)"),
        (lambda p, x, batch: (x.mean(), 1), r"head must return one floating number.* got \(\(\(\), 'float32'\)"),
        (lambda p, x, batch: jnp.int32(1), r"head must return one floating number.* got \(\(\), 'int32'\)"),
    ):
        run = build(stack=STACK._replace(head=head))
        state = start(run, params)
        for call in (run.loss, run.step):
            with pytest.raises(ValueError, match=match):
                call(state, make_batch(0))
    run = build()
    state = start(run, params)
    run.step(state, make_batch(0))
    for call in (run.loss, run.step):
        with pytest.raises(ValueError, match="continue with the state that it returned"):
            call(state, make_batch(0))
    with pytest.raises(ValueError, match="parameters of float64 need"):
        start(build(), make_params(2, np.float64))
    run = build(stack=STACK._replace(embed=lambda p, batch: jnp.ones((8, WIDTH), jnp.int32)))
    with pytest.raises(ValueError, match="floating arrays, got one of int32"):
        run.step(start(run, params), make_batch(0))
    run = build(mesh=jd.make_mesh({"data": 4}, devices=jax.devices()[:4]))
    with pytest.raises(ValueError, match="cannot be split over 4 workers"):
        run.step(start(run, params), {"x": np.zeros((3, 5), np.float32), "y": np.zeros((3, 3), np.float32)})
