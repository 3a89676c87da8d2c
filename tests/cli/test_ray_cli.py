"""`jaxdist train --engine ray`."""

import json
import subprocess
import sys

import pytest

from jaxdist._cli import main as cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "asgd", "--on-death", "continue"], "--rule, --on-death: only with --engine ray"),
        (["--engine", "ray", "--workers", "2"], "needs --rule and --workers"),
        (["--engine", "ray", "--sync", "diloco:H=5", "--zero", "1"], "--sync, --zero: not with --engine ray"),
        (["--engine", "ray", "--rule", "asgd", "--workers", "0"], "--workers must be positive, got 0"),
        (["--engine", "ray", "--rule", "nonsense", "--workers", "2"], "unknown rule 'nonsense'"),
    ],
)
def test_options_of_the_other_engine_are_refused(arguments, message, capsys):
    assert cli.main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_train_on_processes(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, "-c", "import sys; from jaxdist._cli.main import main; sys.exit(main())", "train"]
    command += ["--engine", "ray", "--rule", "ad_psgd", "--workers", "3", "--steps", "30", "--workload", "digits"]
    command += ["--model", "convnet:1", "--batch", "4", "--optimizer", "sgd:0.05", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ad_psgd" in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoint").is_dir()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "run"
    assert lines[-1]["kind"] == "summary"
    assert lines[-1]["steps"] >= 30
