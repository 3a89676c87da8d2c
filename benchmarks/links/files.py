"""A server of named bytes over HTTP, and the store of islands that asks it: as a bucket, without its work.

    python benchmarks/links/files.py 10.177.0.1 5000

It keeps bytes in memory and needs the standard library alone. Buckets behave in the same way: `PUT` with
`If-None-Match: *` creates a name only if it is absent.
"""

import http.client
import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

TIMEOUT = 120  # seconds


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True
    names: ClassVar[dict[str, bytes]] = {}
    lock = threading.Lock()

    def do_GET(self):
        place = urlsplit(self.path)
        if place.query:
            prefix = parse_qs(place.query, keep_blank_values=True)["prefix"][0]
            with self.lock:
                found = sorted(name for name in self.names if name.startswith(prefix))
            self._answer(200, json.dumps(found).encode())
        else:
            body = self.names.get(place.path)
            asked = self.headers["Range"]
            if body is not None and asked:
                start, end = map(int, asked.removeprefix("bytes=").split("-"))
                self._answer(206, body[start : end + 1])
            else:
                self._answer(404 if body is None else 200, body or b"")

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            refused = self.headers["If-None-Match"] == "*" and self.path in self.names
            if not refused:
                self.names[self.path] = body
        self._answer(412 if refused else 200)

    def do_DELETE(self):
        with self.lock:
            self.names.pop(self.path, None)
        self._answer(200)

    def _answer(self, status, body=b""):
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(address: str, port: int) -> None:
    """Serves until it is killed."""
    ThreadingHTTPServer((address, port), Handler).serve_forever()


def connect(address: str, port: int) -> tuple[Callable, ...]:
    """The functions of a `SharedStore`; each thread has a connection of its own."""
    kept = threading.local()

    def ask(method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        if getattr(kept, "connection", None) is None:
            kept.connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT)
        try:
            kept.connection.request(method, path, body, headers)
            with kept.connection.getresponse() as response:
                return response.status, response.read()
        except BaseException:
            # What is on this connection belongs to no later request.
            connection, kept.connection = kept.connection, None
            with suppress(OSError):
                connection.close()
            raise

    def create(name: str, body: bytes) -> bool:
        return ask("PUT", f"/{name}", body, **{"If-None-Match": "*"})[0] == 200

    def put(name: str, body: bytes) -> None:
        ask("PUT", f"/{name}", body)

    def get(name: str) -> bytes | None:
        status, body = ask("GET", f"/{name}")
        return body if status == 200 else None

    def list_names(prefix: str) -> list[str]:
        return [name.removeprefix("/") for name in json.loads(ask("GET", f"/?prefix=/{prefix}")[1])]

    def delete(name: str) -> None:
        ask("DELETE", f"/{name}")

    def read(name: str, start: int, end: int) -> bytes | None:
        status, body = ask("GET", f"/{name}", Range=f"bytes={start}-{end - 1}")
        return body if status == 206 else None

    return create, put, get, list_names, delete, None, read


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
