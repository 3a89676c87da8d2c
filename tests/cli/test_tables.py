"""Tables on terminals of any width, and in files: no number is ever cut."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn

from jaxdist._cli import figures, labels, race, results, running, tables
from jaxdist._cli.commands import advise, show
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import suites, train
from jaxdist.analysis.step_time import StepCost, Traffic

LONG = "streaming_diloco:H=50,fragments=4,warmup_steps=100/ef:two_shot:qsgd:4x"  # 70 letters
NAMES = ("exact", "compressed_adam:2e-3/ef:top_k:0.01", LONG)


def _runs_table():
    record = train.Record(1, 5.0, 0.1, 1.0, 158_400.0, 158_400.0)
    runs = [results.RunResult(name, (record,), {"loss": 2.3456, "accuracy": 0.5}, 158_400.0, 1.0) for name in NAMES]
    return tables.runs_table(runs, runs[0], tables.Units("image", 8.0))


def _race_table():
    cost, curve = StepCost(0.1, 0.05, Traffic(1e6, 6.0)), race.Curve(np.array([10, 20]), np.array([[3.0, 2.0]]))
    links = [parse.parse_link(link) for link in ("100mbit,20ms", "1gbit,1ms")]
    return race.finish_table(race.run_race([race.Entrant(name, cost, curve) for name in NAMES], links, 2.5), 2.5)


def _advice_table():
    found = [advise.Prediction(name, 1e6, 0.01, 0.02, 12.3456, 0.11, 12.5e6, 1234.5) for name in NAMES]
    return advise._predictions_table(found, 2.4, tables.Units("token", 512.0))


def _print(table, **terminal):
    figures.print_table(Console(file=(printed := io.StringIO()), **terminal), table)
    return printed.getvalue()


TABLES = pytest.mark.parametrize("make", [_runs_table, _race_table, _advice_table])


@TABLES
@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_numbers_are_whole_on_a_terminal_of_any_width(make, width):
    table = make()
    lines = _print(table, width=width, force_terminal=True, no_color=True, color_system=None).splitlines()
    assert max(map(len, lines)) <= width
    for column in table.columns[1:]:
        for cell in map(str, column.cells):
            assert any(line.endswith(f" {cell} ") or f" {cell}  " in line for line in lines)
    assert not any("…" in line for line in lines)


@TABLES
def test_names_wrap_and_lose_no_letter(make):
    lines = _print(make(), width=80, force_terminal=True, color_system=None).splitlines()
    assert LONG in "".join(line.split(" ")[1] for line in lines if line[1:2].strip())


@TABLES
def test_a_file_has_a_line_for_each_method(make):
    table = make()
    lines = _print(table, width=80).splitlines()
    (last,) = (line for line in lines if LONG in line)
    for column in table.columns[1:]:
        assert str(list(column.cells)[-1]) in last


def test_a_method_that_sends_nothing_sends_infinitely_many_times_fewer_bytes():
    record = train.Record(1, 5.0, 0.1, 1.0, 0.0, 0.0)
    exact, nothing = (results.RunResult("f16", (record,), {"loss": 2.0}, sent, 1.0) for sent in (100.0, 0.0))
    assert list(tables.runs_table([exact, nothing], exact).columns[2].cells) == ["1.0x", "∞"]
    assert list(tables.runs_table([nothing], nothing).columns[2].cells) == ["1.0x"]
    spreads = [suites.collect_seeds([each], [exact]) for each in (exact, nothing)]
    assert list(tables.seeds_table(spreads).columns[2].cells) == ["1.0x", "∞"]


@pytest.mark.parametrize("suffix", [".md", ".tex"])
def test_tables_for_a_paper_have_no_times_of_this_machine(suffix, tmp_path):
    text = tables.write_table(_runs_table(), [], tmp_path / f"table{suffix}").read_text()
    assert "bytes a step" in text
    assert "ms/step" not in text
    assert "illiseconds" not in text


def test_a_table_has_the_standard_deviation_over_the_seeds():
    record = train.Record(1, 5.0, 0.1, 1.0, 100.0, 100.0)
    runs = [results.RunResult("exact", (record,), {"loss": loss}, 100.0, 1.0) for loss in (1.0, 2.0, 6.0)]
    table = tables.seeds_table([suites.collect_seeds(runs, runs)])
    assert list(table.columns[3].cells) == ["3.0000 ±2.6458"]


def test_a_label_may_have_formulas_in_latex(tmp_path):
    record = train.Record(1, 5.0, 0.1, 1.0, 100.0, 100.0)
    run = results.RunResult("ef:top_k:0.01", (record,), {"loss": 2.0}, 100.0, 1.0)
    (shown,) = labels.relabel([run], {"ef:top_k:0.01": r"Top-$k$, 1\,\%"})
    text = tables.write_table(tables.runs_table([shown], None), [], tmp_path / "t.tex").read_text()
    assert "\nTop-$k$, 1\\,\\% & " in text
    assert labels.relabel([run], {}) == [run]


def test_brackets_in_a_name_are_text(capsys):
    console, name = running.new_console(), "my_reducers:f:[/x]"
    with running.show_compiling(console, f"{name} for 4 workers"):
        console.print(f"digits, {name}", style="dim", highlight=False)
    table = figures.new_table("reducer", ())
    table.add_row(name)
    figures.print_table(console, table)
    assert capsys.readouterr().out.count(name) == 3


@pytest.mark.parametrize("width", [80, 100])
def test_numbers_of_a_running_method_are_whole(width):
    console = Console(file=(printed := io.StringIO()), width=width, force_terminal=True, color_system=None)
    now = "loss 2.345 12,345 tokens/s 158.4 kB/step"
    with running.new_progress(console, MofNCompleteColumn, 10) as progress:
        progress.add_task(LONG, total=2000, completed=1000, now=now)
    assert f"1000/2000 {now}" in printed.getvalue()


def test_rounds_of_islands_are_whole_on_a_narrow_terminal(monkeypatch):
    members = tuple(f"{place}-{number}" for place in ("eu", "us", "asia") for number in range(4))
    one = SimpleNamespace(round=123456, members=members, missing=members[:2], sent_bytes=dict.fromkeys(members, 1e9))
    found = SimpleNamespace(round=123456, rounds=[one], present=members, sessions={}, kept=[])
    monkeypatch.setattr(show.islands, "status", lambda url, last: found)
    console = Console(file=(printed := io.StringIO()), width=40, force_terminal=True, color_system=None)
    console.print(show.rounds_table("runs/islands", 10))
    assert "│ 123456 │" in printed.getvalue()
    assert "│ 12,000,000.0 │" in printed.getvalue()


def test_the_best_row_keeps_its_style_on_a_narrow_terminal():
    printed = _print(_advice_table(), width=60, force_terminal=True, color_system="standard")
    assert printed.count("\x1b[1;32m") > 1


def test_the_bytes_of_a_unit_are_those_of_one_worker():
    units = tables.count_units(parse.parse_workload("text", None)._replace(units_per_example=128), 32, 4)
    assert units == tables.Units("token", 8 * 128)
    record = train.Record(1, 5.0, 0.1, 1.0, 4e6, 4e6)
    runs = [results.RunResult("exact", (record,), {"loss": 2.0}, sent, 1.0) for sent in (4e6, 4e3)]
    table = tables.runs_table(runs, runs[0], units)
    assert table.columns[2].header == "bytes a token"
    assert list(table.columns[2].cells) == ["3.9 kB", "3.9 B"]
    assert [row["wire_bytes_per_token"] for row in tables.run_records(runs, runs[0], units)] == [4e6 / 1024, 4e3 / 1024]
    spreads = [suites.collect_seeds([each], [runs[0]]) for each in runs]
    assert list(tables.seeds_table(spreads, units).columns[2].cells) == ["3.9 kB", "3.9 B"]
    assert tables.seed_records(spreads, spreads[0], units)[0]["wire_bytes_per_token"] == 4e6 / 1024
    assert tables.Units("image", 1.0).heading() == "bytes an image"


def test_the_table_of_periods_has_the_bytes_of_a_unit():
    record = train.Record(1, 5.0, 0.1, 1.0, 4e6, 4e6)
    runs = [results.RunResult(name, (record,), {"loss": 2.0}, sent, 1.0) for name, sent in (("a", 4e6), ("b", 4e3))]
    cells = [
        suites.Cell(
            name, period, 0.1, suites.collect_seeds([run], [runs[0]]), 4e3, np.array([1]), np.array([2.0]), 4096
        )
        for name, period, run in zip(("exact", "diloco"), (0, 50), runs, strict=True)
    ]
    units = tables.Units("token", 1024.0)
    table = tables.periods_table(cells, units)
    assert [column.header for column in table.columns][3:6] == ["bytes a step", "bytes a token", "fewer bytes"]
    assert list(table.columns[4].cells) == ["3.9 kB", "3.9 B"]
    assert [row["wire_bytes_per_token"] for row in tables.period_records(cells, units)] == [4e6 / 1024, 4e3 / 1024]
