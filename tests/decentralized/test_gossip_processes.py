"""Four real processes that only talk to neighbors, against the simulation of them in one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from paths import REPOSITORY, SUPPORT
from real_processes import LIMIT, flags_without_devices, free_port

SCRIPT = SUPPORT / "scripts" / "neighbors.py"


@pytest.fixture(scope="module")
def results():
    """What each of the four found, and the simulation."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags_without_devices(),
        "PYTHONPATH": str(REPOSITORY),
    }
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(number), which],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, which in enumerate([port] * 4 + ["simulate"])
    ]
    try:
        printed = [one.communicate(timeout=LIMIT)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * 5, "\n".join(text[-2000:] for text in printed)
    return [json.loads(text.split("RESULT ")[1].splitlines()[0]) for text in printed]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d_psgd", "sgp", "one_peer", "choco", "relay_sgd"])
def test_four_processes_give_what_the_simulation_gives(results, name):
    found = np.concatenate([one[name] for one in results[:4]])
    np.testing.assert_allclose(found, results[4][name], atol=2e-6)
    assert np.ptp(found, axis=0).max() > 1e-3  # they have not simply agreed
