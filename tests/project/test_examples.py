"""Every example runs as its docstring says, and prints what it promises."""

import os
import subprocess
import sys

import pytest
from paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
PROMISES = {
    "any_batch_regret.py": "times less regret than with fixed batches",
    "chain_with_optax.py": "test accuracy 0.9",
    "does_not_fit.py": "of Adam's moments are in",
    "flax_models.py": "4 workers, steps 40 to 80",
    "grain_data.py": "the same 40 batches, and the same bits",
    "hospitals.py": "quasi-global momentum  8",
    "islands.py": "rounds: 0.",
    "two_clusters.py": "times fewer bytes between clusters",
    "two_processes.py": "one worker sends",
    "uneven_workers.py": "times sooner than bsp",
    "your_own_compressor.py": "the laws hold",
}


def test_all_examples_are_tested_and_short():
    files = {path.name: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(PROMISES)
    # Three versions of one model.
    assert files.pop("flax_models.py") < 200
    assert max(files.values()) < 100


# Four processes, each of which compiles.
SLOW = {"islands.py"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROMISES])
def test_example_runs(name):
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    # Devices are the example's business; with how much effort to compile is ours.
    flags = [flag for flag in environment.pop("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join(flags)
    run = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert PROMISES[name] in run.stdout
