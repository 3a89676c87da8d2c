"""Where checkpoints lie: foreign files, other writers, readers beside them, deaths between two renames."""

import os
import pathlib
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import checkpoint
from jaxdist.checkpoint import _files, from_disk

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
    monkeypatch.setattr(from_disk, "_TRIES", 1000)  # the writer may be as fast as the reader
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


def test_a_checkpoint_that_goes_is_no_damage(tmp_path, monkeypatch):
    """What a reader meets if a writer drops what it has just begun to read."""
    for step in (1, 2):
        checkpoint.save(tmp_path, {"w": STATE["w"] * step}, step)
    listed = _files.listed
    gone = []

    def dropped(folder):
        if not gone:
            gone.append(folder.name)
            checkpoint.save(tmp_path, {"w": STATE["w"] * 3}, 3, keep=1)
        return listed(folder)

    monkeypatch.setattr(_files, "listed", dropped)
    assert checkpoint.restore(tmp_path, STATE)["w"].tolist() == [0, 3, 6, 9, 12]
    gone.clear()
    monkeypatch.setattr(_files, "listed", lambda folder: (_files._drop(folder, ".deleted"), listed(folder)))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
        checkpoint.load(tmp_path, step=3)


OTHER = """
import sys
from jaxdist import checkpoint
with checkpoint.writing(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_one_writer_at_a_time(tmp_path):
    """Two would fill the same folders, each with arrays of the other."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent.parent)}
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with (
            pytest.raises(ValueError, match=r"another process writes checkpoints into .*delete .*\.writer"),
            checkpoint.writing(tmp_path),
        ):
            pass
        other.kill()  # its lock goes with it
        other.wait()
        with checkpoint.writing(tmp_path) as writer:
            writer.save(STATE, 1)
    assert checkpoint.latest(tmp_path) == 1


def test_paths_as_a_shell_takes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    assert checkpoint.save("~/a run", STATE, 1) == tmp_path / "a run" / "1"
    assert (checkpoint.latest("~/a run"), checkpoint.resume("a run", STATE).step) == (1, 1)
    with pytest.raises(ValueError, match=r"folder of a file system .* got gs://bucket/run"):
        checkpoint.latest("gs://bucket/run")
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
    good = _files.listed(folder)
    for name in ("../secret", "/dev/zero", "arrays/../../secret"):
        lines = [f"{digest}  {one}" for digest, one in [*good, ("0" * 64, name)]]
        (folder / "SHA256SUMS").write_text("\n".join([*lines, _files._own_line(lines)]) + "\n")
        with pytest.raises(checkpoint.CheckpointDamagedError, match="SHA256SUMS holds other bytes"):
            checkpoint.load(tmp_path)
    lines = [f"{digest}  {one}" for digest, one in good]
    (folder / "SHA256SUMS").write_text("\n".join([*lines, _files._own_line(lines)]) + "\n")
    checkpoint.load(tmp_path)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(checkpoint.CheckpointDamagedError, match=r"manifest\.json is missing"):
        checkpoint.load(tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where Linux lists them")
def test_forty_saves_leave_no_file_open(tmp_path):
    def open_now():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with checkpoint.writing(tmp_path, keep=1) as writer:
        writer.save(STATE, 0)
        writer.wait()
        before = open_now()
        for step in range(1, 40):
            writer.save(STATE, step)
        writer.wait()
        assert open_now() == before
