"""The launchers of several nodes, played by several launchers on this machine, with scripts that do not start JAX."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from launched import SCRIPT, gone, wait_for
from namespaces import inside, two_namespaces

from jaxdist.processes import MissingProcessError, PortError
from jaxdist.processes.launch import job, launch, nodes

# Without the packages around it, whose import starts JAX.
ALONE = """
import sys, types
for name, folder in zip(("jaxdist", "jaxdist.processes"), sys.argv.pop(1).split(":")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from jaxdist.processes.launch.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
FOLDERS = ":".join(str(pathlib.Path(job.__file__).parents[number]) for number in (2, 1))


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def start(tmp_path, address):
    """Starts the launcher of a node on a script with these lines."""
    started = []

    def run(node: int, body: str, *options: str, nodes: int = 2, to: str = address, **variables: str):
        (tmp_path / f"script{node}.py").write_text(SCRIPT + body)
        command = [sys.executable, "-c", ALONE, FOLDERS]
        command += ["--nodes", str(nodes), "--node", str(node), "--address", to, *options, f"script{node}.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | variables, **pipes))
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.communicate()


def end(*launchers: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    ended = []
    for one in launchers:
        out, err = one.communicate(timeout=300)
        # On a busy machine a launcher waits long enough to say so.
        err = "".join(line for line in err.splitlines(True) if not line.startswith("jaxdist launch: waiting for"))
        ended.append((one.returncode, out, err))
    return ended


def test_processes_are_numbered_over_the_nodes(start, tmp_path, address):
    """The second comes first, and waits."""
    body = """
names = ("JAX_NUM_PROCESSES", "JAXDIST_HOST", "JAX_COORDINATOR_ADDRESS", "JAXDIST_SECRET")
note(f"of{me}", " ".join(os.environ[name] for name in names))
print("here")
"""
    second = start(1, body, "-n", "2")
    (first, second) = end(start(0, body, "-n", "2"), second)
    assert (first[0], sorted(first[1].splitlines()), first[2]) == (0, ["[0] here", "[1] here"], "")
    assert (second[0], sorted(second[1].splitlines()), second[2]) == (0, ["[2] here", "[3] here"], "")
    found = {(tmp_path / f"of{number}").read_text() for number in range(4)}
    assert len(found) == 1
    count, host, coordinator, secret = found.pop().split()
    assert (count, host, len(secret)) == ("4", "127.0.0.1", 64)
    assert coordinator.startswith("127.0.0.1:")
    assert coordinator != address
    logs = tmp_path / "runs/launch"
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log")) == [
        f"node-{number // 2}/{number}.log" for number in range(4)
    ]


def test_a_failure_on_a_node_restarts_all(start, tmp_path):
    """Process 1 is killed in the first attempt; process 0 ends because of it, in the second well."""
    body = """
print("attempt", attempt)
if attempt == 0 and me == 1:
    until("waiting")
    print("the cause")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    note("waiting")
    time.sleep(60)
"""
    launchers = [start(node, body, "--restarts", "1") for node in range(2)]
    report = "ProcessFailedError: process 1 on node 1 was killed by SIGKILL; runs/launch/node-1/1.log there ends with"
    for node, (code, out, err) in enumerate(end(*launchers)):
        assert code == 0
        assert f"[{node}] attempt 1\n" in out
        assert err == f"jaxdist launch: {report}\n  attempt 0\n  the cause\njaxdist launch: restart 1 of 1\n"
        assert (tmp_path / f"runs/launch/node-{node}/attempt-1/{node}.log").read_text() == "attempt 1\n"


@pytest.mark.slow
def test_without_restarts_all_end_with_the_code_of_the_cause(start):
    body = "sys.exit(3) if me == 0 else time.sleep(60)"
    for code, _, err in end(*(start(node, body) for node in range(2))):
        assert code == 3
        assert "process 0 on node 0 exited with code 3" in err


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_launcher_reaches_all_processes(start, tmp_path, at):
    body = "signal.signal(signal.SIGTERM, saved); note(str(me)); time.sleep(60)"
    launchers = [start(node, body, "--restarts", "3") for node in range(2)]
    for name in "01":
        wait_for(tmp_path / name)
    launchers[at].send_signal(signal.SIGTERM)
    assert end(*launchers) == [(0, "[0] saved\n", ""), (0, "[1] saved\n", "")]


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_launcher_that_is_killed_ends_the_job(start, tmp_path, killed):
    body = "note(str(me), str(os.getpid())); time.sleep(60)"
    launchers = [start(node, body) for node in range(2)]
    for name in "01":
        wait_for(tmp_path / name)
    launchers[killed].kill()
    ((code, _, err),) = end(launchers[1 - killed])
    assert code == 1
    assert f"NodeLostError: node {killed} was lost" in err
    until = time.monotonic() + 60
    while not all(gone(int((tmp_path / name).read_text())) for name in "01"):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_node_that_comes_back_takes_part_in_the_restart(start, tmp_path):
    body = """
note(f"{me}-{attempt}", str(os.getpid()))
if attempt == 0:
    time.sleep(60)
"""
    launchers = [start(node, body, "--restarts", "1") for node in range(2)]
    for name in ("0-0", "1-0"):
        wait_for(tmp_path / name)
    launchers[1].kill()
    again = start(1, body, "--restarts", "1")
    (first, second) = end(launchers[0], again)
    assert (first[0], second[0]) == (0, 0)
    assert "restart 1 of 1" in first[2]
    assert (tmp_path / "1-1").exists()


def test_a_node_that_does_not_come_is_named(start, address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as there:
        here = [start(2, "", nodes=4)]
        there.settimeout(60)
        # It is there, and comes again at once.
        there.accept()[0].close()
    here.append(start(0, "", "--timeout", "2", nodes=4))
    for code, _, err in end(*here):
        assert code == 2
        assert err.startswith(
            f"jaxdist launch: MissingProcessError: nodes 1, 3 of 4 did not come to {address} within 2 s"
        )
    ((code, _, err),) = end(start(1, "", "--timeout", "0.3"))
    assert code == 2
    assert f"MissingProcessError: node 0 did not answer at {address} within 0.3 s (Connection refused)" in err


@pytest.mark.parametrize(
    ("node", "said"),
    [(0, "node 1 of 2 to come to {}"), (1, r"node 0 to answer at {} \(Connection refused\)")],
    ids=["first", "other"],
)
def test_a_launcher_that_waits_prints_for_what(node, said, address, tmp_path, monkeypatch, capfd):
    # At once: a busy machine may leave no time after the first attempt.
    monkeypatch.setattr(nodes, "QUIET_SECONDS", -1.0)
    with pytest.raises(MissingProcessError):
        launch([sys.executable], 1, nodes=2, node=node, address=address, timeout_seconds=0.4, logs=tmp_path)
    line = f"jaxdist launch: waiting for {said.format(re.escape(address))}, for 0.4 s at most"
    assert re.fullmatch(line, capfd.readouterr().err.strip())


@pytest.mark.parametrize(
    ("node", "options", "nodes", "said"),
    [
        (1, [], 3, "node 1 was started with --nodes 3, but node 0 with --nodes 2"),
        (1, ["-n", "2"], 2, "node 1 was started with -n 2, but node 0 with -n 1"),
        (2, [], 3, "node 2 was started with --nodes 3"),
    ],
    ids=["nodes", "processes", "number"],
)
def test_nodes_that_disagree(start, node, options, nodes, said):
    for code, _, err in end(start(0, ""), start(node, "", *options, nodes=nodes)):
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"jaxdist launch: MismatchError: {said}")


@pytest.mark.slow
def test_two_nodes_of_one_number(start):
    here = [start(node, "", nodes=3) for node in (0, 1, 1)]
    for code, _, err in end(*here):
        assert code == 2
        assert "MismatchError: two nodes have number 1" in err


@pytest.mark.slow
def test_other_programs_and_nodes_of_another_job_are_ignored(start, tmp_path, address):
    """A job with a secret does not admit a node without; a program that talks does not disturb it."""
    body = 'print(os.environ["JAXDIST_SECRET"])'
    first = start(0, body, JAXDIST_SECRET="mine")
    host, port = address.split(":")
    until = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection((host, int(port))) as other:
                other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)
    ((code, _, err),) = end(start(1, body, JAXDIST_SECRET="another"))
    assert (code, "PortError: another program answers" in err) == (2, True)
    for code, out, _ in end(first, start(1, body, JAXDIST_SECRET="mine")):
        assert (code, out.endswith("mine\n")) == (0, True)


def test_a_port_that_is_taken(address):
    host, port = address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(PortError, match=rf"node 0 cannot listen at port {port} \(Address already in use\)"),
    ):
        launch([sys.executable], 1, nodes=2, node=0, address=address)


def test_a_program_that_is_not_a_launcher_at_the_address(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as other:
        other.settimeout(20)

        def answer():
            call, _ = other.accept()
            call.sendall(b"220 mail\n")
            call.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PortError, match="another program answers"):
            launch([sys.executable], 1, nodes=2, node=1, address=address)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodes": 2, "node": 2, "address": "a:1"}, "node must be from 0 to nodes - 1, got node 2 of 2"),
        ({"nodes": 2, "node": -1, "address": "a:1"}, "got node -1 of 2"),
        ({"nodes": 0}, "got node 0 of 0"),
        ({"nodes": 2}, "several nodes need the address of node 0"),
        ({"address": "a:1"}, "an address, a:1, is for several nodes"),
        ({"nodes": 2, "address": "a"}, "the address of node 0 must be host:port"),
        ({"nodes": 2, "address": "a:70000"}, "the address of node 0 must be host:port"),
        ({"nodes": 2, "address": "a:1", "timeout_seconds": 0.0}, "the timeout must be positive"),
    ],
)
def test_wrong_arguments(wrong, said):
    with pytest.raises(ValueError, match=said):
        launch([sys.executable], 1, **wrong)


TRAINING = """
import os, signal
import jax, jaxdist as jd
assert jd.initialize()
mesh = jd.make_mesh()
jd.processes.self_check(mesh)
if os.environ["JAXDIST_ATTEMPT"] == "0" and jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
jd.processes.self_check(mesh)
print("checked", jax.process_count(), os.environ["JAXDIST_HOST"])
"""


def train(folder: pathlib.Path, address: str, prefixes: list[list[str]]) -> list[tuple[int, str, str]]:
    """Runs the launcher of each node, behind a prefix of its command, on a script that starts JAX."""
    (folder / "train.py").write_text(TRAINING)
    launchers = []
    for node, prefix in enumerate(prefixes):
        command = [*prefix, sys.executable, "-m", "jaxdist.processes.launch", "--restarts", "1"]
        command += ["--nodes", "2", "--node", str(node), "--address", address, "train.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        variables = {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
        launchers.append(subprocess.Popen(command, cwd=folder, env=os.environ | variables, **pipes))
    try:
        return end(*launchers)
    finally:
        for one in launchers:
            one.kill()
            one.communicate()


@pytest.mark.slow
def test_jax_on_two_nodes_of_this_machine(tmp_path, address):
    for node, (code, out, err) in enumerate(train(tmp_path, address, [[], []])):
        assert code == 0, err
        assert f"[{node}] checked 2 127.0.0.1\n" in out
        assert "restart 1 of 1" in err


@pytest.fixture
def namespaces():
    """Two network namespaces, of which each has an address on a link to the other; without root there are none."""
    with two_namespaces("10.83.0") as names:
        yield names


@pytest.mark.slow
def test_jax_between_two_network_namespaces(tmp_path, namespaces):
    """The name of the machine leads to neither address of the link, so gloo has to be told."""
    for node, (code, out, err) in enumerate(train(tmp_path, "10.83.0.1:29400", [*map(inside, namespaces)])):
        assert code == 0, err
        assert f"[{node}] checked 2 10.83.0.{node + 1}\n" in out
        assert "process 1 on node 1 was killed by SIGKILL" in err
