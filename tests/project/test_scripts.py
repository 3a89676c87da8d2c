"""The scripts that the checks consist of."""

import ast
import os
import re
import runpy
import shutil
import signal
import subprocess
import time

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from paths import REPOSITORY

ROOT = REPOSITORY
CHECK = ROOT / "scripts" / "check.sh"
BENCHMARKS = ROOT / "benchmarks"
HALVES = "a\n{} HEAD\nb\n{}\nc\n{} bb09dd3 (d)\n".format("<" * 7, "=" * 7, ">" * 7)


@pytest.mark.parametrize(
    ("text", "code"), [(HALVES, 1), (HALVES.replace("<", "|"), 1), ("Heading\n=======\n<<<<<<<<< x\n", 0)]
)
def test_conflict_markers_are_refused_in_what_is_tracked(tmp_path, text, code):
    (tmp_path / "scripts").mkdir()
    shutil.copy(CHECK, tmp_path / "scripts")
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "untracked.md").write_text(HALVES)
    # The variables of a git hook, under which these tests may run, point at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    subprocess.run(["git", "init", "-q"], check=True, **options)
    subprocess.run(["git", "add", "page.md", "scripts"], check=True, **options)
    checked = subprocess.run(["bash", "scripts/check.sh", "markers"], check=False, **options)
    assert checked.returncode == code, checked.stderr
    assert ("page.md:2:" in checked.stderr) == bool(code)


def test_every_commit_is_checked_for_markers():
    assert "check.sh markers " in (ROOT / ".pre-commit-config.yaml").read_text()
    assert "set -- markers " in CHECK.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_slurm_job_has_its_processes_save_and_goes_back_to_the_queue(tmp_path, number):
    commands = {"srun": "trap 'exit 0' TERM; touch ready; while :; do sleep 0.1; done", "scontrol": 'echo "$@" >queued'}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", str(ROOT / "examples/cluster/slurm.sh"), "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as job:
        while not (tmp_path / "ready").exists():
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(number)
    assert job.returncode == 0
    assert (tmp_path / "queued").read_text() == "requeue 7\n"


def _defined(tree):
    """The names that a module has at its top level."""
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def test_benchmarks_import_what_the_scripts_beside_them_have():
    missing, seen = [], 0
    for script in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(script.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                continue
            for beside in {folder / f"{node.module}.py" for folder in (script.parent, BENCHMARKS)}:
                if not beside.exists():
                    continue
                names = {*_defined(ast.parse(beside.read_text()))}
                seen += len(node.names)
                missing += [f"{script.name}: {a.name} of {beside.name}" for a in node.names if a.name not in names]
    assert seen > 10
    assert not missing


def _subcommands(folder):
    """The modules that the command of a folder runs."""
    for node in ast.parse((folder / "__main__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "SUBCOMMANDS":
            return {*ast.literal_eval(node.value)}
    raise AssertionError(f"{folder} has no SUBCOMMANDS")


def _commands():
    """The benchmarks that a user starts, without the processes that they start themselves."""
    files = (path for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
    return {*files, *(path.parent for path in BENCHMARKS.glob("*/__main__.py"))}


def test_each_subcommand_of_a_benchmark_is_a_module():
    folders = [path for path in _commands() if path.is_dir()]
    assert len(folders) > 5
    for folder in folders:
        for name in _subcommands(folder):
            assert {"add_options", "main"} <= {*_defined(ast.parse((folder / f"{name}.py").read_text()))}, name


def test_each_benchmark_has_one_line_in_the_readme():
    named = re.findall(r"^\| `.*?python benchmarks/([\w/.]+)", (BENCHMARKS / "README.md").read_text(), re.M)
    commands = [str(path.relative_to(BENCHMARKS)) for path in _commands()]
    assert len(commands) <= 20
    assert [name for name in commands if named.count(name) != 1] == []


def test_benchmarks_that_pages_and_docstrings_quote_exist():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *BENCHMARKS.rglob("*.md"), *BENCHMARKS.rglob("*.py")]
    seen, missing = 0, []
    for page in pages:
        for name, word in re.findall(r"python benchmarks/([\w/.-]+)(?: (\w+))?", page.read_text()):
            path = BENCHMARKS / name.rstrip(".")
            seen += 1
            if not path.exists() or (path.is_dir() and word not in _subcommands(path)):
                missing.append(f"{page.name}: {name} {word}")
    assert seen > 50
    assert not missing


@pytest.mark.parametrize("columns", [1, 2])
def test_the_chart_of_a_race_has_all_of_its_title(columns, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    chart = runpy.run_path(str(BENCHMARKS / "race" / "chart.py"))
    bar = chart["Bar"]("PyTorch DDP", "torch", 2.0, (1.0, 3.0), float("nan"))
    title = "Seconds until a language model of 29.9 M parameters reaches a held-out loss of 2.6"
    chart["draw"]([[("100 Mbit/s", [bar])] * columns] * 2, title, "PyTorch DDP", tmp_path / "chart.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (written,) = figure.texts
    box = written.get_window_extent()
    assert " ".join(written.get_text().split()) == title
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
