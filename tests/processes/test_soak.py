"""One kill of each method, and what was not the same afterwards; twenty of each lie in a report."""

import json
import os
import subprocess
import sys

import pytest
from paths import REPOSITORY

SOAK = REPOSITORY / "benchmarks" / "soak"


@pytest.mark.slow
@pytest.mark.parametrize("group", range(3))
def test_one_kill_of_each_method(group, tmp_path):
    command = [sys.executable, str(SOAK), "kill_and_restart", "--groups", str(group), "--kills", "1"]
    command += ["--out", str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads((tmp_path / "kill_and_restart.json").read_text()).values()
    assert found["good"]
    assert len(found["kills"]) == 1
    assert len(found["differ"]) == 3
