"""Stores: create if absent, whole bytes, listings; and what a store that does otherwise is told."""

import contextlib
import errno
import os
import socket
import threading
import time
import uuid

import pytest
from buckets import s3_bucket, s3_server
from islands_run import method, train_together

from jaxdist import islands
from jaxdist._stores import bucket as bucket_module
from jaxdist.islands.connection import Connection
from jaxdist.islands.store import check_usable, open_store

# Set by the fixture: the address of an S3 server.
S3 = []


STORES = {
    "folder": lambda path: islands.folder(path / "run"),
    "memory": lambda path: islands.memory(),
    "bucket": lambda path: (pytest.importorskip("obstore"), islands.bucket("memory:///"))[1],
    "bucket in a folder": lambda path: (
        pytest.importorskip("obstore"),
        (path / "bucket").mkdir(),
        islands.bucket(f"file://{path / 'bucket'}"),
    )[2],
    "S3": lambda path: s3_bucket(S3[0], f"s3://islands/{uuid.uuid4().hex}"),
}


@pytest.fixture(scope="module")
def server():
    """An S3 server of this process."""
    pytest.importorskip("obstore")
    with s3_server() as url:
        S3[:] = [url]
        yield url


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    if request.param == "S3":
        request.getfixturevalue("server")
    return STORES[request.param](tmp_path)


def test_a_name_is_created_once(store):
    assert store.create("rounds/1/commit", b"first")
    assert not store.create("rounds/1/commit", b"second")
    assert store.get("rounds/1/commit") == b"first"


def test_many_names_are_deleted_though_some_are_missing(store):
    for name in ("a/1", "a/2", "b/1"):
        store.create(name, b"x")
    store.delete_many(["a/1", "a/2", "a/3"])
    assert store.list("") == ["b/1"]
    store.delete_many([])
    assert store.list("") == ["b/1"]


def test_of_many_at_once_one_creates(store):
    results = []
    start = threading.Barrier(8)

    def create(number):
        start.wait()
        results.append((store.create("a/name", b"%d" % number), b"%d" % number))

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [body for created, body in results if created]
    assert [store.get("a/name")] == winners


def test_names_are_listed_by_prefix_and_deleted(store):
    for name in ("a/1", "a/2/x", "ab", "b/1"):
        store.put(name, name.encode())
    assert store.list("a/") == ["a/1", "a/2/x"]
    assert store.list("a/2/") == ["a/2/x"]
    assert store.list("nothing/") == []
    store.delete("a/1")
    store.delete("a/1")
    assert store.get("a/1") is None
    assert store.list("a/") == ["a/2/x"]
    store.delete_many(["a/2/x", "nothing", "ab"])
    store.delete_many(["a/2/x"])
    store.delete_many([])
    assert store.list("") == ["b/1"]


def test_bytes_come_back_whole(store):
    body = bytes(range(256)) * 5000
    store.put("bodies/x", body)
    assert store.get("bodies/x") == body
    store.put("bodies/empty", b"")
    assert store.get("bodies/empty") == b""


def test_a_part_of_the_bytes_is_read(store):
    store.put("bodies/x", b"0123456789")
    found = [store.get_range("bodies/x", *bounds) for bounds in ((0, 10), (2, 5), (8, 99), (10, 20), (50, 60), (3, 3))]
    assert found == [b"0123456789", b"234", b"89", b"", b"", b""]
    assert store.get_range("bodies/y", 0, 5) is None


@pytest.mark.parametrize("fields", [7, 6, 5])
def test_a_store_without_ranges_is_read_whole(fields):
    store = islands.memory()
    connection = Connection(islands.SharedStore(*store[:fields]))
    store.put("bodies/x", b"0123456789")
    assert connection.get_range("bodies/x", 3, 7) == b"3456"
    assert connection.get_range("bodies/y", 3, 7) is None
    # A whole body has been read where the store has no ranges.
    assert connection.take_traffic().received == (4 if fields == 7 else 10)


def test_large_bytes_come_back_whole_in_pieces(store, monkeypatch):
    # S3 takes parts of at least 5 MiB.
    monkeypatch.setattr(bucket_module, "PIECE", 6 * 2**20)
    body = bytes(range(256)) * 2**16
    store.put("bodies/x", body)
    assert store.get("bodies/x") == body


# By default `test_buckets.py` has a run over a server that refuses a third of the requests.
@pytest.mark.slow
def test_a_run_over_s3_has_the_bits_of_a_run_over_a_dict(server):
    """Three islands that begin and commit at the same moment: the server lets one create each name."""
    tx, names = method("4 bits with feedback"), ["a", "b", "c"]
    stores = (s3_bucket(server), islands.memory())
    found = [train_together(store, tx, names, 5, keep_every=2) for store in stores]
    over_s3, over_dict = ([[report.digest for report in run[name][1]] for name in names] for run in found)
    assert over_s3 == over_dict
    assert all(report.members == ("a", "b", "c") for name in names for report in found[0][name][1])


def test_a_usable_store_passes_and_is_left_clean(store):
    check_usable(store)
    assert store.list("probe/") == []


def test_a_store_that_overwrites_is_refused():
    store = islands.memory()
    lying = store._replace(create=lambda name, body: store.put(name, body) is None)
    with pytest.raises(islands.StoreUnusableError, match=r"created one name 2 times.*If-None-Match"):
        check_usable(lying)


def test_a_store_without_rights_is_refused():
    def refuse(name, body):
        raise PermissionError(13, "denied")

    with pytest.raises(islands.StoreUnusableError, match=r"PermissionError.*check its address and your rights"):
        check_usable(islands.memory()._replace(create=refuse))


def test_a_store_that_never_answers_is_refused_with_what_it_says(monkeypatch):
    monkeypatch.setattr("jaxdist.islands.store.PROBE_PAUSES", (0.0, 0.0))
    calls = []

    def refuse(name, body):
        calls.append(name)
        raise ConnectionError("503 SlowDown")

    with pytest.raises(islands.StoreUnusableError, match="ConnectionError: 503 SlowDown"):
        check_usable(islands.memory()._replace(create=refuse))
    assert len(set(calls)) == 3


def test_a_store_that_is_busy_every_second_time_passes(monkeypatch):
    """A probe has several requests: if all of them had to pass at once, few islands could join."""
    monkeypatch.setattr("jaxdist.islands.store.PROBE_PAUSES", (0.0, 0.0))
    store, calls = islands.memory(), []

    def refuse_every_second(function):
        def call(*arguments):
            calls.append(arguments)
            if len(calls) % 2:
                raise ConnectionError("503 SlowDown")
            return function(*arguments)

        return call

    check_usable(islands.SharedStore(*map(refuse_every_second, store)))
    assert len(calls) > 5
    assert store.list("") == []


def test_a_probe_whose_answer_is_lost_is_no_store_that_overwrites(monkeypatch):
    monkeypatch.setattr("jaxdist.islands.store.PROBE_PAUSES", (0.0, 0.0))
    store, lost = islands.memory(), []

    def create(name, body):
        created = store.create(name, body)
        if not lost:
            lost.append(name)
            raise ConnectionError("the answer was cut")
        return created

    check_usable(store._replace(create=create))
    # A clean-up of the run deletes it.
    assert store.list("") == lost


def test_a_store_that_does_not_list_is_refused():
    with pytest.raises(islands.StoreUnusableError, match="does not list"):
        check_usable(islands.memory()._replace(list=lambda prefix: []))


class S3Double:
    """A server that answers every request with one status, or never."""

    def __init__(self, status):
        self.requests, self._status, self._socket = 0, status, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._open = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._open.append(connection)
                connection.recv(65536)
                self.requests += 1
                if self._status:
                    answer = f"HTTP/1.1 {self._status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    connection.sendall(answer.encode())
                    connection.close()

    def bucket(self, **client_options):
        options = {"endpoint": self.url, "region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}
        return islands.bucket("s3://bucket/run", **options, client_options={"allow_http": True, **client_options})

    def close(self):
        # Ends what waits in `accept` and `recv`.
        for one in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in (self._socket, *self._open):
            one.close()


@pytest.mark.parametrize("status", [409, 429, 503])
def test_a_bucket_that_refuses_for_now_is_asked_again_by_the_island_until_its_deadline(status):
    pytest.importorskip("obstore")
    with contextlib.closing(S3Double(status)) as server:
        store, calls = server.bucket(), []

        def create(name, body):
            calls.append(name)
            if len(calls) == 3:
                connection.deadline = 0.0
            return store.create(name, body)

        connection = Connection(store._replace(create=create))
        with pytest.raises(ConnectionError, match="the store is out of reach"):
            connection.create("rounds/1/commit", b"{}")
        # Not by obstore. After a conflict the store also looks whether the name is there.
        assert (len(calls), server.requests) == (3, 6 if status == 409 else 3)


def test_a_bucket_that_is_silent_holds_an_island_for_one_request():
    pytest.importorskip("obstore")
    with contextlib.closing(S3Double(None)) as server:
        store, started = server.bucket(timeout="300ms"), time.monotonic()
        with pytest.raises(Exception, match=r"[Tt]imed? ?out|Timeout|error sending request"):
            store.get("name")
        # A second one begins where the first ends just before the time is up; by default there are ten.
        assert server.requests <= 2
        assert time.monotonic() - started < 60


def test_urls(tmp_path):
    open_store(f"file://{tmp_path}/a").put("x", b"1")
    open_store(str(tmp_path / "b")).put("x", b"2")
    assert (tmp_path / "a/x").read_bytes() + (tmp_path / "b/x").read_bytes() == b"12"
    store = islands.memory()
    assert open_store(store) is store


def test_a_bucket_without_obstore_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[islands\]' in a clone"):
        open_store("s3://bucket/run")


def test_a_folder_that_cannot_be_read_is_no_empty_folder(tmp_path, monkeypatch):
    """As of an NFS server that does not answer."""
    store = islands.folder(tmp_path / "run")
    store.put("names/a/1", b"")

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store.list("names/")


def test_a_folder_that_is_gone_is_no_new_run(tmp_path):
    """As of a disk that is not mounted any more: nothing is written below its place."""
    store, away = islands.folder(tmp_path / "run"), tmp_path / "away"
    assert store.list("") == []
    store.put("a", b"first")
    (tmp_path / "run").rename(away)
    for ask in (
        lambda: store.list(""),
        lambda: store.get("a"),
        lambda: store.put("b", b"second"),
        lambda: store.create("b", b"second"),
    ):
        with pytest.raises(ConnectionError, match="is gone"):
            ask()
    assert not (tmp_path / "run").exists()
    away.rename(tmp_path / "run")
    assert (store.list(""), store.get("a")) == (["a"], b"first")


def test_a_file_system_without_hard_links_is_refused_with_the_cure(tmp_path, monkeypatch):
    """As a bucket that is mounted by s3fs or gcsfuse."""

    def fail(source, target):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(islands.StoreUnusableError, match=r"without hard links.*s3fs, gcsfuse.*take the URL"):
        check_usable(islands.folder(tmp_path / "run"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_has_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o002)
    try:
        islands.folder(tmp_path / "run").create("rounds/1", b"record")
    finally:
        os.umask(before)
    rights = [(tmp_path / "run" / place).stat().st_mode & 0o777 for place in (".", "rounds", "rounds/1")]
    assert rights == [0o775, 0o775, 0o664]


@pytest.mark.parametrize("ask", ["create", "put", "get", "delete"])
def test_what_another_user_keeps_to_himself_is_named_with_the_umask(ask, tmp_path, monkeypatch):
    """Root may do all, so that the system's refusals are made here."""
    store = islands.folder(tmp_path / "run")
    store.create("rounds/1", b"record")

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    for place, name in [("builtins", "open"), ("pathlib.Path", "read_bytes"), ("pathlib.Path", "unlink")]:
        monkeypatch.setattr(f"{place}.{name}", refuse)
    body = (b"other",) if ask in ("create", "put") else ()
    name = "rounds/1" if ask in ("get", "delete") else "rounds/2"
    with pytest.raises(PermissionError, match=rf"{tmp_path}/run/rounds.* belongs to user \d+ .*umask of 002"):
        getattr(store, ask)(name, *body)


def test_a_full_disk_keeps_nothing_of_what_it_refused(tmp_path, monkeypatch):
    store = islands.folder(tmp_path)

    def fail(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for write in (store.put, store.create):
        with pytest.raises(OSError, match=rf"No space left on device for {tmp_path}; free some of that disk") as found:
            write("bodies/1", b"first")
        assert found.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_bytes_are_on_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """A record that outlives a power failure must not name a body that does not."""
    store, synced = islands.folder(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append([path.name for path in tmp_path.rglob("name-*")]))
    store.put("bodies/name-1", b"first")
    store.create("anchors/name-2", b"second")
    assert synced == [[], ["name-1"]]


def test_temporary_files_of_dead_processes_are_removed_a_day_later(tmp_path):
    store = islands.folder(tmp_path)
    for name in ("rounds/1", "rounds/2"):
        store.create(name, b"record")
    dead, writing = tmp_path / "rounds" / ".writing-1", tmp_path / "rounds" / ".writing-2"
    for file in (dead, writing):
        file.write_bytes(b"half")
    yesterday = time.time() - 90_000
    os.utime(dead, (yesterday, yesterday))
    store.delete("rounds/1")
    assert (dead.exists(), writing.exists()) == (False, True)
    assert store.list("rounds/") == ["rounds/2"]
