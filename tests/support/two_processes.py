"""Runs a script of `tests/support/scripts` in two processes, or more, and collects what they print."""

import json
import os
import subprocess
import sys

from paths import REPOSITORY, SUPPORT
from real_processes import flags_without_devices


def run_two_processes(script, folder, *cases, timeout, count=2):
    """Returns the JSON value that each process printed after `RESULT`; the script is given the folder and the cases."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags_without_devices(),
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, SUPPORT))),
    }
    command = [sys.executable, "-m", "jaxdist.processes.launch", "-n", str(count), "--logs", str(folder / "logs")]
    command += [str(SUPPORT / "scripts" / script), str(folder), *cases]
    subprocess.run(command, env=environment, check=True, timeout=timeout, stdout=subprocess.DEVNULL)
    texts = [(folder / "logs" / f"{number}.log").read_text() for number in range(count)]
    return [json.loads(text.split("RESULT ")[1].splitlines()[0]) for text in texts]
