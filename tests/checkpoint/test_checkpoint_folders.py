"""Where checkpoints lie: foreign files, other writers, readers beside them, deaths between two renames."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from paths import REPOSITORY

from jaxdist import checkpoint
from jaxdist.checkpoint import _files, _filling, _runs, reader

STATE = {"w": jnp.arange(5.0)}


def names(folder):
    return sorted(one.name for one in folder.iterdir() if one.name != _files.WRITER)


def test_what_is_no_checkpoint_is_neither_read_nor_dropped(tmp_path):
    for name in ("2024", "007", "٣", "5.kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("not ours")
    assert checkpoint.latest(tmp_path) is None
    with checkpoint.writing(tmp_path, keep=1) as writer:
        for step in (3000, 3001):
            writer.save(STATE, step)
    assert names(tmp_path) == ["007", "2024", "3001", "5.kept", "٣"]
    assert checkpoint.resume(tmp_path, STATE, skip_damaged=True).step == 3001


def test_a_death_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    """A checkpoint of the same step is replaced: for a moment only the old one is there, under another name."""
    checkpoint.save(tmp_path, STATE, 0)
    rename = pathlib.Path.rename

    def killed(self, target):
        if self.name == "0.unfinished":
            raise SystemExit
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", killed)
    with pytest.raises(SystemExit):
        checkpoint.save(tmp_path, {"w": STATE["w"] + 1}, 0)
    monkeypatch.undo()
    assert names(tmp_path) == ["0.replaced"]
    assert checkpoint.latest(tmp_path) == 0
    assert checkpoint.resume(tmp_path, STATE).state["w"].tolist() == [0, 1, 2, 3, 4]
    with checkpoint.writing(tmp_path) as writer:
        assert names(tmp_path) == ["0"]
        writer.save({"w": STATE["w"] + 2}, 0)
    assert checkpoint.load(tmp_path).state["w"].tolist() == [2, 3, 4, 5, 6]
    assert names(tmp_path) == ["0"]


# Orbax gives up all reads when one fails, and closes their loop, which those that tensorstore ends then miss.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("same", [False, True])
def test_reading_beside_a_writer_that_drops_and_replaces(tmp_path, same, monkeypatch):
    """Whole, and with its own data, however often the folder goes while it is read."""
    monkeypatch.setattr(reader, "_TRIES", 1000)  # the writer may be as fast as the reader
    stop = threading.Event()

    def write():
        with checkpoint.writing(tmp_path, keep=1) as writer:
            step = 0
            while not stop.wait(0.1):
                step += 1
                writer.save(
                    {"a": np.full(9, step, np.int32), "b": np.full(9, step)[:, None].astype(np.int32)},
                    0 if same else step,
                    data=step,
                )

    checkpoint.save(tmp_path, {"a": np.zeros(9, np.int32), "b": np.zeros((9, 1), np.int32)}, 0, data=0)
    beside = threading.Thread(target=write)
    beside.start()
    try:
        for _ in range(25):
            found = checkpoint.load(tmp_path)
            assert {int(x) for leaf in found.state.values() for x in leaf.ravel()} == {found.data}
    finally:
        stop.set()
        beside.join()


def test_the_newest_may_be_replaced_between_two_looks(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, STATE, 1)
    look, looks = _runs.FolderRun.look, []

    def save_after(run):
        found = look(run)
        looks.append(found[0][-1])
        if found[0] == [[1]]:
            checkpoint.save(tmp_path, {"w": STATE["w"] * 2}, 2, keep=1)
        return found

    monkeypatch.setattr(_runs.FolderRun, "look", save_after)
    assert checkpoint.load(tmp_path).step == 2
    assert looks == [[1], [2]]


def test_a_step_that_was_moved_behind_a_link_does_not_return(tmp_path):
    folder, archive = tmp_path / "run", tmp_path / "archive"
    checkpoint.save(folder, STATE, 1)
    (folder / "1").rename(archive)
    (folder / "1").symlink_to(archive)
    checkpoint.save(folder, {"w": STATE["w"] * 2}, 1)
    checkpoint.save(folder, STATE, 2, keep=1)
    assert names(folder) == ["2"]
    assert (archive / "manifest.json").exists()


def test_a_checkpoint_that_goes_is_no_damage(tmp_path, monkeypatch):
    """What a reader meets if a writer drops what it has just begun to read."""
    for step in (1, 2):
        checkpoint.save(tmp_path, {"w": STATE["w"] * step}, step)
    read_sums = _files.read_sums
    gone = []

    def dropped(folder):
        if not gone:
            gone.append(folder.name)
            checkpoint.save(tmp_path, {"w": STATE["w"] * 3}, 3, keep=1)
        return read_sums(folder)

    monkeypatch.setattr(_files, "read_sums", dropped)
    assert checkpoint.restore(tmp_path, STATE)["w"].tolist() == [0, 3, 6, 9, 12]
    gone.clear()
    monkeypatch.setattr(_files, "read_sums", lambda folder: (_files._drop(folder, ".deleted"), read_sums(folder)))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
        checkpoint.load(tmp_path, step=3)


def test_one_whose_successor_came_while_it_was_read_may_be_half_deleted(tmp_path, monkeypatch):
    """A writer replaces a checkpoint by two renames; a reader between them takes the old one under its second name."""
    checkpoint.save(tmp_path, STATE, 1)
    old = (tmp_path / "1").rename(tmp_path / "1.replaced")
    read_sums = _files.read_sums

    def replace_after(folder):
        sums = read_sums(folder)
        if folder == old:
            shutil.copytree(old, tmp_path / "1")
            (old / _files.MANIFEST).unlink()
        return sums

    monkeypatch.setattr(_files, "read_sums", replace_after)
    assert checkpoint.load(tmp_path).state["w"].tolist() == STATE["w"].tolist()


OTHER = """
import sys
from jaxdist import checkpoint
for _ in range(2):
    sys.stdin.readline()
    try:
        with checkpoint.writing(sys.argv[1]):
            print("ready", flush=True)
            sys.stdin.read()
    except ValueError as error:
        print(error, flush=True)
"""


def test_one_writer_at_a_time(tmp_path):
    """Two would fill the same folders, each with arrays of the other."""
    environment, folder = {**os.environ, "PYTHONPATH": str(REPOSITORY)}, tmp_path / "run"
    command, pipes = [sys.executable, "-c", OTHER, str(folder)], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        def try_there():
            other.stdin.write("now\n")
            other.stdin.flush()
            return other.stdout.readline()

        with checkpoint.writing(folder) as writer:
            writer.save(STATE, 1)
            writer.wait()
            # As of a backup after a save: a lock of `lockf` ends when the process closes the file anywhere.
            shutil.copytree(folder, tmp_path / "backup")
            assert "another process writes checkpoints into" in try_there()
        assert try_there() == "ready\n"
        with (
            pytest.raises(ValueError, match=r"another process writes checkpoints into .*delete .*\.writer"),
            checkpoint.writing(folder),
        ):
            pass
        other.kill()  # its lock goes with it
        other.wait()
        with checkpoint.writing(folder) as writer:
            writer.save(STATE, 2)
    assert checkpoint.latest(folder) == 2


def test_paths_as_a_shell_takes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    assert checkpoint.save("~/a run", STATE, 1) == tmp_path / "a run" / "1"
    assert (checkpoint.latest("~/a run"), checkpoint.resume("a run", STATE).step) == (1, 1)
    assert checkpoint.latest(f"file://{tmp_path}/a run") == 1
    with pytest.raises(NotADirectoryError):
        checkpoint.resume("file", STATE)
    with pytest.raises(FileExistsError), checkpoint.writing("file"):  # before the first step, not after it
        pass
    assert names(tmp_path) == ["a run", "file"]


def test_a_failed_save_gives_its_room_back(tmp_path, monkeypatch):
    """Or a disk that was full stays full."""
    checkpoint.save(tmp_path, STATE, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, STATE, 2)
    assert names(tmp_path) == ["1"]


def test_all_of_it_is_on_the_disk_before_it_is_a_checkpoint(tmp_path, monkeypatch):
    """A power cut after the rename finds each file and each name."""
    synced = []
    sync, rename = _files._sync, pathlib.Path.rename
    monkeypatch.setattr(_files, "_sync", lambda one: (synced.append(one), sync(one)))

    def renamed(self, target):
        if self.name == "1.unfinished":
            assert {self, *self.rglob("*")} <= set(synced)
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", renamed)
    checkpoint.save(tmp_path, STATE, 1)
    assert synced[-1] == tmp_path


def test_names_outside_of_the_folder_are_not_opened(tmp_path, monkeypatch):
    """Whoever can write the checksums could name any file, or one that never ends."""
    folder = checkpoint.save(tmp_path, STATE, 1)
    good = _files.read_sums(folder)
    for name in ("../secret", "/dev/zero", "arrays/../../secret"):
        lines = [f"{digest}  {one}" for digest, one in [*good, ("0" * 64, name)]]
        (folder / "SHA256SUMS").write_text("\n".join([*lines, _files.seal(lines)]) + "\n")
        with pytest.raises(checkpoint.CheckpointDamagedError, match="SHA256SUMS holds other bytes"):
            checkpoint.load(tmp_path)
    lines = [f"{digest}  {one}" for digest, one in good]
    (folder / "SHA256SUMS").write_text("\n".join([*lines, _files.seal(lines)]) + "\n")
    checkpoint.load(tmp_path)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(checkpoint.CheckpointDamagedError, match=r"manifest\.json is missing"):
        checkpoint.load(tmp_path)


def saved(folder, *steps):
    """Checkpoints whose state is the number of the step."""
    for step in steps:
        checkpoint.save(folder, {"w": jnp.full(3, float(step))}, step)


def resumed(folder, **options):
    found = checkpoint.resume(folder, {"w": jnp.zeros(3)}, **options)
    assert set(found.state["w"].tolist()) == {float(found.step)}
    return found.step


def test_after_a_roll_back_the_old_future_is_set_aside(tmp_path):
    saved(tmp_path, 10, 20, 30)
    checkpoint.restore(tmp_path, {"w": jnp.zeros(3)}, step=10)
    saved(tmp_path, 15)
    assert (checkpoint.latest(tmp_path), resumed(tmp_path)) == (15, 15)
    assert names(tmp_path) == ["10", "15", "20.abandoned", "30.abandoned"]
    saved(tmp_path, 20, 18)
    assert names(tmp_path) == ["10", "15", "18", "20.abandoned", "20.abandoned-2", "30.abandoned"]
    with checkpoint.writing(tmp_path, keep=2) as writer:
        writer.save(STATE, 16)
    assert names(tmp_path)[:3] == ["15", "16", "18.abandoned"]


@pytest.mark.parametrize("moved", [0, 1])
def test_a_death_before_all_of_the_old_future_is_aside(tmp_path, monkeypatch, moved):
    """Committed is committed: no reader takes what was given up, and the next writer sets it aside."""
    saved(tmp_path, 10, 20, 30)
    set_aside, calls = _files.set_aside, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) > moved:
            raise SystemExit
        set_aside(*arguments)

    monkeypatch.setattr(_files, "set_aside", dies)
    with pytest.raises(SystemExit):
        saved(tmp_path, 15)
    monkeypatch.undo()
    assert len(names(tmp_path)) == 5  # a journal too
    assert resumed(tmp_path) == 15
    saved(tmp_path, 20)
    assert resumed(tmp_path) == 20
    assert names(tmp_path) == ["10", "15", "20", "20.abandoned", "30.abandoned"]


def test_a_death_before_the_commit_gives_nothing_up(tmp_path, monkeypatch):
    saved(tmp_path, 10, 20)
    monkeypatch.setattr(pathlib.Path, "rename", lambda *_: exec("raise SystemExit"))
    with pytest.raises(SystemExit):
        saved(tmp_path, 15)
    monkeypatch.undo()
    assert _files.JOURNAL in names(tmp_path)
    assert resumed(tmp_path) == 20
    saved(tmp_path, 30)
    assert names(tmp_path) == ["10", "20", "30"]


def test_a_copied_folder_is_refused_and_passed_over(tmp_path):
    saved(tmp_path, 10, 20)
    shutil.copytree(tmp_path / "20", tmp_path / "30")
    with pytest.raises(checkpoint.CheckpointDamagedError, match=r"30 is damaged: .*is that of step 20: .* a copy"):
        checkpoint.resume(tmp_path, STATE)
    with pytest.raises(checkpoint.CheckpointDamagedError, match="is that of step 20"):
        checkpoint.load(tmp_path, step=30)
    found = checkpoint.resume(tmp_path, {"w": jnp.zeros(3)}, skip_damaged=True)
    assert (found.step, found.damaged) == (20, (30,))
    assert "is that of step 20" in found.reasons[0]
    assert names(tmp_path) == ["10", "20", "30.damaged"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["SHA256SUMS", "manifest.json", "arrays"])
def test_what_cannot_be_read_is_not_damaged(tmp_path, monkeypatch, number, name):
    saved(tmp_path, 10, 20)
    stat = os.stat

    def refuses(path, *arguments, **options):
        if f"{tmp_path}/20/{name}" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuses)
    for options in ({}, {"skip_damaged": True, "allow_fresh_start": True}):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            checkpoint.resume(tmp_path, STATE, **options)
        assert caught.value.errno == number
    monkeypatch.undo()
    assert names(tmp_path) == ["10", "20"]


def test_bytes_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    saved(tmp_path, 10)

    def fails(path, *_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(_files, "digest", fails)
    with pytest.raises(checkpoint.CheckpointUnreadableError, match=r"checkpoint 10 cannot be read, .*arrays") as caught:
        checkpoint.resume(tmp_path, STATE, skip_damaged=True)
    assert (caught.value.errno, caught.value.step) == (errno.EIO, 10)
    assert caught.value.file.is_relative_to(tmp_path / "10")


def test_tensorstores_errors_of_the_system_are_the_systems(tmp_path, monkeypatch):
    saved(tmp_path, 10)

    def fails(*_):
        raise ValueError("PERMISSION_DENIED: Error opening \"zarr\" driver: [os_error_code='13']")

    monkeypatch.setattr(_filling, "_read", fails)
    with pytest.raises(checkpoint.CheckpointUnreadableError, match="Permission denied: checkpoint 10"):
        checkpoint.load(tmp_path)


def test_no_folder_and_an_empty_one_are_a_fresh_start(tmp_path):
    assert resumed(tmp_path / "none") == resumed(tmp_path) == 0


def test_a_folder_that_cannot_be_listed_is_no_fresh_start(tmp_path, monkeypatch):
    saved(tmp_path, 10)

    def refuses(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuses)
    with pytest.raises(PermissionError):
        checkpoint.resume(tmp_path, STATE, skip_damaged=True, allow_fresh_start=True)


SAVES = """
import sys, jax.numpy as jnp
from jaxdist import checkpoint
checkpoint.save(sys.argv[1], {"w": jnp.zeros(3)}, 1)
"""


@pytest.mark.slow
def test_a_save_is_alone_too(tmp_path):
    """Another job's `save` neither takes away what is being filled nor commits a mixture."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with checkpoint.writing(tmp_path) as writer:
        (tmp_path / "7.unfinished").mkdir()
        command = [sys.executable, "-c", SAVES, str(tmp_path)]
        other = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "ValueError: another process writes checkpoints into" in other.stderr
        assert names(tmp_path) == ["7.unfinished"]
        writer.save(STATE, 1)
    assert names(tmp_path) == ["1", "7.unfinished"]


@pytest.mark.slow
def test_nested_writers_are_refused_and_harm_nothing(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")
    with checkpoint.writing(tmp_path / "run") as writer:
        (tmp_path / "run" / "7.unfinished").mkdir()
        for inner in (tmp_path / "run", link):
            with pytest.raises(ValueError, match=r"this process writes checkpoints into .* already"):
                checkpoint.save(inner, STATE, 1)
            with pytest.raises(ValueError, match="already"), checkpoint.writing(inner):
                pass
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-c", SAVES, str(tmp_path / "run")]
        other = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "another process writes" in other.stderr  # the lock is still there
        writer.save(STATE, 2)
    assert names(tmp_path / "run") == ["2", "7.unfinished"]
    checkpoint.save(link, STATE, 3)
    assert names(tmp_path / "run") == ["2", "3"]


def test_two_threads_do_not_save_at_once(tmp_path, monkeypatch):
    begun, go, refused = threading.Event(), threading.Event(), []
    commit = _files.commit

    def waits(*arguments):
        begun.set()
        assert go.wait(60)
        commit(*arguments)

    monkeypatch.setattr(_files, "commit", waits)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(saved, tmp_path, 1)
        assert begun.wait(60)
        try:
            saved(tmp_path, 2)
        except ValueError as error:
            refused.append(str(error))
        go.set()
        first.result()
    assert "finish one save before starting another" in refused[0]
    assert names(tmp_path) == ["1"]


FULL = """
import resource, sys, jax.numpy as jnp
from jaxdist import checkpoint
checkpoint.save(sys.argv[1], {"w": jnp.zeros(3)}, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
try:
    checkpoint.save(sys.argv[1], {"w": jnp.arange(1 << 20) ** 2}, 2)
except checkpoint.CheckpointFullError as error:
    print("FULL", error.errno, error.step, error.path == __import__("pathlib").Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_full_disk_is_a_typed_error_and_gives_its_room_back(tmp_path):
    """As tensorstore meets it: it says no number but in its text. A limit of file sizes needs no disk to fill."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["FULL", str(errno.EFBIG), "2", "True"]
    assert names(tmp_path) == ["1"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']", "CheckpointFullError"),
        ("RESOURCE_EXHAUSTED: Failed: Disk quota exceeded [OS error 122: EDQUOT]", "CheckpointFullError"),
        ("PERMISSION_DENIED: Failed to create: Permission denied [os_error_code='13']", "PermissionError"),
        ("INVALID_ARGUMENT: no number", "ValueError"),
    ],
)
def test_tensorstores_words_for_a_disk(tmp_path, monkeypatch, text, kind):
    def fails(*_):
        raise ValueError(text)

    monkeypatch.setattr(_files, "commit", fails)
    with pytest.raises((OSError, ValueError)) as caught:
        saved(tmp_path, 1)
    assert type(caught.value).__name__ == kind
    assert names(tmp_path) == []


ODD = {
    "nothing": lambda manifest: None,
    "a list": lambda manifest: [],
    "no step": lambda manifest: manifest.pop("step") and manifest,
    "a step of text": lambda manifest: {**manifest, "step": "1"},
    "no leaves": lambda manifest: {**manifest, "leaves": None},
    "an unknown mark": lambda manifest: changed(manifest, marks=[{"mark": "Nope"}]),
    "too many marks": lambda manifest: changed(manifest, marks=[{"mark": "PerWorker", "axis": ["x"]}] * 2),
    "no such resize": lambda manifest: changed(manifest, marks=[{"mark": "PerWorker", "axis": ["x"], "resize": 1}]),
    "no such dtype": lambda manifest: changed(manifest, dtype="float33"),
    "a shape of text": lambda manifest: changed(manifest, shape=["5"]),
    "another shape": lambda manifest: changed(manifest, shape=[7]),
    "another dtype": lambda manifest: changed(manifest, dtype="int32"),
    "a key": lambda manifest: changed(manifest, dtype="key<fry>"),
    "a leaf more": lambda manifest: {**manifest, "leaves": {**manifest["leaves"], "v": manifest["leaves"]["w"]}},
}


def changed(manifest, **options):
    manifest["leaves"]["w"] |= options
    return manifest


@pytest.mark.parametrize("odd", ODD)
def test_a_manifest_that_is_sealed_and_odd(tmp_path, odd):
    """Its checksum is right, and the text is none that we write."""
    folder = checkpoint.save(tmp_path, STATE, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(ODD[odd](manifest)))
    (folder / "SHA256SUMS").unlink()
    (folder / "SHA256SUMS").write_text(_files._sum_files(folder))
    with pytest.raises(checkpoint.CheckpointDamagedError, match=r"manifest\.json (is not a manifest|does not belong)"):
        checkpoint.load(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where Linux lists them")
def test_forty_saves_leave_no_file_open(tmp_path):
    def open_now():
        return np.array([len(os.listdir("/proc/self/fd")), threading.active_count()])

    with checkpoint.writing(tmp_path, keep=1) as writer:
        writer.save(STATE, 0)
        writer.wait()
        before = open_now()
        for step in range(1, 40):
            writer.save(STATE, step)
        writer.wait()
        # Nothing waits for the last of a save's threads to end: they do by themselves, and what leaks never would.
        until = time.monotonic() + 60
        while (open_now() > before).any() and time.monotonic() < until:
            time.sleep(0.01)
        assert (open_now() <= before).all()
