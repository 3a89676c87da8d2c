"""Every process asks process 0 whether all processes are there, before JAX starts.

JAX's own client ends its process by a signal, which nothing can catch, where a process is missing, two have one number
or another program has the port; and it answers no question before all have connected. So process 0 calls the roll
first, at the coordinator's port, and then hands the port over to JAX. What processes compare beyond their numbers goes
through JAX's key-value store (`agree.exchange`).

A question is a line, `jaxdist PROCESS PROCESSES OWNER FRESH SEAL`, on a connection of its own. It is asked anew until
the answer, `TEXT SEAL`, is another one than `wait`. A seal is the HMAC of what comes before it, that of an answer also
of `FRESH`, by which nobody can give an old one again.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from .._core.types import Number
from .cluster import Job, split_address
from .errors import AgreementError, MismatchError, MissingProcessError, PortError

SHORTEST_PAUSE = 0.1  # between two questions of a process
QUESTIONS_A_SECOND = 500  # of all processes together
GRACE_SECONDS = 5.0  # beyond what was asked for: for an answer that is about to come, for a name that is looked up
LINGER_SECONDS = 2.0  # where the answer is bad already, for those that come a little later
SILENCE_SECONDS = 3.0  # process 0 answers whoever it hears at once
GONE_SECONDS = 10.0  # a process that waits asks again long before
STOPPED_SECONDS = 1.0  # since process 0 last looked: it was not running
MOST_CALLS = 128  # open at the same time
LONGEST_QUESTION, LONGEST_ANSWER = 256, 1 << 16
TICK = 0.05
QUESTION = re.compile(r"(jaxdist ([0-9]{1,9}) ([0-9]{1,9}) ([0-9a-f]{16}) ([0-9a-f]{16})) ([0-9a-f]{64})\n")
WAIT, GO = "wait", "go"
KINDS = {kind.__name__: kind for kind in (MismatchError, MissingProcessError, PortError)}
ERROR = re.compile(rf"({'|'.join(KINDS)}) ([0-9]{{1,9}}(?:,[0-9]{{1,9}})*) (.+)")


def check_in(
    job: Job, *, listen_at: str, timeout_seconds: Number, secret: str = "", patience_seconds: Number = GRACE_SECONDS
) -> None:
    """Returns when all processes of the job are there; otherwise the same `AgreementError` is raised in all.

    Args:
      job: where process 0 is, how many processes this one was told of, and its number.
      listen_at: `host:port` where process 0 listens.
      timeout_seconds: how long to wait for the others.
      secret: what all processes of the job have, and no other program.
      patience_seconds: how long the coordinator's address may fail to lead to process 0's machine.
    """
    host, port = split_address(job.address, "the coordinator's address")
    own = _Member(host, port, job.processes, job.process, secrets.token_hex(8), secret.encode(errors="surrogateescape"))
    if job.process == 0:
        error = _host(own, listen_at, timeout_seconds, patience_seconds)
    else:
        error = _visit(own, timeout_seconds, patience_seconds)
    if error is not None:
        raise error


def missing(processes: int, present: set[int], seconds: Number, what: str) -> MissingProcessError:
    """The error that names the processes that did not come."""
    absent = tuple(sorted(set(range(processes)) - present))
    names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    many = "es" if len(absent) > 1 else ""
    return MissingProcessError(
        f"process{many} {names} of {processes} did not {what} within {seconds:g} s: see what it printed, and whether "
        "it reaches process 0",
        absent,
    )


class _Member(NamedTuple):
    """A process: where it finds process 0, what it was told, and what tells it from another with its number."""

    host: str
    port: int
    processes: int
    process: int
    owner: str
    secret: bytes


def _sealed(secret: bytes, text: str, fresh: str = "") -> str:
    return f"{text} {hmac.new(secret, f'{fresh}{text}'.encode(), hashlib.sha256).hexdigest()}"


def _pause(processes: int) -> float:
    """Between two questions of a process, so that process 0 can answer all of them."""
    return max(SHORTEST_PAUSE, processes / QUESTIONS_A_SECOND)


# ---- process 0


class _Roll:
    """What process 0 has heard, and what it answers. Times are its own."""

    def __init__(self, own: _Member, seconds: Number):
        self._processes, self._secret, self._seconds = own.processes, own.secret, seconds
        self._began = self._last = time.monotonic()
        self._owners = {0: own.owner}
        self._heard: dict[int, float] = {}
        self._called: float | None = None  # since when all have come: who speaks after that still lives
        self._told: set[int] = set()
        self._until: float | None = None  # when to stop answering, once the answer is known
        self.reached = threading.Event()  # process 0 has reached itself, or another has
        self.error: AgreementError | None = None

    def answer(self, line: bytes) -> bytes:
        """What to say to a line; `ValueError` for what no process of a job says."""
        question = QUESTION.fullmatch(line.decode("ascii"))
        if question is None:
            raise ValueError("no process of a job says this")
        text, process, processes, owner, fresh, _ = question.groups()
        if not hmac.compare_digest(_sealed(self._secret, text), question[0].rstrip("\n")):
            return b"another secret\n"
        self._hear(int(process), int(processes), owner)
        said = WAIT if self._until is None else _spelled(self.error)
        if said != WAIT:
            self._told.add(int(process))
        return f"{_sealed(self._secret, said, fresh)}\n".encode()

    def _hear(self, process: int, processes: int, owner: str) -> None:
        self.reached.set()
        if processes != self._processes:
            self._fail(
                MismatchError(
                    f"process {process} was told of {processes} processes, and process 0 of {self._processes}: start "
                    "all with one number",
                    (process,),
                )
            )
        elif process >= processes:
            text = f"a process has id {process}, and the ids of {processes} processes are below {processes}"
            self._fail(MismatchError(f"{text}: give each its own", (process,)))
        elif self._owners.setdefault(process, owner) != owner:
            self._fail(MismatchError(f"two processes have id {process}: ids must be unique", (process,)))
        elif process:
            self._heard[process] = time.monotonic()

    def _fail(self, error: AgreementError) -> None:
        if self.error is None and self._until is None:
            self.error = error
            self._until = time.monotonic() + LINGER_SECONDS + _pause(self._processes)

    def unreachable(self, error: PortError) -> None:
        """Process 0 does not reach itself: no other will come to hear so."""
        if not self.reached.is_set():
            self.error, self._until = error, 0.0

    def over(self) -> bool:
        """Whether all have the answer, or have had the time to fetch it."""
        now = time.monotonic()
        if now - self._last > STOPPED_SECONDS:  # this process was stopped, and has not listened
            self._began += now - self._last
            self._heard = dict.fromkeys(self._heard, now)
        self._last = now
        here = {0, *self._heard}
        if self._until is None and len(here) == self._processes:
            self._called = self._called or now
            if all(when >= self._called for when in self._heard.values()):
                self._until = now + GRACE_SECONDS + _pause(self._processes)
        longest = GONE_SECONDS + 4 * _pause(self._processes)
        if gone := [process for process, when in self._heard.items() if now - when > longest]:
            text = f"process {gone[0]} ended while it waited for the others: see what it printed"
            self._fail(MissingProcessError(text, (gone[0],)))
        if len(here) < self._processes and now - self._began > self._seconds:
            self._fail(missing(self._processes, here, self._seconds, "check in"))
        if self._until is None:
            return False
        return now > self._until or self._told >= set(range(1, self._processes))


def _host(own: _Member, listen_at: str, seconds: Number, patience: Number) -> AgreementError | None:
    """Process 0: hears all, and answers all."""
    roll = _Roll(own, seconds)
    with _listen(listen_at) as listener:
        # It also asks itself, as its own JAX client will: where it hears nothing, the address is another machine's.
        threading.Thread(target=_reach, args=(own, roll, patience), daemon=True).start()
        _serve(listener, roll.answer, roll.over)
    roll.reached.set()
    return roll.error


def _serve(listener: socket.socket, answer: Callable[[bytes], bytes], over: Callable[[], bool]) -> None:
    """Answers one line on each connection, until it is over. A new connection ends the oldest of too many."""
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        calls: dict[socket.socket, bytes] = {}  # and what was heard, the oldest first

        def close(call: socket.socket) -> None:
            del calls[call]
            selector.unregister(call)
            call.close()

        while not over():
            for key, _ in selector.select(TICK):
                call = key.data
                if call in calls:
                    with contextlib.suppress(OSError, ValueError):  # it ended, or is no process of ours
                        part = call.recv(LONGEST_QUESTION)
                        calls[call] += part
                        if part and b"\n" not in part and len(calls[call]) < LONGEST_QUESTION:
                            continue
                        call.send(answer(calls[call]))  # which fits the buffer of a new connection
                    close(call)
                elif call is None:
                    if len(calls) == MOST_CALLS:
                        close(next(iter(calls)))
                    try:
                        new, _ = listener.accept()
                    except OSError:  # it ended, or there is no descriptor left
                        time.sleep(TICK / 10)
                        continue
                    new.setblocking(False)
                    calls[new] = b""
                    selector.register(new, selectors.EVENT_READ, new)
        for call in list(calls):
            close(call)


def _listen(where: str) -> socket.socket:
    """Listens at an address of this machine; `[::]` is all of them, as in JAX's service."""
    host, port = split_address(where, "the address to listen at")
    try:
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=host == "::")
    except OSError as refused:
        raise PortError(
            f"process 0 cannot listen at port {port} of {host} ({_reason(refused)}): another program has it, or "
            "another process 0; choose another port, and an address of this machine",
            (0,),
        ) from None


def _reach(own: _Member, roll: _Roll, patience: Number) -> None:
    """Process 0 asks itself, at the address that the others have; a thread."""
    until, where = time.monotonic() + patience, f"{own.host}:{own.port}"
    error = _unknown(own, "no answer")
    while not roll.reached.is_set() and (left := until - time.monotonic()) > 0:
        try:
            _ask(own, min(left, SILENCE_SECONDS))
        except (OSError, ValueError) as problem:
            reason = _reason(problem) if isinstance(problem, OSError) else "another program answers"
            text = f"process 0 runs on {socket.gethostname()}, and does not reach itself at {where} ({reason})"
            error = PortError(f"{text}: give all processes the address of its machine", (0,))
            if isinstance(problem, socket.gaierror):
                error = _unknown(own, reason)
            time.sleep(SHORTEST_PAUSE)
    roll.unreachable(error)


# ---- the others


def _visit(own: _Member, seconds: Number, patience: Number) -> AgreementError | None:
    """Every other process: asks until there is an answer."""
    until, where = time.monotonic() + seconds, f"{own.host}:{own.port}"
    if reason := _unresolved(own.host, min(seconds, patience)):
        return _unknown(own, reason)
    met, failing, reason = False, None, ""
    while True:
        try:
            text = _ask(own, SILENCE_SECONDS + _pause(own.processes))
            if text not in (WAIT, None):
                return _read(text)
        except ValueError:
            return _stranger(where, "answers", own.process)
        except OSError as problem:  # process 0 has not come so far
            text, reason = None, f" ({_reason(problem)})"
        else:
            if text is None and not met:
                return _stranger(where, "listens, and does not answer,", own.process)
        if text is None:
            failing = failing or time.monotonic()
        else:
            if not met:  # process 0 came later, and has waited for less
                until, met = time.monotonic() + seconds + GRACE_SECONDS, True
            failing = None
        now = time.monotonic()
        if met and (now > until or (failing and now - failing > GRACE_SECONDS)):
            text = "process 0 ended, or fell silent, while processes checked in: see what it printed"
            return MissingProcessError(text, (0,))
        if now > until:
            return MissingProcessError(
                f"process 0 did not answer process {own.process} at {where} within {seconds:g} s{reason}: see what "
                "it printed, and whether it can be reached there",
                (0,),
            )
        time.sleep(min(_pause(own.processes), max(until - now, 0.0)))


def _ask(own: _Member, seconds: float) -> str | None:
    """Asks process 0 once. None where a program says nothing, or not all; `ValueError` where another one answers."""
    until, fresh, heard = time.monotonic() + seconds, secrets.token_hex(8), b""
    question = _sealed(own.secret, f"jaxdist {own.process} {own.processes} {own.owner} {fresh}")
    with socket.create_connection((own.host, own.port), timeout=seconds) as call:
        if call.getsockname() == call.getpeername():  # where nothing listens, Linux may join a socket with itself
            raise ConnectionRefusedError("no answer")
        call.sendall(f"{question}\n".encode())
        while not heard.endswith(b"\n") and len(heard) < LONGEST_ANSWER:
            left = until - time.monotonic()
            if left <= 0:
                return None
            call.settimeout(left)
            try:
                part = call.recv(LONGEST_ANSWER)
            except TimeoutError:
                return None
            if not part:
                break
            heard += part
    if not heard:
        raise ConnectionError("no answer")  # it was about to listen, or to end
    line = heard.decode("ascii").rstrip("\n")
    text = line.rpartition(" ")[0]
    if not hmac.compare_digest(_sealed(own.secret, text, fresh), line):
        raise ValueError("no process 0 of this job says this")
    return text


def _spelled(error: AgreementError | None) -> str:
    """An error as an answer, in ASCII; `go` for none."""
    if error is None:
        return GO
    text = f"{type(error).__name__} {','.join(map(str, error.processes))} {error}"
    return text.encode("ascii", "backslashreplace").decode()


def _read(text: str) -> AgreementError | None:
    if text == GO:
        return None
    error = ERROR.fullmatch(text)
    if error is None:
        raise ValueError("no process 0 says this")
    return KINDS[error[1]](error[3], tuple(map(int, error[2].split(","))))


def _stranger(where: str, does: str, process: int) -> PortError:
    text = f"at {where} {does} another program, or the job has another JAXDIST_SECRET or began without process"
    return PortError(f"{text} {process}: choose another port, and one number for each process", (0,))


def _unknown(own: _Member, reason: str) -> PortError:
    text = f"the host {own.host!r} of the coordinator's address {own.host}:{own.port} is not found ({reason})"
    return PortError(f"{text}: correct JAX_COORDINATOR_ADDRESS, or what the name stands for", (0,))


def _unresolved(host: str, seconds: Number) -> str:
    """Why a host name has no address; empty once it has one. The system may look for one longer than we wait."""
    found, reasons = threading.Event(), ["no answer"]

    def look() -> None:
        while not found.is_set() and time.monotonic() < until:
            try:
                socket.getaddrinfo(host, None)
                found.set()
            except OSError as problem:
                reasons.append(_reason(problem))
                time.sleep(min(2 * SHORTEST_PAUSE, max(until - time.monotonic(), 0.0)))

    until = time.monotonic() + seconds
    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    looker.join(seconds + TICK)
    return "" if found.is_set() else reasons[-1]


def _reason(problem: OSError) -> str:
    """The words of the system, to which Python adds; those of a name that is not found have numbers below 0."""
    number = problem.errno or 0
    return os.strerror(number) if number > 0 else problem.strerror or str(problem)
