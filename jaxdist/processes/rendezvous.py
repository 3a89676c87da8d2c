"""Checks that all processes of a job are present before JAX starts: each asks process 0.

JAX's own client ends its process by a signal, which cannot be caught, if a process is missing, if two have one number,
or if another program has the port. So process 0 first collects all processes at the coordinator's port, and then leaves
the port to JAX. Anything else is compared through JAX's key-value store (`consistency.exchange`).

A question is a line, `jaxdist PROCESS PROCESSES OWNER NONCE SEAL`, on a separate connection. It is repeated until the
answer, `TEXT SEAL`, is not `wait`. A seal is the HMAC of the text before it; that of an answer also covers `NONCE`, so
that answers cannot be replayed.
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
from .cluster import AgreementError, Job, MismatchError, MissingProcessError, PortError, split_address

SHORTEST_PAUSE = 0.1  # between two questions of a process
QUESTIONS_A_SECOND = 500  # of all processes together
GRACE_SECONDS = 5.0  # beyond the timeout: for an answer on its way, or the look-up of a host name
LINGER_SECONDS = 2.0  # after an error, to answer the processes that come a little later
SILENCE_SECONDS = 3.0  # a running process 0 answers much sooner
GONE_SECONDS = 10.0  # a waiting process asks again much sooner
STOPPED_SECONDS = 1.0  # a longer time between two rounds means that process 0 was suspended
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
    """Waits until all processes of the job are present; otherwise raises the same `AgreementError` in all.

    Process 0 listens at `host:port`, `listen_at`. The `secret` is known to all processes of the job, and to no other
    program. For `patience_seconds` the coordinator's address may be unreachable from process 0's machine.
    """
    host, port = split_address(job.address, "the coordinator's address")
    own = _Member(host, port, job.processes, job.process, secrets.token_hex(8), secret.encode(errors="surrogateescape"))
    if job.process == 0:
        error = _answer_all(own, listen_at, timeout_seconds, patience_seconds)
    else:
        error = _ask_until_answered(own, timeout_seconds, patience_seconds)
    if error is not None:
        raise error


def missing(processes: int, present: set[int], seconds: Number, what: str) -> MissingProcessError:
    """Makes the error that names the missing processes."""
    absent = tuple(sorted(set(range(processes)) - present))
    names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    many = "es" if len(absent) > 1 else ""
    text = f"process{many} {names} of {processes} did not {what} within {seconds:g} s"
    return MissingProcessError(f"{text}: check its output, and that it can reach process 0", absent)


class _Member(NamedTuple):
    """A process: the address of process 0, its own settings, and a random `owner` that tells it from an impostor."""

    host: str
    port: int
    processes: int
    process: int
    owner: str
    secret: bytes


def _seal(secret: bytes, text: str, nonce: str = "") -> str:
    return f"{text} {hmac.new(secret, f'{nonce}{text}'.encode(), hashlib.sha256).hexdigest()}"


def _pause(processes: int) -> float:
    """Returns the pause between two questions of a process, long enough for process 0 to answer all processes."""
    return max(SHORTEST_PAUSE, processes / QUESTIONS_A_SECOND)


# ---- process 0


class _Roster:
    """The processes that have checked in with process 0, and its answer to them. Times are those of process 0."""

    def __init__(self, own: _Member, seconds: Number):
        self._processes, self._secret, self._seconds = own.processes, own.secret, seconds
        self._started = self._last = time.monotonic()
        self._owners = {0: own.owner}
        self._heard: dict[int, float] = {}  # when each process last asked
        # Since when all are present; a question after that is a sign of life.
        self._complete: float | None = None
        self._answered: set[int] = set()
        # When to stop answering, once the answer is known.
        self._until: float | None = None
        # Process 0 was reached by itself or another process.
        self.reached = threading.Event()
        self.error: AgreementError | None = None

    def answer(self, line: bytes) -> bytes:
        """Returns the answer to a line; raises ValueError if the line is not a question."""
        question = QUESTION.fullmatch(line.decode("ascii"))
        if question is None:
            raise ValueError("not a question of a process of a job")
        text, process, processes, owner, nonce, _ = question.groups()
        if not hmac.compare_digest(_seal(self._secret, text), question[0].rstrip("\n")):
            return b"another secret\n"
        # Only a sealed question counts: other programs cannot make the check-in fail.
        self._hear(int(process), int(processes), owner)
        answer = WAIT if self._until is None else _encode_error(self.error)
        if answer != WAIT:
            self._answered.add(int(process))
        return f"{_seal(self._secret, answer, nonce)}\n".encode()

    def _hear(self, process: int, processes: int, owner: str) -> None:
        self.reached.set()
        if processes != self._processes:
            text = f"process {process} expects {processes} processes, but process 0 expects {self._processes}"
            self._fail(MismatchError(f"{text}: start all with the same number", (process,)))
        elif process >= processes:
            text = f"a process has id {process}, but the ids of {processes} processes are below {processes}"
            self._fail(MismatchError(f"{text}: give each a unique id", (process,)))
        elif self._owners.setdefault(process, owner) != owner:
            self._fail(MismatchError(f"two processes have id {process}; ids must be unique", (process,)))
        elif process:
            self._heard[process] = time.monotonic()

    def _fail(self, error: AgreementError) -> None:
        # The first error is the answer for all, so that all raise the same.
        if self.error is None and self._until is None:
            self.error = error
            self._until = time.monotonic() + LINGER_SECONDS + _pause(self._processes)

    def unreachable(self, error: PortError) -> None:
        """Records that process 0 cannot reach itself, so that no other process will ever ask."""
        if not self.reached.is_set():
            self.error, self._until = error, 0.0

    def over(self) -> bool:
        """Returns whether all processes have the answer, or have had the time to fetch it."""
        now = time.monotonic()
        # While this process was suspended it could not listen: that time does not count.
        if now - self._last > STOPPED_SECONDS:
            self._started += now - self._last
            self._heard = dict.fromkeys(self._heard, now)
            if self._until is not None:
                self._until += now - self._last
        self._last = now
        here = {0, *self._heard}
        if self._until is None and len(here) == self._processes:
            # Every process must ask once more, to prove that it still lives.
            self._complete = self._complete or now
            if all(when >= self._complete for when in self._heard.values()):
                self._until = now + GRACE_SECONDS + _pause(self._processes)
        longest = GONE_SECONDS + 4 * _pause(self._processes)
        if gone := [process for process, when in self._heard.items() if now - when > longest]:
            text = f"process {gone[0]} ended while it waited for the others: check its output"
            self._fail(MissingProcessError(text, (gone[0],)))
        if len(here) < self._processes and now - self._started > self._seconds:
            self._fail(missing(self._processes, here, self._seconds, "check in"))
        if self._until is None:
            return False
        return now > self._until or self._answered >= set(range(1, self._processes))


def _answer_all(own: _Member, listen_at: str, seconds: Number, patience: Number) -> AgreementError | None:
    roster = _Roster(own, seconds)
    with _listen(listen_at) as listener:
        # It also asks itself, as its own JAX client will: without an answer, the address is another machine's.
        threading.Thread(target=_ask_itself, args=(own, roster, patience), daemon=True).start()
        _serve(listener, roster.answer, roster.over)
    roster.reached.set()
    return roster.error


def _serve(listener: socket.socket, answer: Callable[[bytes], bytes], over: Callable[[], bool]) -> None:
    """Answers one line on each connection until `over()`."""
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        connections = _Connections(listener, selector, answer)
        while not over():
            for key, _ in selector.select(TICK):
                if key.fileobj is listener:
                    connections.accept()
                # An event of a connection that was closed in this round is stale.
                elif key.data in connections.received:
                    connections.receive(key.data)
        for call in list(connections.received):
            connections.close(call)


class _Connections:
    """The open connections of process 0, with the bytes received so far, the oldest first."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, answer: Callable[[bytes], bytes]):
        self._listener, self._selector, self._answer = listener, selector, answer
        self.received: dict[socket.socket, bytes] = {}
        selector.register(listener, selectors.EVENT_READ)

    def accept(self) -> None:
        # Programs that connect and say nothing must not lock out the processes: close the oldest of too many.
        if len(self.received) == MOST_CALLS:
            self.close(next(iter(self.received)))
        try:
            call, _ = self._listener.accept()
        except OSError:
            # It ended, or no descriptor is left: then the loop must not spin.
            time.sleep(TICK / 10)
            return
        call.setblocking(False)
        self.received[call] = b""
        self._selector.register(call, selectors.EVENT_READ, call)

    def receive(self, call: socket.socket) -> None:
        # It ended, or is another program.
        with contextlib.suppress(OSError, ValueError):
            part = call.recv(LONGEST_QUESTION)
            self.received[call] += part
            if part and b"\n" not in part and len(self.received[call]) < LONGEST_QUESTION:
                return
            # An answer fits into the send buffer of a new connection, so this never blocks.
            call.send(self._answer(self.received[call]))
        self.close(call)

    def close(self, call: socket.socket) -> None:
        del self.received[call]
        self._selector.unregister(call)
        call.close()


def _listen(where: str) -> socket.socket:
    """Listens at an address of this machine; `[::]` is all of them, as in JAX's service."""
    host, port = split_address(where, "the address to listen at")
    try:
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=host == "::")
    except OSError as refused:
        text = f"process 0 cannot listen at port {port} of {host} ({_reason(refused)}): another program uses it, or "
        text += "another process 0; choose another port, and an address of this machine"
        raise PortError(text, (0,)) from None


def _ask_itself(own: _Member, roster: _Roster, patience: Number) -> None:
    """Asks process 0 from its own machine, at the address that the others use; the body of a thread."""
    until, where = time.monotonic() + patience, f"{own.host}:{own.port}"
    # `roster` notes any question that arrives, also that of another process, as proof that the address works.
    error = _unknown_host(own, "no answer")
    # Once in any case: the thread may have been suspended for longer than the patience.
    is_late = False
    while not roster.reached.is_set() and not is_late:
        try:
            _ask(own, min(max(until - time.monotonic(), SHORTEST_PAUSE), SILENCE_SECONDS))
        except (OSError, ValueError) as problem:
            reason = _reason(problem) if isinstance(problem, OSError) else "another program answers"
            text = f"process 0 runs on {socket.gethostname()}, but cannot reach itself at {where} ({reason})"
            error = PortError(f"{text}: give all processes the address of its machine", (0,))
            if isinstance(problem, socket.gaierror):
                error = _unknown_host(own, reason)
            time.sleep(SHORTEST_PAUSE)
        is_late = time.monotonic() > until
    roster.unreachable(error)


# ---- the others


def _ask_until_answered(own: _Member, seconds: Number, patience: Number) -> AgreementError | None:
    until, where = time.monotonic() + seconds, f"{own.host}:{own.port}"
    if reason := _look_up(own.host, min(seconds, patience)):
        return _unknown_host(own, reason)
    # `met`: process 0 has answered before; `failing`: since when it does not. One question may go unanswered because
    # this process or process 0 was suspended meanwhile.
    met, failing, silences, reason = False, None, 0, ""
    while True:
        try:
            text = _ask(own, SILENCE_SECONDS + _pause(own.processes))
            if text not in (WAIT, None):
                return _decode_error(text)
        except ValueError:
            return _other_program(where, "answers", own.process)
        except OSError as problem:
            # Process 0 does not listen yet.
            text, reason = None, f" ({_reason(problem)})"
        else:
            silences = silences + 1 if text is None else 0
            if silences > 1 and not met:
                return _other_program(where, "listens but does not answer", own.process)
        now = time.monotonic()
        if text is None:
            failing = failing or now
        else:
            # At the first answer: process 0 started later, and its timeout ends later.
            until, met, failing = until if met else now + seconds + GRACE_SECONDS, True, None
        if now > until or (met and failing and now - failing > GRACE_SECONDS):
            text = f"process 0 did not answer process {own.process} at {where} within {seconds:g} s{reason}: check its "
            text += "output, and that it can be reached there"
            ended = "process 0 ended, or stopped responding, during the check-in: check its output"
            return MissingProcessError(ended if met else text, (0,))
        time.sleep(min(_pause(own.processes), max(until - now, 0.0)))


def _ask(own: _Member, seconds: float) -> str | None:
    """Asks process 0 once. Returns None without a complete answer; raises ValueError if another program answers."""
    until, nonce, heard = time.monotonic() + seconds, secrets.token_hex(8), b""
    question = _seal(own.secret, f"jaxdist {own.process} {own.processes} {own.owner} {nonce}")
    # A new nonce for each question: an answer that was recorded earlier does not fit.
    with socket.create_connection((own.host, own.port), timeout=seconds) as call:
        # If nothing listens, Linux may connect a socket to itself.
        if call.getsockname() == call.getpeername():
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
        # Process 0 was starting, or ending.
        raise ConnectionError("no answer")
    line = heard.decode("ascii").rstrip("\n")
    text = line.rpartition(" ")[0]
    if not hmac.compare_digest(_seal(own.secret, text, nonce), line):
        raise ValueError("not an answer of process 0 of this job")
    return text


def _encode_error(error: AgreementError | None) -> str:
    """Encodes an error as an ASCII answer; `go` for none."""
    if error is None:
        return GO
    text = f"{type(error).__name__} {','.join(map(str, error.processes))} {error}"
    return text.encode("ascii", "backslashreplace").decode()


def _decode_error(text: str) -> AgreementError | None:
    if text == GO:
        return None
    error = ERROR.fullmatch(text)
    if error is None:
        raise ValueError("not an answer of process 0")
    return KINDS[error[1]](error[3], tuple(map(int, error[2].split(","))))


def _other_program(where: str, does: str, process: int) -> PortError:
    text = f"another program {does} at {where}, or the job has a different JAXDIST_SECRET or started without process"
    return PortError(f"{text} {process}: choose another port, and a unique id for each process", (0,))


def _unknown_host(own: _Member, reason: str) -> PortError:
    text = f"the host {own.host!r} of the coordinator's address {own.host}:{own.port} was not found ({reason})"
    return PortError(f"{text}: correct JAX_COORDINATOR_ADDRESS, or the name service", (0,))


def _look_up(host: str, seconds: Number) -> str:
    """Returns why a host name has no address; empty once it has one. A thread, since a look-up may take longer."""
    found, reasons = threading.Event(), ["no answer"]

    def try_until_found() -> None:
        while not found.is_set():
            try:
                socket.getaddrinfo(host, None)
                found.set()
            except OSError as problem:
                reasons.append(_reason(problem))
                if (left := until - time.monotonic()) <= 0:
                    return
                time.sleep(min(2 * SHORTEST_PAUSE, left))

    until = time.monotonic() + seconds
    thread = threading.Thread(target=try_until_found, daemon=True)
    thread.start()
    thread.join(seconds + TICK)
    return "" if found.is_set() else reasons[-1]


def _reason(problem: OSError) -> str:
    """Returns the system's text of an error, without Python's additions; errors of name look-ups are negative."""
    number = problem.errno or 0
    return os.strerror(number) if number > 0 else problem.strerror or str(problem)
