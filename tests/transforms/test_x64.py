"""With `JAX_ENABLE_X64=1`, set before anything is imported: in a process of its own."""

import os
import subprocess
import sys

import pytest
from paths import REPOSITORY, SUPPORT


@pytest.mark.slow
@pytest.mark.parametrize("taken", [(), ("--run",)])
def test_states_keep_their_dtypes(taken):
    script = SUPPORT / "scripts" / "in_x64.py"
    little = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    path = f"{REPOSITORY}{os.pathsep}{SUPPORT}"
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": little, "PYTHONPATH": path}
    command = [sys.executable, script, *taken]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert found.returncode == 0, found.stdout + found.stderr
