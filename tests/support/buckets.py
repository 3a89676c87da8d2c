"""Servers of buckets on this machine, and a proxy before them that fails on purpose."""

import contextlib
import functools
import http.client
import http.server
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from jaxdist import islands

KEYS: dict[str, Any] = {"region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}
# What clouds' tools read: nothing of the user's may reach a test.
PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_")


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 server in this process, with an empty bucket `islands`."""
    moto = pytest.importorskip("moto.server", reason="no S3 server here: pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    create_once()
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    # Other servers of this process have the same state.
    post(f"{url}/moto-api/reset")
    request(f"{url}/islands", "PUT")
    try:
        yield url
    finally:
        server.stop()


@functools.cache
def create_once() -> None:
    """Lets moto put one object at a time: it looks whether a name is there, and puts it later, without a lock."""
    from moto.s3.responses import S3Response

    put, lock = S3Response._key_response_put, threading.Lock()

    def put_alone(self: S3Response, query: dict[str, Any], key_name: str) -> Any:
        with lock:
            return put(self, query, key_name)

    S3Response._key_response_put = put_alone


def fill(names: Iterable[str]) -> None:
    """Puts empty bodies under these names of the bucket, without a request for each."""
    from moto.s3.models import s3_backends

    for name in names:
        s3_backends["123456789012"]["aws"].put_object("islands", name, b"")


def request(url: str, method: str, body: bytes = b"", **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method)) as answer:
        return answer.read()


def post(url: str, body: bytes = b"") -> bytes:
    return request(url, "POST", body, **{"Content-Type": "text/plain"})


def s3_bucket(endpoint: str, url: str = "s3://islands/run", **options: Any) -> islands.SharedStore:
    return islands.bucket(url, endpoint=endpoint, **(KEYS | options))


def forget_credentials(patch: pytest.MonkeyPatch, home: Any) -> None:
    """Takes from this process all that clouds' tools would find: the environment, files, and the machine's own."""
    for name in os.environ:
        if name.startswith(PREFIXES):
            patch.delenv(name)
    patch.setenv("HOME", str(home))
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class Fault(NamedTuple):
    """What a proxy does to one request.

    Attributes:
      status: answers with it and `body`, and asks no server.
      body: of that answer.
      cut: sends so much of the server's answer, then ends the connection; 0 is no answer to what was done.
      seconds: waits before it answers.
    """

    status: int | None = None
    body: bytes = b""
    cut: int | None = None
    seconds: float = 0.0


class Request(NamedTuple):
    """A request that a proxy has seen, and the bytes of the answer's body that it sent."""

    method: str
    path: str
    range: str | None
    sent: int


class Proxy:
    """A server that hands requests on to another, except where `fault(number, method, path)` says otherwise."""

    def __init__(
        self, backend: str, fault: Callable[[int, str, str], Fault | None] = lambda number, method, path: None
    ):
        self.fault, self.requests, self.inside, self.most_inside = fault, list[Request](), 0, 0
        self._backend, self._lock, self._number = urlsplit(backend).netloc, threading.Lock(), 0
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __getattr__(self, name):
                if not name.startswith("do_"):
                    raise AttributeError(name)
                return lambda: proxy._answer(self)

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        given = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with self._lock:
            number, self._number = self._number, self._number + 1
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        try:
            fault = self.fault(number, handler.command, handler.path) or Fault()
            time.sleep(fault.seconds)
            status, headers, body = fault.status, {}, fault.body
            if status is None:
                status, headers, body = self._ask(handler, given)
        finally:
            with self._lock:
                self.inside -= 1
        sent = body if fault.cut is None else body[: fault.cut]
        self.requests.append(Request(handler.command, handler.path, handler.headers.get("Range"), len(sent)))
        if fault.cut != 0:
            handler.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                handler.send_header(name, value)
            handler.end_headers()
            with contextlib.suppress(ConnectionError):
                handler.wfile.write(sent)
        handler.close_connection = fault.cut is not None

    def _ask(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._backend)
        try:
            connection.request(handler.command, handler.path, body, dict(handler.headers.items()))
            answer = connection.getresponse()
            hidden = ("connection", "transfer-encoding", "content-length", "server", "date")
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in hidden}
            return answer.status, headers, answer.read()
        finally:
            connection.close()


def refusal(status: int, code: str, message: str = "no") -> Fault:
    """The answer of S3 and Azure to what they refuse."""
    return Fault(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())
