"""`jaxdist advise`: what is predicted for links that are told, and what is measured of those that are here."""

import math
import os
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxdist as jd
from jaxdist import analysis
from jaxdist._cli import main as cli
from jaxdist._cli.commands import advise as advice
from jaxdist._cli.models import digits
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import train
from jaxdist.analysis import cost, measured
from jaxdist.analysis.measured import fit
from jaxdist.reducers.reducer import Law
from jaxdist.runtime.json_log import json_line

COMPUTE = 0.01


@pytest.fixture(scope="module")
def workload():
    return digits.digits_workload(4)


def predict(workload, names, link, workers=4):
    link, batch = parse.parse_link(link), 4 * workers
    methods = advice.parse_methods(names, optimizer="adam:1e-3", workers=workers, batch_size=batch)
    settings = {"optimizer": "adam:1e-3", "workers": workers, "batch_size": batch}
    return advice.predict(workload, methods, **settings, link=link, compute=COMPUTE)


@pytest.mark.slow
def test_bytes_are_those_of_the_compiled_step(workload):
    names = ("exact", "two_shot:int8", "local_sgd:H=5")
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    for name, found in zip(names, predict(workload, names, "1gbit"), strict=True):
        method = parse.parse_method(name, "adam:1e-3")
        run = train.prepare(workload, **method._asdict(), mesh=mesh, batch_size=16)
        assert found.wire_bytes == pytest.approx(run.wire_bytes - 6)  # less the mean of the loss


@pytest.mark.slow
def test_a_step_is_work_and_coding_and_network(workload):
    slow, fast = (predict(workload, ("exact", "ef:sign"), link) for link in ("1mbit,1ms", "100gbit,0us"))
    for one in (*slow, *fast):
        assert one.step == pytest.approx(COMPUTE + one.coding + one.network)
        assert one.hidden == pytest.approx(max(COMPUTE, one.network) + one.coding)
    plain = slow[0]
    # One message round a ring of four: six hops, and the bytes.
    assert plain.network == pytest.approx(6e-3 + plain.wire_bytes / 125e3)
    assert slow[1].step < plain.step
    assert advice.recommend(slow).name == "ef:sign"
    assert advice.recommend(fast).name == "exact"


@pytest.mark.slow
def test_at_the_break_even_both_take_as_long(workload):
    before = predict(workload, ("exact", "ef:sign"), "10mbit")
    break_even = before[1].break_even
    assert 0 < break_even < math.inf
    # Coding is measured, the packing of `exact` too: anew for each prediction.
    after = predict(workload, ("exact", "ef:sign"), f"{8 * break_even / 1e3}kbit")
    plain, signs = (new.step - new.coding + old.coding for new, old in zip(after, before, strict=True))
    assert plain == pytest.approx(signs)


def test_a_gather_is_decoded_as_often_as_there_are_workers():
    def decoded(workers):
        def decode(x, nought):
            return jnp.sin(measured._simulate_comm(workers, nought).all_gather(x)).sum(0)

        compiled = jax.jit(decode).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32), jnp.int32(0)).compile()
        return (compiled.cost_analysis() or {})["transcendentals"]

    assert decoded(64) == 64 * decoded(1) > 0


def test_the_transport_that_is_simulated_keeps_the_packing():
    tree = [jnp.ones((4, 4)), jnp.ones(3)]

    def mean(tree, nought):
        return jd.exact().reduce(tree, (), measured._simulate_comm(2, nought))[0].mean

    assert "concatenate" in jax.jit(mean).lower(tree, jnp.int32(0)).compile().as_text()


@pytest.mark.parametrize(("seconds", "expected"), [((5.0, 3.0, 9.0, 3.0, 4.0, 3.0), 2.0), ((1.0, 3.0), 0.0)])
def test_coding_is_what_a_worker_alone_does_not_compute(monkeypatch, seconds, expected):
    clock = iter(seconds)
    monkeypatch.setattr(measured, "_seconds", lambda run: next(clock))
    like = jax.ShapeDtypeStruct((8, 8), "float32")
    turns = len(seconds) // 2
    assert analysis.codec_seconds(jd.compressed(jd.qsgd(4)), like, workers=2, turns=turns) == expected


def test_the_fit_finds_latency_and_bandwidth():
    sizes = (2**10, 2**16, 2**22)
    exact = [6 * 2e-4 + 1.5 * size / 1e8 for size in sizes]
    latency, beta = fit(sizes, exact, 4)
    assert (latency, 1 / beta) == pytest.approx((2e-4, 1e8))
    latency, beta = fit((2**20, 2**22), [1e-3, 5e-3], 4)  # faster than any latency would allow
    assert latency == 0
    assert beta > 0


def test_a_link_of_this_machine():
    link = analysis.measure_link(jd.make_mesh({"data": 2}, devices=jax.devices()[:2]), sizes=(2**10, 2**20), turns=2)
    assert link.name == "measured"
    assert link.bandwidth > 0
    assert link.latency >= 0
    with pytest.raises(ValueError, match="single worker"):
        analysis.measure_link(jd.make_mesh({"data": 1}, devices=jax.devices()[:1]))


def test_advise_says_what_to_take(capsys, monkeypatch):
    small = ["advise", "--workload", "digits", "--model", "convnet:4", "--workers", "4", "--batch", "16"]
    small += ["--compute", "1", "--reducers", "exact", "f16"]
    assert cli.main([*small, "--link", "1kbit"]) == 0
    assert "Take f16: 2.0 times as fast, 2 times fewer bytes." in capsys.readouterr().out
    # The code of so small a model takes less time than the noise of a measurement.
    for seconds, expected in (
        (1e-3, "compression will lose here, it starts to pay below"),
        (0.0, "no other method gains more than a tenth here"),
    ):

        def measure(reducer, like, *, workers, seconds=seconds):
            return 0.0 if reducer.law == Law.MEAN else seconds

        monkeypatch.setattr(analysis, "codec_seconds", measure)
        assert cli.main([*small, "--link", "400gbit"]) == 0
        assert f"Stay with exact: {expected}" in capsys.readouterr().out


def _write_log(path, losses):
    """A log of `compare` as it would be for these held-out losses at steps 10, 20 and 30, of one seed each."""
    settings = {"workload": "digits", "model": "convnet:4", "optimizer": "adam:1e-3", "batch": 16, "workers": 4}
    settings["steps"] = 30
    lines = []
    for name, (first, second, last) in losses.items():
        lines.append({"kind": "run", "reducer": name, **settings})
        lines += [
            {"kind": "evaluation", "reducer": name, "step": step, "held_out": {"loss": loss}}
            for step, loss in ((10, first), (20, second))
        ]
        lines.append({"kind": "summary", "reducer": name, "steps": 30, "held_out": {"loss": last}})
    path.write_text("".join(json_line(line) for line in lines))
    return path


def test_losses_rank_by_the_time_to_a_loss(tmp_path, capsys, monkeypatch):
    # A step of f16 takes half as long, and it needs more than twice as many.
    steps = {"exact": advice.Prediction("exact", 20.0, 0.0, 1.0, 2.0, 2.0, 0.0)}
    steps["f16"] = steps["exact"]._replace(name="f16", wire_bytes=10.0, step=1.0)
    steps["sign"] = steps["exact"]._replace(name="sign", wire_bytes=1.0, step=0.5)
    monkeypatch.setattr(advice, "predict", lambda workload, names, **settings: [steps[name] for name in names])
    losses = {"exact": (1.0, 0.9, 0.8), "f16": (3.0, 2.0, 1.0), "sign": (3.0, 3.0, math.nan)}
    log = _write_log(tmp_path / "log.jsonl", losses)
    table = tmp_path / "table.csv"

    def advise(*arguments):
        told = ["advise", "--link", "1kbit", "--compute", "1", "--losses", str(log), "--table", str(table)]
        assert cli.main([*told, *arguments]) == 0
        return capsys.readouterr().out

    said = advise("--reducers", "exact", "f16")
    assert "4 workers" in said
    assert "Stay with exact: it reaches 1 first, after 20.0 s." in said
    assert "Take f16: it reaches 3 after 10.0 s (exact: after 20.0 s), with 2 times fewer bytes a step." in advise(
        "--reducers", "exact", "f16", "--target", "3"
    )
    assert table.read_text().splitlines()[-1].endswith(",10.0")
    assert "Take sign: it reaches 3 after 5.0 s" in advise("--target", "3")
    assert "Not at 0.9 in the steps of the log: f16, sign." in advise("--target", "0.9")
    assert "Train for longer, or choose a higher --target." in advise("--target", "0.1")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda text: text, ["--reducers", "exact", "int8"], "has no losses of int8, only of exact, f16"),
        (lambda text: text, ["--target", "-1"], "--target must be positive"),
        (lambda text: text, ["--target", "inf"], "--target must be finite"),
        (lambda text: text, ["--workers", "0"], "--workers must be at least 2, got 0"),
        (lambda text: re.sub(r'"loss": ?[\d.]+', '"loss": null', text), [], "that a method reaches with every seed"),
        (lambda text: text[:-20], [], "is not the log of a finished jaxdist compare"),
        (lambda text: text[: text.rindex('{"kind"')], [], "2 runs were started and 1 finished"),
        # As --suite local writes them: the rates would be taken for seeds.
        (lambda text: text + text.replace("adam:1e-3", "adam:2e-3"), [], "its runs differ in optimizer: 'adam:1e-3'"),
        (lambda text: "", [], "is not the log of a finished jaxdist compare"),
        (lambda text: text.replace('"evaluation"', '"step"'), [], "write it with jaxdist compare --link"),
    ],
)
def test_losses_are_refused(change, arguments, message, tmp_path, capsys):
    log = _write_log(tmp_path / "log.jsonl", {"exact": (1.0, 0.9, 0.8), "f16": (3.0, 2.0, 1.0)})
    log.write_text(change(log.read_text()))
    assert cli.main(["advise", "--link", "1kbit", "--compute", "1", "--losses", str(log), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_leaves_the_losses(tmp_path, capsys, monkeypatch):
    """Of every method, also of an optimizer that communicates itself, and with several seeds."""
    monkeypatch.chdir(tmp_path)
    small = ["--workload", "digits", "--model", "convnet:4", "--batch", "16", "--optimizer", "adam:1e-2"]
    names = ["exact", "compressed_adam:1e-2/ef:sign", "local_sgd:H=5"]
    compare = ["compare", *small, "--reducers", *names, "--steps", "40", "--seeds", "2", "--link", "1mbit"]
    assert cli.main([*compare, "--compute", "1"]) == 0
    capsys.readouterr()
    assert cli.main(["advise", "--link", "1mbit", "--compute", "1", "--losses", "runs/compare/log.jsonl"]) == 0
    said = capsys.readouterr().out
    for name in names:
        assert name in said
    assert " first, after " in said or "Take " in said


@pytest.mark.slow
def test_two_processes_measure_their_link():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        sys.executable,
        "-c",
        "from jaxdist._cli.main import main; raise SystemExit(main())",
        "advise",
        "--workload",
        "digits",
        "--model",
        "convnet:4",
    ]
    command += ["--batch", "16", "--reducers", "exact", "ef:sign"]
    told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "XLA_FLAGS": ""}
    children = [
        subprocess.Popen(command, env=os.environ | told | {"JAX_PROCESS_ID": str(n)}, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    try:
        printed = [child.communicate(timeout=300)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0]
    assert "2 workers, links of" in printed[0]
    assert "exact:" in printed[0]
    assert "workers" not in printed[1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "must be set together"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "h:1"}, "must be below"),
        ({"SLURM_NTASKS": "2"}, "this job has several processes"),
    ],
)
def test_initialize_refuses(variables, message, monkeypatch):
    assert jax.devices()
    assert not jd.initialize()  # JAX runs already, and there is nobody else
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        jd.initialize()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one, as in --link"),
        (["--link", "fast"], "such as 100mbit,20ms"),
        (["--link", "1gbit", "--workers", "1"], "--workers must be at least 2"),
        (["--link", "1gbit", "--workers", "5"], "multiple of the 5 workers"),
        (["--link", "1gbit", "--target", "2"], "--target needs losses"),
        (["--link", "1gbit", "--losses", "missing.jsonl"], "is not the log of a finished jaxdist compare"),
        (["--link", "1gbit", "--reducers", "gzip"], "gzip"),
    ],
)
def test_advise_refuses(arguments, message, capsys):
    assert cli.main(["advise", "--workload", "digits", "--compute", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "1"], "--workers must be at least 2, got 1"),
        (["--workers", "0"], "--workers must be at least 2, got 0"),
        (["--batch", "30", "--workers", "4"], "multiple of the 4 workers, got 30"),
        (["--reducers", "exact", "sing"], "did you mean sign?"),
        (["--compute", "nan"], "--compute must be positive, got nan"),
        (["--compute", "inf"], "--compute must be finite, got inf"),
    ],
)
def test_advise_refuses_before_it_measures(arguments, message, capsys, monkeypatch):
    for name in ("measure_compute", "measure_cost"):
        monkeypatch.setattr(advice.costs, name, lambda *given, **settings: pytest.fail("measured"))
    assert cli.main(["advise", "--workload", "digits", "--link", "1gbit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_never_and_always():
    assert parse.parse_link("10gbit,2s") == cost.Link("10gbit,2s", 2.0, 1.25e9)
    twice = advice.Prediction("twice", 20.0, 0.0, 0.0, 1.0, 1.0, 0.0)
    assert advice.recommend([twice._replace(name="exact", wire_bytes=10.0), twice._replace(step=2.0)]).name == "exact"
