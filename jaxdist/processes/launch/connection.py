"""A connection between node 0 and another node: lines of JSON, each with a seal.

A seal is an HMAC over the secret, a random text of node 0, the direction and the number of the line: nothing that was
recorded can be sent again.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading

from .failures import Message

GREETING_SECONDS = 10.0  # for the first lines of a connection, which any program can open
LONGEST_LINE = 1 << 17
# A machine that is gone sends nothing: after this many seconds of silence, questions; without answers it is lost.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 10, 5, 4


class Call:
    """A connection between node 0 and another node, whose lines are sealed."""

    def __init__(self, connection: socket.socket, secret: str, node: int, is_first: bool):
        self._socket, self._secret, self._is_first = connection, secret.encode(errors="surrogateescape"), is_first
        self._file = connection.makefile("rb")
        self._nonce, self._sent, self._read = "", 0, 0
        self._sending = threading.Lock()
        # The other node of the two, as far as it has said so.
        self.node = node
        self.host = connection.getsockname()[0].removeprefix("::ffff:")

    def open(self) -> None:
        """Agrees on the random text that all seals of the connection cover."""
        self._socket.settimeout(GREETING_SECONDS)
        if self._is_first:
            self._nonce = secrets.token_hex(16)
            self._socket.sendall(f"jaxdist launch {self._nonce}\n".encode())
            return
        greeting = self._file.readline(LONGEST_LINE).decode("ascii", "replace").split()
        if not greeting:
            # Node 0 was starting, or ending.
            raise ConnectionResetError("no answer")
        if len(greeting) != 3 or greeting[:2] != ["jaxdist", "launch"]:
            raise ValueError("no greeting")
        self._nonce = greeting[2]

    def keep(self) -> None:
        """Waits without end from now on, but notices when the other machine is gone."""
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Names differ between systems.
        options = {"TCP_KEEPIDLE": IDLE_SECONDS, "TCP_KEEPINTVL": PROBE_SECONDS, "TCP_KEEPCNT": PROBES}
        options["TCP_USER_TIMEOUT"] = 1000 * (IDLE_SECONDS + PROBES * PROBE_SECONDS)
        for name, value in options.items():
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Sends a line; a connection that is lost is noticed by the thread that reads."""
        with self._sending, contextlib.suppress(OSError):
            text = json.dumps(message)
            self._socket.sendall(f"{self._seal(text, self._sent, self._is_first)} {text}\n".encode())
            self._sent += 1

    def receive(self) -> Message | None:
        """Returns the next message, `None` at the end; raises ValueError for a line that is not sealed."""
        line = self._file.readline(LONGEST_LINE).decode("utf-8")
        if not line.endswith("\n"):
            return None
        seal, _, text = line.rstrip("\n").partition(" ")
        if not hmac.compare_digest(seal.encode(), self._seal(text, self._read, not self._is_first).encode()):
            raise ValueError("another secret")
        self._read += 1
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def close(self) -> None:
        """Closes it, which also ends a thread that reads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _seal(self, text: str, number: int, from_first: bool) -> str:
        covered = f"{self._nonce} {int(from_first)} {number} {text}"
        return hmac.new(self._secret, covered.encode(), hashlib.sha256).hexdigest()
