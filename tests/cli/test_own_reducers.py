"""A researcher's reducer on the command line: found, called, refused by name, and compared over seeds in tables."""

import csv
import re
from pathlib import Path

import optax
import pytest
from paths import REPOSITORY
from readers_modules import modules_in

from jaxdist._cli import main as cli
from jaxdist._cli import results, tables
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import train

MODULE = """
import optax
import jaxdist as jd
from jaxdist.compressors import Compressor
from jaxdist.reducers import Reducer

ready = jd.compressed(jd.qsgd(4))
number = 3

def code(bits: int) -> Compressor:
    return jd.qsgd(bits)

def around(inner: Reducer, rate: float = 0.1) -> Reducer:
    return jd.error_feedback(inner)

def optimizer(learning_rate: float) -> optax.GradientTransformation:
    return optax.chain(jd.all_reduce(jd.exact()), optax.sgd(learning_rate))
"""
TINY = ["--workload", "digits", "--model", "convnet:2", "--batch", "8"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with modules of its own in it; they are forgotten afterwards."""
    sources = {
        "own_reducers": MODULE,
        "broken_reducers": "import jaxdist\n\nnothing = 1 / 0\n",
        "late_reducers": "import jaxdist as jd\n\njd.runtime.use_cpu_devices(0)\n",
        "needy_reducers": "import a_package_that_is_missing\n",
    }
    with modules_in(tmp_path, monkeypatch, **sources):
        yield tmp_path


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("own_reducers:ready", "qsgd:4"),
        ("own_reducers:code:2", "qsgd:2"),
        ("ef:own_reducers:code:bits=4", "ef:qsgd:4"),
        ("two_shot:own_reducers:code:4", "two_shot:qsgd:4"),
        ("top_k:0.1+own_reducers:code:4", "top_k:0.1+qsgd:4"),
        ("own_reducers:around:power_sgd:2,rate=0.5", "ef:power_sgd:2"),
        ("own_reducers:around:inner=f16", "ef:f16"),
    ],
)
def test_module_and_name_are_a_spelling(folder, text, same):
    assert repr(parse.parse_reducer(text)) == repr(parse.parse_reducer(same))


def test_methods_take_reducers_of_ones_own(folder):
    assert parse.parse_method("zero:2/own_reducers:ready", "sgd:0.1").stage == 2
    assert parse.parse_method("diloco:H=4/ef:own_reducers:code:4", "sgd:0.1").sync_period == 4
    method = parse.parse_method("own_reducers:optimizer:0.1", "sgd:0.1")
    assert method.reducer is None
    assert isinstance(method.optimizer, optax.GradientTransformation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere:diana", "no module 'nowhere' in {folder} or on the path; run in its folder, or set PYTHONPATH"),
        ("own_reducer:code:4", "no module 'own_reducer' in {folder} or on the path; did you mean own_reducers\\?$"),
        ("own_reducers.code", "did you mean own_reducers:code\\? known: exact"),
        ("own_reducers.py:ready", "no module 'own_reducers.py' .*or import it as own_reducers$"),
        ("own_reducers:codes:4", "did you mean code\\? known: code, around, optimizer in {folder}/own_reducers.py"),
        ("own_reducers:number", "number gives int; return a jaxdist.reducers.Reducer"),
        ("own_reducers:ready:3", "ready is no function; leave out '3'"),
        ("own_reducers:around", "missing a required argument: 'inner'; it takes INNER\\[,rate=0.1\\]"),
        ("own_reducers:code:four", "bits must be a whole number, got 'four'"),
        ("own_reducers:code:4,5", "too many positional arguments; it takes BITS"),
        ("ef:own_reducers:optimizer:0.1", "an optimizer that communicates has no place around or inside"),
        ("own_reducers:code(4)", "give arguments after a colon, as in power_sgd:4"),
        ("broken_reducers:any", "broken_reducers fails at {folder}/broken_reducers.py:3: ZeroDivisionError"),
        # The line of the module, not that of the function which it calls.
        (
            "late_reducers:any",
            "late_reducers fails at {folder}/late_reducers.py:3: ValueError: count must be at least 1",
        ),
        ("needy_reducers:any", "needy_reducers fails at .*No module named 'a_package_that_is_missing'"),
        ("eff:top_k:0.1", "did you mean ef\\?"),
    ],
)
def test_a_wrong_spelling_says_what_to_do(folder, text, message):
    with pytest.raises(ValueError, match=message.format(folder=re.escape(str(folder)))) as told:
        parse.parse_method(text, "sgd:0.1")
    assert repr(text.removeprefix("ef:"))[1:-1] in str(told.value)


@pytest.mark.slow
def test_the_reducer_of_the_guide_is_compared_over_seeds(folder, capsys):
    """What docs/how-to/add-a-reducer.md says: its first block as a file, and its command."""
    page = (REPOSITORY / "docs/how-to/add-a-reducer.md").read_text()
    (folder / "my_reducers.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    assert "my_reducers:diana:qsgd:2,rate=0.1" in page
    names = ["--reducers", "exact", "my_reducers:diana:qsgd:2,rate=0.1", "--seeds", "2", "--steps", "2"]
    assert cli.main(["compare", *TINY, *names, "--devices", "2", "--table", "tables/diana.csv"]) == 0
    printed = capsys.readouterr().out
    assert "table: tables/diana.csv" in printed
    assert (folder / "runs/compare/compare.png").read_bytes().startswith(b"\x89PNG")
    exact, diana = read_csv(folder / "tables/diana.csv")
    assert (diana["name"], diana["seeds"]) == ("my_reducers:diana:qsgd:2,rate=0.1", "2")
    assert 8 < float(exact["wire_bytes_per_step"]) / float(diana["wire_bytes_per_step"]) < 16


def test_every_reducer_of_the_guide_can_be_made(folder):
    page = (REPOSITORY / "docs/how-to/add-a-reducer.md").read_text()
    (folder / "my_reducers.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    spelled = re.findall(r" (my_reducers:\S+)", "".join(re.findall(r"```shell\n(.*?)```", page, re.DOTALL)))
    assert len(spelled) == 3
    for name in spelled:
        parse.parse_reducer(name)


@pytest.mark.slow
def test_advise_takes_reducers_of_ones_own(folder, capsys):
    arguments = [*TINY, "--link", "10mbit,1ms", "--workers", "2", "--compute", "10", "--table", "advice.tex"]
    assert cli.main(["advise", *arguments, "--reducers", "exact", "own_reducers:code:4"]) == 0
    assert "own_reducers:code:4" in capsys.readouterr().out
    text = (folder / "advice.tex").read_text()
    assert text.startswith("% \\usepackage{booktabs}\n% Bytes: sent by one worker")
    assert "\nown\\_reducers:code:4 & " in text


@pytest.fixture
def table():
    made = tables.new_table("reducer", ("bytes a step", "against exact"), caption="*: best")
    made.add_row("  exact", "1 kB", "+0.0000")
    made.add_row("* ef:top_k:0.1", "5 %", "-0.1000 ±0.0200")
    return made


def test_markdown_has_the_rows_as_shown(table, tmp_path):
    text = tables.write_table(table, [], tmp_path / "new" / "a.md").read_text()
    assert text.splitlines() == [
        "| reducer | bytes a step | against exact |",
        "| --- | ---: | ---: |",
        "| exact | 1 kB | +0.0000 |",
        "| \\* ef:top_k:0.1 | 5 % | -0.1000 ±0.0200 |",
        "",
        "\\*: best",
    ]


def test_latex_escapes_names_and_signs(table, tmp_path):
    lines = tables.write_table(table, [], tmp_path / "a.tex").read_text().splitlines()
    assert lines[2:] == [
        "\\begin{tabular}{lrr}",
        "\\toprule",
        "reducer & bytes a step & against exact \\\\",
        "\\midrule",
        "exact & 1 kB & $+$0.0000 \\\\",
        "$\\ast$ ef:top\\_k:0.1 & 5 \\% & $-$0.1000 $\\pm$0.0200 \\\\",
        "\\bottomrule",
        "\\end{tabular}",
    ]


@pytest.mark.parametrize(
    ("label", "latex"),
    [
        ("* Ours & theirs, 50 %, $k = n/4$", r"$\ast$ Ours \& theirs, 50 \%, $k = n/4$"),
        (r"$\mathcal{O}(k_1)$ of a_b, $5%$", r"$\mathcal{O}(k_1)$ of a\_b, $5%$"),
        (r"\textsc{Ours}, 5 \%", r"\textsc{Ours}, 5 \%"),
        ("5 $ a month", r"5 \$ a month"),
        ("-0.10 ±0.02", r"$-$0.10 $\pm$0.02"),
    ],
)
def test_latex_takes_the_formulas_of_a_label_as_they_are(label, latex):
    assert tables._escape_latex(label) == latex


def test_the_form_of_a_table_is_checked_before_training(folder, capsys):
    assert cli.main(["compare", "--table", "table.xlsx"]) == 2
    assert "--table must end in .csv, .md, .tex, got 'table.xlsx'" in capsys.readouterr().err
    (folder / "file").touch()
    assert cli.main(["compare", *TINY, "--table", "file/table.csv"]) == 2
    assert "--table file/table.csv needs a folder 'file', which is a file" in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("command", ["train", "compare", "replay", "plan --target v5e:2x2", "tune", "topology ring"])
def test_a_file_in_place_of_the_folder_is_refused_before_any_work(folder, capsys, command):
    (folder / "file").touch()
    for out in ("file", "file/runs"):
        assert cli.main([*command.split(), "--out", out]) == 2
        expected = f"jaxdist: error: --out {out} needs a folder 'file', which is a file: give another path\n"
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        ("compare --table new/table.csv", "compare.train_to_end"),
        ("advise --link 10mbit,1ms --table new/table.csv", "advise.costs.measure_compute"),
        ("train --engine ray --rule asgd --workers 2 --out new", "train._run_processes"),
        ("replay --out new", "replay._simulate"),
        ("tune --out new", "tune.layers.measure_rate"),
    ],
)
def test_a_folder_that_cannot_be_made_is_found_before_the_work(folder, monkeypatch, capsys, arguments, work):
    def refuse(path, **settings):
        raise PermissionError(f"no permission for {path}")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(f"jaxdist._cli.commands.{work}", lambda *given, **settings: pytest.fail("worked"))
    assert cli.main([*arguments.split(), *TINY]) == 2
    assert "no permission for new" in capsys.readouterr().err


def test_a_single_seed_has_the_numbers_of_its_summary(tmp_path):
    record = train.Record(1, 2.0, 0.1, 10.0, 100.0, 100.0)
    result = results.RunResult("f16", (record,), {"loss": 1.5, "accuracy": 0.5}, 100.0, 1.0)
    path = tables.write_table(tables.runs_table([result], None), tables.run_records([result], None), tmp_path / "a.csv")
    (row,) = read_csv(path)
    assert (row["name"], row["held_out_loss"], row["held_out_accuracy"]) == ("f16", "1.5", "0.5")
    assert (row["wire_bytes_per_step"], row["difference"]) == ("100.0", "")
