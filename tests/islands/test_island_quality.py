"""The measurement of losses with churn: its script runs, and the pages quote what it measured."""

import argparse
import json
import runpy

import numpy as np
import pytest
from paths import REPOSITORY

REPORT = REPOSITORY / "benchmarks" / "reports" / "2026-11-islands"
SMALLEST = "--model gpt:tiny,layers=1,width=8,context=8,heads=1 --steps 400 --islands 2 --periods 16 --seeds 0"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return argparse.Namespace(**runpy.run_path(str(REPOSITORY / "benchmarks/islands/quality.py")))


def run(quality, *arguments):
    parser = argparse.ArgumentParser()
    quality.add_options(parser)
    quality.main(parser.parse_args([*SMALLEST.split(), *arguments]))


@pytest.mark.slow
def test_the_smallest_cell_with_churn_ends_beside_the_undisturbed_one(quality, tmp_path, capsys):
    arguments = ["--fragments", "2", "--conditions", "undisturbed", "islands", "churn", "--out", str(tmp_path)]
    run(quality, *arguments)
    path = tmp_path / "quality.jsonl"
    synchronous, *rows = map(json.loads, path.read_text().splitlines())
    assert synchronous["condition"] == "synchronous"
    assert synchronous["steps"] == 320
    undisturbed, fixed, churned = rows
    # Other draws of the code.
    assert fixed["loss"] == pytest.approx(undisturbed["loss"], rel=0.02)
    assert (fixed["tokens"], fixed["mean_members"]) == (1, 2)
    # In each round, and fragment, half a byte for each parameter, and a record; at last the goodbye.
    payload = synchronous["parameters"] / 2 / (16 * 8 * 8)
    assert payload < fixed["sent_bytes_per_token"]
    assert [churned[kind] for kind in ("kill", "late", "join")] == [2, 2, 1]
    assert churned["loss"] == pytest.approx(undisturbed["loss"], rel=0.1)
    capsys.readouterr()
    before = path.read_text()
    run(quality, *arguments)
    assert path.read_text() == before
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("| islands | `H` |")


def test_tables_of_the_report_and_of_the_page_are_those_of_the_rows(quality):
    rows = quality.read_rows(REPORT)
    table, settings = quality.make_table(rows), quality.make_settings_table(rows)
    assert table in (REPORT / "README.md").read_text()
    assert settings in (REPORT / "README.md").read_text()
    assert table in (REPOSITORY / "docs/how-to/train-on-spot-machines.md").read_text()


def test_lives_have_one_kill_and_one_delay_of_each_island_and_more_islands_for_a_third(quality):
    *lives, joining = quality.draw_lives(np.random.default_rng(0), 4, 2048, ("kill", "late", "join"))
    assert [sorted(event.kind for event in life.events) for life in lives] == [["kill", "late"]] * 4
    assert all(102 <= event.step < 1843 for life in lives for event in life.events)
    assert joining.first > 0
    assert joining.last - joining.first == 682
    assert quality.draw_lives(np.random.default_rng(0), 4, 2048, ()) == [quality.Life(0, 2048, [])] * 4
