"""Two real processes train, one is killed, both start again: as if nothing had happened, in every bit."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from paths import REPOSITORY, SUPPORT
from real_processes import flags_without_devices

from jaxdist import checkpoint

LIMIT = 200  # seconds


@pytest.fixture
def start(tmp_path):
    """Starts both processes; whatever happens, none is left."""
    started = []

    def both(what):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags_without_devices(),
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{SUPPORT}",
        }
        pair = []
        for number in range(2):
            command = [sys.executable, str(SUPPORT / "scripts" / "resume.py"), str(number), port]
            with (tmp_path / f"{what}{number}.log").open("w") as out:
                pair.append(
                    subprocess.Popen(
                        [*command, str(tmp_path / "run"), what], env=environment, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        started.extend(pair)
        return pair

    yield both
    for one in started:
        one.kill()
        one.wait()


def wait(condition, pair, logs):
    until = time.monotonic() + LIMIT
    while not condition():
        failed = [one.poll() for one in pair if one.poll()]
        assert not failed and time.monotonic() < until, "\n".join(log.read_text()[-3000:] for log in logs)  # noqa: PT018
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_in_every_bit(start, tmp_path):
    pair, folder = start("train"), tmp_path / "run"
    wait(lambda: (checkpoint.latest(folder) or 0) >= 3, pair, sorted(tmp_path.glob("*.log")))
    pair[1].send_signal(signal.SIGKILL)  # between two rounds, or while it saves
    pair[1].wait()
    time.sleep(0.2)
    pair[0].kill()  # it waits for the other
    pair[0].wait()

    pair = start("resume")
    logs = [tmp_path / f"resume{number}.log" for number in range(2)]
    wait(lambda: all(one.poll() is not None for one in pair), pair, logs)
    for log in logs:
        result = json.loads(log.read_text().split("RESULT ")[1].splitlines()[0])
        last = result["from"] + 5
        assert result["from"] >= 3
        assert result["from"] % 3 == 0
        assert result["differ"] == []
        assert result["differ_inside"] == []
        # The comparison was one of states that have something to lose.
        assert (result["rounds"], result["since"]) == ([last // 3], [last % 3])
        assert result["residual"] > 0
