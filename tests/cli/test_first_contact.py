"""What a newcomer meets first: versions, the list of commands, help that fits a screen, misspelt names."""

import os
import platform
import signal
import subprocess
import sys

import jax
import pytest
from rich.console import Console
from rich.text import Text

import jaxdist as jd
from jaxdist._cli import __main__ as entry
from jaxdist._cli import main as cli
from jaxdist._cli import running
from jaxdist._cli.spellings import tables
from jaxdist._core.interrupts import raise_interrupts


def _help(capsys, *command):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_version_is_one_line(capsys):
    assert cli.main(["--version"]) == 0
    wanted = f"jaxdist {jd.__version__}, jax {jax.__version__}, Python {platform.python_version()}\n"
    assert capsys.readouterr().out == wanted


def test_help_lists_every_command_with_a_purpose(capsys):
    printed = _help(capsys)
    for name in (*cli.COMMANDS, "launch"):
        assert f"• {name} " in printed
    assert "several processes of a script" in printed


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    printed = _help(capsys, command)
    assert printed.count("\n") <= 52
    assert "{None}" not in printed


@pytest.mark.parametrize("command", ["train", "compare", "plan", "replay"])
def test_help_begins_with_examples(command, capsys):
    printed = _help(capsys, command)
    assert printed.index(f"\n  jaxdist {command} ") < printed.index("--out")
    assert "jaxdist reducers" in printed


def test_reducers_lists_every_name_in_one_line(capsys):
    assert cli.main(["reducers"]) == 0
    printed = capsys.readouterr().out
    names = [*tables.REDUCERS, *tables.FEEDBACK, *tables.COLLECTIVES, *tables.OPTIMIZERS, *tables.SYNCS, *tables.RULES]
    listed = [line.split()[0].partition(":")[0] for line in printed.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted([*names, "CODE+CODE"])
    assert "power_sgd:RANK " in printed


def test_reducers_shows_one_with_all_arguments(capsys):
    assert cli.main(["reducers", "power_sgd"]) == 0
    assert "--reducer power_sgd:RANK[,one_sided=False" in capsys.readouterr().out
    assert cli.main(["reducers", "slowmo"]) == 0
    assert "--sync slowmo:H=N[,slow_learning_rate=1.0" in capsys.readouterr().out
    assert cli.main(["reducers", "powersgd"]) == 2
    assert "did you mean power_sgd?" in capsys.readouterr().err


def test_a_second_interrupt_aborts(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(running, "preemption_requested", lambda step: False)
    received = []
    monkeypatch.setattr(signal, "raise_signal", received.append)
    with running._interrupt_as_preemption(0):
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    signal.signal(signal.SIGINT, before)
    with running._interrupt_as_preemption(0):
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_with_nothing_to_save_is_one_line(monkeypatch, capsys):
    def interrupt(chosen):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "topology", (cli.TopologyOptions, interrupt))
    assert cli.main(["topology", "ring"]) == 130
    assert capsys.readouterr().err == "jaxdist: interrupted\n"


def test_compiling_shows_a_clock_on_a_terminal_and_a_line_elsewhere(capsys):
    with running.show_compiling(running.new_console(), "f16 for 4 workers"):
        pass
    assert capsys.readouterr().out == "compiling f16 for 4 workers ...\n"
    terminal = Console(force_terminal=True, width=100)
    with running.show_compiling(terminal, "f16 for 4 workers"):
        pass
    assert "compiling f16 for 4 workers ... 0:00:00" in "".join(Text.from_ansi(capsys.readouterr().out).plain)


def test_train_speaks_of_paths_from_here_and_shows_the_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    arguments = ["--workload", "digits", "--model", "convnet:2", "--steps", "2", "--batch", "8", "--devices", "2"]
    assert cli.main(["train", *arguments, "--reducer", "f16", "--no-baseline", "--resume", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling f16 for 2 workers ..."
    assert lines[1] == "no checkpoint in runs/train/checkpoint: starting from step 0"
    assert lines[-3:] == [
        "log: runs/train/log.jsonl",
        "checkpoint: runs/train/checkpoint",
        "figure: runs/train/loss.png",
    ]
    assert opened == [(tmp_path / "runs/train/loss.png").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["-n", "2", "missing.py"], 2), (["-n", "two", "x.py"], 2)]
)
def test_the_launcher_needs_no_extra(arguments, code, capsys, monkeypatch):
    """It answers as the command does that has them."""

    def answer(run):
        try:
            return run(), capsys.readouterr()
        except SystemExit as stop:
            return stop.code, capsys.readouterr()

    wanted = answer(lambda: cli.main(["launch", *arguments]))
    monkeypatch.setattr(sys, "argv", ["jaxdist", "launch", *arguments])
    monkeypatch.setitem(sys.modules, "jaxdist._cli.main", None)  # as without tyro
    assert answer(entry.run) == wanted
    assert wanted[0] == code


# Ctrl-C while JAX is being imported, by the command or by a program of the user.
INTERRUPTED_IMPORT = """
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background may ignore it
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[:] = [NAME, "launch"]
import jaxdist
"""


@pytest.mark.parametrize(("name", "is_command"), [("/usr/bin/jaxdist", True), ("train.py", False)])
def test_ctrl_c_during_the_imports_of_a_command_ends_it_without_a_traceback(name, is_command):
    code = INTERRUPTED_IMPORT.replace("NAME", repr(name))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGINT
    assert ("KeyboardInterrupt" in done.stderr) is not is_command
    assert (done.stderr == "") is is_command


def test_after_the_imports_ctrl_c_raises_unless_it_was_ignored():
    before = signal.getsignal(signal.SIGINT)
    try:
        for given, wanted in [(signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)]:
            signal.signal(signal.SIGINT, given)
            raise_interrupts()
            assert signal.getsignal(signal.SIGINT) is wanted
    finally:
        signal.signal(signal.SIGINT, before)
