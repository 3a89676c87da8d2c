"""A headless Chromium that opens a page and says what a reader would see.

It speaks the DevTools protocol through a pair of pipes, so no driver, port or Python package is needed.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
# What a page logs, throws, or asks for in vain.
COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")


def find_chromium() -> str | None:
    """The command that starts Chromium, or None where it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a running browser: opens addresses, evaluates JavaScript, takes pictures."""

    def __init__(self, commands: int, answers: int, timeout: float = 120):
        self._commands, self._answers, self._timeout = commands, answers, timeout
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []  # the addresses of all that pages have asked for
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            received = os.read(self._answers, 1 << 20)
            if not received:
                raise ConnectionError("Chromium has closed its pipe")
            self._buffer += received
        message, self._buffer = self._buffer.split(b"\0", 1)
        decoded = json.loads(message)
        called = decoded.get("method", "")
        is_error = called == "Runtime.consoleAPICalled" and decoded["params"]["type"] in ("error", "assert")
        if called in COMPLAINTS or is_error:
            self.complaints.append(json.dumps(decoded["params"]))
        if called == "Network.requestWillBeSent":
            self.requests.append(decoded["params"]["request"]["url"])
        return decoded

    def _send(self, method: str, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def show_as(self, width: int, height: int = 900, *, phone: bool = False, dark: bool = False):
        """Sets the size of the window in CSS pixels and the color scheme that the reader prefers."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str):
        """Goes to an address and waits until everything on the page is loaded."""
        self.complaints.clear()
        self._send("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def forget(self, address: str):
        """Clears what pages of an address have stored, such as the color scheme that was chosen."""
        self.open("about:blank")  # an open page would store its settings again
        self._send("Storage.clearDataForOrigin", origin=address, storageTypes="local_storage")

    def evaluate(self, expression: str):
        """The value of a JavaScript expression."""
        result = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def wait_for(self, expression: str):
        """Waits until a JavaScript expression is true, and returns its value."""
        end = time.monotonic() + self._timeout
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true within {self._timeout} s: {expression}")
            time.sleep(0.05)
        return value

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        picture = self._send("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        return base64.b64decode(picture["data"])

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self._send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@contextmanager
def open_browser() -> Iterator[Page]:
    """Starts Chromium with an empty profile; it ends with the block."""
    chromium = find_chromium()
    assert chromium is not None
    ours, theirs = os.pipe(), os.pipe()
    # Chromium reads from descriptor 3 and writes to 4; above 9 none of the four is in the way of those.
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0], theirs[1]))
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{read} 4>&{write}', chromium, *FLAGS, f"--user-data-dir={profile}"]
        browser = subprocess.Popen(
            command, pass_fds=(read, write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for end in (ours[0], theirs[1], read, write):
            os.close(end)
        try:
            yield Page(ours[1], theirs[0])
        finally:
            # Chromium ends when its pipe does.
            os.close(ours[1])
            os.close(theirs[0])
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args):
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves a folder on a free port of this machine; yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
