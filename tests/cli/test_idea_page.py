"""The commands of the page `From an idea to a figure` leave what it says: a figure, a table and a bibliography."""

import re
import shlex

import pytest
from paths import REPOSITORY
from readers_modules import modules_in

from jaxdist._cli import main as cli

PAGE = (REPOSITORY / "docs/how-to/from-an-idea-to-a-figure.md").read_text()
COMMANDS = re.findall(
    r"^jaxdist (.*)", "".join(re.findall(r"^```shell\n(.*?)```", PAGE, re.M | re.S)).replace("\\\n", ""), re.M
)
# The same runs, but shorter.
SHORT = {"--steps": ["2"], "--seeds": ["2"], "--devices": ["2"], "--seconds": ["0.5"], "--evaluations": ["4"]}
SHORT |= {"--rates": ["0.4"], "--rule": ["ringmaster:8"]}
SMALL = ["--model", "convnet:1", "--batch", "4"]


def shorten(words):
    """A command with the values of `SHORT` in place of its own."""
    kept, option = [], None
    for word in words:
        option = word if word.startswith("--") else option
        if word == option:
            kept += [word, *SHORT.get(word, [])]
        elif option not in SHORT:
            kept.append(word)
    return kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory with `my_idea.py`, the first block of the page."""
    block = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1]
    with modules_in(tmp_path, monkeypatch, my_idea=block):
        yield tmp_path


def run(command, capsys, *, short):
    """Runs a command of the page, with its output in the file that it names; returns what it printed."""
    line, _, place = command.partition(" > ")
    words = shlex.split(line)
    if short and words[0] != "reducers":
        words = [*shorten(words), *SMALL]
    capsys.readouterr()
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    if place:
        with open(place, "w") as file:
            file.write(printed)
    return printed


def check_files(folder, name, *rows):
    """The figure and the table of a command."""
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    table = (folder / f"{name}.tex").read_text()
    assert table.count(r"\begin{tabular}") == table.count(r"\end{tabular}") == 1
    assert "ms/step" not in table
    assert all(f"{row} & " in table for row in rows)


def check_papers(folder):
    papers = (folder / "idea.bib").read_text()
    assert {"@misc{alistarh2016qsgd,", "@misc{stich2018sparsifiedsgd,"} <= set(papers.splitlines())


@pytest.mark.slow
def test_commands_of_the_page_without_the_comparison_leave_what_it_says(folder, capsys):
    assert [command.split()[0] for command in COMMANDS] == ["compare", "reducers", "replay"]
    for command in COMMANDS[1:]:
        run(command, capsys, short=True)
    check_papers(folder)
    check_files(folder, "uneven", "ringmaster:8")


@pytest.mark.slow
def test_commands_of_the_page_leave_what_it_says(folder, capsys):
    for command in COMMANDS:
        run(command, capsys, short=True)
    check_papers(folder)
    check_files(folder, "idea", r"Top-k, 10 \%", "Ours")
    check_files(folder, "uneven", "ringmaster:8")
    # What the LaTeX of the page reads.
    for name in re.findall(r"\\(?:includegraphics(?:\[.*\])?|input)\{(.+?)\}", PAGE):
        assert (folder / name).exists(), name


@pytest.mark.slow
def test_the_table_of_the_page_is_what_its_command_prints(folder, capsys):
    printed = run(COMMANDS[0], capsys, short=False)
    (shown,) = re.findall(r"^reducer  .*\n((?:.+\n)+?)```", PAGE, re.M)
    for row in shown.splitlines():
        name, sent, fewer, *numbers = re.split(r"  +", row)
        (line,) = (line for line in printed.splitlines() if f" {name} " in line and " ±" in line)
        # The page leaves the bytes of an example out.
        found_name, found_sent, _, found_fewer, found_losses, *_ = re.split(r"  +", line.strip(" *"))
        assert [found_name, found_sent, found_fewer] == [name, sent, fewer]
        losses = [[float(number) for number in re.findall(r"[\d.]+", text)] for text in (numbers[0], found_losses)]
        # Losses differ slightly between processors.
        assert losses[0] == pytest.approx(losses[1], abs=0.02)
