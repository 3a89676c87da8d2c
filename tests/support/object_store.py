"""An S3 server of this process, whose requests can be counted and disturbed."""

import contextlib
import datetime
import itertools
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

QUICKLY = {
    "init_backoff": datetime.timedelta(milliseconds=1),
    "max_backoff": datetime.timedelta(milliseconds=5),
    "base": 2,
}


class S3Server:
    """Moto behind a function that sees every request.

    Attributes:
      url: the endpoint.
      requests: the method, the path and the bytes of the body of every request.
      disturb: `disturb(method, path)` returns "before" for a 503 and nothing done, "after" to lose the answer.
    """

    def __init__(self, application: Any):
        from werkzeug.serving import make_server

        self._application, self._buckets = application, itertools.count()
        self.requests: list[tuple[str, str, int]] = []
        self.disturb: Callable[[str, str], str | None] | None = None
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_silent_handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, int(environ.get("CONTENT_LENGTH") or 0)))
        how = self.disturb(method, path) if self.disturb else None
        if how is None:
            return self._application(environ, start)
        if how == "after":
            for _ in self._application(environ, lambda *_: None):
                pass
        start("503 Slow Down", [("Content-Length", "0")])
        return [b""]

    def new_bucket(self) -> str:
        """Makes a bucket and returns its name."""
        name = f"bucket-{next(self._buckets)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"))
        return name

    def options(self) -> dict[str, Any]:
        """Returns the options of obstore that lead here, with quick repetitions."""
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        retry_config = {"backoff": QUICKLY, "max_retries": 4}
        return {"endpoint": self.url, **keys, "client_options": {"allow_http": True}, "retry_config": retry_config}

    def store(self, folder: str = "run") -> Any:
        """Returns a folder in a new bucket, as a store of obstore."""
        from obstore.store import from_url

        return from_url(f"s3://{self.new_bucket()}/{folder}", **self.options())

    @contextlib.contextmanager
    def refusing(self):
        """Refuses all credentials."""
        self._set_unchecked(0)
        try:
            yield
        finally:
            self._set_unchecked(float("inf"))

    def _set_unchecked(self, count: float) -> None:
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", str(count).encode(), headers)
        urllib.request.urlopen(request)

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()


def _silent_handler() -> Any:
    from moto.moto_server.werkzeug_app import MotoRequestHandler

    class Silent(MotoRequestHandler):
        def log_request(self, *_: Any) -> None:
            pass

    return Silent


@pytest.fixture(scope="session")
def s3_server():
    """One for all tests; moto is not among the packages for development, since it brings fifty others."""
    pytest.importorskip("obstore")
    moto = pytest.importorskip("moto.server", reason="no S3 server here: pip install 'moto[s3,server]'")
    server = S3Server(moto.DomainDispatcherApplication(moto.create_backend_app))
    yield server
    server.close()
