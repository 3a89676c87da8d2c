"""Workers that meet every H steps, from the command line: spelled, trained, counted, evaluated, drawn."""

import csv
from functools import cache
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist._cli import losses, results
from jaxdist._cli import main as cli
from jaxdist._cli.commands import compare
from jaxdist._cli.models import digits
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import starts, suites, train

OPTIMIZER = "sgd:0.1,momentum=0.9"
TINY = ["--workload", "digits", "--model", "convnet:2", "--batch", "8", "--optimizer", OPTIMIZER]


@cache
def work():
    return digits.digits_workload(2)


def _prepare(spelling, workers=2, **settings):
    mesh = jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])
    method = parse.parse_method(spelling, OPTIMIZER)
    return train.prepare(work(), **method._asdict(), mesh=mesh, batch_size=8, **settings)


@pytest.fixture(scope="module")
def any_period():
    return _prepare("diloco:H=2", any_period=True)


@pytest.fixture(scope="module")
def trained(any_period):
    """Five steps with H=2: the records, and the state in the middle of the third round."""
    pairs = list(train.steps(any_period.with_period(2), 5))
    return [record for record, _ in pairs], pairs[-1][1]


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        (
            "dilco:H=50",
            r"unknown sync 'dilco:H=50'; did you mean diloco\? known: local_sgd, post_local_sgd, slowmo, diloco",
        ),
        ("diloco", r"give the number of steps between two rounds as H alone, as in diloco:H=50"),
        ("diloco:50", r"as H alone, as in diloco:H=50"),
        ("diloco:H=50,sync_period=2", r"as H alone, as in diloco:H=50"),
        ("diloco:H=0", r"H must be a positive whole number, got 0"),
        ("diloco:H=many", r"H must be a positive whole number, got 'many'"),
        ("diloco:H=50,rate=1", r"'rate'; it takes .*learning_rate=0.7"),
        ("diloco:H=50/nothing", r"unknown reducer 'nothing'; known: exact"),
        ("post_local_sgd:H=50", r"missing a required (keyword-only )?argument: 'switch_step'"),
        ("slowmo:H=2,momentum=2.0", r"momentum must be in \[0, 1\), got 2.0"),
        ("streaming_diloco:H=2,fragments=4", r"sync_period=2 must be at least the number of fragments \(4\)"),
    ],
)
def test_spellings_that_cannot_work_say_why(spelling, message):
    with pytest.raises(ValueError, match=message):
        parse.parse_sync(spelling, OPTIMIZER)


def test_every_cell_of_the_suite_can_be_built():
    spelled = suites.list_sweep((1, *suites.PERIODS), start=64)
    assert spelled[0] == ("exact", 0, "exact")
    assert {method for method, _, _ in spelled} >= {"Local SGD", "SlowMo", "DiLoCo", "streaming DiLoCo"}
    for _, period, spelling in spelled:
        assert (parse.parse_method(spelling, "adamw:1e-3").sync_period or 0) == period


@pytest.mark.slow
def test_bytes_are_sent_in_rounds_alone(any_period, trained):
    records, _ = trained
    a_round = 2 * 1 / 2 * 4 * any_period.parameters
    assert [record.wire_bytes for record in records] == [0, a_round, 0, a_round, 0]
    loss = 2 * 1 / 2 * 4  # the mean loss, which every step reports
    assert any_period.with_period(2).wire_bytes == a_round / 2 + loss
    assert any_period.with_period(5).wire_bytes == a_round / 5 + loss


def _loss(params):
    metrics = jax.jit(work().metrics)
    return np.mean([metrics(params, batch)["loss"] for batch in work().held_out(8)])


@pytest.mark.slow
def test_what_was_agreed_on_is_evaluated_not_a_workers_own(any_period, trained):
    _, state = trained
    wanted = _loss(jd.local_sgd.global_params(state.opt_state))
    assert any_period.evaluate(state)["loss"] == pytest.approx(wanted, abs=1e-5)
    assert abs(wanted - _loss(jd.consensus(state.params))) > 1e-3  # workers are a step further


@pytest.mark.slow
def test_a_period_as_an_argument_is_the_period(any_period):
    longer = any_period.with_period(3).with_seed(1)
    records = [record for record, _ in train.steps(longer, 4)]
    assert [record.wire_bytes > 0 for record in records] == [False, False, True, False]
    np.testing.assert_array_equal(longer.batch(0).images, work().batch(1, 0, 8).images)


@pytest.mark.slow
def test_fragments_send_in_all_what_the_program_says_of_a_round():
    run = _prepare("streaming_diloco:H=4,fragments=2,delay=0,merge_alpha=0.0")
    records = [record for record, _ in train.steps(run, 8)]
    assert [record.wire_bytes > 0 for record in records] == [False, True] * 4
    loss = 2 * 1 / 2 * 4
    assert records[-1].total_wire_bytes == 8 * (run.wire_bytes - loss)
    assert run.wire_bytes == 2 * 1 / 2 * 4 * run.parameters / 4 + loss


@pytest.mark.slow
def test_train_with_sync_leaves_the_right_figures(tmp_path, capsys):
    arguments = ["train", *TINY, "--steps", "4", "--devices", "2", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--sync", "diloco:H=2", "--reducer", "f16"]) == 0
    name, lines = "diloco:H=2/f16", results.read_log(tmp_path / "log.jsonl")
    own = [line for line in lines if line["reducer"] == name]
    exact = [line for line in lines if line["reducer"] == "exact"]
    assert exact[1]["loss"] == pytest.approx(own[1]["loss"], rel=1e-5)  # the same parameters and images
    assert [line["wire_bytes"] > 0 for line in own[1:5]] == [False, True, False, True]
    ratio = exact[4]["total_wire_bytes"] / own[4]["total_wire_bytes"]
    assert ratio == pytest.approx(2 * 2, rel=0.01)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{name} sent {ratio:,.1f} times fewer bytes than plain all-reduce" in printed
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    def first():
        params = work().init(jax.random.key(0))
        return train.TrainState(jd.PerWorker(params), parse.parse_method(name, OPTIMIZER).optimizer.init(params))

    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    state = results.restore(tmp_path / "checkpoint", jd.init_state(first, mesh))
    assert _loss(jd.local_sgd.global_params(state.opt_state)) == pytest.approx(own[-1]["held_out_loss"], abs=1e-5)


def test_a_sync_that_does_not_exist_is_one_line(capsys, tmp_path):
    assert cli.main(["train", *TINY, "--sync", "qsgd:4", "--out", str(tmp_path)]) == 2
    assert "unknown sync 'qsgd:4'; did you mean palsgd? known: local_sgd" in capsys.readouterr().err


@pytest.mark.slow
def test_compare_local_suite(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suites, "METHODS", {key: suites.METHODS[key] for key in ("exact", "Local SGD")})
    arguments = ["compare", "--suite", "local", *TINY, "--workers", "2", "--periods", "1", "2", "--seeds", "2"]
    arguments += ["--start", "4", "--table", str(tmp_path / "table.csv")]
    assert cli.main([*arguments, "--steps", "12", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "local-2.png").read_bytes().startswith(b"\x89PNG")
    lines = results.read_log(tmp_path / "log.jsonl")
    runs = [(line["reducer"], line["seed"]) for line in lines if line["kind"] == "run"]
    assert runs == [(name, seed) for name in ("exact", "local_sgd:H=1", "local_sgd:H=2") for seed in (0, 1)]
    summaries = [line for line in lines if line["kind"] == "summary"]
    assert summaries[2]["held_out_loss"] != summaries[3]["held_out_loss"]  # seeds
    # With H = 1 and momentum SGD, whose update is linear, averaging models is averaging gradients.
    assert summaries[2]["held_out_loss"] == pytest.approx(summaries[0]["held_out_loss"], abs=1e-3)
    evaluated = [line["step"] for line in lines if line["kind"] == "evaluation"]
    # Local methods go on from the start of the baseline, which is trained once for each seed.
    assert evaluated == [2, 4, 6, 8, 10, 12] * 2 + [6, 8, 10, 12] * 4
    assert [line["step"] for line in lines if line["kind"] == "step"] == [*range(1, 13)] * 2 + [*range(5, 13)] * 4
    exact, _, rare = csv.DictReader((tmp_path / "table-2.csv").read_text().splitlines())
    assert (exact["learning_rate"], rare["learning_rate"], rare["H"]) == ("0.1", "0.1", "2")
    # Rounds send the model and the loss, the start gradients and the loss.
    assert float(rare["times_fewer_bytes_in_rounds"]) == pytest.approx(2, rel=0.01)
    assert float(rare["times_fewer_bytes"]) == pytest.approx(12 / (4 + 8 / 2), rel=0.01)
    assert "2.0x" in capsys.readouterr().out


@pytest.mark.slow
def test_each_method_is_shown_at_its_best_rate(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suites, "METHODS", {key: suites.METHODS[key] for key in ("exact", "Local SGD")})
    arguments = ["compare", "--suite", "local", *TINY, "--workers", "2", "--periods", "2", "--rates", "1e3", "1e-9"]
    table = tmp_path / "table.csv"
    assert cli.main([*arguments, "--steps", "8", "--out", str(tmp_path), "--table", str(table)]) == 0
    found = [*csv.DictReader((tmp_path / "table-2.csv").read_text().splitlines())]
    # At 1e-9 nothing is learned, and at 1000 everything diverges.
    assert [(row["method"], row["learning_rate"]) for row in found] == [("exact", "1e-09"), ("Local SGD", "1e-09")]
    assert "best of rates 1000, 1e-09" in " ".join(capsys.readouterr().out.split())
    headers = [line for line in results.read_log(tmp_path / "log.jsonl") if line["kind"] == "run"]
    assert [line["optimizer"] for line in headers] == ["sgd:1000,momentum=0.9"] * 2 + ["sgd:1e-09,momentum=0.9"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["diloco:H=2,momentum=0.9", "slowmo:H=2,buffers=maintain"])
def test_a_shared_start_is_the_warm_up_of_the_method(spelling):
    """After it, the losses are those of the same recipe with `warmup_steps`, and so is the count of its schedule."""
    optimizer, steps, start = "adamw:0.01,schedule=cosine", 8, 4
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])

    def prepare(name, **settings):
        method = parse.parse_method(name, optimizer, steps)
        return train.prepare(work(), **method._asdict(), mesh=mesh, batch_size=8, **settings)

    exact = prepare("exact")
    *_, (_, state) = train.steps(exact, start)
    begun = starts.begin_at(prepare(spelling), starts.take_start(exact, state, start), sync_period=2, seed=0)
    continued = [record for record, _ in train.steps(begun, steps - start, first=start)]
    whole = [record for record, _ in train.steps(prepare(f"{spelling},warmup_steps={start}"), steps)][start:]
    assert [record.loss for record in continued] == pytest.approx([record.loss for record in whole], abs=1e-5)
    assert [record.step for record in continued] == [record.step for record in whole]
    assert continued[-1].total_wire_bytes > start * exact.wire_bytes


@pytest.mark.slow
def test_a_start_is_for_local_steps():
    exact = _prepare("exact")
    start = starts.Start(1, exact.state.params, exact.state.opt_state[1], 1.0)
    with pytest.raises(ValueError, match="a start is for methods around local_steps"):
        starts.begin_at(exact, start, sync_period=2, seed=0)
    with pytest.raises(ValueError, match="whose inner optimizer is the one of the synchronous run"):
        starts.begin_at(_prepare("diloco:H=2"), start._replace(inner=()), sync_period=2, seed=0)


def test_the_suite_has_a_start_a_cosine_and_rates_by_default():
    filled = compare.fill_local_defaults(compare.CompareOptions(suite="local"))
    assert (filled.steps, filled.start, filled.rates) == (
        suites.LOCAL_STEPS,
        suites.LOCAL_STEPS // 5,
        suites.LOCAL_RATES,
    )
    assert (filled.optimizer, filled.model) == (suites.LOCAL_OPTIMIZER, suites.LOCAL_MODEL)
    # An optimizer of one's own comes with its rate.
    given = compare.CompareOptions(suite="local", optimizer="sgd:0.1", steps=640, start=0, workload="digits")
    filled = compare.fill_local_defaults(given)
    assert (filled.optimizer, filled.rates, filled.steps, filled.start, filled.model) == ("sgd:0.1", (), 640, 0, None)


@pytest.mark.parametrize("option", [["--start", "8"], ["--rates", "0.1"]])
def test_options_of_the_suite_need_it(option, capsys, tmp_path):
    assert cli.main(["compare", *TINY, *option, "--steps", "8", "--out", str(tmp_path)]) == 2
    assert f"{option[0]} is for --suite local" in capsys.readouterr().err


def test_momentum_of_the_suite_is_the_default_of_the_recipe():
    with_start, from_scratch = (dict((m, s) for m, _, s in suites.list_sweep([32], start=start)) for start in (64, 0))
    assert with_start["DiLoCo"] == "diloco:H=32,momentum=0.9"
    assert from_scratch["DiLoCo"] == "diloco:H=32,momentum=0.5"
    for method, spelling in with_start.items():
        assert parse.parse_method(spelling, suites.LOCAL_OPTIMIZER, suites.LOCAL_STEPS), method


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--periods", "0"], "--periods needs positive numbers, got (0,)"),
        (["--workers", "99"], "--workers 99 requested, but only 8 devices"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--steps", "100", "--start", "50"], "--start 50 of --steps 100 leaves no round of H = 128"),
    ],
)
def test_bad_sweeps_are_one_clear_line(arguments, message, capsys, tmp_path):
    assert cli.main(["compare", "--suite", "local", *TINY, *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_drawing_survives_a_method_that_fails(tmp_path):
    run = mock.create_autospec(train.Run, instance=True, units_per_step=8)

    def cell(method, period, loss, baseline=None):
        found = results.Evaluation(4, 10.0, {"loss": loss})
        records = (train.Record(4, loss, 0.1, 10.0, 1.0, 10.0),)
        one = results.RunResult(method, records, {"loss": loss}, 10.0 / (period + 1), 1.0, (found,))
        return suites.collect_cell(method, period, [one], baseline, run, rate=0.1)

    exact = cell("exact", 0, 1.0)
    cells = [exact, cell("DiLoCo", 8, np.nan, exact), cell("SlowMo", 8, 1.1, exact)]
    assert cells[2].spread.difference.tolist() == pytest.approx([0.1])
    none = [cell("exact", 0, np.nan), cell("DiLoCo", 8, np.nan, exact)]
    for drawn in (cells, none):
        path = losses.draw_periods(drawn, tmp_path / "local.png", title="three", unit="nats", counted="images")
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()


def test_evaluations_come_after_whole_rounds():
    assert suites.evaluation_interval(768, (1, 8, 32, 128)) == 96
    assert suites.evaluation_interval(100, (1, 128)) == 12
    assert parse.learning_rate("adamw:3e-4,b2=0.95") == 3e-4
    assert parse.parse_method("f16", "adam:1e-3").sync_period is None
    assert isinstance(parse.parse_method("demo:1e-3", "adam:1e-3").optimizer, optax.GradientTransformation)


def test_an_optimizer_that_communicates_takes_its_reducer_after_a_slash():
    method = parse.parse_method("compressed_adam:2e-3,b2=0.99/ef:top_k:0.01", OPTIMIZER)
    assert (method.reducer, method.sync_period) == (None, None)
    assert parse.parse_method("qadam:1e-3,warmup_steps=3/two_shot:qsgd:4", OPTIMIZER).reducer is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("compressed_adam:2e-3", "name the reducer after a slash, as in compressed_adam:2e-3/ef:top_k:0.01"),
        ("compressed_adam:2e-3/ef:topk:0.01", "did you mean top_k"),
        ("demo:1e-3/ef:sign", "demo has a fixed encoding and takes no reducer"),
        ("compressed_adam/ef:sign", "it takes LEARNING_RATE"),
        ("compressed_adam:2e-3,b1=1/ef:sign", r"b1 must be in \[0, 1\), got 1"),
    ],
)
def test_a_wrong_optimizer_that_communicates_is_named(spelling, message):
    with pytest.raises(ValueError, match=message):
        parse.parse_method(spelling, OPTIMIZER)
