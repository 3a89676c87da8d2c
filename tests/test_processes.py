"""Two real processes, joined by `jax.distributed`, against the simulation in each of them.

By default one reducer for each kind of wire, since what processes change is the transport; all with `--slow`.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from laws import CASES

HERE = pathlib.Path(__file__).parent
LIMIT = 400  # seconds; a process that waits for a dead one would wait for ever

# The first case of each: levels, and the kinds and dtypes of messages.
WIRES = {(case.levels, frozenset(case.wire)): name for name, case in reversed(CASES.items())}
NAMES = [name if name in WIRES.values() else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def wanted(request):
    """Names of the cases that run."""
    return [name for name in CASES if request.config.getoption("--slow") or name in WIRES.values()]


@pytest.fixture(scope="module")
def results(tmp_path_factory, wanted):
    """What each process printed. The first that fails ends both."""
    folder, port = tmp_path_factory.mktemp("processes"), free_port()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag),
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
    }
    logs = [folder / f"{number}.log" for number in range(2)]
    started = []
    for number, log in enumerate(logs):
        command = [sys.executable, str(HERE / "processes" / "worker.py"), str(number), port, *wanted]
        with log.open("w") as out:
            started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    try:
        until = time.monotonic() + LIMIT
        while any(one.poll() is None for one in started):
            if time.monotonic() > until or any(one.poll() for one in started):
                break
            time.sleep(0.1)
        codes = [one.poll() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    text = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(part[-3000:] for part in text)
    return [json.loads(part.split("RESULT ")[1].splitlines()[0]) for part in text]


@pytest.mark.parametrize("name", [*NAMES, "skip_nonfinite"])
def test_two_processes_give_what_the_simulation_gives(results, name):
    tolerance = CASES[name].tolerance if name in CASES else 0
    assert max(result[name] for result in results) <= max(1e-5, tolerance)


def test_nothing_was_left_out(results, wanted):
    assert all(set(result) == {*wanted, "skip_nonfinite"} for result in results)
