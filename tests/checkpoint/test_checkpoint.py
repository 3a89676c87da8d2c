"""Checkpoints: every bit back, onto other numbers of workers, and never half a one."""

import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from paths import REPOSITORY
from problems import TrainState, assert_close, batch, make_step, params

import jaxdist as jd
from jaxdist import checkpoint

RNG = np.random.default_rng(0)


def marked():
    """One leaf of each kind; those that differ between workers do."""
    return {
        "w": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.full(3, 0.1, jnp.bfloat16),
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 4)),
        "none": None,
        "count": jnp.asarray(7, jnp.int32),
        "cut": jd.Sharded(jnp.arange(10.0), multiple=2),
        "residual": jd.PerWorker({"a": jnp.zeros((2, 3)), "nothing": jnp.zeros(0)}),
        "seen": jd.PerWorker(jnp.asarray(0, jnp.int32), resize="copy"),
        "zero": jd.PerWorker(jnp.zeros(2), resize="zero"),
        "drawn": jd.PerWorker(jax.random.key(0)),
        "nested": jd.PerWorker(jd.Sharded(jnp.arange(5.0), axis="chip"), axis="pod"),
    }


def fill(state):
    """Other numbers everywhere, of the same shapes."""

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(RNG.integers(0, 2**32, (*x.shape, 2), np.uint32))
        return jax.device_put(RNG.standard_normal(x.shape).astype(x.dtype) * 10, x.sharding)

    return jax.tree.map(one, state)


def place(workers):
    """So many workers, in two pods."""
    return jd.place(marked(), {"pod": 2, "chip": workers // 2}, axis=("pod", "chip"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A state of four workers and where it was saved."""
    folder, state = tmp_path_factory.mktemp("four"), fill(place(4))
    # The padding of what is cut holds nothing.
    state["cut"] = jd.place(marked(), {"pod": 2, "chip": 2}, axis=("pod", "chip"))["cut"]
    state["nested"] = jd.place(marked(), {"pod": 2, "chip": 2}, axis=("pod", "chip"))["nested"]
    checkpoint.save(folder, state, step=5)
    return folder, state


def test_every_leaf_comes_back_in_every_bit(four):
    folder, state = four
    assert_close(checkpoint.restore(folder, place(4)), state, tolerance=0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    assert_close(checkpoint.restore(folder, shapes, step=5), state, tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8])
def test_other_numbers_of_workers_follow_the_marks(four, workers):
    """As `resize` moves a state that is in memory, and with its rules checked by themselves."""
    folder, state = four
    found = checkpoint.restore(folder, place(workers))
    for name in ("w", "half", "key", "count"):
        assert_close(found[name], state[name], tolerance=0)
    moved = jd.resize(state, {"pod": 2, "chip": workers // 2}, axis=("pod", "chip"))
    residual, cut = found.pop("residual").value["a"], found["cut"].value
    assert_close(residual, moved.pop("residual").value["a"], 3e-7)
    assert_close(found, moved, tolerance=0)
    mean = np.asarray(state["residual"].value["a"], np.float64).mean(0)
    np.testing.assert_array_max_ulp(residual[0], mean.astype(np.float32), maxulp=1)
    np.testing.assert_array_equal(residual, np.broadcast_to(residual[:1], residual.shape))
    assert (residual.shape[0], found["seen"].value.shape[0]) == (workers, workers)
    assert found["seen"].value[:2].tolist() == state["seen"].value[:2].tolist()
    np.testing.assert_array_equal(cut[:10], np.arange(10.0))
    assert cut.shape == (-(-10 // (2 * workers)) * 2 * workers,)


def test_onto_a_mesh_of_another_size(four):
    """Each part is put where it belongs; nothing is compiled for it."""
    folder, state = four
    mesh = jd.make_mesh({"pod": 2, "chip": 4})
    like = jd.place(marked(), mesh, axis=("pod", "chip"))
    found = checkpoint.restore(folder, like)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, found, like))
    assert_close(found, checkpoint.restore(folder, place(8)), tolerance=0)
    assert_close(found["w"], state["w"], tolerance=0)


@pytest.fixture(scope="module")
def diloco(tmp_path_factory):
    """Four workers of DiLoCo with residuals, saved inside their second round, and where they went from there."""
    tx = jd.local_sgd.diloco(optax.adam(0.05), sync_period=3, reducer=jd.error_feedback(jd.compressed(jd.top_k(0.25))))

    def fresh(workers):
        return jd.place(TrainState(jd.PerWorker(params()), tx.init(params())), workers)

    step = make_step(tx)
    run, folder, state = jd.simulate(step, 4), tmp_path_factory.mktemp("diloco"), fresh(4)
    for number in range(8):
        if number == 4:
            checkpoint.save(folder, state, step=number)
            saved = state
        state, _ = run(state, batch(seed=number))
    return fresh, step, run, folder, saved, state


@pytest.mark.slow
def test_resuming_inside_a_round_changes_nothing(diloco):
    fresh, _, run, folder, _, last = diloco
    state = checkpoint.restore(folder, fresh(4))
    assert state.opt.since.tolist() == [1]
    for number in range(checkpoint.latest(folder), 8):
        state, _ = run(state, batch(seed=number))
    assert_close(state, last, tolerance=0)


def floats(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8])
def test_local_steps_go_on_with_another_number_of_workers(diloco, workers):
    fresh, step, _, folder, saved, _ = diloco
    state = checkpoint.restore(folder, fresh(workers))
    for name in ("count", "since", "rounds", "anchor", "outer"):
        assert_close(getattr(state.opt, name), getattr(saved.opt, name), tolerance=0)
    before, after = (floats(one.opt.reducer) for one in (saved, state))
    assert any(np.any(x != 0) for x in before)
    for old, new in zip(before, after, strict=True):
        assert new.shape == (workers, *old.shape[1:])
        np.testing.assert_array_max_ulp(new[0], old.mean(0, dtype=np.float64).astype(np.float32), maxulp=1)
    if workers == 2:  # and trains: a round ends after two more steps
        run = jd.simulate(step, workers)
        for number in range(4, 6):
            state, metrics = run(state, batch(seed=number))
        assert state.opt.rounds.tolist() == [2]
        assert np.isfinite(metrics["loss"])


KILLED = """
import sys, jax, jax.numpy as jnp
from jaxdist import checkpoint
for step in range(1, 10_000):
    checkpoint.save(sys.argv[1], {"x": jnp.full(1 << 20, float(step)), "y": jnp.full(1 << 18, step)}, step)
"""


def test_a_save_that_was_killed_is_never_seen(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) as child:
        try:
            until = time.monotonic() + 120
            while (checkpoint.latest(tmp_path) or 0) < 3:
                assert child.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(RNG.uniform(0, 0.1))
        finally:
            child.send_signal(signal.SIGKILL)
    step = checkpoint.latest(tmp_path)
    (tmp_path / f"{step + 1}.orbax-checkpoint-tmp").mkdir(exist_ok=True)  # as one that was killed at once
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert checkpoint.latest(tmp_path) == step >= 3
    like = {"x": jnp.zeros(1 << 20), "y": jnp.zeros(1 << 18, jnp.int32)}
    for kept in range(1, step + 1):
        found = checkpoint.restore(tmp_path, like, step=kept)
        assert float(found["x"].min()) == float(found["x"].max()) == kept
        assert int(found["y"].min()) == int(found["y"].max()) == kept
    checkpoint.save(tmp_path, like, step + 1)  # over what was left behind
    assert checkpoint.latest(tmp_path) == step + 1


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two checkpoints of one state, the data random bits, which no decoder can tell from other random bits."""
    folder = tmp_path_factory.mktemp("small")
    state = {
        "noise": jnp.asarray(RNG.integers(0, 2**32, 1 << 12, np.uint32)),
        "key": jax.random.key(1),
        "w": jnp.ones(3),
    }
    for step in (1, 2):
        checkpoint.save(folder, state, step)
    return folder, state


def damage(file, rng):
    """One bit flipped, the end cut off, or gone."""
    content, how = file.read_bytes(), rng.integers(3)
    if how == 2 or not content:
        file.unlink()
        return "is missing"
    place = int(rng.integers(len(content)))
    flipped = bytes([content[place] ^ 1 << int(rng.integers(8))])
    file.write_bytes(content[:place] + (b"" if how == 1 else flipped + content[place + 1 :]))
    return "holds other bytes than were written"


def test_each_of_a_hundred_damages_names_its_file(small):
    folder, state = small
    files = sorted(file for file in (folder / "2").rglob("*") if file.is_file())
    assert {"manifest.json", "SHA256SUMS", "_METADATA"} < {file.name for file in files}
    for seed in range(100):
        rng = np.random.default_rng(seed)
        file = files[seed % len(files)]
        good = file.read_bytes()
        message = damage(file, rng)
        with pytest.raises(
            checkpoint.CheckpointDamagedError, match=f"^checkpoint 2 is damaged: .* {message}"
        ) as caught:
            checkpoint.restore(folder, state)
        assert (caught.value.file, caught.value.step) == (file, 2)
        file.write_bytes(good)
    assert_close(checkpoint.restore(folder, state), state, tolerance=0)


def test_anyone_can_check_the_files(small):
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=small[0] / "2", check=False).returncode == 0


def test_the_newest_whole_one_by_choice(small, tmp_path):
    folder, state = shutil.copytree(small[0], tmp_path / "run"), small[1]
    next((folder / "2" / "arrays").rglob("manifest.ocdbt")).unlink()
    assert checkpoint.latest(folder) == 2
    with pytest.raises(checkpoint.CheckpointDamagedError, match=r"manifest\.ocdbt is missing; .* skip_damaged=True"):
        checkpoint.resume(folder, state)
    found = checkpoint.resume(folder, jax.tree.map(lambda x: x, state), skip_damaged=True)
    assert (found.step, found.damaged, checkpoint.latest(folder)) == (1, (2,), 1)
    assert_close(found.state, state, tolerance=0)
    assert (folder / "2.damaged").is_dir()
    (folder / "1" / "SHA256SUMS").unlink()
    with pytest.raises(checkpoint.NoCheckpointLeftError, match=r"of step 1: .*SHA256SUMS is missing; .*fresh_start"):
        checkpoint.resume(folder, state, skip_damaged=True)
    assert (folder / "1").is_dir()  # or the next start would find nothing, and begin anew
    found = checkpoint.resume(folder, state, skip_damaged=True, allow_fresh_start=True)
    assert (found.step, found.damaged, found.reasons) == (0, (1,), (f"{folder / '1' / 'SHA256SUMS'} is missing",))
    with pytest.raises(checkpoint.NoCheckpointLeftError, match="set aside as damaged"):
        checkpoint.resume(folder, state)
    assert checkpoint.resume(folder, state, allow_fresh_start=True).step == 0


def test_saved_beside_the_training(tmp_path, mesh):
    """The state is donated to the next step while it is being written; the last ones are kept, with their data."""
    (tmp_path / "7.unfinished").mkdir()
    run = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    copies, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    state = jax.device_put({"w": jnp.zeros((256, 1024)), "count": jnp.zeros((), jnp.int32)}, copies)
    state["cut"] = jax.device_put(state["w"], cut)
    with checkpoint.writing(tmp_path, keep=2) as writer:
        for step in range(1, 5):
            state = run(state)
            writer.save(state, step, data={"examples": 8 * step})
        run(state)
        writer.wait()
        assert checkpoint.latest(tmp_path) == 4
    assert sorted(one.name for one in tmp_path.iterdir()) == [".writer", "3", "4"]
    for step in (3, 4):
        found = checkpoint.load(tmp_path, step=step)
        assert (found.step, found.data, found.state["count"]) == (step, {"examples": 8 * step}, step)
        for name in ("w", "cut"):
            assert found.state[name].min() == found.state[name].max() == step
    checkpoint.save(tmp_path, {"w": jnp.ones(2)}, 3, keep=1)  # a step that is there, and one that is later
    assert (checkpoint.latest(tmp_path), checkpoint.load(tmp_path).state["w"].tolist()) == (3, [1, 1])


def test_what_went_wrong_beside_the_training_is_raised(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint._files, "_write", full)
    with pytest.raises(OSError, match="No space left"), checkpoint.writing(tmp_path) as writer:  # noqa: PT012
        writer.save({"w": jnp.ones(2)}, 1)
        writer.wait()
    assert checkpoint.latest(tmp_path) is None


def test_without_devices(four):
    """Plain numpy arrays in their marks; the consensus is that of the state itself."""
    folder, state = four
    found = checkpoint.load(folder)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(found.state))
    assert (found.step, found.data) == (5, None)
    assert found.state["residual.a"].axis == ("pod", "chip")
    assert (found.state["nested"].axis, found.state["nested"].value.value.shape) == (("pod",), (2, 6))
    assert (found.state["cut"].shape, found.state["cut"].multiple) == ((10,), 2)
    assert (found.state["zero"].resize, found.state["empty"].shape) == ("zero", (0, 4))
    assert found.state["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.state["key"], jax.random.key_data(state["key"]))
    mine, wanted = jd.consensus(found.state), jd.consensus(state)
    np.testing.assert_allclose(mine["residual.a"], wanted["residual"]["a"], atol=1e-5)  # sums in two orders
    np.testing.assert_array_equal(mine["cut"], np.arange(10.0))
    np.testing.assert_array_equal(mine["nested"], np.arange(5.0))


def test_another_method_keeps_the_model_and_says_what_is_new(tmp_path):
    """From plain data parallel to parameters of each worker, cut moments and a residual, and back."""
    w, moment = RNG.standard_normal((3, 5)).astype(np.float32), RNG.standard_normal((3, 5)).astype(np.float32)
    key = jax.random.key(4)
    opt = {"count": jnp.int32(5), "moment": moment, "key": key, "rank2": jnp.ones((3, 2))}
    plain = jd.place({"params": {"w": w}, "opt": opt}, 4)
    checkpoint.save(tmp_path, plain, 10)
    opt = {"moment": jd.Sharded(jnp.zeros((3, 5))), "key": jd.PerWorker(jax.random.key(0), resize="copy")}
    opt |= {"count": jd.PerWorker(jnp.int32(0))}
    opt |= {"rank2": jnp.full((3, 4), 7.0), "residual": jd.PerWorker(jnp.zeros((3, 5)))}
    other = jd.place({"params": {"w": jd.PerWorker(jnp.zeros((3, 5)))}, "opt": opt}, 8)
    with pytest.raises(ValueError, match=r"leaf `opt\.rank2` was saved .*, and 1 more leaves do not fit; .* changed="):
        checkpoint.resume(tmp_path, other)
    with pytest.raises(ValueError, match=r"write changed=\('opt',\)"):
        checkpoint.resume(tmp_path, other, changed="opt")
    found = checkpoint.resume(tmp_path, other, changed=["opt"])
    assert (found.step, found.new, found.dropped) == (10, ("opt.rank2", "opt.residual"), ())
    assert found.converted == ("opt.count", "opt.key", "opt.moment", "params.w")
    state = found.state
    np.testing.assert_array_equal(state["params"]["w"].value, np.broadcast_to(w, (8, 3, 5)))
    np.testing.assert_array_equal(state["opt"]["moment"].value, np.pad(moment.ravel(), (0, 1)))
    folded = jd.place(jd.PerWorker(key), 8)
    np.testing.assert_array_equal(*(jax.random.key_data(x) for x in (state["opt"]["key"].value, folded.value)))
    assert float(state["opt"]["rank2"].min()) == 7
    checkpoint.save(tmp_path, state, 20)
    found = checkpoint.resume(tmp_path, plain, changed=["opt"])
    assert (found.new, found.dropped) == (("opt.rank2",), ("opt.residual",))
    assert_close(found.state["params"], plain["params"], tolerance=0)
    # The key of worker 0, which was folded with its number.
    assert_close(found.state["opt"], {**plain["opt"], "key": folded.value[0]}, tolerance=0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other)
    with pytest.raises(ValueError, match=r"leaf `opt\.new` is new and `like` has only its shape"):
        checkpoint.resume(
            tmp_path, {**shapes, "opt": {**shapes["opt"], "new": shapes["opt"]["rank2"]}}, changed=["opt"]
        )


def test_what_does_not_fit_is_named(tmp_path):
    state = jd.place({"w": jnp.ones((2, 3)), "e": jd.PerWorker(jnp.ones(2))}, 4)
    checkpoint.save(tmp_path / "run", state, step=0)
    for message, other in {
        r"lacks `b`, and 1 more": {**state, "b": jnp.ones(2), "c": {"d": jnp.ones(1)}},
        "also has `e`": {"w": state["w"]},
        "leaf `w` of .* is float32, the state to fill has int32": {**state, "w": jnp.ones((2, 3), jnp.int32)},
        r"leaf `w` was saved as \[2, 3\], the state to fill has \[3, 2\]": {**state, "w": jnp.ones((3, 2))},
        r"leaf `e` was saved as \[4, 2\]": jd.place({"w": state["w"], "e": jd.PerWorker(jnp.ones(3))}, 2),
    }.items():
        with pytest.raises(ValueError, match=message):
            checkpoint.restore(tmp_path / "run", other)
    with pytest.raises(ValueError, match=r"two leaves have the name `a\.b`"):
        checkpoint.save(tmp_path, {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}, 0)
    for message, arguments in {
        "step must be at least 0, got -1": {"step": -1},
        "keep must be a whole number of at least 1, or None to keep all, got 0": {"step": 1, "keep": 0},
        "data must be JSON .*, got .*object": {"step": 1, "data": {"position": object()}},
    }.items():
        with pytest.raises(ValueError, match=message):
            checkpoint.save(tmp_path, state, **arguments)
    assert checkpoint.latest(tmp_path / "elsewhere") is None
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*elsewhere"):
        checkpoint.restore(tmp_path / "elsewhere", state)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 9"):
        checkpoint.restore(tmp_path / "run", state, step=9)


def test_without_orbax_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setitem(sys.modules, "orbax", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]' in a clone"):
        checkpoint.save(tmp_path, {"w": jnp.ones(1)}, 0)


@pytest.mark.parametrize("rule", ["mean", "copy", "zero"])
def test_values_per_worker_become_their_mean_by_any_rule(tmp_path, rule):
    """The rule is about another number of workers; a model of each worker was that of worker 0, or zeros."""
    model = {"w": jnp.array([[1.0], [3.0]]), "count": jnp.array([4, 5])}
    checkpoint.save(tmp_path, jd.PerWorker(model, axis="data", resize=rule), 0)
    found = checkpoint.resume(tmp_path, {"w": jnp.zeros(1), "count": jnp.zeros((), jnp.int32)})
    assert found.converted == ("count", "w")
    assert (found.state["w"].tolist(), int(found.state["count"])) == ([2.0], 4)


def test_a_donated_state_is_named(tmp_path):
    state = {"w": jnp.ones(3)}
    jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)(state)
    with pytest.raises(ValueError, match="leaf `w` of the state has been deleted: an earlier call donated it"):
        checkpoint.save(tmp_path, state, 0)
    with (
        pytest.raises(ValueError, match="leaf `w` of the state has been deleted: an earlier call donated it"),
        checkpoint.writing(tmp_path) as writer,
    ):
        writer.save(state, 0)
    assert checkpoint.latest(tmp_path) is None
