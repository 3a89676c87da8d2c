"""The launcher, with scripts that do not start JAX."""

import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxdist.launch import devices, launch, ports

SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
me, attempt = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAXDIST_ATTEMPT"])
def until(path):
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
def saved(*_):
    print("saved", flush=True)
    sys.exit(0)
"""
# Without the package around it, whose import starts JAX: the launcher needs the standard library alone.
ALONE = """
import sys, types
package = sys.modules["jaxdist"] = types.ModuleType("jaxdist")
package.__path__ = [sys.argv.pop(1)]
from jaxdist.launch.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts the launcher on a script with these lines."""
    started = []

    def run(body: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(SCRIPT + body)
        command = [sys.executable, "-c", ALONE, str(pathlib.Path(devices.__file__).parents[1])]
        command += [*options, "script.py", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, **pipes))
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.communicate()


def wait_for(path: pathlib.Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def gone(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_output_is_numbered_and_kept(start, tmp_path):
    body = 'print(sys.argv[1:], os.environ["JAX_NUM_PROCESSES"]); sys.stderr.write("no end")'
    job = start(body, "-n", "2", "--logs", "here", arguments=("-x", "--logs"))
    out, err = job.communicate()
    assert job.returncode == 0
    assert sorted(out.splitlines()) == [f"[{number}] ['-x', '--logs'] 2" for number in range(2)]
    assert sorted(err.splitlines()) == ["[0] no end", "[1] no end"]
    assert sorted((tmp_path / "here/1.log").read_text().splitlines()) == ["['-x', '--logs'] 2", "no end"]


def test_the_first_failure_ends_the_rest_and_is_shown(start):
    """Process 0 takes no notice of SIGTERM, process 2 fails only because of it."""
    body = """
if me == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "w").close()
if me == 1:
    until("ready")
    print("the cause")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    job = start(body, "-n", "3")
    _, err = job.communicate()
    assert job.returncode == 128 + signal.SIGKILL
    report = "WorkerLost: process 1 was killed by SIGKILL; runs/launch/1.log ends with\n  the cause\n"
    assert err == f"jaxdist launch: {report}"


def test_restarts_until_it_works(start, tmp_path):
    body = 'print("attempt", attempt); sys.exit(0 if attempt == 2 else 3 + attempt)'
    job = start(body, "--restarts", "2")
    out, err = job.communicate()
    assert (job.returncode, out) == (0, "[0] attempt 0\n[0] attempt 1\n[0] attempt 2\n")
    assert [line for line in err.splitlines() if "restart" in line] == [
        f"jaxdist launch: restart {number} of 2" for number in (1, 2)
    ]
    assert (tmp_path / "runs/launch/attempt-2/0.log").read_text() == "attempt 2\n"
    job = start(body, "--restarts", "1")
    assert (job.wait(), "exited with code 4" in job.stderr.read()) == (4, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_nothing_is_restarted(start, tmp_path, number):
    body = f"signal.signal({int(number)}, saved); pathlib.Path(str(me)).touch(); time.sleep(60)"
    job = start(body, "-n", "2", "--restarts", "3")
    for name in "01":
        wait_for(tmp_path / name)
    job.send_signal(number)
    out, err = job.communicate()
    assert (job.returncode, sorted(out.splitlines()), err) == (0, ["[0] saved", "[1] saved"], "")


def test_who_does_not_end_after_a_signal_is_killed(start, tmp_path):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path(str(me)).touch(); time.sleep(60)"
    job = start(body, "--grace", "0.1", "--restarts", "3")
    wait_for(tmp_path / "0")
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate()
    assert job.returncode == 128 + signal.SIGKILL
    assert "restart" not in err


def test_nothing_is_left_behind(start, tmp_path):
    """Of a process and of what it started and forgot: when it ends well, and when the launcher is killed."""
    forgotten = """
child = subprocess.Popen(["sleep", "60"])
pathlib.Path(f"{me}.part").write_text(f"{os.getpid()} {child.pid}")
os.rename(f"{me}.part", sys.argv[1] + str(me))
"""
    job = start(forgotten, arguments=("well",))
    job.communicate()
    assert job.returncode == 0
    killed = start(forgotten + "time.sleep(60)", "-n", "2", arguments=("killed",))
    names = ("well0", "killed0", "killed1")
    for name in names:
        wait_for(tmp_path / name)
    killed.kill()
    until = time.monotonic() + 20
    while not all(gone(int(number)) for name in names for number in (tmp_path / name).read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_held_port_is_for_process_0_alone():
    with ports.hold_port() as held:
        port = ports.number_of(held)
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ValueError, match=rf"port {port} cannot be had .* in use"),
        ):
            ports.hold_port(port)
        with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
            pass


def test_gpus_are_dealt_out(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    name = devices.CHOSEN
    assert devices.given(2, {}, tmp_path) == [{name: "0,1"}, {name: "2,3"}]
    assert devices.given(2, {"CUDA_VISIBLE_DEVICES": "5,7"}, tmp_path) == [{name: "0"}, {name: "1"}]
    for variables in ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": "-1"}, {name: "0"}):
        assert devices.given(3, variables, tmp_path) == [{}, {}, {}]
    with pytest.raises(ValueError, match="4 GPUs do not divide among 3 processes"):
        devices.given(3, {}, tmp_path)


def test_wrong_arguments(start):
    with pytest.raises(ValueError, match=r"at least 1 process.*got 0"):
        launch([sys.executable], 0)
    job = start("", "--port", "1", "-n", "0")
    _, err = job.communicate()
    assert (job.returncode, err.count("\n")) == (2, 1)
