"""Checkpoints in a bucket: whole or not there, whatever request fails and whoever writes beside."""

import os
import pathlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from island_stores import KilledError, killing, wrap
from object_store import s3_server  # noqa: F401
from two_processes import run_two_processes

import jaxdist as jd
from jaxdist import checkpoint, islands
from jaxdist._stores import bucket as bucket_module
from jaxdist.checkpoint import _bucket, _bucket_run

obstore = pytest.importorskip("obstore")
STATE = {"w": jnp.arange(5.0)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch, tmp_path):
    """Repeats at once, and keeps temporary files out of the system's folder."""
    monkeypatch.setattr(_bucket, "SHORTEST_PAUSE", 0.0)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yield
    assert os.listdir(tmp_path / "temporary") == []


def times(factor):
    return {"w": STATE["w"] * factor}


def scale_of(place, **options):
    """The factor of the state that is restored; all its entries have it."""
    (w,) = checkpoint.load(place, **options).state.values()
    assert (w == np.arange(5.0) * w[1]).all()
    return int(w[1])


PLACES = {
    "memory URL": lambda request, path: f"memory:///{path.name}",
    "obstore": lambda request, path: obstore.store.MemoryStore(),
    "islands": lambda request, path: islands.memory(),
    "islands folder": lambda request, path: islands.folder(path / "run"),
    "S3": lambda request, path: request.getfixturevalue("s3_server").store(),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_run(kind, request, tmp_path):
    place = PLACES[kind](request, tmp_path)
    assert checkpoint.latest(place) is None
    assert checkpoint.resume(place, STATE).step == 0
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint.load(place)
    state = jd.place({"w": jnp.arange(3.0), "e": jd.PerWorker(jnp.ones(2))}, 4)
    with checkpoint.writing(place, keep=2) as writer:
        for step in (10, 20, 30):
            writer.save(state, step, data={"examples": step})
    assert checkpoint.latest(place) == 30
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 10"):
        checkpoint.load(place, step=10)
    like = jd.place({"w": jnp.zeros(3), "e": jd.PerWorker(jnp.zeros(2))}, 2)
    found = checkpoint.restore(place, like, step=20)
    assert (found["w"].tolist(), found["e"].value.tolist()) == ([0, 1, 2], [[1, 1], [1, 1]])
    with pytest.raises(ValueError, match=r"leaf `w` of .*/30-3-[0-9a-f]{8} is float32, the state to fill has int32"):
        checkpoint.restore(place, {**like, "w": jnp.zeros(3, jnp.int32)})
    # After a roll-back the later ones are abandoned.
    name = checkpoint.save(place, state, 25, data="again")
    assert pathlib.Path(name).name.startswith("25-4-")
    assert (checkpoint.latest(place), checkpoint.load(place).data) == (25, "again")
    checkpoint.save(place, state, 25, data="replaced")
    assert checkpoint.load(place, step=25).data == "replaced"


def test_nothing_but_checkpoints_is_in_the_bucket_and_a_copy_is_a_folder(tmp_path):
    """The format is that of a folder: a copy under the number of its step can be read without a bucket."""
    store = islands.memory()
    for step in (1, 2, 3):
        checkpoint.save(store, times(step), step, keep=2)
    tops = {name.partition("/")[0][:4] for name in store.list("")}
    assert tops == {"2-2-", "3-3-", "comm"}
    for name in store.list("3-3-"):
        file = tmp_path / "run" / "3" / name.partition("/")[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(store.get(name))
    assert scale_of(tmp_path / "run") == 3
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path / "run" / "3", check=False).returncode == 0


def test_what_is_foreign_is_neither_read_nor_deleted():
    store = islands.memory()
    foreign = [
        "2024/precious",
        "notes.txt",
        "7/manifest.json",
        "commits/readme",
        "commits/007",
        "9-1-kept/x",
        "commits",
    ]
    for name in foreign:
        store.put(name, b"not ours")
    assert checkpoint.latest(store) is None
    for step in (1, 2):
        checkpoint.save(store, times(step), step, keep=1)
    assert scale_of(store) == 2
    assert all(store.get(name) == b"not ours" for name in foreign)


def saving(store):
    """A replacement, a roll-back and the deletion of an old one, all with one save."""
    checkpoint.save(store, times(9), 20, keep=2)


@pytest.fixture(scope="module")
def three():
    """The names of a run with the steps 10, 20 and 30."""
    store = islands.memory()
    for step in (10, 15, 20, 30):
        checkpoint.save(store, times(step), step)
    return {name: store.get(name) for name in store.list("")}


def copy(names):
    store = islands.memory()
    for name, body in names.items():
        store.put(name, body)
    return store


def requests_of(function, store):
    """The names of the requests."""
    calls = []
    function(wrap(store, lambda number, name, function, arguments: (calls.append(name), function(*arguments))[1]))
    return calls


def test_a_death_before_any_request_leaves_the_old_or_the_new(three):
    total, committed = len(requests_of(saving, copy(three))), []
    for moment in range(total):
        store = copy(three)
        with pytest.raises(KilledError):
            saving(killing(store, moment))
        state = (checkpoint.latest(store), scale_of(store))
        assert state in [(30, 30), (20, 9)]
        committed.append(state == (20, 9))
        if committed[-1]:
            assert [step for step, *_ in _bucket_run.BucketRun(store).look()[0]] == [15, 20]
    # Committed by one request, and then for good.
    assert committed == sorted(committed)
    assert 0 < sum(committed) < total
    # What was left behind goes with the next save.
    checkpoint.save(store, times(40), 40, keep=1)
    assert {name.partition("-")[0] for name in store.list("") if not name.startswith("commits/")} == {"30", "40"}


def test_every_request_is_refused_and_then_unanswered(three):
    """Each is tried three times: the first is refused, and the answer to the second, which did its work, is lost."""
    store, tries = copy(three), {}

    def around(number, name, function, arguments):
        tries[name, arguments[0]] = tries.get((name, arguments[0]), 0) + 1
        if tries[name, arguments[0]] == 1:
            raise ConnectionError("503 SlowDown")
        answer = function(*arguments)
        if tries[name, arguments[0]] == 2:
            raise ConnectionError("connection reset")
        return answer

    saving(wrap(store, around))
    assert scale_of(store) == 9
    tries.clear()
    assert scale_of(wrap(store, around)) == 9


def test_every_request_to_s3_is_refused_and_then_unanswered(s3_server, monkeypatch):  # noqa: F811
    store, tries = s3_server.store(), {}

    def disturb(method, path):
        tries[method, path] = tries.get((method, path), 0) + 1
        return {1: "before", 2: "after"}.get(tries[method, path])

    monkeypatch.setattr(s3_server, "disturb", disturb)
    for step in (1, 2):
        checkpoint.save(store, times(step), step, keep=1)
        tries.clear()
    assert scale_of(store) == 2


def test_a_store_that_does_not_come_back_is_a_typed_error_and_nothing_is_committed(three, monkeypatch):
    monkeypatch.setattr(_bucket, "PATIENCE_SECONDS", 0.0)
    store = copy(three)

    def refuse(name, body):
        raise ConnectionError("503 SlowDown")

    with pytest.raises(checkpoint.CheckpointStoreError, match=r"503 SlowDown; check the network") as caught:
        saving(store._replace(put=refuse))
    assert caught.value.url == "the store"
    assert {name: store.get(name) for name in store.list("")} == three
    # Where it is unknown whether the commit was created, nothing is taken back.
    lost = store._replace(create=lambda *arguments: (store.create(*arguments), refuse(*arguments)))
    with pytest.raises(checkpoint.CheckpointStoreError):
        saving(lost)
    assert scale_of(store) == 9


def test_a_commit_stands_though_nothing_can_be_deleted(three):
    store = copy(three)

    def refuse(name):
        raise PermissionError("no rights to delete")

    with pytest.warns(UserWarning, match=r"checkpoint 20 is saved, but older ones remain: .*no rights to delete"):
        saving(store._replace(delete=refuse))
    assert scale_of(store) == 9


def test_each_damage_is_named_and_passed_over(three):
    newest = sorted(name for name in three if name.startswith("30-"))
    assert {"manifest.json", "SHA256SUMS", "_METADATA"} < {pathlib.Path(name).name for name in newest}
    for number, name in enumerate(newest):
        store, body = copy(three), three[name]
        if number % 3 == 0:
            store.delete(name)
        else:
            store.put(name, body[:-1] if number % 3 == 1 else bytes([body[0] ^ 1]) + body[1:])
        what = "is missing" if number % 3 == 0 else "holds other bytes"
        with pytest.raises(checkpoint.CheckpointDamagedError, match=f"checkpoint 30 is damaged: .* {what}") as caught:
            checkpoint.resume(store, STATE)
        assert caught.value.file == f"the store/{name}"
    found = checkpoint.resume(store, STATE, skip_damaged=True)
    assert (found.step, found.damaged, checkpoint.latest(store)) == (20, (30,), 20)
    assert newest[0].partition("/")[0] in found.reasons[0]
    # Neither deleted nor counted, also by later saves.
    checkpoint.save(store, times(40), 40, keep=1)
    assert any(name.startswith("30-") for name in store.list(""))
    for name in store.list("40-"):
        store.delete(name)
    with pytest.raises(checkpoint.NoCheckpointLeftError, match="all checkpoints of the run are damaged"):
        checkpoint.resume(store, STATE, skip_damaged=True)
    assert checkpoint.resume(store, STATE, skip_damaged=True, allow_fresh_start=True).step == 0


@pytest.mark.parametrize("body", [b"", b"[]\n#\n", b"not ours", None])
def test_a_damaged_list_is_named_and_no_run_begins_anew(three, body):
    store = copy(three)
    store.put("commits/4", three["commits/4"].replace(b"30", b"31") if body is None else body)
    for read in (
        checkpoint.latest,
        lambda place: checkpoint.resume(place, STATE, skip_damaged=True, allow_fresh_start=True),
    ):
        with pytest.raises(checkpoint.CheckpointStoreError, match=r"commits/4 is not a list .* delete it to return"):
            read(store)
    store.delete("commits/4")
    assert scale_of(store) == 20


def test_a_reader_beside_a_writer_gets_one_whole(three):
    """Before each of its requests all that it may have begun to read is replaced."""
    total = len(requests_of(scale_of, copy(three)))
    for moment in range(total):
        store = copy(three)

        def around(number, name, function, arguments, store=store, moment=moment):
            if number == moment:
                checkpoint.save(store, times(50), 50, keep=1)
            return function(*arguments)

        assert scale_of(wrap(store, around)) in (30, 50)
    # The last one replaced it after all of it had been read.
    assert checkpoint.latest(store) == 50


def three_files(names):
    return [name for name in names if name.startswith("30-")]


def problem_of(function, *arguments):
    """The message of a `ValueError`, or None."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return None


def another(monkeypatch, name="process 1 elsewhere"):
    monkeypatch.setattr(_bucket_run, "_this_process", lambda: name)


def test_of_two_writers_the_second_to_commit_is_refused(three, monkeypatch):
    """At whatever request of the first the second one saves; of many uploads in a row the first stands for all."""
    names, won = requests_of(saving, copy(three)), []
    for moment in [number for number, name in enumerate(names) if name != [None, *names][number]]:
        store = copy(three)

        def around(number, name, function, arguments, store=store, moment=moment):
            if number == moment:
                with monkeypatch.context() as patch:
                    another(patch)
                    checkpoint.save(store, times(50), 50, keep=2)
            return function(*arguments)

        problem = problem_of(saving, wrap(store, around))
        assert problem is None or "another process writes checkpoints into the store (process 1 elsewhere)" in problem
        won.append(problem is None)
        # Whichever it was, what is listed is whole: no file has gone.
        for _, folder, _ in _bucket_run.BucketRun(store).look()[0]:
            assert len(store.list(f"{folder}/")) == len(three_files(three))
        # One that began after the other had saved has rolled the run back.
        assert checkpoint.latest(store) == (20 if won[-1] and moment < 2 else 50)
    assert {False, True} == set(won)


def test_a_writer_that_slept_for_long_destroys_nothing(three, monkeypatch):
    """Its number is free again: the lists of others have been deleted since."""
    store, woken = copy(three), []

    def create(name, body):
        if not woken:
            woken.append(name)
            with monkeypatch.context() as patch:
                another(patch)
                for step in (40, 50, 60):
                    checkpoint.save(store, times(step), step, keep=5)
            assert store.get(name) is None
        return store.create(name, body)

    with pytest.raises(ValueError, match="another process writes checkpoints"):
        saving(store._replace(create=create))
    assert [scale_of(store, step=step) for step, *_ in _bucket_run.BucketRun(store).look()[0]] == [20, 30, 40, 50, 60]


def test_a_save_under_way_is_not_swept(three):
    """It begins after another writer's commit, and before that one looks what it may delete."""
    store, began, swept = copy(three), threading.Event(), threading.Event()

    def second(number, name, function, arguments):
        if name == "create":
            began.set()
            assert swept.wait(60)
        return function(*arguments)

    def first(number, name, function, arguments):
        if name == "list" and arguments == ("",):
            later = pool.submit(checkpoint.save, wrap(store, second), times(50), 50)
            assert began.wait(60)
            laters.append(later)
        return function(*arguments)

    laters = []
    with ThreadPoolExecutor(1) as pool:
        saving(wrap(store, first))
        swept.set()
        laters[0].result()
    assert [scale_of(store, step=step) for step in (15, 20, 50)] == [15, 9, 50]


def test_a_writer_and_another_job_that_sets_a_damaged_one_aside(three, monkeypatch):
    store = copy(three)
    with checkpoint.writing(store) as writer:
        store.delete(next(name for name in three if name.startswith("30-") and name.endswith("manifest.json")))
        with monkeypatch.context() as patch:
            another(patch)
            assert checkpoint.resume(store, STATE, skip_damaged=True).step == 20
        writer.save(times(40), 40)
    assert [step for step, *_ in _bucket_run.BucketRun(store).look()[0]] == [10, 15, 20, 40]


def test_one_writer_of_a_process(monkeypatch):
    store = islands.memory()
    with checkpoint.writing(store), pytest.raises(ValueError, match=r"this process writes checkpoints into .* already"):
        checkpoint.save(store, STATE, 1)
    with checkpoint.writing("memory:///run"), pytest.raises(ValueError, match="memory:///run already"):
        checkpoint.save("memory:///run/", STATE, 1)


def test_credentials_buckets_and_addresses(s3_server, monkeypatch):  # noqa: F811
    """Each is one error at once, names the cure, and starts no run over."""
    monkeypatch.setattr(_bucket, "PATIENCE_SECONDS", 0.0)
    from_url, options = obstore.store.from_url, s3_server.options()
    bucket = s3_server.new_bucket()
    cases = {
        "create the bucket first, or mend its name": from_url("s3://no-such-bucket/run", **options),
        "AWS_ALLOW_HTTP=true": from_url(f"s3://{bucket}", **{**options, "client_options": {}}),
        "check the network and the endpoint": from_url(
            f"s3://{bucket}", **{**options, "endpoint": "http://127.0.0.1:1"}
        ),
    }
    for cure, store in cases.items():
        for use in (
            checkpoint.latest,
            lambda store: checkpoint.save(store, STATE, 1),
            lambda store: checkpoint.resume(store, STATE, skip_damaged=True, allow_fresh_start=True),
        ):
            with pytest.raises(checkpoint.CheckpointStoreError, match=cure):
                use(store)
    store = from_url(f"s3://{bucket}", **options)
    checkpoint.save(store, STATE, 1)
    with s3_server.refusing():
        for use in (checkpoint.latest, checkpoint.load, lambda store: checkpoint.save(store, STATE, 2)):
            with pytest.raises(checkpoint.CheckpointStoreError, match=r"InvalidAccessKeyId: .*; mend the key"):
                use(store)
    with pytest.raises(ValueError, match="is no bucket, such as s3://"):
        checkpoint.latest("nonsense://bucket")
    with pytest.raises(ValueError, match="a folder, a URL, a store of obstore or of islands is needed, got 7"):
        checkpoint.latest(7)
    with pytest.raises(ValueError, match="pass the URL as text"):
        checkpoint.latest(pathlib.Path("s3://bucket/run"))


def test_a_url_takes_its_options_from_the_environment(s3_server, monkeypatch):  # noqa: F811
    bucket = s3_server.new_bucket()
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    name = checkpoint.save(f"s3://{bucket}/a/run", STATE, 1)
    assert name.startswith(f"s3://{bucket}/a/run/1-1-")
    assert checkpoint.latest(f"s3://{bucket}/a/run/") == 1
    assert checkpoint.latest(f"s3://{bucket}/a") is None


def test_without_obstore_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[islands\]' in a clone"):
        checkpoint.latest("s3://bucket/run")


def test_large_files_go_in_pieces(s3_server, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bucket_module, "PIECE", 5 * 2**20)  # S3 takes parts of at least 5 MiB
    state = {"noise": jnp.asarray(np.random.default_rng(0).integers(0, 2**32, 3 << 20, np.uint32))}
    store = s3_server.store()
    begun = len(s3_server.requests)
    checkpoint.save(store, state, 1)
    sent = s3_server.requests[begun:]
    assert max(size for _, _, size in sent) <= 5 * 2**20 + 2**16
    assert sum(size for _, _, size in sent) < 1.01 * 12 * 2**20
    found = checkpoint.restore(store, state)
    assert (found["noise"] == state["noise"]).all()


def test_what_a_save_and_a_restore_cost(s3_server):  # noqa: F811
    """The figures of the reference: docs/reference/checkpoint.md."""
    store = s3_server.store()
    checkpoint.save(store, STATE, 1, keep=1)
    costs = {}
    for name, use in {
        "save": lambda: checkpoint.save(store, STATE, 2, keep=1),
        "latest": lambda: checkpoint.latest(store),
        "restore": lambda: checkpoint.restore(store, STATE),
    }.items():
        begun = len(s3_server.requests)
        use()
        costs[name] = len(s3_server.requests) - begun
    files = len([name for name in _bucket.open_patiently(store).sizes("") if name.startswith("2-2-")])
    assert costs == {"save": files + 5, "latest": 2, "restore": files + 3}
    assert files == 10


def test_what_a_killed_process_left_on_this_machine_is_deleted(tmp_path):
    left = tmp_path / "temporary" / f"{_bucket_run.STAGED}dead"
    (left / "files").mkdir(parents=True)
    (left / _bucket_run.LOCK).touch()
    with _bucket_run._stage() as first, _bucket_run._stage() as second:
        assert not left.exists()
        assert [first.is_dir(), second.is_dir()] == [True, True]


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    server = request.getfixturevalue("s3_server")
    bucket = server.new_bucket()
    results = run_two_processes("bucket.py", tmp_path_factory.mktemp("two"), server.url, bucket, timeout=150)
    return results, obstore.store.from_url(f"s3://{bucket}/run", **server.options())


@pytest.mark.slow
def test_two_processes(processes):
    results, store = processes
    for number, result in enumerate(results):
        assert result["name"] == "4-4-"
        assert result["latest"] == 4
        assert result["resumed together"] == result["resumed apart"] == [4, None, [True] * 4]
        assert result["left"] == []
        for process in (0, 1):
            name, text = result[f"upload of {process}"]
            assert name == ("OSError" if number == process else "CheckpointPeerError")
            assert "Input/output error" in text
    # A machine downloads one copy, each process as much of it; processes that share no folder have one each.
    sizes = _bucket.open_patiently(store).sizes("4-4-")
    total = sum(size for name, size in sizes.items() if not name.endswith("SHA256SUMS"))
    together = [result["received together"] for result in results]
    assert sum(together) == total
    assert max(together) < 0.6 * total
    assert [result["received apart"] for result in results] == [total] * 2
    # A failure or damage in the part of one process reaches the other one.
    (peer, what), (store_error, _) = (result["refused"] for result in results)
    assert (peer, store_error) == ("CheckpointPeerError", "CheckpointStoreError")
    assert "no rights to read" in what
    short, same = (result["short"] for result in results)
    assert short == same
    assert short[0] == "CheckpointDamagedError"
    # And one process reads what two have written.
    assert checkpoint.load(store).state["cut"].value[:3].tolist() == [0, 4, 8]
    tops = {name.partition("/")[0][:4] for name in _bucket.open_patiently(store).sizes("")}
    assert tops == {"3-3-", "4-4-", "comm"}
