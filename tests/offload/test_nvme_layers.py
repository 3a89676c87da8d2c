"""Parameters and gradients on disk, layer by layer: the optimizer's steps, within one layer's memory, and kills."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stacks import STACK, WIDTH, difference, make_batch, make_params, plain_steps, whole_loss

import jaxdist as jd
from jaxdist import offload
from jaxdist.offload.layers import passes
from jaxdist.offload.layers.stack import StepConfig
from jaxdist.offload.nvme import files
from jaxdist.offload.nvme_layers.step import DiskStep

ONE_CHUNK = 3 * 4096 * 4  # 4096 entries of Adam's state in float32, with the parameters


def start(run, params):
    return run.init(lambda i: params["layers"][i], len(params["layers"]), embed=params["embed"], head=params["head"])


def read_all(run, count):
    return {
        "embed": run.params("embed"),
        "layers": [run.params(i) for i in range(count)],
        "head": run.params("head"),
    }


@pytest.fixture
def x64():
    # Not `jax.enable_x64`, which holds for one thread.
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("count", "prefetch", "clip"),
    [
        (1, 0, None),
        (3, 1, 0.3),
        (6, 2, None),
        pytest.param(1, 2, 0.3, marks=pytest.mark.slow),
        pytest.param(2, 2, None, marks=pytest.mark.slow),
        pytest.param(4, 0, 0.3, marks=pytest.mark.slow),
        pytest.param(5, 1, None, marks=pytest.mark.slow),
        pytest.param(6, 1, 1e3, marks=pytest.mark.slow),
    ],
)
def test_equals_the_optimizer_in_memory(tmp_path, x64, count, prefetch, clip):
    tx = optax.adamw(optax.cosine_decay_schedule(1e-2, 50), mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    params = make_params(count, np.float64)
    whole = tx if clip is None else optax.chain(optax.clip_by_global_norm(clip), tx)
    every, state, losses = plain_steps(whole, params, 4, np.float64)
    run = offload.nvme_layers(STACK, tx, offload.Store(tmp_path), prefetch=prefetch, clip_norm=clip)
    assert start(run, params) == 0
    found = [float(run.step(make_batch(k, np.float64))) for k in range(4)]
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    assert difference(read_all(run, count), every[-1]) < 1e-12
    adam = (state if clip is None else state[1])[0]
    mine = run.state(count - 1)[0]
    assert int(mine.count) == 4
    assert difference((mine.mu, mine.nu), (adam.mu["layers"][-1], adam.nu["layers"][-1])) < 1e-12
    np.testing.assert_allclose(run.loss(make_batch(9, np.float64)), whole_loss(every[-1], make_batch(9, np.float64)))
    run.close()


@pytest.mark.parametrize("direct", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_float32_in_several_chunks(tmp_path, direct):
    """A layer of two and a half chunks; with the page cache too."""
    params = make_params(2, width=64)
    every, _, _ = plain_steps(optax.adam(1e-2), params, 3)
    store = offload.Store(tmp_path, chunk_bytes=ONE_CHUNK, direct=direct)
    run = offload.nvme_layers(STACK, optax.adam(1e-2), store, clip_norm=1e6)
    start(run, params)
    for k in range(3):
        run.step(make_batch(k))
    # Adam divides by small second moments, which enlarges rounding errors.
    assert difference(read_all(run, 2), every[-1]) < 2e-5
    run.close()


def test_workers_average_each_layer(tmp_path):
    """Four workers with two examples each, as one worker with all eight; one all-reduce for each part."""
    params, mesh = make_params(3), jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    every, _, losses = plain_steps(optax.sgd(0.1, momentum=0.9), params, 3)
    run = offload.nvme_layers(STACK, optax.sgd(0.1, momentum=0.9), offload.Store(tmp_path), mesh=mesh)
    start(run, params)
    found = [float(run.step(make_batch(k))) for k in range(3)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert difference(read_all(run, 3), every[-1]) < 1e-6
    with pytest.raises(ValueError, match="cannot be split over 4 workers"):
        run.step({"x": np.zeros((3, 5), np.float32), "y": np.zeros((3, 3), np.float32)})
    run.close()

    config = StepConfig(STACK, jd.exact(), mesh, "data")
    layer_grads = config.build_programs().layer_grads
    x = jnp.ones((8, WIDTH))
    ops = jd.analysis.collectives(layer_grads.lower(params["layers"][0], x, x, None).compile()).ops
    assert [op.kind for op in ops] == ["all-reduce"]
    # On four workers a ring sends 2 (W-1)/W of the gradient.
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"][0]))
    assert ops[0].wire_bytes == pytest.approx(1.5 * size, rel=0.01)


def test_one_layer_of_gradients_and_one_compilation(tmp_path, monkeypatch):
    """ZeRO-Offload's gradients leave as they are produced: never those of two layers."""
    params, traces, alive = make_params(6, width=64), [], []
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"][0]))

    def layer(p, x):
        traces.append(1)
        return STACK.layer(p, x)

    leave = DiskStep._leave

    def live_bytes():
        # Several arrays may be views of one buffer.
        return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays() if len(x.devices()) == 1}.values())

    def count_memory(step, part, grads, data):
        alive.append(live_bytes())
        leave(step, part, grads, data)

    monkeypatch.setattr(DiskStep, "_leave", count_memory)
    run = offload.nvme_layers(STACK._replace(layer=layer), optax.adam(1e-2), offload.Store(tmp_path), prefetch=0)
    start(run, params)
    before = live_bytes()
    for k in range(2):
        run.step(make_batch(k))
    activations = 10 * 8 * 64 * 4
    # A layer's parameters and its gradient, beside the inputs of all layers.
    assert len(alive) == 16
    assert size < max(alive) - before < 2 * size + activations + 4096
    assert sum(traces) == 2  # forward, and backward
    stats = run.stats()
    # Adam: parameters in the forward pass, parameters and state in the backward pass; written once a step and by init.
    entries = stats.state_bytes // 12
    head = 4096 * 4
    assert stats.read_bytes == 2 * (16 * entries - head)
    assert stats.written_bytes == 3 * 12 * entries
    # One buffer: the parameters and the state of a layer, of 8256 entries in pages.
    assert stats.buffer_bytes == 12 * 3 * 4096
    run.close()


@pytest.mark.parametrize("prefetch", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_parameters_are_read_ahead(tmp_path, monkeypatch, prefetch):
    """While a part is computed the next ones are read and copied to the device; without prefetch none is."""
    prepared = [threading.Event() for _ in range(20)]
    prepare, visit, seen = DiskStep.prepare, DiskStep.visit, []

    def note(step, k, data):
        prepare(step, k, data)
        prepared[k].set()

    def look(step, k, data):
        ahead = [event.wait(20) for event in prepared[k + 1 : min(k + 1 + prefetch, len(step.visits))]]
        seen.append(all(ahead) and not any(event.is_set() for event in prepared[k + 1 + prefetch :]))
        visit(step, k, data)

    monkeypatch.setattr(DiskStep, "prepare", note)
    monkeypatch.setattr(DiskStep, "visit", look)
    run = offload.nvme_layers(STACK, optax.sgd(0.1), offload.Store(tmp_path), prefetch=prefetch)
    start(run, make_params(3))
    run.step(make_batch(0))
    assert seen == [True] * 9
    run.close()


def test_activations_in_host_memory(tmp_path, monkeypatch):
    """As on an accelerator, whose memory numpy cannot look into."""
    kinds = []
    put = jax.device_put

    def note(x, where=None, **options):
        kinds.append(getattr(where, "memory_kind", None))
        return put(x, where, **options)

    params = make_params(2)
    every, _, _ = plain_steps(optax.sgd(0.1), params, 1)
    run = offload.nvme_layers(
        STACK, optax.sgd(0.1), offload.Store(tmp_path), mesh=jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    )
    start(run, params)
    monkeypatch.setattr(passes, "on_host", lambda device: False)
    monkeypatch.setattr(passes.jax, "device_put", note)
    run.step(make_batch(0))
    monkeypatch.undo()
    # Of the embedding and of the first layer; the head takes the result of the second from the device.
    assert kinds.count("pinned_host") == 2
    assert difference(read_all(run, 2), every[-1]) < 1e-6
    run.close()


def test_parameters_that_are_returned_are_copied(tmp_path):
    """`jit` returns an argument itself where it can, and its memory is a buffer that the next layer overwrites."""
    stack = offload.LayerStack(
        embed=lambda p, batch: p["x"], layer=lambda p, x: x + p["w"], head=lambda p, x, batch: jnp.sum(x * x)
    )
    layers = [{"w": np.full(4096, i, np.float32)} for i in range(3)]
    run = offload.nvme_layers(stack, optax.sgd(0.0), offload.Store(tmp_path), prefetch=2)
    run.init(layers.__getitem__, 3, embed={"x": np.ones(4096, np.float32)}, head={})
    assert float(run.step(())) == 4096 * 16
    run.close()


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 0.3])
def test_a_kill_between_any_two_operations_leaves_one_step(tmp_path, monkeypatch, clip):
    """What is on disk before each write, removal and renaming is what a SIGKILL at that moment would leave."""
    count, params, folder = 2, make_params(2), tmp_path / "run"
    tx, numbers = optax.adam(1e-2), itertools.count()
    run = offload.nvme_layers(STACK, tx, offload.Store(folder), clip_norm=clip, prefetch=1)
    start(run, params)
    run.step(make_batch(0))

    def save_first(call):
        def save(*args, **options):
            # The writing thread is the only one that changes the folder at this time.
            shutil.copytree(folder, tmp_path / f"{next(numbers):03d}", ignore=shutil.ignore_patterns("lock"))
            return call(*args, **options)

        return save

    models = [read_all(run, count)]
    for name in ("write_chunk", "write_manifest", "drop_manifest"):
        monkeypatch.setattr(files, name, save_first(getattr(files, name)))
    monkeypatch.setattr(os, "replace", save_first(os.replace))
    run.step(make_batch(1))
    monkeypatch.undo()
    models.append(read_all(run, count))
    run.close()
    saved = sorted(path for path in tmp_path.iterdir() if path.name.isdigit())
    # Parameters and state of four parts, their gradients, and the two manifests.
    assert len(saved) == 3 + (8 if clip is None else 12)
    for path in saved:
        run = offload.nvme_layers(STACK, tx, offload.Store(path), clip_norm=clip, prefetch=1)
        assert start(run, params) == 1
        assert difference(read_all(run, count), models[0]) == 0
        # It continues as if nothing had happened.
        if path in (saved[1], saved[-1]):
            run.step(make_batch(1))
            assert difference(read_all(run, count), models[1]) == 0
        run.close()


CHILD = """
import os, signal, sys, optax
sys.path[:0] = sys.argv[3:]
import test_nvme_layers as t
from jaxdist import offload
from jaxdist.offload.nvme import files
run = offload.nvme_layers(t.STACK, optax.adam(1e-2), offload.Store(sys.argv[1]), prefetch=2)
t.start(run, t.make_params(3))
left, write = [int(sys.argv[2])], files.write_chunk
def killed_at(*args, **options):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*args, **options)
files.write_chunk = killed_at
while True:
    run.step(t.make_batch(run.stats().step))
"""


@pytest.mark.slow
@pytest.mark.parametrize("write", [1, 7, 10, 11, 25, 44])
def test_killed_it_continues_in_every_bit(tmp_path, write):
    """Ten writes a step: killed in the steps 1 to 5, at a first, a middle and a last write."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "killed"), str(write), *sys.path]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    params, found = make_params(3), []
    for name in ("killed", "spared"):
        run = offload.nvme_layers(STACK, optax.adam(1e-2), offload.Store(tmp_path / name), prefetch=2)
        first = start(run, params)
        assert first == ((write - 1) // 10 if name == "killed" else 0)
        for k in range(first, 6):
            run.step(make_batch(k))
        found.append(read_all(run, 3))
        run.close()
    assert difference(*found) == 0


def test_damage_and_full_disks_are_typed(tmp_path, monkeypatch):
    run = offload.nvme_layers(STACK, optax.adam(1e-2), offload.Store(tmp_path))
    start(run, make_params(2))
    write, calls = os.pwritev, itertools.count()

    def fill_disk(*args):
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwritev", fill_disk)
    with pytest.raises(offload.StoreFullError):
        run.step(make_batch(0))
    monkeypatch.undo()
    assert run.stats().step == 0
    run.step(make_batch(0))
    folder = tmp_path / "worker-00000-of-00001"
    # Step 0 is in slot 0, step 1 in the other.
    with open(folder / "state.1", "r+b") as file:
        file.seek(5)
        file.write(b"x")
    with pytest.raises(offload.StoreDamagedError, match="not those that were written"):
        run.step(make_batch(1))
    run.close()


def test_refuses_by_name(tmp_path):
    store, params = offload.Store(tmp_path), make_params(2)

    def build(tx=None, stack=STACK, **options):
        return offload.nvme_layers(stack, tx or optax.adam(1e-2), options.pop("store", store), **options)

    for match, options in {
        "prefetch must be": {"prefetch": -1},
        "clip_norm must be positive": {"clip_norm": 0.0},
        "not an axis of the mesh": {"mesh": jd.make_mesh({"data": 8}), "axis": "pod"},
        "residuals or random keys": {"reducer": jd.error_feedback(jd.power_sgd(rank=1))},
    }.items():
        with pytest.raises(ValueError, match=match):
            build(**options)
    for match, tx in {
        r"nvme_layers\(clip_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        "reduce_sum": optax.lamb(1e-2),
        "random key": optax.chain(optax.adam(1e-2), optax.add_noise(0.1, 0.5, 0)),
    }.items():
        with pytest.raises(ValueError, match=match):
            start(build(tx), params)
    with pytest.raises(ValueError, match="host_bytes=50000 is less than 2 buffers"):
        start(build(store=store._replace(host_bytes=50_000), prefetch=1), params)
    with pytest.raises(ValueError, match="layer 1 differs"):
        start(build(store=offload.Store(tmp_path / "b")), {**params, "layers": [params["layers"][0], params["head"]]})
    run = build()
    with pytest.raises(ValueError, match="call init"):
        run.step(make_batch(0))
    start(run, params)
    with pytest.raises(ValueError, match="number below 2, got 7"):
        run.params(7)
    run.close()
    with pytest.raises(ValueError, match="another model"):
        start(build(), make_params(3))
    run = build(stack=STACK._replace(layer=lambda p, x: x[:, :2]))
    start(run, params)
    with pytest.raises(ValueError, match="must return what it takes"):
        run.step(make_batch(0))
    run.close()
    with pytest.raises(ValueError, match="parameters of float64 need"):
        start(build(), make_params(2, np.float64))
    run = build(stack=STACK._replace(embed=lambda p, batch: jnp.ones((8, WIDTH), jnp.int32)))
    start(run, params)
    with pytest.raises(ValueError, match="floating arrays, got one of int32"):
        run.step(make_batch(0))
    run.close()
    with pytest.raises(ValueError, match="another model, optimizer"):
        start(build(optax.adam(optax.constant_schedule(1e-2))), params)


def test_rules_in_another_order(tmp_path):
    """Their arrays have the same sizes and dtypes: each was that of the other without a word."""
    first, second, params = optax.trace(0.9), optax.scale_by_rms(), make_params(2)
    run = offload.nvme_layers(STACK, optax.chain(first, second), offload.Store(tmp_path))
    start(run, params)
    run.close()
    message = r"of \.\.\., embed\.0\.trace\..*, and here of \.\.\., embed\.0\.nu\."
    with pytest.raises(ValueError, match=f"another model, optimizer, .*{message}"):
        start(offload.nvme_layers(STACK, optax.chain(second, first), offload.Store(tmp_path)), params)


def test_the_state_of_empty_leaves_keeps_its_dtype(tmp_path):
    params = {"e": np.zeros((0, 2), np.float32), "w": np.ones((5, 3), np.float32)}
    tx = optax.adam(0.1, mu_dtype="bfloat16")
    run = offload.nvme_layers(STACK, tx, offload.Store(tmp_path))
    run.init(lambda i: {"w": np.ones(2, np.float32)}, 1, embed={}, head=params)
    found, wanted = run.state("head"), tx.init(jax.tree.map(jnp.asarray, params))
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, wanted)
    run.close()


def test_examples_weight_the_workers(tmp_path):
    """A worker counts as often as it has examples; one without any is left out, whatever its rows give."""
    params, mesh = make_params(2), jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    stack = STACK._replace(
        head=lambda p, x, batch: jnp.sum(batch["real"] * (x @ p["w"] - batch["y"]).sum(1) ** 2) / batch["real"].sum()
    )
    run = offload.nvme_layers(stack, optax.sgd(0.1), offload.Store(tmp_path), mesh=mesh)
    start(run, params)
    batch = {**make_batch(0), "real": np.array([1, 1, 1, 0, 1, 0, 0, 0], np.float32)}
    loss, grads = jax.jit(jax.value_and_grad(whole_loss), static_argnums=2)(params, batch, stack)
    np.testing.assert_allclose(run.loss(batch, [3, 1]), loss, rtol=1e-6)
    np.testing.assert_allclose(run.step(batch, np.array([3, 1])), loss, rtol=1e-6)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert difference(read_all(run, 2), after) < 1e-6
    # The second worker's mean is that of no rows, 0/0.
    batch["real"] = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32)
    assert np.isfinite(run.step(batch, [4, 0]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(read_all(run, 2)))
    before = run.stats().step
    assert np.isnan(run.step(batch, [0, 0]))
    assert run.stats().step == before
    for examples, match in (([1, 2, 3], "one number for each of 2 workers"), ([1, -1], "at least 0 and finite")):
        with pytest.raises(ValueError, match=match):
            run.step(batch, examples)
    run.close()
