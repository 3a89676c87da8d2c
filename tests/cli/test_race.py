"""`jaxdist compare --link`: which method reaches a loss first over given links."""

import csv
import math
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxdist as jd
from jaxdist import analysis
from jaxdist._cli import main as cli
from jaxdist._cli import race, results, tables
from jaxdist._cli.figures import in_bytes, in_rate
from jaxdist._cli.models import digits
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import costs, train
from jaxdist._cli.training.one_worker import one_worker
from jaxdist.analysis.step_time import Schedule, StepCost, Traffic

SLOW, FAST = parse.parse_link("8mbit"), parse.parse_link("800mbit")
STEPS = np.array([10, 20, 30, 40])


def _runner(name, losses, wire_bytes, *, coding=0.0):
    return race.Entrant(name, StepCost(0.1, coding, Traffic(wire_bytes, 0.0)), race.Curve(STEPS, np.array(losses)))


def _runners():
    # Plain steps learn faster; coded ones send 1 % of the bytes and take 50 ms more.
    plain = _runner("exact", [[4.0, 3.0, 2.0, 1.0]], 1e6)
    coded = _runner("coded", [[4.0, 3.5, 3.0, 2.0]], 1e4, coding=0.05)
    return [plain, coded]


def test_the_first_step_at_or_below_the_target():
    losses = np.array([4.0, 3.0, 3.5, 1.0])
    assert race.step_at(STEPS, losses, 4.5) == 10
    assert race.step_at(STEPS, losses, 3.25) == 17.5
    assert race.step_at(STEPS, losses, 3.0) == 20
    assert race.step_at(STEPS, losses, 0.5) == math.inf
    assert race.step_at(STEPS, np.array([4.0, np.nan, 3.0, 2.0]), 3.5) == 30


def test_the_common_target_leaves_out_what_diverges():
    entrants = _runners()
    assert race.common_target(one.curve for one in entrants) == 2.0
    broken = _runner("broken", [[4.0, np.nan, np.nan, np.nan]], 1.0)
    assert race.common_target(one.curve for one in [*entrants, broken]) == 2.0
    # Every seed of a method has to reach it.
    assert race.common_target([entrants[0].curve, _runner("seeds", [[3.0] * 4, [2.5] * 4], 1.0).curve]) == 3.0


def test_slow_links_have_kilobits():
    assert [in_rate(bits / 8) for bits in (4e4, 256e3, 1e6, 2e9)] == [
        "40.0 kbit/s",
        "256.0 kbit/s",
        "1.0 Mbit/s",
        "2.0 Gbit/s",
    ]


def test_the_first_method_depends_on_the_link():
    ends = race.run_race(_runners(), [SLOW, FAST], 2.0)
    times = {(one.link.name, one.name): one.seconds for one in ends}
    # Steps to 2.0 are 30 and 40; the bytes take 1 and 0.01 s over the slow link, a hundredth of it over the fast one.
    assert times["8mbit", "exact"] == pytest.approx(30 * 1.1)
    assert times["8mbit", "coded"] == pytest.approx(40 * 0.16)
    assert times["800mbit", "exact"] == pytest.approx(30 * 0.11)
    assert times["800mbit", "coded"] == pytest.approx(40 * 0.1501)
    said = race.conclude(ends, 2.0, "exact")
    assert said[0] == "8.0 Mbit/s, 0 ms: coded reaches 2 first, after 6.4 s (exact: after 33.0 s)."
    assert said[1] == "800.0 Mbit/s, 0 ms: exact reaches 2 first, after 3.3 s."


def test_a_method_that_does_not_reach_the_target_is_named(tmp_path):
    ends = race.run_race(_runners(), [FAST], 1.5)
    assert race.conclude(ends, 1.5, "exact")[-1] == "Not in these steps: coded."
    assert race.finish_records(ends, 1.5)[1]["seconds_to_target"] == math.inf
    table = race.finish_table(ends, 1.5)
    assert [str(cell) for cell in table.columns[-1].cells] == ["3.9", "-"]
    path = tables.write_table(table, race.finish_records(ends, 1.5), tmp_path / "race.md")
    assert path.read_text().splitlines()[0].endswith("| 800mbit step ms | 800mbit seconds |")


def test_the_picture_has_a_panel_for_each_link(tmp_path):
    links = [SLOW, FAST, parse.parse_link("1gbit,10ms")]
    entrants = [*_runners(), _runner("broken", [[np.nan] * 4], 1.0), _runner("seeds", [[3.0] * 4, [2.5] * 4], 1.0)]
    path = race.draw_race(entrants, links, 2.0, tmp_path / "links.png", title="four methods", unit="nats")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exact", Schedule(1, 1, 0)),
        ("diloco:H=50/ef:qsgd:4", Schedule(50, 1, 0)),
        ("streaming_diloco:H=12,fragments=4,delay=3", Schedule(12, 4, 1)),
        ("async_model_average:H=6", Schedule(6, 1, 1)),
    ],
)
def test_the_schedule_of_a_method(name, expected):
    assert costs.schedule_of(name, parse.parse_method(name, "sgd:0.1")) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "compressed_adam:2e-3/ef:sign",
        "sparse_loco:H=1,density=0.1,block=64",
        "muloco:H=1,learning_rate=0.02/two_shot:int8",
        "one_bit_adam:1e-3,freeze_step=1",
        "qadam:1e-3,warmup_steps=1",
        "zero:1/two_shot:int8",
        "local_sgd:H=1",
    ],
)
def test_the_reducer_whose_coding_is_timed_sends_the_bytes_of_the_method(name):
    workload, method = digits.digits_workload(4), parse.parse_method(name, "sgd:0.1")
    reducer, alone = costs.find_reducer(name, method), one_worker(workload, method, axis="data")
    state = jax.eval_shape(lambda: jd.init_state(lambda: alone.make_state(0), 4, axis="data"))
    step = jd.distribute(alone.step, AbstractMesh((4,), ("data",)), axis="data")
    batch = jax.eval_shape(lambda: workload.batch(0, 0, 8))
    # The branch after the warm-up, where there is one.
    ops = analysis.logical_collectives(
        step, state, batch, branch="min" if "adam:1e-3" in name else "max", platform="cpu"
    )
    own = parse.TrainingMethod(reducer, optax.sgd(0.1), None, method.stage)
    expected = costs.traffic_of_trace(workload, own, workers=4, batch_size=8)
    assert ops.wire_bytes - 6 == pytest.approx(expected.wire_bytes)  # less the mean of the loss


@pytest.mark.parametrize(
    ("name", "compute", "coding"),
    [
        ("exact", 9.0, 0.5),
        ("diloco:H=5/ef:sign", 9.0, 0.1),
        ("compressed_adam:2e-3/ef:sign", 11.0, 0.5),
        ("muloco:H=5,learning_rate=0.02", 11.0, 0.1),
        ("demo:1e-3", 9.0, 2.0),
    ],
)
def test_a_method_costs_what_its_own_optimizer_and_its_code_take(name, compute, coding, monkeypatch):
    timed = []
    monkeypatch.setattr(costs, "_measure_alone", lambda *given: 3.0)
    monkeypatch.setattr(costs, "measure_compute", lambda *given: 1.0)
    monkeypatch.setattr(costs.analysis, "codec_seconds", lambda *given, workers: timed.append(workers) or 0.5)
    method = parse.parse_method(name, "sgd:0.1")
    settings = {"optimizer": "sgd:0.1", "workers": 64, "examples": 1, "compute": 9.0}
    found = costs.measure_cost(name, method, digits.digits_workload(2), **settings)
    assert (found.compute, found.coding) == pytest.approx((compute, coding))
    assert timed == ([] if name.startswith("demo") else [64])


@pytest.mark.slow
def test_the_traffic_of_the_compiled_step_is_that_of_its_trace():
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    workload = digits.digits_workload(4)
    for name in ("exact", "local_sgd:H=5"):
        method = parse.parse_method(name, "sgd:0.1")
        run = train.prepare(workload, **method._asdict(), mesh=mesh, batch_size=16)
        compiled = costs.traffic_of_run(run)
        traced = costs.traffic_of_trace(workload, method, workers=4, batch_size=16)
        assert compiled.wire_bytes == pytest.approx(traced.wire_bytes)
        assert compiled.hops == pytest.approx(traced.hops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warm", "without"),
    [
        ("diloco:H=5,warmup_steps=9/two_shot:int8", "diloco:H=5/two_shot:int8"),
        ("post_local_sgd:H=5,switch_step=9", "local_sgd:H=5"),
        ("palsgd:H=5", "local_sgd:H=5"),  # a hundred steps of warm-up unless told
        ("streaming_diloco:H=8,fragments=4,warmup_steps=9", "streaming_diloco:H=8,fragments=4"),
    ],
)
def test_the_traffic_of_rounds_leaves_the_warm_up_out(warm, without):
    workload = digits.digits_workload(2)
    found, expected = (
        costs.traffic_of_trace(workload, parse.parse_method(name, "sgd:0.1"), workers=4, batch_size=8)
        for name in (warm, without)
    )
    assert found == expected


@pytest.mark.slow
def test_a_run_predicts_the_bytes_of_its_rounds():
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    method = parse.parse_method("local_sgd:H=3", "sgd:0.1")
    warm = parse.parse_method("post_local_sgd:H=3,switch_step=3", "sgd:0.1")
    workload = digits.digits_workload(2)
    own, plain = (train.prepare(workload, **one._asdict(), mesh=mesh, batch_size=8) for one in (warm, method))
    assert own.wire_bytes == pytest.approx(plain.wire_bytes)
    assert costs.traffic_of_run(own).wire_bytes == pytest.approx(costs.traffic_of_run(plain).wire_bytes)
    sent = [record.wire_bytes for record, _ in train.steps(own, 6)]
    assert sum(sent[3:]) == pytest.approx(3 * (own.wire_bytes - 6))  # a count leaves the mean of the loss out


@pytest.mark.slow
def test_a_warm_up_counts_its_hops_apart_from_those_of_coded_rounds():
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    workload = digits.digits_workload(2)
    method = parse.parse_method("diloco:H=2,warmup_steps=4/two_shot:qsgd:4", "sgd:0.1")
    run = train.prepare(workload, **method._asdict(), mesh=mesh, batch_size=8)
    records = [record for record, _ in train.steps(run, 12)]
    found = costs.traffic_of_run(run, sent=records[-1].total_wire_bytes / 12)
    plain, rounds = (
        costs.traffic_of_trace(workload, parse.parse_method(name, "sgd:0.1"), workers=4, batch_size=8)
        for name in ("exact", "diloco:H=2/two_shot:qsgd:4")
    )
    # Four steps with mean gradients, one mean of the models as they end, and four rounds in the other eight.
    assert found.wire_bytes == pytest.approx((5 * plain.wire_bytes + 8 * rounds.wire_bytes) / 12, rel=1e-3)
    assert found.hops == pytest.approx((5 * plain.hops + 8 * rounds.hops) / 12, rel=0.1)


@pytest.mark.slow
def test_compare_over_links(tmp_path, capsys):
    arguments = ["compare", "--workload", "digits", "--model", "convnet:2", "--steps", "4", "--batch", "8"]
    arguments += ["--reducers", "exact", "local_sgd:H=2", "--devices", "2", "--compute", "10", "--target", "9"]
    arguments += ["--link", "1mbit,2ms", "8gbit", "--link", "measured", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--table", str(tmp_path / "table.csv")]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
    assert "1.0 Mbit/s, 2 ms: local_sgd:H=2 reaches 9 first" in printed
    rows = list(csv.DictReader((tmp_path / "table-links.csv").read_text().splitlines()))
    assert [(row["link"], row["name"]) for row in rows[1:3]] == [("1mbit,2ms", "local_sgd:H=2"), ("8gbit", "exact")]
    exact, local = ({key: float(row[key]) for key in row if key not in ("link", "name")} for row in rows[:2])
    # The ring of two has two hops; a round of two steps halves bytes and hops.
    assert exact["hops_per_step"] == 2
    network = 0.004 + exact["wire_bytes_per_step"] / 125e3
    assert exact["step_seconds"] == pytest.approx(0.01 + exact["coding_seconds"] + network)
    assert local["hops_per_step"] == 1
    assert local["wire_bytes_per_step"] == pytest.approx(exact["wire_bytes_per_step"] / 2)
    # The bars show the mean too, after a last step that ends a round.
    means = [in_bytes(row["wire_bytes_per_step"]) for row in (exact, local)]
    assert re.findall(r"[\d.]+ k?B(?=/step)", printed) == means
    # The first evaluation is below the target.
    assert exact["seconds_to_target"] == pytest.approx(exact["step_seconds"])
    kinds = [line["kind"] for line in results.read_log(tmp_path / "log.jsonl")]
    assert kinds.count("evaluation") == 2 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "fast"], "such as 100mbit,20ms"),
        (["--link", "1gbit", "--devices", "1"], "--link needs at least two workers (--devices), got 1"),
        (["--link", "1gbit", "--suite", "local"], "--link cannot be used with --suite local"),
        (["--target", "2"], "--target is for times over a link: give one, as in --link 100mbit,20ms"),
        (["--compute", "2"], "--compute is for times over a link"),
        (["--link", "1gbit", "--compute", "0"], "--compute must be positive, got 0.0"),
        (["--link", "1gbit", "--compute", "nan"], "--compute must be positive, got nan"),
        (["--link", "1gbit", "--compute", "inf"], "--compute must be finite, got inf"),
        (["--link", "1.2.3mbit"], "such as 100mbit,20ms or 10gbit,50us, got '1.2.3mbit'"),
        (["--reducers", "exact", "f16", "exact"], "--reducers has exact more than once: name each method once"),
        (["--workers", "2"], "--workers is for --suite local; the number of workers is --devices"),
        (["--periods", "8"], "--periods is for --suite local; a method takes H="),
        (["--start", "0"], "--start is for --suite local; a method takes warmup_steps="),
        (["--suite", "compression", "--rates", "0.1"], "--rates is for --suite local; --optimizer takes its rate"),
        (["--suite", "compression", "--reducers", "exact"], "--reducers cannot be used with --suite compression"),
        (["--suite", "local", "--reducers", "exact"], "--reducers cannot be used with --suite local"),
        (["--suite", "local", "--devices", "4"], "--devices cannot be used with --suite local: give --workers"),
    ],
)
def test_compare_refuses(arguments, message, capsys):
    assert cli.main(["compare", "--workload", "digits", "--model", "convnet:2", "--batch", "8", *arguments]) == 2
    assert message in capsys.readouterr().err
