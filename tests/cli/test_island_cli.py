"""`jaxdist train --islands`: several jobs that meet in a folder."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxdist import checkpoint, islands, offload
from jaxdist._cli import main as cli
from jaxdist._cli import results

DIGITS = ["--workload", "digits", "--model", "convnet:2", "--batch", "8", "--optimizer", "sgd:0.1"]


@pytest.mark.slow
def test_an_island_trains_meets_and_resumes(tmp_path, capsys):
    url, out = str(tmp_path / "run"), str(tmp_path / "out")
    arguments = ["train", *DIGITS, "--sync", "diloco:H=2", "--reducer", "ef:qsgd:4", "--devices", "2", "--out", out]
    assert cli.main([*arguments, "--islands", url, "--name", "a", "--steps", "4"]) == 0
    assert "2 meetings, 2 of them counted; the last round took a." in " ".join(capsys.readouterr().out.split())
    rounds = [line for line in results.read_log(tmp_path / "out/log.jsonl") if line["kind"] == "round"]
    assert [line["round"] for line in rounds] == [1, 2]
    assert all(line["counted"] for line in rounds)
    assert cli.main([*arguments, "--islands", url, "--name", "a", "--steps", "6", "--resume"]) == 0
    found = islands.status(url)
    assert (found.round, found.sessions) == (3, {"a": 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--islands", "x"], "--islands needs --sync"),
        (["--islands", "x", "--sync", "diloco:H=2", "--zero", "1"], "--zero: not with --islands"),
        (["--name", "a", "--begin-with", "2"], "--name, --begin-with: only with --islands"),
        (["--islands", "x", "--sync", "muloco:H=2,learning_rate=0.1"], "islands take diloco, slowmo, local_sgd"),
        (
            ["--islands", "x", "--sync", "streaming_diloco:H=4,fragments=2", "--name", "a"],
            "islands need local_steps with fragments",
        ),
        (["--islands", "x", "--sync", "diloco:H=4", "--name", "a/b"], "name of an island"),
        (["--islands", "x", "--sync", "diloco:H=2", "--save-every", "-2"], "--save-every must be at least 1, got -2"),
        (["--engine", "ray", "--islands", "x"], "--islands: not with --engine ray"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *DIGITS, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_two_jobs_train_together_and_one_leaves_at_sigterm(tmp_path):
    """The one that leaves sends its progress, and the other waits for it no longer."""

    def start(name, steps):
        command = [sys.executable, "-m", "jaxdist._cli", "train", *DIGITS, "--sync", "local_sgd:H=2", "--devices", "1"]
        command += ["--islands", str(tmp_path / "run"), "--name", name, "--begin-with", "2", "--round-timeout", "300"]
        command += ["--steps", str(steps), "--out", str(tmp_path / name)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def rounds(name):
        log = tmp_path / name / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in map(json.loads, lines[:-1]) if line["kind"] == "round"]

    stays, leaves = start("stays", 10**6), start("leaves", 10**6)
    try:
        for count, name in [(3, "stays"), (3, "leaves")]:
            while len(rounds(name)) < count:
                assert (stays.poll(), leaves.poll()) == (None, None)
                time.sleep(0.1)
        leaves.send_signal(signal.SIGTERM)
        printed, _ = leaves.communicate(timeout=300)
        assert leaves.returncode == 0
        assert "stopped after step" in printed
        after = len(rounds("stays"))
        while len(rounds("stays")) < after + 3:
            assert stays.poll() is None
            time.sleep(0.1)
        found = rounds("stays")
        assert found[0]["members"] == ["leaves", "stays"]
        assert found[-1]["members"] == ["stays"]
        assert all(line["missing"] == [] for line in found)
    finally:
        for job in (stays, leaves):
            job.kill()
            job.communicate()


def test_errors_of_islands_and_stores_are_one_line():
    for error in (
        islands.DamagedError,
        islands.RunMismatchError,
        offload.StoreDamagedError,
        checkpoint.CheckpointPeerError,
    ):
        assert issubclass(error, cli.EXPECTED)
