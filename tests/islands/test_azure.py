"""Azure's buckets, by its emulator Azurite, which npm installs: slow, and skipped where that is not possible."""

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from email.utils import formatdate

import pytest
from buckets import forget_credentials
from islands_run import method, train

from jaxdist import islands
from jaxdist.islands.store import check_usable

pytestmark = pytest.mark.slow
pytest.importorskip("obstore")

# The account that every emulator has.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("no node and npm here")
    folder = tmp_path_factory.mktemp("azurite")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "azurite@3"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as problem:
        pytest.skip(f"npm cannot install azurite: {problem}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["node_modules/.bin/azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    # Its checks of the version of the interface refuse clients that are newer than the emulator.
    command += ["--location", "data", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(autouse=True)
def connection_string(endpoint, tmp_path, monkeypatch):
    forget_credentials(monkeypatch, tmp_path)
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)


def create_container(endpoint, name):
    date, version = formatdate(usegmt=True), "2021-08-06"
    # The account is twice in the emulator's resource: once of its own, once as the first part of the path.
    signed = "\n".join(["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"])
    signed += f"\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers = {"x-ms-date": date, "x-ms-version": version}
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", headers=headers, method="PUT")
    urllib.request.urlopen(request).close()


@pytest.fixture(scope="module")
def container(endpoint):
    create_container(endpoint, "islands")
    return "az://islands"


def test_a_container_is_a_store(container):
    store = islands.bucket(f"{container}/laws")
    check_usable(store)
    assert store.create("a/1", b"first")
    assert not store.create("a/1", b"second")
    body = bytes(range(256)) * (33 * 2**12)
    store.put("bodies/large", body)
    store.put("bodies/empty", b"")
    assert (store.get("a/1"), store.get("bodies/large") == body, store.get("bodies/empty")) == (b"first", True, b"")
    assert store.list("bodies/") == ["bodies/empty", "bodies/large"]
    store.delete_many(["a/1", "nothing", "bodies/empty"])
    store.delete("nothing")
    assert store.list("") == ["bodies/large"]


def test_a_run_has_the_bits_of_a_run_over_a_dict(container):
    tx = method("4 bits with feedback")
    stores = (islands.bucket(f"{container}/run"), islands.memory())
    over_azure, over_dict = (train(store, tx, "a", 3, keep_every=1)[1] for store in stores)
    assert [report.digest for report in over_azure] == [report.digest for report in over_dict]


def test_what_is_wrong_is_named(container, monkeypatch):
    for ask in (lambda store: store.get("x"), lambda store: store.create("x", b""), lambda store: store.list("")):
        with pytest.raises(FileNotFoundError, match=r"ContainerNotFound.*create the bucket first"):
            ask(islands.bucket("az://missing/run"))
    wrong = base64.b64encode(b"other").decode()
    with pytest.raises(PermissionError, match=r"mend the key.*AZURE_STORAGE_CONNECTION_STRING|rights"):
        islands.bucket(f"{container}/run", account_key=wrong).get("x")
