"""The comparison with other systems in its smallest size, without the other systems."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "peers.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no benchmarks")


def run(subcommand, folder, *options):
    command = [sys.executable, str(SCRIPT), subcommand, "--out", str(folder), *map(str, options)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_rules_are_the_recursions_of_bluefog(tmp_path):
    shown = run("consensus", tmp_path, "--draws", 2)
    rows = json.loads((tmp_path / "consensus.json").read_text())["rows"]
    assert max(row["largest_difference"] for row in rows if "largest_difference" in row) < 1e-12
    assert (tmp_path / "consensus.md").read_text() in shown + "\n"


@pytest.mark.slow
def test_every_stage_has_the_same_losses_and_less_memory(tmp_path):
    options = ("--problem", 64, 3, 16, 10, 8, "--turns", 1, "--steps", 2, "--malloc", "default")
    run("sharding", tmp_path, *options, "--compiled", tmp_path / "compiled")
    rows = {row["mode"]: row for row in json.loads((tmp_path / "sharding.json").read_text())["rows"]}
    assert list(rows) == ["exact", "zero_1", "zero_2", "zero_3"]
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["exact"]["losses"], rel=1e-4)
    sizes = [row["arguments"] for row in rows.values()]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 0.05])
def test_state_on_the_host_has_two_moments(tmp_path, seconds):
    shown = run("offload", tmp_path, "--entries", 2**20, "--leaves", 1, "--turns", 1, "--seconds", seconds)
    rows = json.loads((tmp_path / "offload.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["jaxdist", "optax"]
    for row in rows:
        assert len(row["step"]) >= 3 if seconds else row["step"] == []
        # Parameters, gradients and two moments.
        assert 16 * 2**20 <= row["peak"] < 64 * 2**20
    assert "| 2^20 | 1 | jaxdist `offload.host(adamw)` |" in shown


@pytest.mark.slow
def test_islands_survive_a_kill(tmp_path):
    # On a machine that is busy, workers start slowly, and islands that answer late are not waited for.
    options = ("--systems", "islands", "torchft", "--events", "kill", "--runs", 1, "--timeout", 10, "--patience", 600)
    run("failures", tmp_path, *options, "--compiled", tmp_path / "compiled")
    (row,) = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert row["system"] == "islands"
    assert row["next_step"] <= row["next_joint_step"]
    assert row["longest_gap"] >= row["usual_gap"]
    assert row["params_after"]["shared"] > 0
    assert row["params_after"]["different"] == 0


def test_a_command_that_is_terminated_ends_its_workers(tmp_path):
    options = ("--systems", "islands", "--events", "kill", "--compiled", tmp_path / "compiled", "--out", tmp_path)
    command = [sys.executable, str(SCRIPT), "failures", *map(str, options)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            # Workers have the folder of the run, which is made in TMPDIR, among their arguments.
            assert wait_for(lambda: len(workers_of(tmp_path)) == 3)
        finally:
            process.terminate()
    assert wait_for(lambda: not workers_of(tmp_path))


def workers_of(folder):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            found.append(path.read_text())
    return [line for line in found if "failing_islands.py" in line and str(folder) in line]


def wait_for(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()
