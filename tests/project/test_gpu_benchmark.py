"""The benchmark of a GPU in its smallest size: a machine that was lent must not be spent on mistakes in a script."""

import json
import os
import subprocess
import sys

import pytest
from paths import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"
OTHERS = {"torch", "torchao", "bitsandbytes"}


def measure(folder, *only):
    # The limit is that of a lease: a busy machine takes longer than its nine minutes.
    command = [sys.executable, str(SCRIPT), "--smallest", "--minutes", "60", "--out", str(folder)]
    command += ["--only", *only] if only else []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "call again" not in done.stderr, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_goes_on_where_it_was_cut_off_and_names_the_device(tmp_path):
    first = measure(tmp_path, "copy")
    assert [(row["section"], row["name"]) for row in first] == [("device", "jax"), ("copy", "-x in place")]
    assert first[1]["seconds"] > 0
    assert first[1]["bytes"] == 8 * 2**14
    # The machine went away while the last row was being written.
    path = tmp_path / "gpu.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])
    with pytest.raises(json.JSONDecodeError):
        measure(tmp_path, "copy")
    *before, damaged, again = path.read_text().splitlines(keepends=True)
    assert before == lines[:-1]
    assert damaged == lines[-1][:20] + "\n"
    assert json.loads(again)["name"] == "-x in place"
    assert (tmp_path / "gpu.md").read_text().startswith("# One cpu\n")


@pytest.mark.slow
def test_every_section_measures_something_or_says_why_not(tmp_path):
    rows = measure(tmp_path)
    sections = {row["section"] for row in rows}
    ours = {"copy", "rates", "codes", "warps", "selection", "power_sgd", "states", "overhead", "offload", "plan"}
    assert sections >= ours | OTHERS
    # Nothing of JAX fails; what is not installed is named.
    assert [row for row in rows if "skipped" in row and row["section"] not in OTHERS] == []
    assert all("is not installed" in row["skipped"] for row in rows if "skipped" in row)
    (plan,) = [row for row in rows if row["section"] == "plan"]
    assert plan["seconds"] > 0
    assert plan["read_peak"] > 16 * plan["parameters"]
    assert len(measure(tmp_path)) == len(rows)


def test_a_code_without_its_kernel_is_a_failure(tmp_path):
    row = {"section": "codes", "name": "qsgd(4)", "seconds": 1e-3, "bytes": 10**9, "one_pass": False}
    (tmp_path / "gpu.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, str(SCRIPT), "--minutes", "0", "--only", "copy", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("jaxdist/compressors/one_pass.py: qsgd(4)")
    assert "in two passes" in (tmp_path / "gpu.md").read_text()
