"""`jaxdist train --islands`: several jobs that meet in a folder."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from buckets import forget_credentials, s3_bucket, s3_server
from islands_run import GOALS, begin, method, step_of, train, wait_for_threads

from jaxdist import checkpoint, islands, offload
from jaxdist._cli import main as cli
from jaxdist._cli import results
from jaxdist._cli.commands import show

PROVIDERS = """
from pathlib import Path

def keys(asked):
    Path("asked").write_text(asked)
    return {"access_key_id": "key", "secret_access_key": "secret", "expires_at": None}

def renew():
    return keys("renew")

class Renewed:
    def __call__(self):
        return keys("Renewed")
"""
JOIN = islands.join
DIGITS = ["--workload", "digits", "--model", "convnet:2", "--batch", "8", "--optimizer", "sgd:0.1"]


@pytest.mark.slow
def test_an_island_trains_meets_and_resumes(tmp_path, capsys):
    url, out = str(tmp_path / "run"), str(tmp_path / "out")
    arguments = ["train", *DIGITS, "--sync", "diloco:H=2", "--reducer", "ef:qsgd:4", "--devices", "2", "--out", out]
    assert cli.main([*arguments, "--islands", url, "--name", "a", "--steps", "4"]) == 0
    assert "2 meetings, 2 of them counted; the last round took a." in " ".join(capsys.readouterr().out.split())
    rounds = [line for line in results.read_log(tmp_path / "out/log.jsonl") if line["kind"] == "round"]
    assert [line["round"] for line in rounds] == [1, 2]
    assert all(line["counted"] for line in rounds)
    assert cli.main([*arguments, "--islands", url, "--name", "a", "--steps", "6", "--resume"]) == 0
    found = islands.status(url)
    assert (found.round, found.sessions) == (3, {"a": 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--islands", "x"], "--islands needs --sync"),
        (["--islands", "x", "--sync", "diloco:H=2", "--zero", "1"], "--zero: not with --islands"),
        (["--name", "a", "--begin-with", "2"], "--name, --begin-with: only with --islands"),
        (["--no-begin"], "--no-begin: only with --islands"),
        (["--overlap", "--quorum", "2"], "--quorum, --overlap: only with --islands"),
        (["--eager", "--owners", "2"], "--eager, --owners: only with --islands"),
        (["--engine", "ray", "--owners", "2"], "--owners: not with --engine ray"),
        (["--islands", "x", "--sync", "diloco:H=2", "--name", "a", "--eager"], "join with overlap=True too"),
        (
            ["--islands", "x", "--sync", "diloco:H=2", "--name", "a", "--quorum", "0"],
            "quorum must be at least 1, got 0",
        ),
        (["--islands", "x", "--sync", "diloco:H=2", "--store", "region=auto"], "for a bucket, such as s3://bucket/run"),
        (["--islands", "x", "--sync", "muloco:H=2,learning_rate=0.1"], "islands take diloco, slowmo, local_sgd"),
        (
            ["--islands", "x", "--sync", "streaming_diloco:H=4,fragments=2", "--name", "a"],
            "islands need local_steps with delay=0 (overlap=True of join hides the exchange)",
        ),
        (["--islands", "x", "--sync", "diloco:H=4", "--name", "a/b"], "name of an island"),
        (["--islands", "x", "--sync", "diloco:H=2", "--save-every", "-2"], "--save-every must be at least 1, got -2"),
        (["--engine", "ray", "--islands", "x"], "--islands: not with --engine ray"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *DIGITS, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_join_is_given_every_option(tmp_path, monkeypatch, capsys):
    found = {}

    def join(url, tx, **given):
        found.update(given)
        raise ValueError("joined")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(islands, "join", join)
    given = {"owners": 3, "quorum": 2, "begin_with": 4, "keep_every": 5, "grace": 0.5}
    given |= {"round_timeout": 2.0, "patience": 9.0, "name": "a"}
    options = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    island = ["--islands", "x", "--sync", "diloco:H=2", "--overlap", "--eager", "--no-begin"]
    assert cli.main(["train", *DIGITS, *island, *options]) == 2
    assert "joined" in capsys.readouterr().err
    assert found == given | {"overlap": True, "eager": True, "begin": False}
    # The help fits a screen; moments are for scripts.
    assert {"url", "tx", "moments", *found} == set(inspect.signature(JOIN).parameters)


@pytest.mark.slow
def test_two_jobs_train_together_and_one_leaves_at_sigterm(tmp_path):
    """The one that leaves sends its progress, and the other waits for it no longer."""

    def start(name, steps):
        command = [sys.executable, "-m", "jaxdist._cli", "train", *DIGITS, "--sync", "local_sgd:H=2", "--devices", "1"]
        command += ["--islands", str(tmp_path / "run"), "--name", name, "--begin-with", "2", "--round-timeout", "300"]
        command += ["--steps", str(steps), "--out", str(tmp_path / name)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def rounds(name):
        log = tmp_path / name / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in map(json.loads, lines[:-1]) if line["kind"] == "round"]

    stays, leaves = start("stays", 10**6), start("leaves", 10**6)
    try:
        for count, name in [(3, "stays"), (3, "leaves")]:
            while len(rounds(name)) < count:
                assert (stays.poll(), leaves.poll()) == (None, None)
                time.sleep(0.1)
        leaves.send_signal(signal.SIGTERM)
        printed, _ = leaves.communicate(timeout=300)
        assert leaves.returncode == 0
        assert "stopped after step" in printed
        after = len(rounds("stays"))
        while len(rounds("stays")) < after + 3:
            assert stays.poll() is None
            time.sleep(0.1)
        found = rounds("stays")
        assert found[0]["members"] == ["leaves", "stays"]
        assert found[-1]["members"] == ["stays"]
        assert all(line["missing"] == [] for line in found)
    finally:
        for job in (stays, leaves):
            job.kill()
            job.communicate()


@pytest.mark.slow
def test_an_island_that_must_give_up_leaves_its_progress_and_a_code(tmp_path, capsys):
    arguments = ["train", *DIGITS, "--sync", "diloco:H=2", "--devices", "1", "--out", str(tmp_path / "out")]
    arguments += ["--islands", str(tmp_path / "run"), "--name", "a", "--steps", "40"]
    arguments += ["--quorum", "2", "--round-timeout", "0.1", "--patience", "0.5"]
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("jaxdist: error: ")
    assert "quorum" in printed[-1]
    assert checkpoint.latest(tmp_path / "out/checkpoint") is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("region", "--store takes KEY=VALUE"),
        ("allow_http=perhaps", "allow_http is true or false, got 'perhaps'"),
        ("timeout=long", "timeout is a number of seconds, got 'long'"),
        ("credential_provider=renew", "credential_provider is MODULE:NAME of a function or class"),
        ("credential_provider=string:digits", "string:digits is a str, and not a function or class"),
        ("endpont=http://10.0.0.7:9000", "'endpont' is not valid for store 'S3'"),
    ],
)
def test_mistyped_options_of_a_store_are_one_line(options, message, capsys):
    pytest.importorskip("obstore")
    assert cli.main(["islands", "s3://bucket/run", "--store", f"access_key_id=key,{options}"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.fixture(scope="module")
def server():
    """The address of a server; each test has a run of its own in its bucket."""
    pytest.importorskip("obstore")
    with s3_server() as url:
        yield url


def test_a_run_in_a_bucket_is_shown_with_the_options_of_its_store(server, tmp_path, monkeypatch, capsys):
    forget_credentials(monkeypatch, tmp_path)
    train(s3_bucket(server), method(), "eu-1", 2)
    store = f"endpoint={server},region=us-east-1,access_key_id=key,secret_access_key=secret,timeout=20"
    assert cli.main(["islands", "s3://islands/run", "--store", store]) == 0
    assert "eu-1" in capsys.readouterr().out
    assert cli.main(["islands", "s3://islands/other", "--store", store]) == 2
    assert "no run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["renew", "Renewed"])
def test_credentials_come_from_a_function_or_class_of_ones_own(name, server, tmp_path, monkeypatch, capsys):
    forget_credentials(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path(f"keys_of_{name}.py").write_text(PROVIDERS)
    train(s3_bucket(server, f"s3://islands/{name}"), method(), "eu-1", 1)
    store = f"endpoint={server},region=us-east-1,credential_provider=keys_of_{name}:{name}"
    assert cli.main(["islands", f"s3://islands/{name}", "--store", store]) == 0
    assert "eu-1" in capsys.readouterr().out
    assert Path("asked").read_text() == name


def test_clean_deletes_what_no_island_needs_beside_a_running_run(tmp_path, capsys):
    """Here the island that should have deleted was killed each time before it did."""
    url, tx = str(tmp_path / "run"), method()
    store = islands.folder(url)
    kept = store._replace(delete=lambda name: None, delete_many=lambda names: None)
    with islands.join(kept, tx, name="a", keep_every=1) as island:
        state = island.enter(begin(tx))
        for _ in range(14):
            state, _ = island.meet(step_of(tx)(state, GOALS[0]))
            wait_for_threads(island)
        before = store.list("")
        assert cli.main(["islands", url, "--clean"]) == 0
        after = store.list("")
        assert f"{url}: {len(before) - len(after)} names deleted" in " ".join(capsys.readouterr().out.split())
        # The first record stays, and so do commits.
        assert len(store.list("anchors/")) == 3
        assert len([name for name in store.list("rounds/") if not name.endswith("/commit")]) < 10
        assert len(store.list("bodies/")) < len([name for name in before if name.startswith("bodies/")]) - 8
        state, report = island.meet(step_of(tx)(state, GOALS[0]))
        assert report.counted
    assert islands.read(url, tx, begin(tx)[0])[0] == 15
    assert cli.main(["islands", url, "--clean"]) == 0
    assert cli.main(["islands", str(tmp_path / "typo"), "--clean"]) == 2
    assert not (tmp_path / "typo").exists()


def hours(moments):
    """A clock for `--watch`: each pause takes an hour and calls the next function; after the last comes Ctrl-C."""
    now, left = [0.0], iter(moments)

    def sleep(seconds):
        now[0] += 3600.0
        try:
            next(left)()
        except StopIteration:
            raise KeyboardInterrupt from None

    return types.SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])


def watch(monkeypatch, url, moments, *options):
    monkeypatch.setattr(show, "time", hours(moments))
    return cli.main(["islands", url, "--watch", "10", *options])


def test_watching_keeps_the_last_picture_while_a_folder_is_away(tmp_path, monkeypatch, capsys):
    url, away = tmp_path / "run", tmp_path / "unmounted"
    train(url, method(), "eu-1", 1)

    def come_back():
        away.rename(url)
        train(url, method(), "eu-2", 1)

    assert watch(monkeypatch, str(url), [lambda: url.rename(away), lambda: None, come_back]) == 130
    shown = capsys.readouterr()
    assert "error" not in shown.err
    # Lines are broken according to the length of the folder's name.
    *_, lost, still, back = " ".join(shown.out.split()).split(": round ")
    for picture, seconds in ((lost, 3600), (still, 7200)):
        assert "eu-1" in picture
        assert f"as it was {seconds} s ago: there is no run of islands in" in picture
    assert "eu-2" in back
    assert "ago" not in back


def test_watching_ends_after_the_patience(tmp_path, monkeypatch, capsys):
    url = tmp_path / "run"
    train(url, method(), "eu-1", 1)
    moments = [lambda: url.rename(tmp_path / "unmounted"), lambda: None, lambda: None]
    assert watch(monkeypatch, str(url), moments, "--patience", "5000") == 2
    assert "there is no run of islands in" in capsys.readouterr().err
    # What was never there is a mistake.
    assert watch(monkeypatch, str(url), []) == 2


@pytest.mark.parametrize(("option", "name"), [("--watch", "--watch must be positive"), ("--last", "last must be at")])
def test_numbers_that_mean_nothing_are_named_before_a_run_is_shown(option, name, tmp_path, capsys):
    assert cli.main(["islands", str(tmp_path), option, "-1"]) == 2
    shown = capsys.readouterr()
    assert name in shown.err
    assert shown.out == ""


def test_an_island_that_may_not_begin_says_that_there_is_no_run(tmp_path, capsys):
    arguments = ["--islands", str(tmp_path / "run"), "--sync", "diloco:H=2", "--name", "a", "--no-begin"]
    assert cli.main(["train", *DIGITS, *arguments, "--devices", "1", "--out", str(tmp_path / "out")]) == 2
    assert "no run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_errors_of_islands_and_stores_are_one_line():
    for error in (
        islands.DamagedError,
        islands.RunMismatchError,
        offload.StoreDamagedError,
        checkpoint.CheckpointPeerError,
    ):
        assert issubclass(error, cli.EXPECTED)
