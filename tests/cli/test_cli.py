import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import offload
from jaxdist._cli import main as cli
from jaxdist._cli import results, running
from jaxdist._cli.commands.compare import DEMO
from jaxdist._cli.commands.train import _print_savings
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import train
from jaxdist.asynchronous.errors import DeadlockError, TooManyEventsError

TINY = ["--model", "gpt:tiny,context=8,width=16", "--steps", "3", "--batch", "8", "--optimizer", "adam:1e-3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("train")
    with contextlib.redirect_stdout(open(out / "printed", "w")) as printed:
        code = cli.main(["train", *TINY, "--reducer", "ef:sign", "--devices", "4", "--out", str(out)])
        printed.close()
    return code, out, (out / "printed").read_text()


@pytest.mark.slow
def test_train_leaves_log_plot_and_checkpoint(trained):
    code, out, printed = trained
    assert code == 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoint").is_dir()
    assert "times fewer bytes than plain all-reduce" in printed
    assert f"figure: {out / 'loss.png'}" in printed
    assert [folder.name for folder in (out / "checkpoint").iterdir() if folder.is_dir()] == ["3"]


def test_train_logs_every_step_of_both_runs(trained):
    lines = results.read_log(trained[1] / "log.jsonl")
    for name in ("exact", "ef:sign"):
        own = [line for line in lines if line["reducer"] == name]
        assert [line["kind"] for line in own] == ["run", "step", "step", "step", "summary"]
        assert own[0]["workers"] == 4
        assert own[3]["total_wire_bytes"] == pytest.approx(3 * own[0]["wire_bytes_per_step"])
    losses = [line["loss"] for line in lines if line["kind"] == "step" and line["step"] == 1]
    assert losses[0] == losses[1]  # the same parameters and the same tokens


def test_train_reports_what_the_log_says(trained):
    heads = {line["reducer"]: line for line in results.read_log(trained[1] / "log.jsonl") if line["kind"] == "run"}
    ratio = heads["exact"]["wire_bytes_per_step"] / heads["ef:sign"]["wire_bytes_per_step"]
    assert f"{ratio:,.1f} times fewer" in " ".join(trained[2].split())


def test_the_savings_of_a_resumed_run_are_those_of_all_its_steps(capsys):
    def finish(name, sent):
        records = [train.Record(step, 1.0, 0.1, 10.0, sent, step * sent) for step in (99, 100)]
        return results.RunResult(name, tuple(records), {"loss": 1.0}, sent, 1.0)

    _print_savings(running.new_console(), finish("f16", 20.0), finish("exact", 40.0))
    assert "2.0 times fewer bytes than plain all-reduce (2.0 kB less from each worker)" in capsys.readouterr().out
    _print_savings(running.new_console(), finish("diloco:H=500", 0.0), finish("exact", 40.0))
    assert "infinitely many times fewer bytes than plain all-reduce (4.0 kB less" in capsys.readouterr().out


@pytest.mark.slow
def test_checkpoint_of_train_can_be_restored(trained):
    mesh = jd.make_mesh({"data": 4})
    workload = parse.parse_workload("text", "gpt:tiny,context=8,width=16")
    reducer, optimizer = parse.parse_reducer("ef:sign"), optax.adam(1e-3)
    run = train.prepare(workload, reducer, optimizer, mesh=mesh, batch_size=8)
    state = results.restore(trained[1] / "checkpoint", run.state)
    log = results.read_log(trained[1] / "log.jsonl")
    assert run.evaluate(state)["loss"] == pytest.approx(log[-1]["held_out_loss"], abs=1e-6)
    # And it is the state that the same steps lead to, in every bit.
    *_, (_, again) = train.steps(run, 3)
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


@pytest.mark.slow
def test_train_goes_on_with_fewer_workers(trained, tmp_path):
    """One step more, by two workers instead of four, from the state that three steps left."""
    out = shutil.copytree(trained[1], tmp_path / "run")
    arguments = [
        *TINY,
        "--reducer",
        "ef:sign",
        "--devices",
        "2",
        "--steps",
        "4",
        "--no-baseline",
        "--out",
        str(out),
    ]
    assert cli.main(["train", *arguments, "--resume", "--save-every", "1"]) == 0
    lines = results.read_log(out / "log.jsonl")[10:]
    assert [(line["kind"], line.get("step")) for line in lines] == [("run", None), ("step", 4), ("summary", None)]
    assert lines[0]["workers"] == 2
    found = jd.checkpoint.load(out / "checkpoint")
    assert (found.data, jd.checkpoint.latest(out / "checkpoint")) == ({"steps": 4}, 4)
    assert max(int(leaf) for name, leaf in found.state.items() if name.endswith(".count")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_train_saves_and_leaves_at_a_signal(tmp_path, number):
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "jaxdist._cli", "train", *TINY, "--steps", "100000", "--reducer", "ef:sign"]
    with subprocess.Popen([*command, "--no-baseline", "--out", str(tmp_path)], stderr=subprocess.PIPE) as run:
        try:
            while not (log.exists() and log.read_text().count("\n") > 2):
                assert run.poll() is None
                time.sleep(0.05)
            run.send_signal(number)
            printed = run.communicate(timeout=300)[1].decode()
        finally:
            run.kill()
    last = results.read_log(log)[-1]
    assert (run.returncode, last["kind"]) == (0, "step")
    assert f"jaxdist: stopped after step {last['step']} of 100000: the checkpoint is in {tmp_path}" in printed
    assert "--resume continues from it\n" in printed
    assert jd.checkpoint.load(tmp_path / "checkpoint").data == {"steps": last["step"]}


def test_compare_draws_and_prints_a_table(tmp_path, capsys):
    arguments = ["compare", *TINY, "--workload", "digits", "--model", "convnet:2"]
    assert cli.main([*arguments, "--reducers", "exact", "f16", "--devices", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "accuracy" in printed
    assert "2.0x" in printed
    assert str(tmp_path / "compare.png") in printed
    summaries = [line for line in results.read_log(tmp_path / "log.jsonl") if line["kind"] == "summary"]
    assert [line["name"] for line in summaries] == ["exact", "f16"]


@pytest.mark.slow
def test_one_worker_sends_nothing(tmp_path, capsys):
    arguments = ["train", *TINY, "--workload", "digits", "--model", "convnet:2", "--devices", "1", "--no-baseline"]
    assert cli.main([*arguments, "--reducer", "exact", "--out", str(tmp_path)]) == 0
    assert results.read_log(tmp_path / "log.jsonl")[0]["wire_bytes_per_step"] == 0
    assert "fewer bytes" not in capsys.readouterr().out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--reducer", "powersgd:4"],
            "unknown reducer 'powersgd:4'; did you mean power_sgd? known: exact, f16",
        ),
        (["train", "--reducer", "power_sgd:four"], "rank must be a whole number, got 'four'"),
        (["train", "--reducer", "power_sgd:4,rang=2"], "it takes RANK[,one_sided=False"),
        (["train", "--reducer", "top_k:2.0"], "density must be in (0, 1], got 2.0"),
        (["train", "--reducer", "top_k"], "missing a required argument: 'density'"),
        (["train", "--reducer", "ef"], "name what the feedback goes around"),
        (["train", "--reducer", "ef:nothing"], "unknown reducer 'nothing'"),
        (["train", "--optimizer", "adamw"], "needs a learning rate, as in adamw:3e-4"),
        (["train", "--optimizer", "sgd:fast"], "the learning rate must be a number, got 'fast'"),
        (["train", "--reducer", "ef:loco:sign"], "loco is feedback already; use one, around what compresses"),
        (["train", "--optimizer", "adamv:0.1"], "unknown optimizer 'adamv:0.1'; did you mean adam? known: adabelief"),
        (["train", "--model", "gpt:huge"], "unknown size 'huge'; known: tiny, demo"),
        (["train", "--model", "gpt:tiny,depth=2"], "unknown field 'depth'; did you mean width? known: layers"),
        (["train", "--model", "gpt:tiny,layers=0"], "layers must be a positive whole number, got 0"),
        (["train", "--model", "convnet:4"], "the workload 'text' has the model 'gpt'"),
        (["train", "--workload", "digits", "--text", "x"], "--text is for the workload 'text'"),
        (["train", "--text", "/no/such/file"], "no file or folder at /no/such/file"),
        (["train", "--devices", "3"], "the batch must be a positive multiple of the 3 workers, got 32"),
        (["train", "--devices", "99"], "--devices=99 requested, but only 8 devices"),
        (["train", "--zero", "3", "--reducer", "qsgd:4"], "with a reduce-scatter form, got 'zero:3/qsgd:4': use exact"),
        (["train", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["replay", "--rule", "asgd", "--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["tune", "--workers", "2", "--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["train", "--engine", "ray", "--rule", "asgd", "--workers", "2", "--seed", "-1"], "--seed must be from 0 to"),
        (["train", "--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["compare", "--seed", "4294967295", "--seeds", "2"], "--seed must be from 0 to 4294967295, got 4294967296"),
        (["train", "--optimizer", "sgd:-0.1"], "the learning rate must be at least 0 and finite, got -0.1"),
        (["train", "--optimizer", "adamw:1e999"], "the learning rate must be at least 0 and finite, got inf"),
        (["compare", "--reducers"], "--reducers needs at least one name"),
        (["doctor", "--devices", "0"], "--devices must be at least 1, got 0"),
        (["compare", "--reducers", "exact", "sing"], "unknown reducer 'sing'; did you mean sign?"),
        (["train", "--reducer", "PowerSGD:4"], "did you mean power_sgd?"),
        (["train", "--reducer", "eff:top_k:0.1"], "did you mean ef?"),
        (["train", "--reducer", "ef:topk:0.1"], "unknown reducer 'topk:0.1'; did you mean top_k?"),
        (["compare", "--reducers", "exact", "dilco:H=2"], "did you mean diloco?"),
        (["trian"], "unknown command 'trian'; did you mean train? known: train, compare"),
        (["lanch", "-n", "2", "train.py"], "unknown command 'lanch'; did you mean launch?"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("jaxdist: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--reducers", "nothing"],
        ["compare", "--batch", "7", "--devices", "4"],
        ["compare", "--suite", "local", "--batch", "7", "--workers", "1", "2", "--steps", "10", "--periods", "2"],
        # The warm-up of its optimizer has 100 steps.
        ["compare", "--suite", "local", "--batch", "8", "--workers", "2", "--steps", "10", "--periods", "2"],
        ["train", "--batch", "7", "--devices", "4"],
        ["train", "--batch", "7", "--devices", "4", "--sync", "diloco:H=2", "--islands", "store"],
    ],
)
def test_bad_arguments_leave_an_older_log_alone(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"kept": True}))
    assert cli.main([*arguments, "--workload", "digits", "--model", "convnet:2", "--out", str(tmp_path)]) == 2
    assert results.read_log(log) == [{"kept": True}]


@pytest.mark.parametrize("islands", [[], ["--sync", "diloco:H=2", "--islands", "store"]])
def test_a_folder_that_another_run_uses_keeps_the_log_of_that_run(islands, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text("of the other run\n")
    command = ["train", "--workload", "digits", "--model", "convnet:2", "--devices", "1", "--out", str(tmp_path)]
    with jd.checkpoint.writing(tmp_path / "checkpoint"):
        assert cli.main([*command, "--no-baseline", *islands]) == 2
    assert "writes checkpoints into" in capsys.readouterr().err
    assert (tmp_path / "log.jsonl").read_text() == "of the other run\n"


@pytest.mark.parametrize("islands", [[], ["--sync", "diloco:H=5", "--islands", "store", "--no-baseline"]])
def test_a_finished_run_is_refused_before_anything_is_trained(islands, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results.save(tmp_path / "checkpoint", {"x": np.zeros(2, np.float32)}, 5)
    log = tmp_path / "log.jsonl"
    log.write_text('{"kept": true}\n')
    monkeypatch.setattr(train, "prepare", lambda *given, **settings: pytest.fail("compiled"))
    assert cli.main(["train", "--steps", "5", "--out", str(tmp_path), "--resume", *islands]) == 2
    assert "has already done 5 steps: --steps must be larger, got 5" in capsys.readouterr().err
    assert results.read_log(log) == [{"kept": True}]


@pytest.mark.slow
def test_train_keeps_its_checkpoints_in_a_bucket(tmp_path, capsys):
    pytest.importorskip("obstore")
    url, out = f"memory:///{tmp_path.name}", tmp_path / "out"
    arguments = ["train", *TINY, "--devices", "1", "--no-baseline", "--out", str(out), "--checkpoint", url, "--resume"]
    assert cli.main(arguments) == 0
    assert f"no checkpoint in {url}: starting from step 0" in capsys.readouterr().out
    assert (jd.checkpoint.latest(url), (out / "checkpoint").exists()) == (3, False)
    assert cli.main(arguments) == 2
    assert "has already done 3 steps" in capsys.readouterr().err
    # A store that fails is one line.
    assert cli.main([*arguments[:-1], "--resume", "--checkpoint", "nonsense://bucket"]) == 2
    assert "nonsense://bucket is no bucket, such as s3://" in capsys.readouterr().err


def test_a_finished_run_on_disk_is_refused_before_its_baseline_is_trained(tmp_path, monkeypatch, capsys):
    optimizer = offload.nvme(optax.sgd(0.1), offload.Store(tmp_path / "disk"))
    params = optimizer.init({"x": np.zeros(2, np.float32)})
    for _ in range(5):
        params = optimizer.apply(params, params)
    optimizer.close()
    monkeypatch.setattr(train, "prepare", lambda *given, **settings: pytest.fail("compiled"))
    arguments = ["train", "--steps", "5", "--out", str(tmp_path), "--offload", f"nvme:{tmp_path / 'disk'}"]
    assert cli.main(arguments) == 2
    assert "has already done 5 steps: --steps must be larger, got 5" in capsys.readouterr().err
    assert not (tmp_path / "log.jsonl").exists()


def test_a_killed_run_leaves_whole_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    with results.open_log(path) as log:
        results.write_line(log, {"step": 1})
        # In the file at once, whatever happens next.
        assert results.read_log(path) == [{"step": 1}]
        log.write('{"step": 2, "lo')
    with results.open_log(path, append=True) as log:
        results.write_line(log, {"step": 2})
    assert results.read_log(path) == [{"step": 1}, {"step": 2}]


def test_errors_of_a_simulation_are_one_line():
    assert {DeadlockError, TooManyEventsError} <= set(cli.EXPECTED)


@pytest.mark.parametrize("arguments", [["train", "--reduser", "exact"], ["train", "--workload", "speech"], []])
def test_unknown_options_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "qsgd:4",
        "ef:top_k:0.01",
        "ef:sign",
        "bf16",
        "fp8",
        "ef21:top_k:0.1",
        "ef:qsgd:2,bucket=64",
        "ef:random_k:0.1",
    ],
)
def test_every_spelling_makes_a_reducer(name):
    assert isinstance(parse.parse_reducer(name), jd.reducers.Reducer)


@pytest.mark.parametrize("name", DEMO)
def test_every_method_of_the_demo_is_known(name):
    assert isinstance(parse.parse_method(name, "adamw:2e-3").optimizer, optax.GradientTransformation)


@pytest.mark.parametrize(
    "text",
    [part * 100_000 for part in (":", "ef:", "two_shot:", "qsgd:4+", "qsgd:(", "qsgd:-", "qsgd:1,", "x")]
    + ["ef:" * 100_000 + "sign", "qsgd:" + "1+" * 100_000 + "1", "diloco:H=5/" + "ef:" * 100_000]
    # Short enough to be looked at, and nested too deep for Python's own parser.
    + ["ef:" * 300 + "sign", "top_k:0.1+" * 90 + "loco", "qsgd:" + "-" * 900 + "1", "qsgd:" + "(" * 900]
    + ["qsgd:{[]}", "qsgd:\0", "qsgd:1" + "1" * 900],
)
def test_no_spelling_is_too_odd_for_a_short_message(text):
    parsers = [parse.parse_reducer, parse.parse_code, parse.parse_optimizer, parse.parse_durations]
    parsers += [lambda text: parse.parse_method(text, "sgd:0.1"), lambda text: parse.parse_sync(text, "sgd:0.1")]
    parsers += [lambda text: parse.parse_method("diloco:H=5", text), lambda text: parse.parse_workload("text", text)]
    parsers += [lambda text: parse.parse_rule(text, optax.sgd(0.1)), parse.parse_links]
    parsers += [lambda text: parse.parse_factor("--slow", text), lambda text: parse.parse_optimizer("sgd:" + text)]
    for parser in parsers:
        with pytest.raises(ValueError, match=r".") as told:
            parser(text)
        assert len(str(told.value)) < 5000


def test_a_hundred_thousand_colons_are_one_line(capsys):
    for spelled in (["--reducer", "ef:" * 100_000], ["--optimizer", ":" * 100_000], ["--sync", "diloco:" * 100_000]):
        assert cli.main(["train", *spelled]) == 2
        printed = capsys.readouterr().err
        assert "characters; a spelling has at most 1,000" in printed
        assert (printed.count("\n"), len(printed) < 200) == (1, True)


def test_any_optax_optimizer():
    assert {"adamw", "sgd", "lion", "lamb", "adafactor"} <= set(parse.list_optimizers())
    assert "lbfgs" not in parse.list_optimizers()
    transformation = parse.parse_optimizer("sgd:0.5,momentum=0.9")
    updates, _ = transformation.update({"w": np.ones(2)}, transformation.init({"w": np.ones(2)}))
    np.testing.assert_allclose(updates["w"], -0.5)
