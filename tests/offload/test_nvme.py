"""Optimizer state on disk: the same bits as in memory, within the buffers, through crashes and full disks."""

import collections
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import Executor, Future
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import offload
from jaxdist.offload.nvme import arrays, disk, files
from jaxdist.offload.nvme.base import committed_step
from jaxdist.offload.nvme.disk import stream

CHUNK = 3 * 4096 * 4  # 4096 entries of Adam's state with master parameters


def params():
    w = jax.random.normal(jax.random.key(0), (300, 41))
    return {"w": w, "b": jnp.ones(3), "e": jnp.zeros((0, 4)), "s": jnp.float32(2)}


def gradient(params, step=0):
    return jax.tree.map(lambda x: (np.sin(3 * np.asarray(x, np.float32)) + step * 0.1).astype(x.dtype), params)


def plain(tx, found, steps=5, dtype=None):
    """The optimizer, for each leaf alone: XLA rounds some last bits another way if leaves share a program."""
    held = jax.tree.map(lambda x: x.astype(dtype or x.dtype), found)
    states = {name: tx.init({name: held[name]}) for name in held}

    @jax.jit
    def one(grads, state, params):
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        grads = gradient(jax.tree.map(lambda h, p: h.astype(p.dtype), held, found), step)
        for name in held:
            new, states[name] = one({name: grads[name]}, states[name], {name: held[name]})
            held = held | new
    return jax.tree.map(lambda h, p: h.astype(p.dtype), held, found)


def train(opt, found, steps=5, first=0):
    for step in range(first, steps):
        found = opt.apply(found, gradient(found, step))
    return found


def equal(x, y):
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), x, y))


@pytest.fixture(scope="module")
def adamw():
    return optax.adamw(optax.cosine_decay_schedule(1e-2, 50))


@pytest.fixture(scope="module")
def expected(adamw):
    return plain(adamw, params())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("chunk", "depth"), [(CHUNK, 1), (CHUNK, 2), (CHUNK, 3), (10 * CHUNK, 3)])
def test_equals_the_optimizer_in_every_bit(tmp_path, adamw, expected, chunk, depth):
    opt = offload.nvme(adamw, offload.Store(tmp_path, chunk_bytes=chunk, host_bytes=depth * chunk))
    found = train(opt, opt.init(params()))
    assert equal(found, expected)
    assert opt.stats().buffer_bytes <= depth * chunk


def test_bytes_and_buffers_are_the_formula(tmp_path, adamw):
    """A state four times larger than the buffers; Adam with master parameters reads and writes 12 bytes an entry."""
    seen = []
    store = offload.Store(tmp_path, chunk_bytes=CHUNK, host_bytes=CHUNK, progress=lambda *done: seen.append(done))
    opt = offload.nvme(adamw, store, master_dtype=jnp.float32)
    train(opt, opt.init(params()))
    entries = -(-(300 * 41 + 3 + 1) // 4096) * 4096
    stats = opt.stats()
    assert stats.state_bytes == 12 * entries >= 4 * stats.buffer_bytes
    assert (stats.read_bytes, stats.written_bytes) == (5 * 12 * entries, 6 * 12 * entries)  # `init` writes too
    assert stats.buffer_bytes == CHUNK
    assert seen == [(k + 1, 4) for k in range(4)] * 6


def test_low_precision_parameters_with_master(tmp_path, adamw):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    opt = offload.nvme(adamw, offload.Store(tmp_path), master_dtype=jnp.float32)
    found = train(opt, opt.init(low))
    assert equal(found, plain(adamw, low, dtype=jnp.float32))
    opt.close()
    assert equal(opt.init(low), found)  # from disk


def test_literals_that_print_alike(tmp_path):
    rates = {"a": 1.23456e-4, "b": 1.23464e-4}
    tx = optax.partition({name: optax.sgd(rate) for name, rate in rates.items()}, {name: name for name in rates})
    opt = offload.nvme(tx, offload.Store(tmp_path))
    found = opt.apply(opt.init({name: jnp.zeros(2) for name in rates}), {name: jnp.ones(2) for name in rates})
    assert equal(found, {name: jnp.full(2, -rate) for name, rate in rates.items()})
    opt.close()


def test_a_weakly_typed_argument_keeps_its_promotion(tmp_path):
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: (g * value).astype(g.dtype), updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    opt, three = offload.nvme(tx, offload.Store(tmp_path)), {"w": jnp.full(2, 3, jnp.bfloat16)}
    zero = opt.init({"w": jnp.zeros(2, jnp.bfloat16)})
    # A weak 1.005 is rounded to bfloat16 before it multiplies.
    weak, strong = [opt.apply(zero, three, value=value)["w"][0] for value in (1.005, np.float32(1.005))]
    assert (weak, strong) == (3.03125, 3.015625)
    opt.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
        optax.novograd(1e-2),
    ],
    ids=["clipped", "masked", "injected", "novograd"],
)
def test_other_optimizers_and_their_state(tmp_path, tx):
    opt = offload.nvme(tx, offload.Store(tmp_path, chunk_bytes=10 * CHUNK))
    found, state = params(), tx.init(params())
    mine, update = opt.init(found), jax.jit(tx.update)
    for step in range(3):
        grads = gradient(found, step)
        mine = opt.apply(mine, grads)
        updates, state = update(grads, state, found)
        found = optax.apply_updates(found, updates)
    for x, y in zip(jax.tree.leaves((mine, opt.state())), jax.tree.leaves((found, state)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("tx", "primitive"),
    [
        (optax.lamb(1e-2), "reduce_sum"),
        (optax.contrib.muon(1e-2), "transpose"),
        (optax.chain(optax.adam(1e-2), optax.add_noise(0.1, 0.5, 0)), "random key"),
    ],
)
def test_refuses_what_is_not_entry_by_entry(tmp_path, tx, primitive):
    opt = offload.nvme(tx, offload.Store(tmp_path))
    with pytest.raises(ValueError, match=primitive):
        train(opt, opt.init({"w": params()["w"]}), 1)


def test_a_folder_is_no_store(tmp_path, adamw):
    for make, arguments in ((offload.nvme, [adamw]), (offload.nvme_layers, [None, adamw])):
        with pytest.raises(TypeError, match=r"such as offload.Store\(.*, got '/"):
            unwrap(make)(*arguments, str(tmp_path))


def test_refuses_sizes_and_other_states(tmp_path, adamw):
    with pytest.raises(ValueError, match="host_bytes=10"):
        offload.nvme(adamw, offload.Store(tmp_path, host_bytes=10))
    with pytest.raises(ValueError, match="chunk_bytes=100 "):
        offload.nvme(adamw, offload.Store(tmp_path, chunk_bytes=100)).init(params())
    opt = offload.nvme(adamw, offload.Store(tmp_path))
    with pytest.raises(ValueError, match="call init"):
        opt.apply(params(), params())
    opt.init(params())
    with pytest.raises(ValueError, match="is in use"):
        offload.nvme(adamw, offload.Store(tmp_path)).init(params())
    with pytest.raises(ValueError, match="as `init` saw them"):
        opt.apply(params(), {**params(), "b": jnp.ones(4)})
    renamed = {"z" if name == "w" else name: x for name, x in params().items()}
    with pytest.raises(ValueError, match="tree of parameters and gradients"):
        opt.apply(params(), renamed)
    opt.close()
    with pytest.raises(ValueError, match="another model"):
        opt.init({"w": jnp.ones(3)})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (optax.sgd(0.1, momentum=0.9), optax.lion(0.1)),
        (optax.adam(0.1), optax.adam(optax.constant_schedule(0.1))),
        (optax.inject_hyperparams(optax.adam)(0.1), optax.adam(0.1)),
    ],
)
def test_numbers_of_another_optimizer_are_refused(tmp_path, first, second):
    """Its arrays have the same dtypes."""
    ones = {"w": jnp.ones(3)}
    opt = offload.nvme(first, offload.Store(tmp_path), master_dtype=jnp.float32)
    opt.apply(opt.init(ones), ones)
    opt.close()
    with pytest.raises(ValueError, match="another model, optimizer"):
        offload.nvme(second, offload.Store(tmp_path), master_dtype=jnp.float32).init(ones)


FirstA = collections.namedtuple("FirstA", "a b")
FirstB = collections.namedtuple("FirstB", "b a")
ONES, MOMENTUM = jnp.ones(3), optax.sgd(0.1, momentum=0.9)
TRACE, RMS = optax.trace(0.9), optax.scale_by_rms()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (({"w": jnp.ones((2, 3))}, MOMENTUM), ({"w": jnp.ones((3, 2))}, MOMENTUM), r"w \[2, 3\].* here of w \[3, 2\]"),
        (({"w": ONES}, optax.chain(TRACE, RMS)), ({"w": ONES}, optax.chain(RMS, TRACE)), r"0\.trace\.w.*0\.nu\.w"),
        (({"w": ONES}, MOMENTUM), ({"w": ONES}, optax.rmsprop(0.1)), r"0\.trace\.w \[3\].*0\.nu\.w \[3\]"),
    ],
    ids=["transposed", "rules in another order", "another rule"],
)
def test_arrays_of_equal_sizes_of_other_leaves(tmp_path, first, second, message):
    """They were those of others without a word, and still are in stores that earlier versions wrote."""
    (params, rule), (other_params, other_rule) = first, second
    opt = offload.nvme(rule, offload.Store(tmp_path), master_dtype=jnp.float32)
    opt.apply(opt.init(params), params)
    opt.close()
    other = offload.nvme(other_rule, offload.Store(tmp_path), master_dtype=jnp.float32)
    with pytest.raises(ValueError, match=f"another model, optimizer, .*{message}"):
        other.init(other_params)
    edit_manifests(tmp_path, lambda manifest: manifest.pop("order"))
    other.init(other_params)
    other.close()


def test_fields_in_another_order(tmp_path):
    opt = offload.nvme(MOMENTUM, offload.Store(tmp_path))
    found = opt.apply(opt.init(FirstA(ONES, ONES)), FirstA(ONES, ONES))
    opt.close()
    with pytest.raises(ValueError, match=r"of a \[3\], b \[3\], .*, and here of b \[3\], a \[3\], "):
        offload.nvme(MOMENTUM, offload.Store(tmp_path)).init(FirstB(found.b, found.a))


def edit_manifests(folder, change):
    """Changes the manifests of a store, whose checksums stay right."""
    for path in folder.glob("worker-00000-of-00001/manifest.*.json"):
        manifest = json.loads(json.loads(path.read_text())["manifest"])
        change(manifest)
        text = json.dumps(manifest)
        path.write_text(json.dumps({"crc": zlib.crc32(text.encode()), "manifest": text}))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_whole_gradients_of_sharded_parameters_are_refused(tmp_path, mesh, kind):
    whole = {"w": jnp.linspace(0, 1, 40).reshape(8, 5)}
    opt = offload.nvme(optax.sgd(0.5), offload.Store(tmp_path))
    found = opt.init(jd.place(jd.zero.shard(whole, smallest=0), mesh))
    with pytest.raises(ValueError, match="mark the gradient Sharded"):
        opt.apply(found, jax.tree.map(kind, whole))
    opt.close()


def test_tied_parameters_are_not_overwritten_twice(tmp_path):
    w = np.ones(3, np.float32)
    opt = offload.nvme(optax.sgd(0.5), offload.Store(tmp_path))
    tied = opt.init({"a": w, "b": w, "e": w[:0], "f": w[:0]})
    with pytest.raises(ValueError, match="into the same memory"):
        opt.apply(tied, tied, donate=True)
    assert equal(opt.apply(tied, tied), jax.tree.map(lambda x: x / 2, tied))
    opt.close()


def test_parameters_of_another_step_are_refused(tmp_path, adamw):
    """Without master parameters the store has none of its own: it knows by their hashes which it gave."""
    opt = offload.nvme(adamw, offload.Store(tmp_path, chunk_bytes=CHUNK))
    third = train(opt, opt.init(params()), 3)
    fifth = train(opt, third, 5, first=3)
    for wrong in (third, params(), {**fifth, "s": jnp.float32(7)}):
        with pytest.raises(
            ValueError, match=r"step 5, .* not the parameters .* restore those of step 5, .* master_dtype"
        ):
            opt.init(wrong)
    sixth = train(opt, opt.init(fifth), 6, first=5)
    opt.close()
    unspoiled = offload.nvme(adamw, offload.Store(tmp_path / "other", chunk_bytes=CHUNK))
    assert equal(train(unspoiled, unspoiled.init(params()), 6), sixth)
    unspoiled.close()


@pytest.mark.parametrize("kinds", [(jnp.asarray, np.asarray), (np.asarray, jnp.asarray)])
def test_numpy_and_jax_parameters_are_one_model(tmp_path, adamw, kinds):
    first, second = kinds
    opt = offload.nvme(adamw, offload.Store(tmp_path, chunk_bytes=CHUNK))
    found = train(opt, opt.init(jax.tree.map(first, params())), 2)
    found = train(opt, opt.init(jax.tree.map(second, found)), 4, first=2)
    opt.close()
    assert equal(found, plain(adamw, params(), 4))
    assert all(isinstance(x, np.ndarray) == (second is np.asarray) for x in jax.tree.leaves(found))


FORKED = """
import os, sys, time, jax.numpy as jnp, optax
from jaxdist import offload
opt = offload.nvme(optax.sgd(0.1), offload.Store(sys.argv[1]))
opt.init({"w": jnp.ones(3)})
child = os.fork()
if not child:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_a_forked_child_does_not_keep_the_store(tmp_path):
    """Such as a worker that loads data, which outlives its parent for a while."""
    opt = offload.nvme(optax.sgd(0.1), offload.Store(tmp_path))
    with subprocess.Popen([sys.executable, "-c", FORKED, tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            with pytest.raises(ValueError, match="is in use"):
                opt.init({"w": jnp.ones(3)})
            parent.kill()
            parent.wait()
            opt.init({"w": jnp.ones(3)})
        finally:
            parent.kill()
            os.kill(child, signal.SIGKILL)
    opt.close()


def test_disk_full_is_typed_and_harmless(tmp_path, adamw, expected, monkeypatch):
    opt = offload.nvme(adamw, offload.Store(tmp_path, chunk_bytes=CHUNK))
    found = train(opt, opt.init(params()), 3)
    real, calls = os.pwritev, []

    def full(*args):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(offload.StoreFullError, match="Free some space") as caught:
        train(opt, found, 4, 3)
    assert caught.value.step == 4
    assert caught.value.path.parent.parent == tmp_path
    monkeypatch.undo()
    assert opt.stats().step == 3
    assert equal(train(opt, found, 5, 3), expected)  # the same call again


def test_a_limit_of_file_sizes_shows_in_init(tmp_path, adamw):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(offload.StoreFullError):
            offload.nvme(adamw, offload.Store(tmp_path)).init(params())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("harm", ["short", "changed", "missing", "manifest"])
def test_damage_is_typed(tmp_path, adamw, harm):
    opt = offload.nvme(adamw, offload.Store(tmp_path, chunk_bytes=CHUNK))
    found = train(opt, opt.init(params()), 1)
    file = tmp_path / "worker-00000-of-00001" / "state.1"
    if harm == "short":
        os.truncate(file, file.stat().st_size - 4096)
    elif harm == "changed":
        with open(file, "r+b") as out:
            out.seek(5000)
            byte = out.read(1)
            out.seek(5000)
            out.write(bytes([byte[0] ^ 1]))
    elif harm == "missing":
        file.unlink()
    else:
        opt.close()
        (file.parent / "manifest.1.json").write_text("{}")
    match = {"short": "too early", "changed": "not those", "missing": "missing", "manifest": "manifest is damaged"}
    with pytest.raises(offload.StoreDamagedError, match=match[harm]):
        opt.init(params()) if harm == "manifest" else opt.apply(found, gradient(found))


def test_writes_of_the_last_chunks_in_the_background(tmp_path, adamw, expected, monkeypatch):
    opt = offload.nvme(adamw, offload.Store(tmp_path, wait=False))
    found = train(opt, opt.init(params()))
    assert opt.flush() == 5
    assert equal(found, expected)
    monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    ahead = opt.apply(found, gradient(found))
    for again in (opt.flush, opt.flush, lambda: opt.apply(ahead, gradient(ahead))):
        with pytest.raises(offload.StoreError, match=r"broken; the state is still that of step 5, .* again by `init`"):
            again()
    assert opt.stats().step == 5
    monkeypatch.undo()
    # These parameters are not those of the state.
    with pytest.raises(ValueError, match="holds the state of step 5"):
        opt.init(ahead)
    opt.init(found)
    assert equal(train(opt, found, 7, 5), plain(adamw, params(), 7))
    opt.close()


@pytest.mark.parametrize("dtypes", ["bfloat16 float16", "float16 bfloat16", "float8_e4m3fn bfloat16"])
@pytest.mark.parametrize("master", [True, False])
def test_leaves_of_two_narrow_dtypes_keep_their_bits(tmp_path, dtypes, master):
    """Both are computed in float32, where they could share a buffer, and as gradients come with parameters of one."""
    large, small = dtypes.split()
    values = {"large": np.full(8, 1.25, large), "small": np.asarray([1000, 1.0625, 1e-3], small)}
    zeros = jax.tree.map(np.zeros_like, values)
    opt = offload.nvme(optax.sgd(1.0), offload.Store(tmp_path), master_dtype=jnp.float32 if master else None)
    if master:
        found, wanted = opt.apply(opt.init(values), zeros), values
    else:
        wanted = jax.tree.map(lambda x: -x.astype(np.float32), values)
        found = opt.apply(opt.init(jax.tree.map(lambda x: np.zeros(x.shape, np.float32), values)), values)
    opt.close()
    assert equal(found, wanted)


def test_parameters_of_another_order_or_of_an_update_without_a_mean_are_refused(tmp_path):
    opt = offload.nvme(optax.sgd(0.125, momentum=0.9), offload.Store(tmp_path))
    old = opt.init({"w": jnp.array([1.5, 1.5, 1.25])})
    new = opt.apply(old, {"w": jnp.array([1.0, -1.0, 0.0])})
    for wrong in (old, {"w": new["w"][::-1]}):
        with pytest.raises(ValueError, match="not the parameters of that step"):
            opt.init(wrong)
    opt.init(new)
    opt.close()


def test_a_damaged_manifest_is_deleted_as_its_error_says(tmp_path, adamw):
    opt = offload.nvme(adamw, offload.Store(tmp_path))
    first = opt.init(params())
    opt.apply(first, gradient(first))
    opt.close()
    (tmp_path / "worker-00000-of-00001" / "manifest.1.json").write_text("{}")
    try:
        opt.init(first)
    except offload.StoreDamagedError as error:
        error.path.unlink()
        # While the traceback is alive.
        opt.init(first)
    assert opt.stats().step == 0
    opt.close()
    # Where no other one is left there is no step to return to.
    (tmp_path / "worker-00000-of-00001" / "manifest.0.json").write_text("{}")
    with pytest.raises(offload.StoreDamagedError, match="restore it from a copy, or delete the folder"):
        opt.init(first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checksums", []),
        ("checksums", "abc"),
        ("checksums", [True]),
        ("step", "x"),
        ("step", -7),
        ("step", 1.0),
        ("chunk_bytes", None),
        ("layout", 3),
        ("numbers", [{"dtype": "no such", "shape": [], "data": ""}]),
        ("numbers", {"count": 3}),
        ("hashes", 5),
        ("hashes", [["x"]]),
        ("order", 5),
        ("order", [["w", ["x"]]]),
    ],
)
def test_a_manifest_of_wrong_types(tmp_path, adamw, field, value):
    """Its checksum is right."""
    store = offload.Store(tmp_path)
    opt = offload.nvme(adamw, store)
    first = opt.init(params())
    found = opt.apply(first, gradient(first))
    opt.close()
    edit_manifests(tmp_path, lambda manifest: manifest.update({field: value}))
    with pytest.raises(
        offload.StoreDamagedError, match=r"the manifest .* restore it from a copy, or delete the folder"
    ):
        offload.nvme(adamw, store).init(found)


def test_what_would_be_rounded_is_refused(tmp_path):
    opt = offload.nvme(optax.sgd(0.1), offload.Store(tmp_path))
    with pytest.raises(ValueError, match="parameters of float64 need"):
        opt.init({"w": np.ones(3)})
    opt = offload.nvme(optax.inject_hyperparams(optax.adam)(0.1), offload.Store(tmp_path))
    # Its hyperparameters are float32, and so is what they multiply.
    found = opt.init({"v": jnp.ones(3), "w": jnp.ones(3, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"mu.w` .* is bfloat16 after `init` and float32 after `update`"):
        opt.apply(found, found)
    opt.close()


def test_parameters_anywhere(tmp_path, adamw, mesh, monkeypatch):
    """Cut over a mesh, in numpy arrays that are overwritten, on a device that numpy cannot look into."""
    expected = plain(adamw, {"w": params()["w"]}, 2)["w"]
    cut = jd.place({"w": jd.Sharded(params()["w"], axis="data", multiple=8)}, mesh)
    opt = offload.nvme(adamw, offload.Store(tmp_path / "cut"))
    found = train(opt, opt.init(cut), 2)
    assert found["w"].value.sharding == cut["w"].value.sharding
    assert np.array_equal(np.asarray(found["w"].value)[: 300 * 41].reshape(300, 41), expected)
    assert opt.state()[0].mu["w"].shape == (300, 41)

    mine = {"w": np.array(params()["w"])}
    opt = offload.nvme(adamw, offload.Store(tmp_path / "numpy"))
    opt.init(mine)
    for step in range(2):
        assert opt.apply(mine, gradient(mine, step), donate=True)["w"] is mine["w"]
    assert np.array_equal(mine["w"], expected)

    monkeypatch.setattr(arrays, "on_host", lambda device: False)
    opt = offload.nvme(adamw, offload.Store(tmp_path / "device"))
    found = train(opt, opt.init({"w": params()["w"]}), 2)
    assert np.array_equal(found["w"], expected)


def test_processes_go_back_to_a_step_that_all_have(monkeypatch):
    """One of them was killed before it could commit step 7; another has begun to write step 8."""
    monkeypatch.setattr(disk.jax, "process_count", lambda: 3)
    far = 3_000_000_000
    everyone = [np.array([[6, 7], [6, 5], [6, 7]]), np.array([[6, 7], [-1, 5], [8, 7]]), np.array([[far, -1]] * 3)]
    monkeypatch.setattr(
        disk.multihost_utils, "process_allgather", lambda own: everyone[own[0]].view(np.int32).reshape(3, 4)
    )
    assert disk._common(np.array([0, 0])) == 6
    assert disk._common(np.array([2, 0])) == far
    with pytest.raises(ValueError, match="no step in common"):
        disk._common(np.array([1, 0]))


RSS = """
import resource, sys, jax.numpy as jnp, ml_dtypes, numpy as np, optax
from jaxdist import offload
entries = 1 << 26
leaf = lambda name: {"w": np.memmap(sys.argv[1] + name, ml_dtypes.bfloat16, "w+", shape=entries)}
found, grads = leaf("/params"), leaf("/grads")
grads["w"][:] = 0.5
tx, store = optax.adam(1e-2), offload.Store(sys.argv[1] + "/store", chunk_bytes=8 << 20)
opt = offload.nvme(tx, store, master_dtype=jnp.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
opt.init(found)
for _ in range(2):
    opt.apply(found, grads, donate=True)
assert abs(float(found["w"][-1]) + 0.02) < 1e-3, found["w"][-1]
assert opt.stats().buffer_bytes <= 24 << 20
print(opt.stats().state_bytes >> 20, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
def test_memory_of_the_process(tmp_path):
    """768 MiB of state; parameters and gradients in mapped files, 256 MiB in all."""
    command = [sys.executable, "-c", RSS, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    state, grown = map(int, found.split())
    assert state == 768
    assert grown < 256 + 24 + 120


def test_checksum_sees_what_disks_do():
    data = np.random.default_rng(0).integers(0, 255, 8 * 4096, np.uint8)
    harmed = [data.copy() for _ in range(4)]
    harmed[0][12345] ^= 1
    harmed[1][4096:8192], harmed[1][8192:12288] = data[8192:12288], data[4096:8192]  # pages swapped
    harmed[2][:8], harmed[2][8:16] = data[8:16], data[:8]  # words swapped
    harmed[3][-512:] = 0  # a torn end
    assert len({files.checksum(x) for x in (data, *harmed)}) == 5


class _Clock:
    """Executors whose time is counted, not waited for. `now` is that of whoever is running."""

    def __init__(self):
        self.now = 0.0

    def executor(self):
        clock, free = self, [0.0]

        class Counted(Executor):
            def submit(self, job, *args):
                before, clock.now = clock.now, max(clock.now, free[0])
                job(*args)
                free[0], clock.now = clock.now, before
                return Waited(clock, free[0])

        return Counted()


class Waited(Future):
    def __init__(self, clock, at):
        self.clock, self.at = clock, at

    def result(self, timeout=None):
        self.clock.now = max(self.clock.now, self.at)


@pytest.mark.parametrize(("r", "c", "w"), [(3, 1, 2), (1, 4, 2), (1, 1, 5), (2, 2, 2)])
def test_the_slowest_of_the_three_sets_the_pace(r, c, w):
    """From three buffers on; with one buffer it is their sum, with two at least half of it."""
    count = 20

    def seconds(depth):
        clock = _Clock()

        def spend(cost):
            def job(k, buffer):
                clock.now += cost

            return job

        jobs = dict(read=spend(r), compute=spend(c), write=spend(w))
        for one in stream(count, range(depth), **jobs, reader=clock.executor(), writer=clock.executor()):
            one.result()
        return clock.now

    assert seconds(3) == max(r, c, w) * (count - 1) + r + c + w
    assert seconds(1) == count * (r + c + w)
    assert seconds(3) <= seconds(2) <= max(max(r, c, w), (r + c + w) / 2) * count + r + c + w


CHILD = """
import sys, jax, jax.numpy as jnp, optax
sys.path.insert(0, sys.argv[2])
import test_nvme as t
from jaxdist import offload
opt = offload.nvme(optax.adamw(1e-2), offload.Store(sys.argv[1], chunk_bytes=t.CHUNK), master_dtype=jnp.float32)
found = opt.init(t.params())
print("ready", flush=True)
while True:
    found = opt.apply(found, t.gradient(found, opt.stats().step))
    print(opt.stats().step, flush=True)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_at_any_time_it_goes_on_from_the_last_step(tmp_path, kills):
    """Bit for bit as if it had never been killed."""
    rng = np.random.default_rng(kills)
    tx, reported = optax.adamw(1e-2), 0
    spared = offload.nvme(tx, offload.Store(tmp_path / "spared", chunk_bytes=CHUNK), master_dtype=jnp.float32)
    after = [spared.init(params())]  # so many steps
    for _ in range(kills):
        command = [sys.executable, "-c", CHILD, str(tmp_path / "killed"), os.path.dirname(__file__)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        reported = max(reported, int(child.stdout.readline()))
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        reported = max([reported, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
        child.wait()
        child.stdout.close()

        opt = offload.nvme(tx, offload.Store(tmp_path / "killed", chunk_bytes=CHUNK), master_dtype=jnp.float32)
        found = opt.init(params())
        step = opt.stats().step
        assert step >= reported
        while len(after) <= step + 2:
            after.append(spared.apply(after[-1], gradient(after[-1], len(after) - 1)))
        assert equal(found, after[step])
        found = train(opt, found, step + 2, step)
        assert equal(found, after[step + 2])
        reported = step + 2
        opt.close()
    spared.close()


def test_the_state_of_another_number_of_processes_is_not_overlooked(tmp_path, adamw, monkeypatch):
    """A new state beside it would begin at step 0, without a word."""
    opt = offload.nvme(adamw, offload.Store(tmp_path))
    found = train(opt, opt.init(params()), 1)
    opt.close()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        for look in (lambda: opt.init(found), lambda: committed_step(tmp_path)):
            with pytest.raises(ValueError, match="holds the state of 1 processes, and there are 2 now: start as many"):
                look()
        assert os.listdir(tmp_path) == ["worker-00000-of-00001"]
    opt.init(found)
    assert opt.stats().step == committed_step(tmp_path) == 1


def test_the_folder_of_a_store_may_be_in_the_home_folder(tmp_path, adamw, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    offload.nvme(adamw, offload.Store("~/run")).init(params())
    assert os.listdir(tmp_path) == ["run"]


def test_parameters_that_overlap_are_not_overwritten_twice(tmp_path):
    """They begin at different addresses, as a view of the last rows does."""
    w = np.ones(1 << 12, np.float32)
    opt = offload.nvme(optax.sgd(0.5), offload.Store(tmp_path))
    params = opt.init({"all": w, "tail": w[1 << 11 :]})
    with pytest.raises(ValueError, match="into the same memory"):
        opt.apply(params, {"all": np.ones_like(w), "tail": np.ones(1 << 11, np.float32)}, donate=True)
    opt.close()


def test_an_interrupted_wait_leaves_the_step_to_be_waited_for(tmp_path, monkeypatch):
    """Else two steps would be written at once, and a folder that is given up would still be written."""
    opt = offload.nvme(optax.sgd(0.5), offload.Store(tmp_path, wait=False))
    params = opt.init({"w": np.ones(4, np.float32)})
    opt.apply(params, {"w": np.ones(4, np.float32)})
    waits, wait = [], Future.exception

    def interrupted_once(self, timeout=None):
        waits.append(self)
        if len(waits) == 1:
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(Future, "exception", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        opt.flush()
    assert opt.flush() == 1
    assert len(waits) == 2
    assert waits[0] is waits[1]
    opt.close()


def test_what_is_no_optimizer_no_number_of_bytes_and_no_folder(tmp_path):
    with pytest.raises(TypeError, match=r"expected an optimizer, such as optax.adam\(1e-3\), got <function adam"):
        unwrap(offload.nvme)(optax.adam, offload.Store(tmp_path))
    for name in ("chunk_bytes", "host_bytes"):
        with pytest.raises(ValueError, match=f"{name} must be a positive whole number of bytes, got 1000000.0"):
            offload.nvme(optax.sgd(0.1), offload.Store(tmp_path)._replace(**{name: 1e6}))
    (tmp_path / "file").write_text("")
    opt = offload.nvme(optax.sgd(0.1), offload.Store(tmp_path / "file"))
    with pytest.raises(offload.StoreError, match="Not a directory"):
        opt.init({"w": np.ones(4, np.float32)})


@pytest.mark.parametrize(("dtype", "message"), [(jnp.float64, "float64 need jax.config"), (jnp.int8, "floating")])
def test_the_dtype_of_master_parameters(tmp_path, dtype, message):
    opt = offload.nvme(optax.sgd(0.1), offload.Store(tmp_path), master_dtype=dtype)
    with pytest.raises(ValueError, match=message):
        opt.init({"w": np.ones(4, np.float32)})


def test_parameters_of_another_dtype_than_at_first_are_refused(tmp_path):
    opt = offload.nvme(optax.sgd(0.1), offload.Store(tmp_path))
    params = opt.init({"w": jnp.ones(4, jnp.bfloat16)})
    with pytest.raises(ValueError, match="`w` was bfloat16 in `init` and is float32 now: cast it back"):
        opt.apply(jax.tree.map(lambda x: x.astype(jnp.float32), params), params)
    opt.apply(params, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    opt.close()
