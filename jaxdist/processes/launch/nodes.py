"""The launchers of a job on several machines: they start and stop together, as node 0's launcher says.

Each keeps one connection to node 0, with these messages:

- `join` (node, nodes, processes) is answered by `welcome`, or by `error` with the reason.
- `start` (attempt, port, secret) begins an attempt on all nodes, once all are there.
- `failed` tells node 0 of a process that failed; `stop` tells the others to stop theirs. `signal` passes on a signal.
- `ended` (failures) is the report of a node whose processes have all ended. `restart` or `end` answers those of all.
"""

import contextlib
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..cluster import AgreementError, MismatchError, MissingProcessError, PortError, split_address, where_to_listen
from .connection import GREETING_SECONDS, Call
from .failures import (
    Failure,
    Message,
    NodeLostError,
    decode_error,
    decode_failure,
    encode_error,
    encode_failure,
    likely_cause,
)

TICK = 0.1  # between two looks for signals while there is nothing else to do
QUIET_SECONDS = 5.0  # of waiting for another node, before it is printed
RETRY_SECONDS = 0.2  # between two attempts to reach node 0
REPORT_SECONDS = 30.0  # from the order to stop to the report of a node


class Launcher(NamedTuple):
    """A node: its number, the number of nodes, of processes on each, and `host:port` of node 0's launcher."""

    node: int
    nodes: int
    processes: int
    address: str
    secret: str
    timeout: float


class Attempt(NamedTuple):
    """What the processes of an attempt need: its number, where process 0 listens, and a secret of the job.

    `host` is the address of this machine that the other nodes can reach; empty on one machine.
    """

    attempt: int
    address: str
    secret: str
    host: str = ""


class Passed(int):
    """The number of a signal that came to another node."""


class Alone:
    """The launcher of a job on one machine."""

    def __init__(self, received: Sequence[int]):
        self._received, self._attempt = received, 0

    def start(self, attempt: int, port: int) -> Attempt:
        """Starts at once, on the loopback interface, with a secret of its own."""
        self._attempt = attempt
        return Attempt(attempt, f"127.0.0.1:{port}", secrets.token_hex())

    def stopping(self) -> bool:
        """There is no other node."""
        return False

    def failed(self) -> None:
        """There is no other node."""

    def pass_on(self) -> None:
        """There is no other node."""

    def finish(self, failures: Sequence[Failure], restarts: int) -> tuple[RuntimeError | None, bool]:
        """Returns the cause; a job that was asked to stop is not retried."""
        if not failures:
            return None, False
        cause = likely_cause([(failure, None) for failure in failures])
        return cause, self._attempt < restarts and not self._received


@contextlib.contextmanager
def join(
    own: Launcher, wake: Callable[[], None], received: list[int], tell: Callable[[bytes], None]
) -> Iterator["Team"]:
    """Connects this launcher with those of the other nodes.

    `wake` interrupts its main thread, which has `received`; `tell` prints a line.
    """
    if own.nodes == 1:
        yield Alone(received)
        return
    team = First(own, wake, received, tell) if own.node == 0 else Other(own, wake, received, tell)
    try:
        yield team
    finally:
        team.close()


def check_node(own: Launcher) -> None:
    """Raises ValueError for numbers that do not fit together."""
    if own.nodes < 1 or not 0 <= own.node < own.nodes:
        raise ValueError(
            f"node must be from 0 to nodes - 1, got node {own.node} of {own.nodes}: number the nodes from 0, and give "
            "--nodes, how many there are"
        )
    if own.timeout <= 0:
        raise ValueError(f"the timeout must be positive, got {own.timeout:g} seconds")
    if own.nodes == 1 and own.address:
        raise ValueError(f"an address, {own.address}, is for several nodes: give their number too, as in --nodes 2")
    if own.nodes > 1 and not own.address:
        raise ValueError(
            "several nodes need the address of node 0, the same for all: --address HOST:PORT, with a port that is free "
            "there"
        )
    if own.address:
        split_address(own.address, "the address of node 0")


def _forward_new(received: Sequence[int], first: int, send: Callable[[Message], None]) -> int:
    """Sends the signals from number `first` on that came to this launcher itself; returns how many there are."""
    for number in received[first:]:
        if not isinstance(number, Passed):
            send({"kind": "signal", "number": int(number)})
    return len(received)


# ---- node 0


class First:
    """The launcher of node 0, which the others follow."""

    def __init__(self, own: Launcher, wake: Callable[[], None], received: list[int], tell: Callable[[bytes], None]):
        self._own, self._wake, self._received, self._forwarded = own, wake, received, 0
        self._tell = tell
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._attempt, self._is_gathering = 0, True
        self._is_stopping, self._interrupted = False, False
        self._reports: dict[int, list[Failure]] = {}
        self._lost: list[int] = []
        self._error: AgreementError | None = None
        self._listener = _listen(own.address)
        self._closed = False
        threading.Thread(target=self._accept, name="jaxdist launch nodes", daemon=True).start()

    def start(self, attempt: int, port: int) -> Attempt:
        """Waits for all nodes, and starts the attempt on them.

        Raises:
          MissingProcessError: a node did not come in time.
          MismatchError: a node expects another number of nodes or of processes.
        """
        own, until = self._own, time.monotonic() + self._own.timeout
        with self._changed:
            self._is_gathering = True
            notice = _Notice(own, self._tell)
            while len(self._calls) < own.nodes - 1 and self._error is None and time.monotonic() < until:
                self._changed.wait(TICK)
                if self._received:
                    raise KeyboardInterrupt
                notice.show(f"{_names(own, self._missing())} to come to {own.address}")
            missing = self._missing()
            if missing and self._error is None:
                self._error = _missing(own, missing)
            if self._error is not None:
                self._broadcast(encode_error(self._error))
                raise self._error
            self._is_gathering, self._attempt = False, attempt
            self._is_stopping, self._reports, self._lost = False, {}, []
            secret = own.secret or secrets.token_hex()
            self._broadcast({"kind": "start", "attempt": attempt, "port": port, "secret": secret})
            host = next(iter(self._calls.values())).host
        return Attempt(attempt, f"{own.address.rpartition(':')[0]}:{port}", secret, host)

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._own.nodes) if node not in self._calls]

    def stopping(self) -> bool:
        """Whether a process of another node failed, or a node was lost."""
        return self._is_stopping

    def failed(self) -> None:
        """Stops the other nodes."""
        with self._changed:
            self._stop()

    def pass_on(self) -> None:
        """Passes signals that came to this launcher on to the others."""
        with self._changed:
            self._forwarded = _forward_new(self._received, self._forwarded, self._broadcast)

    def finish(self, failures: Sequence[Failure], restarts: int) -> tuple[RuntimeError | None, bool]:
        """Waits for the reports of all nodes, decides, and tells them."""
        until: float | None = None
        with self._changed:
            while True:
                waiting = [node for node in self._calls if node not in self._reports]
                if not waiting:
                    break
                if self._is_stopping and until is None:
                    until = time.monotonic() + REPORT_SECONDS
                if until is not None and time.monotonic() > until:
                    for node in waiting:
                        self._lose(self._calls[node])
                    continue
                self._changed.wait(TICK)
                self._forwarded = _forward_new(self._received, self._forwarded, self._broadcast)
            reports = {0: list(failures), **self._reports}
            error = self._find_cause(reports)
            again = error is not None and self._attempt < restarts and not self._received and not self._interrupted
            self._broadcast({"kind": "restart" if again else "end", "error": encode_failure(error)})
        return error, again

    def _find_cause(self, reports: Mapping[int, Sequence[Failure]]) -> RuntimeError | None:
        # The processes of other nodes fail because of a node that is lost.
        if self._lost:
            return NodeLostError(self._lost[0])
        found = [(failure, node) for node, failures in reports.items() for failure in failures]
        return likely_cause(found) if found else None

    def close(self) -> None:
        """Closes all connections; nodes that have not been told of an end have lost this one."""
        with self._changed:
            self._closed = True
            for call in self._calls.values():
                call.close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._closed:
                    time.sleep(TICK)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Reads what a node sends; closes connections of other programs without an answer."""
        call = Call(connection, self._own.secret, -1, True)
        try:
            call.open()
            message = call.receive()
            if message is None or not self._admit(call, message):
                call.close()
                return
        except (OSError, ValueError, KeyError, TypeError):
            call.close()
            return
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            while message := call.receive():
                with self._changed:
                    self._take(call, message)
                    self._changed.notify_all()
        with self._changed:
            self._lose(call)
            self._changed.notify_all()

    def _admit(self, call: Call, message: Message) -> bool:
        node, nodes, processes = (int(message[key]) for key in ("node", "nodes", "processes"))
        own = self._own
        with self._changed:
            error = None
            if nodes != own.nodes:
                text = f"node {node} was started with --nodes {nodes}, but node 0 with --nodes {own.nodes}"
                error = MismatchError(f"{text}: start all with the same number")
            elif processes != own.processes:
                text = f"node {node} was started with -n {processes}, but node 0 with -n {own.processes}"
                error = MismatchError(f"{text}: start the same number of processes on each node")
            elif not 0 < node < nodes or node in self._calls:
                error = MismatchError(f"two nodes have number {node}: give each its own, from --node 0 on")
            if error is None:
                call.node = node
                call.keep()
                call.send({"kind": "welcome"})
                self._calls[node] = call
            else:
                call.send(encode_error(error))
                # A node that comes late and wrong must not end a job that runs.
                if self._is_gathering and self._error is None:
                    self._error = error
            self._changed.notify_all()
        return error is None

    def _take(self, call: Call, message: Message) -> None:
        kind = message["kind"]
        if kind == "signal":
            number = int(message["number"])
            self._received.append(Passed(number))
            for node, other in self._calls.items():
                if node != call.node:
                    other.send({"kind": "signal", "number": number})
            self._wake()
        elif message["attempt"] != self._attempt:
            return
        elif kind == "failed":
            self._stop()
        elif kind == "ended":
            failures = [Failure(*failure) for failure in message["failures"]]
            self._reports[call.node] = failures
            self._interrupted = self._interrupted or bool(message["interrupted"])
            if failures:
                self._stop()

    def _lose(self, call: Call) -> None:
        call.close()
        if self._calls.get(call.node) is not call:
            return
        del self._calls[call.node]
        if not self._is_gathering and not self._closed:
            self._lost.append(call.node)
            self._stop()

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._broadcast({"kind": "stop", "attempt": self._attempt})
            self._wake()

    def _broadcast(self, message: Message) -> None:
        for call in self._calls.values():
            call.send(message)


def _listen(address: str) -> socket.socket:
    """Listens where the other nodes are told to come: on all interfaces, or on the loopback one if that is meant."""
    host, port = split_address(where_to_listen(address, {}), "the address of node 0")
    try:
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=host == "::")
    except OSError as refused:
        text = f"node 0 cannot listen at port {port} ({_reason(refused)}): another program uses it; choose another port"
        raise PortError(f"{text} for --address, on all nodes", (0,)) from None
    # Closing it in another thread does not interrupt a wait.
    listener.settimeout(TICK)
    return listener


def _reason(problem: OSError) -> str:
    """Returns the system's text of an error, without Python's additions; errors of name look-ups are negative."""
    number = problem.errno or 0
    return os.strerror(number) if number > 0 else problem.strerror or str(problem) or "no answer"


def _names(own: Launcher, nodes: Sequence[int]) -> str:
    many = "s" if len(nodes) > 1 else ""
    names = ", ".join(map(str, nodes[:8])) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    return f"node{many} {names} of {own.nodes}"


class _Notice:
    """Prints once what a launcher waits for, unless it comes soon."""

    def __init__(self, own: Launcher, tell: Callable[[bytes], None]):
        self._own, self._tell, self._due = own, tell, time.monotonic() + QUIET_SECONDS

    def show(self, what: str) -> None:
        """Prints it if it is due."""
        if time.monotonic() > self._due:
            self._due = math.inf
            self._tell(f"waiting for {what}, for {self._own.timeout:g} s at most".encode())


def _missing(own: Launcher, missing: Sequence[int]) -> MissingProcessError:
    absent = tuple(process for node in missing for process in range(node * own.processes, (node + 1) * own.processes))
    text = f"{_names(own, missing)} did not come to {own.address} within {own.timeout:g} s: start jaxdist "
    return MissingProcessError(f"{text}launch there, with this --address, and check that it can be reached", absent)


# ---- the others


class Other:
    """The launcher of a node other than 0, which does what node 0's says."""

    def __init__(self, own: Launcher, wake: Callable[[], None], received: list[int], tell: Callable[[bytes], None]):
        self._own, self._wake, self._received, self._forwarded = own, wake, received, 0
        # The attempt, the last one that was ordered to stop, and whether node 0 is lost.
        self._attempt, self._stopped, self._is_lost = -1, -1, False
        # Orders, and `None` when node 0 is lost.
        self._orders: queue.Queue[Message | None] = queue.Queue()
        self._call = _reach(own, received, tell)
        threading.Thread(target=self._read, name="jaxdist launch node 0", daemon=True).start()

    def start(self, attempt: int, port: int) -> Attempt:
        """Waits until node 0 starts an attempt.

        Raises:
          AgreementError: not all nodes came, or one differs.
          NodeLostError: node 0 was lost.
        """
        del attempt, port
        order = self._next_order("start")
        self._attempt = order["attempt"]
        host = self._own.address.rpartition(":")[0]
        return Attempt(self._attempt, f"{host}:{order['port']}", order["secret"], self._call.host)

    def stopping(self) -> bool:
        """Whether node 0 said so, or is lost."""
        return self._stopped == self._attempt or self._is_lost

    def failed(self) -> None:
        """Tells node 0, which stops the others."""
        self._call.send({"kind": "failed", "attempt": self._attempt})

    def pass_on(self) -> None:
        """Passes signals that came to this launcher on to node 0."""
        self._forwarded = _forward_new(self._received, self._forwarded, self._call.send)

    def finish(self, failures: Sequence[Failure], restarts: int) -> tuple[RuntimeError | None, bool]:
        """Reports to node 0 and waits for its decision."""
        del restarts
        message = {"kind": "ended", "attempt": self._attempt, "failures": failures}
        self._call.send(message | {"interrupted": bool(self._received)})
        order = self._next_order("restart", "end")
        return decode_failure(order["error"]), order["kind"] == "restart"

    def close(self) -> None:
        """Leaves the job."""
        self._call.close()

    def _next_order(self, *kinds: str) -> Message:
        while True:
            self.pass_on()
            try:
                order = self._orders.get(timeout=TICK)
            except queue.Empty:
                # Between two attempts there is no process that a signal could stop.
                if self._received and "start" in kinds:
                    raise KeyboardInterrupt from None
                continue
            if order is None:
                raise NodeLostError(0)
            if order["kind"] == "error":
                raise decode_error(order)
            if order["kind"] in kinds:
                return order

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            while message := self._call.receive():
                if message["kind"] == "signal":
                    self._received.append(Passed(int(message["number"])))
                elif message["kind"] == "stop":
                    self._stopped = message["attempt"]
                else:
                    self._orders.put(message)
                self._wake()
        self._is_lost = True
        self._orders.put(None)
        self._wake()


def _reach(own: Launcher, received: Sequence[int], tell: Callable[[bytes], None]) -> Call:
    """Connects to node 0, whose launcher may start later."""
    host, port = split_address(own.address, "the address of node 0")
    until, reason = time.monotonic() + own.timeout, "no answer"
    notice = _Notice(own, tell)
    while True:
        try:
            return _greet(own, socket.create_connection((host, port), timeout=min(own.timeout, GREETING_SECONDS)))
        except AgreementError:
            raise
        except OSError as problem:
            reason = _reason(problem)
        except ValueError:
            text = (
                f"another program answers at {own.address}, or node 0 has another JAXDIST_SECRET: choose another port"
            )
            raise PortError(f"{text} for --address, and the same secret on all nodes", (0,)) from None
        if received:
            raise KeyboardInterrupt
        if time.monotonic() > until:
            text = f"node 0 did not answer at {own.address} within {own.timeout:g} s ({reason}): start jaxdist launch "
            raise MissingProcessError(f"{text}--node 0 there, and check that this node can reach it", (0,))
        notice.show(f"node 0 to answer at {own.address} ({reason})")
        time.sleep(RETRY_SECONDS)


def _greet(own: Launcher, connection: socket.socket) -> Call:
    if connection.getsockname() == connection.getpeername():
        # If nothing listens, Linux may connect a socket to itself.
        connection.close()
        raise ConnectionRefusedError("no answer")
    call = Call(connection, own.secret, 0, False)
    try:
        call.open()
        call.send({"kind": "join", "node": own.node, "nodes": own.nodes, "processes": own.processes})
        answer = call.receive()
        if answer is None:
            raise ValueError("no answer")
        if answer["kind"] == "error":
            raise decode_error(answer)
    except BaseException:
        call.close()
        raise
    call.keep()
    return call


Team = Alone | First | Other
