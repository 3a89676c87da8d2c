"""Runs a job: gives its processes devices, a port and settings, starts them together, and ends all when one fails."""

import contextlib
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .failures import Failure
from .nodes import Attempt, Launcher, Team, check_node, join
from .reaper import reaper
from .worker import Worker, finish, kill, printers, start

STOP_SECONDS = 1.0  # from the first failure to SIGKILL for the others
PAUSE_SECONDS, LONGEST_PAUSE = 0.5, 30.0  # before the first restart, and at most
READ_SECONDS = 5.0  # for the output of ended processes to reach their logs
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOHUP = (signal.SIGHUP, signal.SIG_IGN)  # under `nohup` the job outlives its terminal
WARNING = signal.SIGUSR1  # which Slurm can be asked to send some time before SIGTERM
CHOSEN = "JAX_LOCAL_DEVICE_IDS"
OTHERS = ("kfd", "accel[0-9]*", "vfio/[0-9]*")  # AMD's GPUs, and TPUs under two drivers
# XLA:CPU allocates every large buffer anew. Glibc maps blocks beyond 32 MiB each time and returns the end of its heap
# to the kernel, which then has to clear the pages again. Arenas other than the first cannot hold a block beyond 64 MiB
# and map it as well: the first two variables have no effect without the third.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_ARENA_MAX": "1"}


class Events(NamedTuple):
    """What interrupts the launcher: a socket that becomes readable, as after `wake()`, and the signals to pass on."""

    wake: Callable[[], None]
    socket: socket.socket
    received: list[int]


def launch(
    command: Sequence[str],
    processes: int,
    *,
    restarts: int = 0,
    port: int = 0,
    logs: Path | str = "runs/launch",
    grace_seconds: float = 30.0,
    environment: Mapping[str, str] = os.environ,
    nodes: int = 1,
    node: int = 0,
    address: str = "",
    timeout_seconds: float = 300.0,
) -> None:
    """Runs a command in several processes on this machine and waits for them. Call it from the main thread.

    On several machines, call it on each with the same arguments, but for `node`; the launchers start, stop and restart
    together.

    Each process gets its share of the GPUs, the variables that `jaxdist.initialize` reads, and `JAXDIST_ATTEMPT`, the
    number of restarts so far. Its output is shown after its number, and is complete in `logs/NUMBER.log`; logs of
    earlier launches are in `logs/earlier-1` and so on.

    If a process fails, the others receive SIGTERM, and SIGKILL a second later. SIGINT, SIGTERM and SIGHUP are passed
    on, the second one as SIGKILL, and SIGUSR1 as SIGTERM. The end of the launcher, even by SIGKILL, ends all processes
    and their children in the same session.

    Args:
      command: the program and its arguments.
      processes: on each machine, numbered from node 0 on.
      restarts: how often to restart all processes after a failure; node 0 decides.
      port: where process 0 listens; a free one by default.
      logs: a folder, in it `node-0` and so on for several nodes, `attempt-1` and so on for restarts.
      grace_seconds: for processes to save after a signal.
      environment: theirs; on CPUs with settings of glibc's allocator, unless it has some.
      nodes: the number of machines.
      node: the number of this one, from 0.
      address: `HOST:PORT` of node 0's launcher; its network is used.
      timeout_seconds: to wait for the other nodes.

    Raises:
      ProcessFailedError: a process failed, and no restarts were left.
      NodeLostError: another node's launcher or machine ended; from then on likewise.
      AgreementError: a node did not come in time, or differs in `nodes` or `processes`; another program has the port of
        `address`.
      ValueError: the port is taken, the GPUs do not divide among the processes, `node` and `address` do not fit.

    Examples:
      >>> import sys, tempfile
      >>> from jaxdist.processes.launch import launch
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     launch([sys.executable, "-c", "pass"], 2, logs=folder)
    """
    if processes < 1 or restarts < 0 or not 0 <= grace_seconds < math.inf:
        raise ValueError(
            f"launch needs at least 1 process, 0 restarts and 0 seconds of grace, got {processes}, {restarts} and "
            f"{grace_seconds}"
        )
    own = Launcher(node, nodes, processes, address, environment.get("JAXDIST_SECRET", ""), timeout_seconds)
    check_node(own)
    devices = assign_gpus(processes, environment)
    logs = Path(logs, f"node-{node}") if nodes > 1 else Path(logs)
    with (
        _signals() as events,
        printers(logs) as outputs,
        join(own, events.wake, events.received, outputs[1].tell) as team,
    ):
        attempt, is_first = 0, True
        while True:
            # Of several nodes, the port of node 0 counts.
            with hold_port(0 if node else port) as held, reaper() as note:
                begin = team.start(attempt, port_of(held))
                if is_first:
                    _set_aside(logs)
                attempt, is_first = begin.attempt, False
                folder = Path(logs, f"attempt-{attempt}") if attempt else logs
                variables = _variables(environment, own, begin)
                workers: list[Worker] = []
                # Whatever happens here, also an exception from a signal handler, no process may be left behind.
                try:
                    for number, gpus_of in enumerate(devices, node * processes):
                        of_process = variables | gpus_of | {"JAX_PROCESS_ID": str(number)}
                        workers.append(start(command, number, of_process, folder / f"{number}.log", outputs))
                        note(workers[-1].process.pid, True)
                    failed = _watch(workers, events, grace_seconds, note, team)
                finally:
                    _clear(workers)
            error, again = team.finish([_describe(worker) for worker in failed], restarts)
            if error is None:
                return
            if again:
                outputs[1].tell(f"{type(error).__name__}: {error}".encode())
                outputs[1].tell(f"restart {attempt + 1} of {restarts}".encode())
                # The other nodes wait for node 0.
                _pause(events, 0.0 if node else min(PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE))
            if not again or events.received:
                raise error
            attempt += 1


def _variables(environment: Mapping[str, str], own: Launcher, begin: Attempt) -> dict[str, str]:
    """Returns the environment of all processes of this node."""
    found = {**environment, "PYTHONUNBUFFERED": "1", "JAXDIST_ATTEMPT": str(begin.attempt)}
    found |= {"JAX_COORDINATOR_ADDRESS": begin.address, "JAXDIST_SECRET": begin.secret}
    found |= {"JAX_NUM_PROCESSES": str(own.nodes * own.processes)} | allocator_settings(environment)
    if own.nodes == 1:
        # All processes are on this machine: listen on the loopback interface only.
        return found | {"JAX_COORDINATOR_BIND_ADDRESS": begin.address}
    return {"JAXDIST_HOST": begin.host} | found


def _clear(workers: Sequence[Worker]) -> None:
    """Kills the processes that still run, and waits for the output of all."""
    for worker in workers:
        if not worker.ended:
            kill(worker)
            worker.process.wait()
            finish(worker)
    _wait_for_readers(workers)


def _set_aside(folder: Path) -> None:
    """Moves the logs of an earlier launch away, since that of a failure may be needed after the next start too."""
    left = [path for path in folder.glob("*.log") if path.stem.isdecimal() and path.is_file()]
    left += [path for path in folder.glob("attempt-*") if path.name[8:].isdecimal() and path.is_dir()]
    if not left:
        return
    # The next number, even if earlier ones were deleted.
    earlier = [int(path.name[8:]) for path in folder.glob("earlier-*") if path.name[8:].isdecimal()]
    to = folder / f"earlier-{max(earlier, default=0) + 1}"
    to.mkdir()
    for path in left:
        path.rename(to / path.name)


def _pause(events: Events, seconds: float) -> None:
    """Waits, or until a signal comes. Without pauses, a job that fails at once would use up its restarts in seconds."""
    until = time.monotonic() + seconds
    while not events.received and (left := until - time.monotonic()) > 0:
        _wait(events, left)


def _wait(events: Events, seconds: float | None) -> None:
    """Waits until a signal comes or a process ends, at most `seconds`."""
    events.socket.settimeout(seconds)
    with contextlib.suppress(TimeoutError, BlockingIOError):
        events.socket.recv(4096)


def _watch(
    workers: Sequence[Worker], events: Events, grace: float, note: Callable[[int, bool], None], team: Team
) -> list[Worker]:
    """Passes on signals until all processes have ended; returns the first to fail, several if found together.

    If the processes of another node failed first, none of these did.
    """
    # It never reads or writes the output of processes, so that a slow disk or terminal cannot block it.
    failed: list[Worker] = []
    asked, passed_on, deadline, is_stopping = 0, 0, math.inf, False
    while alive := [worker for worker in workers if not worker.ended]:
        _wait(events, None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        for number in events.received[passed_on:]:
            passed_on += 1
            asked += number != WARNING
            # The second signal kills at once; a warning does not count as the first.
            deadline = min(deadline, time.monotonic() + (grace if asked < 2 else 0.0))
            _send(alive, signal.SIGTERM if number == WARNING else number)
        team.pass_on()
        ended = [worker for worker in alive if worker.process.poll() is not None]
        for worker in ended:
            finish(worker)
            note(worker.process.pid, False)
        if not is_stopping and not failed and (failed := [worker for worker in ended if worker.process.returncode]):
            team.failed()
        if not is_stopping and (failed or team.stopping()):
            is_stopping = True
            deadline = min(deadline, time.monotonic() + STOP_SECONDS)
            _send([worker for worker in alive if not worker.ended], signal.SIGTERM)
        if time.monotonic() >= deadline:
            for worker in alive:
                if not worker.ended:
                    kill(worker)
            deadline = math.inf
    return failed


def _wait_for_readers(workers: Sequence[Worker]) -> None:
    """Waits until the output of the processes is in their logs, for a limited time, since a disk may hang."""
    until = time.monotonic() + READ_SECONDS
    for worker in workers:
        worker.reader.join(max(0.0, until - time.monotonic()))


def _describe(worker: Worker) -> Failure:
    last = [line.decode(errors="replace") for line in worker.last]
    return Failure(worker.number, worker.process.returncode, str(worker.path), last)


def _send(workers: Sequence[Worker], number: int) -> None:
    """Signals the processes but not their children, such as data loaders, which they end themselves."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(number)


@contextlib.contextmanager
def _signals() -> Iterator[Events]:
    """Yields a socket that becomes readable when a signal comes or a process ends, and the signals to pass on."""
    received: list[int] = []
    wakeup, end = socket.socketpair()
    end.setblocking(False)

    def wake() -> None:
        # If it is full, it is readable.
        with contextlib.suppress(OSError):
            end.send(b"\0")

    handled = [number for number in (*STOP_SIGNALS, WARNING) if (number, signal.getsignal(number)) != NOHUP]
    old = {number: signal.signal(number, lambda number, _: received.append(number)) for number in handled}
    old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    old_wakeup = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
    try:
        yield Events(wake, wakeup, received)
    finally:
        signal.set_wakeup_fd(old_wakeup)
        for number, handler in old.items():
            signal.signal(number, handler)
        wakeup.close()
        end.close()


def gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> int:
    """Returns the number of GPUs that JAX would use."""
    platforms = environment.get("JAX_PLATFORMS")
    if environment.get(CHOSEN) or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return 0
    return _visible(environment, folder)


def on_cpu(environment: Mapping[str, str], folder: Path = Path("/dev")) -> bool:
    """Returns whether JAX would run on the CPU."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not _visible(environment, folder) and not any(any(folder.glob(pattern)) for pattern in OTHERS)


def _visible(environment: Mapping[str, str], folder: Path) -> int:
    """Returns the number of NVIDIA GPUs that a process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name and not name.startswith("-")])
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in folder.glob("nvidia*"))


def assign_gpus(processes: int, environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[dict[str, str]]:
    """Returns the environment variables that give each process an equal share of the GPUs; empty without GPUs."""
    count = gpus(environment, folder)
    if count % processes:
        raise ValueError(
            f"{count} GPUs do not divide among {processes} processes: set CUDA_VISIBLE_DEVICES, or JAX_PLATFORMS=cpu"
        )
    if not count:
        return [{} for _ in range(processes)]
    each = count // processes
    return [{CHOSEN: ",".join(map(str, range(first, first + each)))} for first in range(0, count, each)]


def allocator_settings(environment: Mapping[str, str], folder: Path = Path("/dev")) -> dict[str, str]:
    """Returns the variables with which a process on the CPU keeps freed memory for its next step.

    Empty if the C library is not glibc, or if the environment configures an allocator already: the variables only work
    together.
    """
    return dict(KEEPING) if is_glibc() and on_cpu(environment, folder) and not user_allocator(environment) else {}


def user_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that configure an allocator: settings of glibc, or another library that replaces it."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("MALLOC_")
        or (name == "GLIBC_TUNABLES" and "glibc.malloc." in value)
        or (name == "LD_PRELOAD" and "malloc" in value)
    }


def is_glibc() -> bool:
    """Returns whether the C library of this process is glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        # Windows lacks confstr, and other libraries this name.
        return False


def hold_port(port: int = 0) -> socket.socket:
    """Reserves a port for process 0 to listen at; 0 chooses a free one.

    The socket stays bound while the processes run and never listens: the kernel then assigns the port to no other
    program that asks for a free one, and Linux lets a socket with `SO_REUSEADDR` (those of Python and gRPC) listen.
    """
    dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("::" if dual else "0.0.0.0", port))
    except (OSError, OverflowError) as problem:
        held.close()
        reason = getattr(problem, "strerror", "it must be from 0 to 65535")
        raise ValueError(f"port {port} is not available ({reason}): choose another, or omit it") from None
    return held


def port_of(held: socket.socket) -> int:
    """Returns the port of a socket. Systems other than Linux refuse to listen at a bound port: there it is released."""
    port = held.getsockname()[1]
    if not sys.platform.startswith("linux"):
        held.close()
    return port
