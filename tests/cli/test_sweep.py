"""Rules at their best rates over several seeds: what is chosen, when runs end, and what is left."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import REPOSITORY

from jaxdist._cli import main as cli
from jaxdist._cli import sweep, sweep_tables
from jaxdist.asynchronous import replay, rules

SMALL = ["replay", "--rule", "asgd", "bsp", "--workers", "2", "--seconds", "2", "--model", "convnet:1", "--batch", "4"]


def _clock(rate, seed=0, optimum=1.0):
    # f(x) = (x - 1)² / 2 from 3: with one worker a step a second, the error is 2 (1 - rate)^t.
    task = replay.Task(
        jnp.asarray(3.0),
        lambda x, b: 0.5 * (x - b) ** 2,
        lambda *job: jnp.asarray(optimum),
        lambda x: 0.5 * (x - 1.0) ** 2,
    )
    return replay.simulator(rules.asgd(optax.sgd(rate)), task, workers=1, evaluate_every=1.0, seed=seed)


def _clocks(*rates):
    return {rate: _clock(rate) for rate in rates}


def test_the_best_rate_reaches_the_target_first():
    # Losses are 2 (1 - rate)^2t: below 0.1 after 4.3 steps at 0.3, 2.2 at 0.5.
    assert sweep.tune_rate(_clocks(0.3, 0.5, 3.0), sweep.Goal(60.0, 0.1)) == (0.5, {0.5: 3.0})


def test_without_a_target_the_best_rate_has_the_lowest_loss():
    rate, losses = sweep.tune_rate(_clocks(0.01, 0.02, 3.0), sweep.Goal(60.0, None))
    assert rate == 0.02
    assert losses[0.02] < losses[0.01]
    assert losses[3.0] == np.inf


def test_a_target_that_no_rate_reaches_leaves_the_lowest_loss():
    assert sweep.tune_rate(_clocks(0.01, 0.02), sweep.Goal(60.0, 1e-9)) == (0.02, {})


def test_of_equal_rates_the_lowest_is_taken():
    assert sweep.tune_rate(_clocks(1.0, 1.5, 0.9), sweep.Goal(60.0, 0.1))[0] == 0.9


def test_a_run_ends_at_the_target_and_where_it_diverges():
    goal = sweep.Goal(60.0, 0.1)
    found = sweep.run_to_goal(_clock(0.5), goal)
    assert sweep.seconds_to(found, 0.1) == 3.0
    # Three evaluations in a row, the third of which is after five seconds.
    assert found.seconds == 5.0
    assert sweep.final_loss(sweep.run_to_goal(_clock(3.0), goal)) == np.inf
    broken = sweep.run_to_goal(_clock(0.1, optimum=np.nan), goal)
    assert broken.losses[-1] == np.inf
    assert len(broken.losses) == len(broken.times)
    assert sweep.seconds_to(broken, 0.1) == sweep.final_loss(broken) == np.inf


def test_a_rate_at_the_edge_is_named():
    assert sweep.edge_of(0.4, (0.1, 0.4, 0.2)) == "0.4 is the largest of --rates"
    assert sweep.edge_of(0.1, (0.1, 0.4, 0.2)) == "0.1 is the smallest of --rates"
    assert sweep.edge_of(0.2, (0.1, 0.4, 0.2)) == sweep.edge_of(0.1, (0.1,)) == ""


def _swept(name, *ends):
    clock = _clock(0.5)
    run = clock.result(clock.advance(clock.init(), seconds=8.0))
    # Reaches 0.1 at the second given, for each seed.
    losses = [np.where(run.times >= end, 0.05, 2.0) for end in ends]
    return sweep.Swept(name, 0.5, tuple(run._replace(losses=each) for each in losses))


def test_the_table_has_means_and_deviations_and_what_never_arrives():
    swept = [_swept("bsp", 4.0, 6.0), _swept("asgd", 2.0, 3.0), _swept("dude", 2.0, np.inf)]
    table = sweep_tables.sweep_table(swept, 0.1, {"asgd": "Hogwild"})
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["rule"] == ["bsp", "Hogwild", "dude"]
    assert columns["seconds to 0.1"] == ["5.00 ±1.41", "2.50 ±0.71", "never in 1 of 2"]
    assert columns["times sooner than bsp"] == ["1.0", "2.0", "-"]
    bsp, asgd, dude = sweep_tables.sweep_records(swept, 0.1)
    assert (asgd["rule"], asgd["rate"], asgd["seeds"], asgd["times_sooner"]) == ("asgd", 0.5, 2, 2.0)
    assert bsp["seconds_to_target_std"] == pytest.approx(2**0.5)
    assert dude["seconds_to_target_mean"] == np.inf
    losses = sweep_tables.sweep_table(swept, None)
    assert [str(column.header) for column in losses.columns][:3] == ["rule", "rate", "held-out loss"]


def test_one_command_leaves_a_table_and_a_figure(tmp_path, capsys):
    arguments = ["--seeds", "2", "--rates", "0.1", "0.01", "--target", "2.4", "--label", "asgd=Ours, $k = 2$"]
    arguments += ["--evaluations", "4", "--table", str(tmp_path / "t.csv"), "--figure", str(tmp_path / "new" / "f.pdf")]
    assert cli.main([*SMALL, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "Ours, $k = 2$" in printed
    assert "of --rates; its best may be beyond" in printed
    with (tmp_path / "t.csv").open(newline="") as file:
        asgd, bsp = csv.DictReader(file)
    assert [asgd["rule"], bsp["rule"]] == ["asgd", "bsp"]
    assert {asgd["rate"], bsp["rate"]} <= {"0.1", "0.01"}
    assert float(asgd["seconds_to_target_mean"]) >= 0
    assert (tmp_path / "new/f.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_a_single_run_leaves_a_table_too_without_a_model(tmp_path, capsys):
    arguments = ["--timing-only", "--seed", str(2**32 - 1), "--out", str(tmp_path), "--label", "bsp=Synchronous"]
    for suffix in (".csv", ".tex"):
        assert cli.main([*SMALL, *arguments, "--table", str(tmp_path / f"t{suffix}")]) == 0
    with (tmp_path / "t.csv").open(newline="") as file:
        asgd, bsp = csv.DictReader(file)
    assert (asgd["rule"], asgd["held_out_loss_mean"], bsp["rule"]) == ("asgd", "nan", "bsp")
    assert "\nSynchronous & " in (tmp_path / "t.tex").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be positive, got 0"),
        (["--rates", "0.1", "-1"], "--rates must be positive, got -1.0"),
        (["--seeds", "2", "--timing-only"], "--seeds needs losses: leave out --timing-only"),
        (["--seeds", "2", "--events", "e"], "--events is a log of one run of each rule: leave out --seeds and --rates"),
        (["--nic"], "--nic is for messages that take time: give a link, as in --link 100mbit,20ms"),
        (["--figure", "a.gif"], "--figure must end in .png, .pdf, .svg, got 'a.gif'"),
        (["--table", "a.txt"], "--table must end in .csv, .md, .tex, got 'a.txt'"),
        (["--rule", "bsp", "bsp"], "--rule has bsp more than once: name each rule once"),
        (["--label", "bps=x"], "unknown method in --label 'bps=x'; did you mean bsp? known: asgd, bsp"),
        (["--label", "bsp="], "--label 'bsp=' has no text: write it behind the equals sign, as in bsp=Ours"),
        (["--label", "bsp=asgd"], "--label gives 'asgd' to 2 methods: give each its own"),
    ],
)
def test_options_that_cannot_work_are_refused_before_any_run(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SMALL, *arguments]) == 2
    assert f"jaxdist: error: {message}\n" == capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not (REPOSITORY / "benchmarks").exists(), reason="a source distribution has no reports")
def test_a_command_gives_the_seconds_of_the_report(tmp_path):
    arguments = ["--workers", "16", "--slow", "6x", "--law", "lognormal:0.005,0.2", "--link", "10gbit,10us", "--nic"]
    arguments += ["--seconds", "6", "--evaluations", "600", "--batch", "16", "--target", "0.2", "--seeds", "5"]
    arguments += ["--rule", "asgd", "--optimizer", "sgd:0.025", "--table", str(tmp_path / "table.csv")]
    assert cli.main(["replay", *arguments, "--out", str(tmp_path)]) == 0
    with (tmp_path / "table.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    report = json.loads((REPOSITORY / "benchmarks/reports/2026-11-asynchronous/stragglers.json").read_text())
    (asgd,) = (one for one in report if (one["scene"], one["rule"]) == ("16, one slow", "asgd"))
    assert asgd["rate"] == 0.025
    # A last bit may differ between machines, and then an evaluation.
    assert float(row["seconds_to_target_mean"]) == pytest.approx(np.mean(asgd["seconds"]), abs=0.02)
