"""Every process tells process 0 who it is, over TCP, before JAX starts: its own service aborts where one is missing.

Process 0 listens at the coordinator's port, which it hands over to JAX afterwards. Messages are lines of JSON: what a
process says of itself (its number, how many it was told of, its card), the answer `{"wait": seconds}`, and at last
`{"problem": null}` or what is wrong, the same for all.
"""

import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..._typing import Number
from .cards import Card, difference
from .errors import AgreementError, MismatchError, MissingProcessError, PortError

LONGEST_LINE = 1 << 16
LINGER_SECONDS = 2.0  # where the answer is bad already, for those who come a little later
GRACE_SECONDS = 5.0  # for an answer that was promised
SILENCE_SECONDS = 3.0  # process 0 answers whoever it hears at once
RETRY_SECONDS = 0.1
KINDS = {kind.__name__: kind for kind in (MismatchError, MissingProcessError)}
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass
class _Call:
    """A connection to process 0."""

    socket: socket.socket
    heard: bytearray = field(default_factory=bytearray)
    process: int | None = None


def check_in(address: str, processes: int, process: int, card: Card, *, timeout_seconds: Number) -> None:
    """Returns when all processes are there with equal cards; otherwise the same `AgreementError` is raised in all.

    Args:
      address: `host:port` of process 0.
      processes: how many processes this one was told of.
      process: its number.
      card: what must be the same everywhere.
      timeout_seconds: how long to wait for the others.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the coordinator's address must be host:port, got {address!r}")
    own = {"process": process, "processes": processes, "card": card}
    meet = _host if process == 0 else _visit
    error = meet(host.strip("[]"), int(port), own, timeout_seconds)
    if error is not None:
        raise error


def problem(said: Mapping[int, Mapping[str, Any]]) -> AgreementError | None:
    """What is wrong with what processes said of themselves, by their number; process 0 is among them."""
    first = said[0]
    for process, other in sorted(said.items()):
        if other["processes"] != first["processes"]:
            return MismatchError(
                f"process {process} was told of {other['processes']} processes, and process 0 of "
                f"{first['processes']}: start all with one number",
                (process,),
            )
    for process, other in sorted(said.items()):
        if sentence := difference(other["card"], first["card"], process):
            return MismatchError(sentence, (process,))
    return None


def missing(processes: int, present: Mapping[int, Any], seconds: Number, what: str) -> MissingProcessError:
    """Who did not come."""
    absent = tuple(sorted(set(range(processes)) - set(present)))
    names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    many = "es" if len(absent) > 1 else ""
    return MissingProcessError(
        f"process{many} {names} of {processes} did not {what} within {seconds:g} s: see what it printed, and whether "
        "it reaches process 0",
        absent,
    )


def _host(host: str, port: int, own: dict[str, Any], seconds: Number) -> AgreementError | None:
    """Process 0: hears all, and answers all."""
    until = time.monotonic() + seconds
    said, calls, error = {0: own}, [], None
    with _listen(host, port) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(said) < max(one["processes"] for one in said.values()) and time.monotonic() < until:
            for key, _ in selector.select(max(0.0, min(0.2, until - time.monotonic()))):
                if key.data is None:
                    calls.append(_Call(listener.accept()[0]))
                    calls[-1].socket.setblocking(False)
                    selector.register(calls[-1].socket, selectors.EVENT_READ, calls[-1])
                    continue
                try:
                    found = _hear(key.data, said, until)
                except (OSError, ValueError):  # it ended, or is no process of ours
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
                    number, found = key.data.process, None
                    if number is not None:
                        text = f"process {number} ended while it waited for the others: see what it printed"
                        found = MissingProcessError(text, (number,))
                error = error or found
                if error is not None:
                    until = min(until, time.monotonic() + LINGER_SECONDS)
    # No longer listening when they hear the answer: whoever hears that all is well goes to JAX's service at this port.
    if error is None and len(said) < own["processes"]:
        error = missing(own["processes"], said, seconds, "check in")
    wrong = error and {"kind": type(error).__name__, "message": str(error), "processes": error.processes}
    for call in calls:
        _say(call, {"problem": wrong})
        call.socket.close()
    return error


def _hear(call: _Call, said: dict[int, dict[str, Any]], until: float) -> AgreementError | None:
    """What a process says, if that has arrived whole; it is then told how long it may have to wait."""
    part = call.socket.recv(LONGEST_LINE)
    call.heard += part
    if not part or len(call.heard) > LONGEST_LINE:
        raise ConnectionError
    if call.process is not None or not call.heard.endswith(b"\n"):
        return None
    message = _parsed(call.heard)
    number = message["process"]
    if number in said:
        return MismatchError(f"two processes call themselves {number}: each has a number of its own", (number,))
    call.process, said[number] = number, message
    _say(call, {"wait": until - time.monotonic()})
    return problem({0: said[0], number: message})


def _parsed(line: bytearray) -> dict[str, Any]:
    """What a process of ours would say; `ValueError` for anything else that came to the port."""
    try:
        message = json.loads(line)
        good = isinstance(message["process"], int) and isinstance(message["processes"], int)
        good = good and all(
            isinstance(value, str) for section in message["card"].values() for value in section.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ValueError("no process of a job says this")
    return message


def _say(call: _Call, message: dict[str, Any]) -> None:
    try:
        call.socket.settimeout(1.0)
        call.socket.sendall(json.dumps(message).encode() + b"\n")
        call.socket.setblocking(False)
    except OSError:  # it ended: whoever waits for it will hear so
        pass


def _listen(host: str, port: int) -> socket.socket:
    """At all addresses of this machine, as JAX's service will, or at the loopback alone."""
    try:
        if host in LOOPBACK or not socket.has_dualstack_ipv6():
            return socket.create_server((host if host in LOOPBACK else "", port), backlog=1024)
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except OSError as refused:
        raise PortError(
            f"process 0 cannot listen at port {port} ({os.strerror(refused.errno or 0)}): another program has it, or "
            "another process 0; choose another port",
            (0,),
        ) from None


def _visit(host: str, port: int, own: dict[str, Any], seconds: Number) -> AgreementError | None:
    """Every other process: says who it is and waits for the answer."""
    until, reason = time.monotonic() + seconds, ""
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, GRACE_SECONDS)) as call:
                return _ask(call, own, until, f"{host}:{port}")
        except OSError as problem:  # process 0 has not come so far
            reason = f" ({problem.strerror or problem})"
            time.sleep(RETRY_SECONDS)
    return MissingProcessError(
        f"process 0 did not answer process {own['process']} at {host}:{port} within {seconds:g} s{reason}: see what "
        "it printed, and whether it can be reached there",
        (0,),
    )


def _ask(call: socket.socket, own: dict[str, Any], until: float, where: str) -> AgreementError | None:
    call.sendall(json.dumps(own).encode() + b"\n")
    lines = call.makefile("rb")
    promised = False
    while True:
        left = max(RETRY_SECONDS, until - time.monotonic())
        call.settimeout(left if promised else min(left, SILENCE_SECONDS))
        try:
            line = lines.readline(LONGEST_LINE)
        except OSError as silence:
            if isinstance(silence, TimeoutError) and not promised:
                return _stranger(where, "listens, and does not answer,", own["process"])
            line = b""
        if not line and not promised:
            raise ConnectionError("no answer")  # as it was about to listen, or to end
        if not line:
            text = "process 0 ended, or fell silent, while processes checked in: see what it printed"
            return MissingProcessError(text, (0,))
        try:
            message = json.loads(line)
            until, promised = time.monotonic() + message.get("wait", 0) + GRACE_SECONDS, True
            wrong = message.get("problem")
            error = None if wrong is None else KINDS[wrong["kind"]](wrong["message"], tuple(wrong["processes"]))
        except (ValueError, AttributeError, KeyError, TypeError):
            return _stranger(where, "answers", own["process"])
        if "problem" in message:
            return error


def _stranger(where: str, does: str, process: int) -> PortError:
    text = f"at {where} {does} another program, or the job has begun without process {process}"
    return PortError(f"{text}: choose another port, and one number for each process", (0,))
