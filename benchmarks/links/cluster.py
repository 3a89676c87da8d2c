"""Hosts on one machine: network namespaces joined by a switch, every link shaped to a rate by a token bucket.

    sudo python benchmarks/links cluster check --hosts 2 --rate 100 --delay 10    # makes, measures and removes them
    sudo python benchmarks/links cluster clean                         # removes what a killed run left behind

Needs root and iproute2 for the namespaces, and a C compiler for links with a delay (`delay_line.c`). `loopback()` needs
none of them; with root it is a namespace of its own, so that its byte counter sees no other traffic.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PREFIX = "jaxdist-link"
SUBNET = "10.177.0"


class Host(NamedTuple):
    """A place where a process can run.

    Attributes:
      command: the prefix of commands that run there.
      address: its address for the other hosts.
      interface: the name of its network interface.
      sent: bytes sent so far, headers included.
      set_rate: changes the rate of its link, in Mbit/s, in both directions.
      dropped: packets that the queues of its link have dropped so far, in both directions.
    """

    command: list[str]
    address: str
    interface: str
    sent: Callable[[], float]
    set_rate: Callable[[float], None] = lambda rate_mbit: None
    dropped: Callable[[], int] = lambda: 0


class Processes:
    """A process on each of several hosts; each answers a line of JSON with another one."""

    def __init__(
        self, python: str, script: str, places: list[Host], settings: Mapping[str, str], arguments: Sequence[str] = ()
    ):
        """Starts them, each with a core and one computing thread; `settings` are further environment variables."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.processes = []
        cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        for rank, place in enumerate(places):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": place.interface,
                "OMP_NUM_THREADS": "1",
                # The library, and what the commands of `benchmarks` share.
                "PYTHONPATH": os.pathsep.join([*map(str, HERE.parents[1::-1]), os.environ.get("PYTHONPATH", "")]),
                **settings,
            }
            command = [*place.command, python, script, *arguments]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.processes.append(subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes))
            if cores:
                # Threads that wait for the network would move the computing one from core to core.
                os.sched_setaffinity(self.processes[-1].pid, {cores[rank % len(cores)]})

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Sends a request to all processes, and returns the answer of each."""
        for process in self.processes:
            process.stdin.write(json.dumps(request) + "\n")
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Waits for a line of each process."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError("a process ended; its last words are above")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Ends all processes: they stop when their input does, or are killed after a while."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def refusal() -> str | None:
    """The reason why this machine cannot have namespaces, or None."""
    if os.name != "posix" or sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root (try sudo, or --link loopback)"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"iproute2 is not installed: {', '.join(missing)} not found"
    probe = f"{PREFIX}-probe-{os.getpid()}"
    tried = _run("ip", "netns", "add", probe, check=False)
    if tried.returncode:
        return f"the kernel refuses network namespaces: {tried.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


@contextlib.contextmanager
def loopback(count: int) -> Iterator[list[Host]]:
    """`count` places that share one unshaped loopback interface."""
    if refusal() is not None:
        yield [Host([], "127.0.0.1", "lo", lambda: _interface_bytes([], "lo") / count)] * count
        return
    name = f"{PREFIX}-{os.getpid()}-lo"
    with _cleaning_up([name]):
        _add_namespace(name, [("127.0.0.1", socket.gethostname())])
        inside = ["ip", "netns", "exec", name]
        yield [Host(inside, "127.0.0.1", "lo", lambda: _interface_bytes(inside, "lo") / count)] * count


@contextlib.contextmanager
def hosts(count: int, rate_mbit: float, delay_ms: float = 0.0) -> Iterator[list[Host]]:
    """`count` hosts, each behind a full-duplex link of `rate_mbit` to one switch.

    `delay_ms` is that from host to host; a round trip takes twice as long.

    Raises:
      RuntimeError: the machine cannot have them.
    """
    reason = refusal()
    if reason is not None:
        raise RuntimeError(reason)
    switch = f"{PREFIX}-{os.getpid()}-switch"
    names = [f"{PREFIX}-{os.getpid()}-{i}" for i in range(count)]
    with _cleaning_up([*names, switch]), contextlib.ExitStack() as until_the_end:
        _add_namespace(switch, [])
        _run("ip", "link", "add", "br0", "type", "bridge", namespace=switch)
        _run("ip", "link", "set", "br0", "up", namespace=switch)
        for i, name in enumerate(names):
            # All namespaces share one host name; gloo listens on what it resolves to, so each resolves it to itself.
            _add_namespace(name, [("127.0.0.1", "localhost"), (f"{SUBNET}.{i + 1}", socket.gethostname())])
        if delay_ms:
            until_the_end.enter_context(_delay_line(names, switch, delay_ms))
        for i, name in enumerate(names):
            address = f"{SUBNET}.{i + 1}"
            if not delay_ms:
                _run(*f"ip link add eth0 netns {name} type veth peer name port{i} netns {switch}".split())
            _run(*f"ip link set port{i} master br0 up".split(), namespace=switch)
            _run(*f"ip addr add {address}/24 dev eth0".split(), namespace=name)
            _run("ip", "link", "set", "eth0", "up", namespace=name)
            # What most machines use; a namespace may not choose it for all its sockets, but a route may.
            route = f"ip route replace {SUBNET}.0/24 dev eth0 src {address} congctl cubic"
            _run(*route.split(), namespace=name, check=False)
            _shape_both(name, switch, i, delay_ms, rate_mbit)
        inside = [["ip", "netns", "exec", name] for name in names]
        yield [
            Host(
                command,
                f"{SUBNET}.{i + 1}",
                "eth0",
                partial(_shaped_bytes, command),
                partial(_shape_both, names[i], switch, i, delay_ms, verb="change"),
                partial(_dropped, [(names[i], "eth0"), (switch, f"port{i}")]),
            )
            for i, command in enumerate(inside)
        ]


def clean() -> list[str]:
    """Removes the namespaces of runs that have ended; returns their names."""
    listed = [line.split()[0] for line in _run("ip", "netns").stdout.splitlines() if line.startswith(PREFIX)]
    stale = [name for name in listed if not Path(f"/proc/{name.split('-')[2]}").exists()]
    for name in stale:
        _remove(name)
    return stale


def check(count: int, rate_mbit: float, delay_ms: float = 0.0, megabytes: int = 8) -> tuple[float, float]:
    """Builds hosts, sends some data from the last to the first; returns the rate in Mbit/s and the round trip in ms."""
    receive = """
        import socket, sys, time
        first, server = (socket.create_server((sys.argv[1], port)) for port in (5202, 5201))
        print("listening", flush=True)
        connection, _ = server.accept(); total, start = len(connection.recv(1 << 20)), time.perf_counter()
        while part := connection.recv(1 << 20): total += len(part)
        print(total * 8 / (time.perf_counter() - start) / 1e6)
        """
    send = """
        import socket, sys, time
        # The handshake is one round trip; the first one also finds the hardware address.
        socket.create_connection((sys.argv[1], 5202)).close(); start = time.perf_counter()
        connection = socket.create_connection((sys.argv[1], 5201)); print(time.perf_counter() - start)
        connection.sendall(bytes(int(sys.argv[2]) << 20))
        """
    with hosts(count, rate_mbit, delay_ms) as found:

        def python(host: Host, code: str, *given: str) -> list[str]:
            return [*host.command, sys.executable, "-c", textwrap.dedent(code), *given]

        listener = subprocess.Popen(python(found[0], receive, found[0].address), stdout=subprocess.PIPE, text=True)
        try:
            listener.stdout.readline()
            sender = python(found[-1], send, found[0].address, str(megabytes))
            sent = subprocess.run(sender, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
            return float(listener.communicate(timeout=120)[0]), 1e3 * float(sent.stdout)
        finally:
            listener.kill()


def _run(*command: str, namespace: str | None = None, check: bool = True) -> subprocess.CompletedProcess:
    whole = [*(["ip", "netns", "exec", namespace] if namespace else []), *command]
    done = subprocess.run(whole, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(whole)}: {done.stderr.strip()}")
    return done


def _add_namespace(name: str, names_of_addresses: list[tuple[str, str]]) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "link", "set", "lo", "up", namespace=name)
    folder = Path("/etc/netns", name)  # `ip netns exec` mounts these files over those in /etc
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text("".join(f"{address} {host}\n" for address, host in names_of_addresses))


@contextlib.contextmanager
def _delay_line(names: list[str], switch: str, delay_ms: float) -> Iterator[None]:
    """Joins every host to the switch by devices with a delay, as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "delay_line")
        _run("cc", "-O2", "-o", str(program), str(Path(__file__).with_name("delay_line.c")))
        pairs = [f"{name}:eth0:{switch}:port{i}" for i, name in enumerate(names)]
        command = [str(program), str(round(1e3 * delay_ms)), *pairs]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as line:
            try:
                if line.stdout.readline() != "ready\n":
                    raise RuntimeError("the delay line did not start; its reason is above")
                yield
            finally:
                line.kill()


def _shape_both(name: str, switch: str, i: int, delay_ms: float, rate_mbit: float, verb: str = "add") -> None:
    """Shapes what host `i` sends, and what the switch sends to it."""
    _shape("eth0", rate_mbit, delay_ms, name, verb)
    _shape(f"port{i}", rate_mbit, delay_ms, switch, verb)


def _shape(device: str, rate_mbit: float, delay_ms: float, namespace: str, verb: str) -> None:
    burst = max(16 * 1024, int(rate_mbit * 125))  # one millisecond of the line, or one large segment
    # A queue of twenty milliseconds beside what is on its way.
    limit = max(256 * 1024, int(rate_mbit * 125 * (20 + 2 * delay_ms)))
    _run(
        *f"tc qdisc {verb} dev {device} root tbf rate {rate_mbit}mbit burst {burst} limit {limit}".split(),
        namespace=namespace,
    )


def _interface_bytes(inside: list[str], device: str) -> float:
    table = subprocess.run([*inside, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    return float(re.search(rf"\b{device}:((?:\s+\d+)+)", table)[1].split()[8])


def _shaped_bytes(inside: list[str]) -> float:
    # The queue counts every segment's headers; the interface counts one header for each 64 KiB.
    text = subprocess.run([*inside, "tc", "-s", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout
    return float(re.search(r"Sent (\d+) bytes", text)[1])


def _dropped(queues: list[tuple[str, str]]) -> int:
    texts = [_run(*f"tc -s qdisc show dev {device}".split(), namespace=name).stdout for name, device in queues]
    return sum(int(re.search(r"dropped (\d+)", text)[1]) for text in texts)


def _remove(name: str) -> None:
    _run("ip", "netns", "del", name, check=False)
    shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


@contextlib.contextmanager
def _cleaning_up(names: list[str]) -> Iterator[None]:
    """Removes the namespaces at the end; `run_subcommand` sees to it that SIGTERM is an end, too."""
    try:
        yield
    finally:
        for name in names:
            _remove(name)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", choices=["check", "clean"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each link")
    parser.add_argument("--delay", type=float, default=0.0, help="ms from host to host")


def main(given: argparse.Namespace) -> None:
    reason = refusal()
    if reason is not None:
        sys.exit(f"cannot make hosts here: {reason}")
    if given.command == "clean":
        print("removed:", ", ".join(clean()) or "nothing")
    else:
        rate, round_trip = check(given.hosts, given.rate, given.delay)
        print(f"asked for {given.rate:g} Mbit/s and {given.delay:g} ms, measured {rate:.1f} Mbit/s of payload", end="")
        print(f" and a round trip of {round_trip:.2f} ms")
